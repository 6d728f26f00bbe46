// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Behaviour towards well-behaved front ends.

use std::time::Duration;

use virtio_ism_abi::command::{
    BACKING_GUEST, BACKING_WINDOW, Op, QueryGidRequest, RegisterReply, ReleaseSlabRequest,
    StatsReply, TokenRequest, stat,
};
use virtio_ism_abi::config::{CONFIG_LEN, Config as DeviceConfig};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::slab::{CONTROL_LEN, LINE_ARMED, LINE_PEND, line_offset};
use virtio_ism_abi::{Gid, REVISION, Status};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::front_end::*;

const DMB: u32 = 64 << 10;

/// Two connected front ends after HELLO.
fn pair(place: &Place) -> ((FrontEnd, Gid), (FrontEnd, Gid)) {
    (FrontEnd::greet(&place.path("a")), FrontEnd::greet(&place.path("b")))
}

#[test]
fn configuration_says_what_the_chapter_says_and_reads_as_zero_beyond() {
    let place = Place::new();
    let _daemon = place.daemon(&["a"]);
    let mut a = FrontEnd::connect(&place.path("a"));
    let bytes = a.config(0, 256);
    let config = DeviceConfig::read_from_bytes(&bytes[..CONFIG_LEN]).unwrap();
    assert_eq!(config.revision.get(), REVISION);
    assert_eq!(config.chid.get(), 0xff00);
    assert_eq!(config.num_move_queues.get(), 2);
    assert_eq!(config.window_size.get(), 64 << 30);
    assert!(bytes[CONFIG_LEN..].iter().all(|byte| *byte == 0));
    assert_eq!(a.config(24, 2), bytes[24..26]);
    assert_eq!(a.config(200, 56), [0; 56]);
    // Writes are accepted and change nothing.
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
    vhost::vhost_user::VhostUserFrontend::set_config(&mut a.vhost, 24, flags, &[1, 2]).unwrap();
    assert_eq!(a.config(0, 256), bytes);
}

#[test]
fn a_front_end_without_shared_memory_has_no_window_and_can_move() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let wish = || Wish { maps: Maps::None, ..Wish::default() };
    let mut a = FrontEnd::connect_with(&place.path("a"), wish());
    let mut b = FrontEnd::connect_with(&place.path("b"), wish());
    let config = DeviceConfig::read_from_bytes(&a.config(0, CONFIG_LEN as u32)).unwrap();
    assert_eq!(config.window_size.get(), 0);
    let (gid_a, gid_b) = (a.hello(), b.hello());

    let window = register_request(gid_a, 1, DMB, BACKING_WINDOW);
    assert_eq!(b.command(Op::Register, window.as_bytes()).0, Status::Enotsup);

    // A DMB in b's own memory.
    let gpa = 0x10_0000 + (2 << 20);
    let mut request = register_request(gid_a, 1, DMB, BACKING_GUEST);
    request.nsg = 1.into();
    let mut sg = virtio_ism_abi::command::SgEntry::new_zeroed();
    (sg.gpa, sg.len) = (gpa.into(), DMB.into());
    let (status, reply) = b.command(Op::Register, &[request.as_bytes(), sg.as_bytes()].concat());
    assert_eq!(status, Status::Ok);
    let token = RegisterReply::read_from_bytes(&reply).unwrap().token.get();

    assert_eq!(a.transfer(token, &[(100, b"hello"), (0, &[7; 32])], true), Status::Ok);
    assert_eq!(b.read_buffer(gpa + 100, 5), b"hello");
    assert_eq!(b.read_buffer(gpa, 32), [7; 32]);
    match b.event(TIMEOUT) {
        Some(Event::DmbSignal(event)) => {
            assert_eq!((event.n.get(), event.entries[0].idx.get()), (1, 1));
            assert_eq!(event.entries[0].mask.get(), 1);
        }
        other => panic!("{other:?}"),
    }
    let _ = gid_b;
}

#[test]
fn commands_before_hello_are_refused() {
    let place = Place::new();
    let _daemon = place.daemon(&["a"]);
    let mut a = FrontEnd::connect(&place.path("a"));
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Estate);
    assert_eq!(a.transfer(1, &[], true), Status::Estate);
    a.hello();
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok);
}

