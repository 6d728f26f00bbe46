// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends offering their driver less than QEMU. [`connect`] behaves like cloud-hypervisor's generic
//! vhost-user device.

use vhost::VhostBackend;
use virtio_ism_abi::command::{
    BACKING_WINDOW, Op, QueryGidRequest, SignalEventRequest, StatsReply, stat,
};
use virtio_ism_abi::config::{CONFIG_LEN, Config, Features};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Gid, Status};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::front_end::*;

const DMB: u32 = 64 << 10;
/// The features such a front end shows its driver.
const GENERIC: u64 = VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL_FEATURES;
/// Chains made available before DRIVER_OK, too early.
const EARLY: u16 = 3;

/// A front end hiding the bits of the device's type, with unsealed memory and without mappings. Each queue
/// begins at the driver's index: at DRIVER_OK, or in a machine restored from a snapshot.
fn start(place: &Place, name: &str) -> FrontEnd {
    let wish = Wish { maps: Maps::None, features: GENERIC, sealed: false };
    let mut front_end = FrontEnd::negotiate(&place.path(name), &wish);
    front_end.set_memory();
    front_end.feed_events(EARLY.into());
    for queue in 0..QUEUES {
        front_end.start_queue(queue, if queue == EVENTS { EARLY } else { 0 });
    }
    front_end.feed_events(8);
    front_end
}

fn connect(place: &Place, name: &str) -> (FrontEnd, Gid) {
    let mut front_end = start(place, name);
    let gid = front_end.hello();
    (front_end, gid)
}

// cloud-hypervisor restores a device without DEVICE_STATE by a new connection, and tells the driver nothing.
#[test]
fn the_driver_of_a_restored_machine_hears_that_its_session_is_over_and_begins_anew() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let (mut a, (mut b, gid_b)) = (start(&place, "a"), connect(&place, "b"));
    assert_eq!(a.transfer(1, &[(100, b"old")], true), Status::Estate);
    let query = QueryGidRequest { gid: gid_b, ..QueryGidRequest::new_zeroed() };
    assert_eq!(a.command(Op::QueryGid, query.as_bytes()).0, Status::Estate);
    let gid_a = a.hello();
    let dmb = b.register_in_memory(gid_a, 1, DMB);
    assert_eq!(a.transfer(dmb.token.get(), &[(100, b"new")], true), Status::Ok);
}

#[test]
fn the_configuration_repeats_the_feature_bits_of_the_type() {
    let place = Place::new();
    let _daemon = place.daemon(&["a"]);
    let mut a = FrontEnd::connect(&place.path("a"));
    let config = Config::read_from_bytes(&a.config(0, CONFIG_LEN as u32)).unwrap();
    let offered = a.vhost.get_features().unwrap();
    assert_eq!(u64::from(config.features.get()), offered & 0xff_ffff);
    assert_eq!(u64::from(config.features.get()), Features::all().bits());
}

#[test]
fn a_driver_that_sees_no_type_bits_moves_and_gets_every_kind_of_event() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, gid_b)) = (connect(&place, "a"), connect(&place, "b"));
    let dmb = b.register_in_memory(gid_a, 1, DMB);
    assert_eq!(a.transfer(dmb.token.get(), &[(100, b"hello")], true), Status::Ok);
    let (head, _) = b.used(EVENTS, TIMEOUT).expect("no event");
    assert_eq!(head, u32::from(EARLY), "the first buffer after DRIVER_OK");

    let signal = SignalEventRequest {
        gid: gid_b,
        trigger: 1.into(),
        code: 7.into(),
        info: 8.into(),
        reserved: 0.into(),
    };
    assert_eq!(a.command(Op::SignalEvent, signal.as_bytes()).0, Status::Ok);
    let event = b.event(TIMEOUT);
    assert!(matches!(event, Some(Event::SwEvent { code: 7, info: 8, .. })), "{event:?}");

    let (status, reply) = a.command(Op::Stats, &[]);
    assert_eq!(status, Status::Ok);
    let stats = StatsReply::read_from_bytes(&reply).unwrap();
    assert_eq!(stats.counters[stat::MOVES].get(), 1);

    drop(a);
    let event = b.event(TIMEOUT);
    assert!(matches!(event, Some(Event::PeerDown { gid, .. }) if gid == gid_a), "{event:?}");
}

#[test]
fn a_window_needs_no_feature_bit_and_words_and_doorbells_do() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let wish = || Wish { features: GENERIC, ..Wish::default() };
    let mut a = FrontEnd::connect_with(&place.path("a"), wish());
    let mut b = FrontEnd::connect_with(&place.path("b"), wish());
    let (gid_a, _) = (a.hello(), b.hello());
    let own = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let attached = a.attach(own.token.get());
    assert_eq!((own.flags, attached.flags), (0, 0), "neither FUTEX nor MOVE_ONLY");
    a.write_window(attached.dmb_off.get(), b"stored");
    assert_eq!(b.read_window(own.dmb_off.get(), 6), b"stored");
    assert!(a.doorbells().is_empty() && b.doorbells().is_empty());
}