#[test]
fn a_window_dmb_is_mapped_once_and_holds_the_nonce() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((a, gid_a), (mut b, _)) = pair(&place);
    let first = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let tail = first.slab_off.get() + u64::from(first.slab_len.get()) - CONTROL_LEN as u64;
    assert_eq!(b.read_window(tail, 8), first.nonce.get().to_le_bytes());
    let second = b.register(gid_a, 2, DMB, BACKING_WINDOW);
    assert_eq!(second.slab_id, first.slab_id);
    assert_ne!(second.dmb_off, first.dmb_off);
    let requests = b.shm_requests();
    assert_eq!(requests.len(), 1, "a slab is mapped once: {requests:?}");
    assert_eq!(requests[0].window_offset, first.slab_off.get());
    assert_eq!(requests[0].len, u64::from(first.slab_len.get()));
    assert!(a.shm_requests().is_empty());
}

#[test]
fn attached_memory_is_shared_and_moves_land_in_it() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, gid_b)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let attached = a.attach(dmb.token.get());
    assert_eq!(attached.owner_gid, gid_b);
    assert_eq!(attached.nonce, dmb.nonce);
    a.write_window(attached.dmb_off.get() + 10, b"stored");
    assert_eq!(b.read_window(dmb.dmb_off.get() + 10, 6), b"stored");
    let moved = a.transfer(dmb.token.get(), &[(5000, b"moved"), (0, &[1; 32])], false);
    assert_eq!(moved, Status::Ok);
    assert_eq!(b.read_window(dmb.dmb_off.get() + 5000, 5), b"moved");
    assert_eq!(b.read_window(dmb.dmb_off.get(), 32), [1; 32]);
}

#[test]
fn a_kick_wakes_the_owner_with_the_number_of_its_slab() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, _)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let attached = a.attach(dmb.token.get());
    let tail = attached.slab_off.get() + u64::from(attached.slab_len.get()) - CONTROL_LEN as u64;
    let line = tail + line_offset(attached.line.get()).unwrap() as u64;
    b.write_window(line + LINE_ARMED as u64, &1u32.to_le_bytes());
    // A user's steps: bit, disarm, kick.
    a.write_window(line + LINE_PEND as u64, &(1u64 << attached.bit).to_le_bytes());
    a.write_window(line + LINE_ARMED as u64, &0u32.to_le_bytes());
    assert_eq!(a.transfer(dmb.token.get(), &[], true), Status::Ok);
    match b.event(TIMEOUT) {
        Some(Event::SlabWake(wake)) => {
            assert_eq!((wake.n.get(), wake.slabs[0].get()), (1, dmb.slab_id.get()));
        }
        other => panic!("{other:?}"),
    }
    assert!(b.event(QUIET).is_none());
}

#[test]
fn wakes_wait_for_event_buffers() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let (mut a, gid_a) = FrontEnd::greet(&place.path("a"));
    let mut b = FrontEnd::negotiate(&place.path("b"), &Wish::default());
    b.set_memory();
    for queue in 0..QUEUES {
        b.start_queue(queue, 0);
    }
    b.hello();
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    assert_eq!(a.transfer(dmb.token.get(), &[], true), Status::Ok);
    assert!(b.used(EVENTS, QUIET).is_none());
    b.feed_events(1);
    assert!(matches!(b.event(TIMEOUT), Some(Event::SlabWake(_))));
}

#[test]
fn many_kicks_in_a_row_all_arrive() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, _)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    // Also beyond the slab's wake rate: the limit delays, but never drops.
    for round in 0..300 {
        assert_eq!(a.transfer(dmb.token.get(), &[], true), Status::Ok, "{round}");
        assert!(matches!(b.event(TIMEOUT), Some(Event::SlabWake(_))), "{round}");
    }
}

#[test]
fn a_storm_of_signals_is_slowed_down_and_none_is_lost() {
    let place = Place::new();
    let daemon = place.daemon_with(&["a", "b"], |config| {
        config.fabrics[0].quotas.wakes_per_second = Some(200);
    });
    let ((mut a, gid_a), (mut b, _)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    for round in 0..10 {
        for _ in 0..15 {
            a.send_move(MOVES, dmb.token.get(), &[], true);
        }
        for _ in 0..15 {
            a.used(MOVES, TIMEOUT).unwrap();
        }
        // Each signal has its record, or was merged with a later one.
        eventually("a record for every signal", || {
            while b.event(Duration::ZERO).is_some() {}
            let ports = daemon.list();
            let counts = |i: usize| ports[i].device.as_ref().unwrap().counts;
            let (sender, owner) = (counts(0), counts(1));
            assert_eq!(sender.signals, 15 * (round + 1));
            sender.signals == owner.wakes + sender.coalesced + owner.coalesced
        });
    }
}

#[test]
fn several_moves_per_kick_are_done_in_order() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, _)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    for _ in 0..20 {
        for i in 0..20u8 {
            a.send_move(MOVES + 1, dmb.token.get(), &[(0, &[i; 100])], false);
        }
        for _ in 0..20 {
            a.used(MOVES + 1, TIMEOUT).unwrap();
        }
        assert_eq!(b.read_window(dmb.dmb_off.get(), 100), [19; 100]);
    }
}

#[test]
fn indirect_descriptors_and_split_requests_work() {
    let place = Place::new();
    let _daemon = place.daemon(&["a"]);
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    // STATS with each byte of the request in a descriptor of its own, in an indirect table.
    let request = [Op::Stats as u8, 0, 0, 0, 9, 0, 0, 0];
    let at = a.write_buffer(&request);
    let reply = a.buffer(256);
    let mut table = Vec::new();
    for i in 0..8u64 {
        table.extend_from_slice(&(at + i).to_le_bytes());
        table.extend_from_slice(&1u32.to_le_bytes());
        table.extend_from_slice(&1u16.to_le_bytes());
        table.extend_from_slice(&(i as u16 + 1).to_le_bytes());
    }
    for (i, len) in [(0, 3u32), (3, 200)] {
        table.extend_from_slice(&(reply + i).to_le_bytes());
        table.extend_from_slice(&len.to_le_bytes());
        table.extend_from_slice(&(if i == 0 { 3u16 } else { 2 }).to_le_bytes());
        table.extend_from_slice(&9u16.to_le_bytes());
    }
    let table_at = a.write_buffer(&table);
    a.descriptor(CONTROL, 20, table_at, table.len() as u32, 4, 0);
    a.offer(CONTROL, 20);
    a.kick(CONTROL);
    assert_eq!(a.used(CONTROL, TIMEOUT), Some((20, 136)));
    let bytes = a.read_buffer(reply, 136);
    assert_eq!(bytes[..8], [0, 0, 0, 0, 9, 0, 0, 0]);
    let stats = StatsReply::read_from_bytes(&bytes[8..]).unwrap();
    assert_eq!(stats.counters[stat::DMBS].get(), 0);
}

#[test]
fn works_without_event_idx() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let features = Wish::default().features & !(EVENT_IDX | INDIRECT);
    let wish = || Wish { features, ..Wish::default() };
    let mut a = FrontEnd::connect_with(&place.path("a"), wish());
    let mut b = FrontEnd::connect_with(&place.path("b"), wish());
    let gid_a = a.hello();
    b.hello();
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    for _ in 0..100 {
        assert_eq!(a.transfer(dmb.token.get(), &[(0, b"x")], false), Status::Ok);
        assert_eq!(a.transfer(dmb.token.get(), &[], true), Status::Ok);
        assert!(matches!(b.event(TIMEOUT), Some(Event::SlabWake(_))));
    }
}

#[test]
fn a_burst_of_commands_is_answered_completely() {
    let place = Place::new();
    let _daemon = place.daemon(&["a"]);
    let (mut a, gid) = FrontEnd::greet(&place.path("a"));
    let query = QueryGidRequest { gid, ..QueryGidRequest::new_zeroed() };
    for _ in 0..10 {
        for _ in 0..30 {
            a.send_command(Op::QueryGid, query.as_bytes());
        }
        for _ in 0..30 {
            assert!(a.reply().is_some());
        }
    }
}

#[test]
fn a_release_unmaps_the_slab() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((_a, gid_a), (mut b, _)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let release = ReleaseSlabRequest { slab_id: dmb.slab_id, ..ReleaseSlabRequest::new_zeroed() };
    assert_eq!(b.command(Op::ReleaseSlab, release.as_bytes()).0, Status::Ebusy);
    let token = TokenRequest { token: dmb.token };
    assert_eq!(b.command(Op::Unregister, token.as_bytes()).0, Status::Ok);
    assert_eq!(b.command(Op::ReleaseSlab, release.as_bytes()).0, Status::Ok);
    let last = *b.shm_requests().last().unwrap();
    assert_eq!((last.map, last.window_offset), (false, dmb.slab_off.get()));
}

#[test]
fn a_front_end_that_comes_back_has_a_new_gid_and_its_peer_is_told() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((a, gid_a), (mut b, _)) = pair(&place);
    b.register(gid_a, 1, DMB, BACKING_WINDOW);
    drop(a);
    match b.event(TIMEOUT) {
        Some(Event::PeerDown { gid, failed: true }) => assert_eq!(gid, gid_a),
        other => panic!("{other:?}"),
    }
    let (_a, again) = FrontEnd::greet(&place.path("a"));
    assert_ne!(again, gid_a);
}

#[test]
fn while_a_front_end_is_connected_others_wait_in_connect_or_are_told() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let place = Place::new();
    let _daemon = place.daemon(&["a"]);
    let path = place.path("a");
    let at_once = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap())
    };
    let (first, gid) = FrontEnd::greet(&path);
    eventually("a full queue", || at_once() == Err(rustix::io::Errno::AGAIN));
    std::thread::scope(|scope| {
        let second = scope.spawn(|| FrontEnd::greet(&path));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished());
        drop(first);
        let (_second, new) = second.join().unwrap();
        assert_ne!(new, gid);
        eventually("a full queue again", || at_once() == Err(rustix::io::Errno::AGAIN));
    });
}

#[test]
fn reset_ends_the_life_in_order_and_keeps_the_connection() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, _)) = pair(&place);
    b.register(gid_a, 1, DMB, BACKING_WINDOW);
    a.pause();
    vhost::vhost_user::VhostUserFrontend::reset_device(&mut a.vhost).unwrap();
    match b.event(TIMEOUT) {
        Some(Event::PeerDown { gid, failed: false }) => assert_eq!(gid, gid_a),
        other => panic!("{other:?}"),
    }
    vhost::VhostBackend::set_features(&a.vhost, Wish::default().features).unwrap();
    a.restart();
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Estate);
    assert_ne!(a.hello(), gid_a);
}

#[test]
fn a_pause_keeps_dmbs_and_holds_events() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, _)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let bases = b.pause();
    assert_eq!(a.transfer(dmb.token.get(), &[(0, b"while you slept")], true), Status::Ok);
    assert_eq!(a.transfer(dmb.token.get(), &[], true), Status::Ok);
    assert!(b.used(EVENTS, QUIET).is_none());
    b.resume(&bases);
    assert!(matches!(b.event(TIMEOUT), Some(Event::SlabWake(_))));
    assert_eq!(b.read_window(dmb.dmb_off.get(), 15), b"while you slept");
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok);
}

#[test]
fn no_mapping_is_asked_for_while_paused_and_the_answer_comes_after() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((_a, gid_a), (mut b, _)) = pair(&place);
    // The ring stops at once after taking the command.
    b.send_command(Op::Register, register_request(gid_a, 1, DMB, BACKING_WINDOW).as_bytes());
    let bases = b.pause();
    let asked = b.shm_requests().len();
    std::thread::sleep(QUIET);
    assert!(b.shm_requests().len() <= asked.max(1));
    b.resume(&bases);
    assert_eq!(b.reply().unwrap().0, Status::Ok);
    assert_eq!(b.shm_requests().len(), 1);
}

/// A front end with a REGISTER and an unacknowledged mapping.
fn waiting(place: &Place) -> FrontEnd {
    let (_a, gid_a) = FrontEnd::greet(&place.path("a"));
    let wish = Wish { maps: Maps::Late, ..Wish::default() };
    let mut b = FrontEnd::connect_with(&place.path("b"), wish);
    b.hello();
    b.send_command(Op::Register, register_request(gid_a, 1, DMB, BACKING_WINDOW).as_bytes());
    b.wait_shm_requests(1);
    b
}

#[test]
fn a_mapping_under_way_delays_neither_other_commands_nor_a_pause() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let mut b = waiting(&place);
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok, "replies may come out of order");
    assert_eq!(b.config(0, 4).len(), 4);
    let bases = b.pause();
    b.acknowledge();
    assert!(b.used(CONTROL, QUIET).is_none(), "a stopped ring is not written");
    b.resume(&bases);
    assert_eq!(b.used(CONTROL, TIMEOUT).map(|(head, _)| head), Some(2));
}

#[test]
fn an_answer_to_a_driver_that_restarted_is_dropped() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let mut b = waiting(&place);
    b.pause();
    b.restart();
    b.acknowledge();
    assert!(b.used(CONTROL, QUIET).is_none());
    b.hello();
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok);
}

#[test]
fn what_an_earlier_life_left_mapped_is_unmapped_after_hello() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((_a, gid_a), (mut b, _)) = pair(&place);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    b.hello();
    b.wait_shm_requests(2);
    let last = *b.shm_requests().last().unwrap();
    assert_eq!((last.map, last.window_offset), (false, dmb.slab_off.get()));
}

#[test]
fn what_a_command_that_failed_left_mapped_is_unmapped_at_once() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    let wish = Wish { maps: Maps::Late, ..Wish::default() };
    let mut b = FrontEnd::connect_with(&place.path("b"), wish);
    let dmb = a.register(b.hello(), 1, DMB, BACKING_WINDOW);
    let token = TokenRequest { token: dmb.token };
    b.send_command(Op::Attach, token.as_bytes());
    b.wait_shm_requests(1);
    // No driver is told of the slab mapped by b meanwhile, so none could release the slab.
    assert_eq!(a.command(Op::Unregister, token.as_bytes()).0, Status::Ok);
    b.acknowledge();
    assert_eq!(b.reply().unwrap().0, Status::Enoent);
    b.wait_shm_requests(2);
    let [mapped, unmapped] = b.shm_requests()[..] else { panic!("{:?}", b.shm_requests()) };
    assert_eq!(unmapped, ShmRequest { map: false, ..mapped });
}

#[test]
fn rings_that_stay_stopped_end_the_device() {
    let place = Place::new();
    let _daemon = place.daemon_with(&["a", "b"], |config| {
        config.stopped_grace = Some(Duration::from_millis(50));
    });
    let ((mut a, gid_a), (mut b, _)) = pair(&place);
    b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let bases = a.pause();
    match b.event(TIMEOUT) {
        Some(Event::PeerDown { gid, failed: true }) => assert_eq!(gid, gid_a),
        other => panic!("{other:?}"),
    }
    a.resume(&bases);
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Estate);
}

#[test]
fn guests_on_different_fabrics_do_not_meet() {
    let place = Place::new();
    let _daemon = place.daemon_with(&["a", "b"], |config| {
        let other = virtio_ism_abi::Chid(0xff01);
        config.fabrics.push(vhost_device_ism::config::FabricSpec::new(other));
        config.guests[1].chid = other;
    });
    let ((mut a, gid_a), (mut b, gid_b)) = pair(&place);
    let query = |gid| QueryGidRequest { gid, ..QueryGidRequest::new_zeroed() };
    assert_eq!(a.command(Op::QueryGid, query(gid_b).as_bytes()).0, Status::Enodev);
    assert_eq!(b.command(Op::QueryGid, query(gid_a).as_bytes()).0, Status::Enodev);
}

#[test]
fn a_pinned_gid_is_the_gid_of_every_life() {
    let place = Place::new();
    let pinned = vhost_device_ism::config::parse_gid("3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b");
    let pinned = pinned.unwrap();
    let _daemon = place.daemon_with(&["a"], |config| config.guests[0].gid = Some(pinned));
    for _ in 0..3 {
        let (_a, gid) = FrontEnd::greet(&place.path("a"));
        assert_eq!(gid, pinned);
    }
}
