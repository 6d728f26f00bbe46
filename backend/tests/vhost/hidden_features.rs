// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends offering their driver less than QEMU. [`Monitor`] is a double of cloud-hypervisor: [`ACTS`] has
//! the messages of its generic vhost-user device, by the source of version 53.0
//! (`virtio-devices/src/vhost_user`). Its seven features of the protocol lack shared memory.

use std::io::Read;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio_ism_abi::command::{
    BACKING_WINDOW, Op, QueryGidRequest, SignalEventRequest, StatsReply, TokenRequest, stat,
};
use virtio_ism_abi::config::{CONFIG_LEN, Config, Features};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Gid, Status};
use vm_memory::{Bytes, GuestAddress};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::front_end::*;

const DMB: u32 = 64 << 10;
/// The features such a front end shows its driver.
const GENERIC: u64 = VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL_FEATURES;
/// Chains made available before DRIVER_OK, too early.
const EARLY: u16 = 3;

/// A message of the monitor, messages for each queue in turn, or a deed of the driver.
#[derive(Clone, Copy, Debug)]
enum Say {
    /// A new connection, after the end of the former one.
    Connect,
    SetOwner,
    GetFeatures,
    GetProtocolFeatures,
    SetProtocolFeatures,
    GetQueueNum,
    SetFeatures,
    SetMemTable,
    SetBackendReqFd,
    Queues(&'static [SayOfQueue]),
    /// The driver begins with empty rings, and reads the configuration (GET_CONFIG).
    Probe,
    /// More memory for the next SET_MEM_TABLE.
    Grow,
}

/// A message about a queue.
#[derive(Clone, Copy, Debug)]
enum SayOfQueue {
    Num,
    Addr,
    /// The driver's index, at DRIVER_OK as in a restored machine.
    Base,
    Call,
    Kick,
    Enable,
    Disable,
    GetBase,
}

use Say::*;
use SayOfQueue::*;

const START: &[Say] =
    &[Connect, SetOwner, GetFeatures, GetProtocolFeatures, SetProtocolFeatures, GetQueueNum, Probe];
/// The features are those of the first connection.
const START_AGAIN: &[Say] = &[Connect, SetOwner, GetFeatures, SetProtocolFeatures];
/// DRIVER_OK.
const ACTIVATE: &[Say] = &[
    SetFeatures,
    SetMemTable,
    Queues(&[Num]),
    Queues(&[Addr, Base, Call, Kick]),
    Queues(&[Enable]),
    SetBackendReqFd,
];
const RESUME: &[Say] = &[Queues(&[Enable])];
const PAUSE: &[Say] = &[Queues(&[Disable])];
/// The driver writes 0 to the device's status.
const RESET: &[Say] = &[Queues(&[Disable, GetBase])];

/// The driver's view of an act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Session {
    GoesOn,
    /// The driver itself has begun another one.
    IsNew,
    /// The driver has done nothing, and hears at its next move or command that its session is over.
    IsOver,
}

/// The messages of each act of a guest, or of a user of `ch-remote`. `add-generic-vhost-user` starts a device,
/// too, and `remove-device` refuses this one.
const ACTS: [(&str, &[&[Say]], Session); 7] = [
    ("pause, snapshot, resume", &[PAUSE, RESUME], Session::GoesOn),
    ("resize, memory", &[&[Grow, SetMemTable]], Session::GoesOn),
    ("the driver is bound again", &[RESET, &[Probe], ACTIVATE], Session::IsNew),
    ("the guest reboots", &[RESET, START, ACTIVATE], Session::IsNew),
    ("reboot; shutdown and boot", &[START, ACTIVATE], Session::IsNew),
    ("restore, resume", &[PAUSE, START_AGAIN, ACTIVATE, RESUME], Session::IsOver),
    ("the connection was lost", &[START_AGAIN, ACTIVATE], Session::IsOver),
];

struct Monitor {
    path: PathBuf,
    front_end: FrontEnd,
    protocol: Protocol,
    /// The monitor's side of the channel for requests of the device.
    requests: Option<UnixStream>,
    is_grown: bool,
}

impl Deref for Monitor {
    type Target = FrontEnd;

    fn deref(&self) -> &FrontEnd {
        &self.front_end
    }
}

impl DerefMut for Monitor {
    fn deref_mut(&mut self) -> &mut FrontEnd {
        &mut self.front_end
    }
}

impl Monitor {
    fn start(path: PathBuf) -> Monitor {
        let (none, _) = UnixStream::pair().unwrap();
        let vhost = Frontend::from_stream(none.try_clone().unwrap(), QUEUES as u64);
        let front_end = FrontEnd::on_rings(vhost, none, false);
        let (protocol, requests, is_grown) = (Protocol::empty(), None, false);
        let mut monitor = Monitor { path, front_end, protocol, requests, is_grown };
        monitor.say(&[START, ACTIVATE]);
        monitor.feed_events(8);
        monitor
    }

    fn say(&mut self, messages: &[&[Say]]) {
        messages.iter().copied().flatten().for_each(|message| self.say_one(*message));
    }

    fn say_one(&mut self, message: Say) {
        let front_end = &mut self.front_end;
        let vhost = &mut front_end.vhost;
        match message {
            Connect => {
                let (none, _) = UnixStream::pair().unwrap();
                *vhost = Frontend::from_stream(none.try_clone().unwrap(), QUEUES as u64);
                front_end.socket = none;
                self.requests = None;
                front_end.socket = connected(&self.path);
                let stream = front_end.socket.try_clone().unwrap();
                front_end.vhost = Frontend::from_stream(stream, QUEUES as u64);
            }
            SetOwner => vhost.set_owner().unwrap(),
            GetFeatures => assert_eq!(GENERIC & !vhost.get_features().unwrap(), 0),
            GetProtocolFeatures => {
                let known = Protocol::CONFIG
                    | Protocol::MQ
                    | Protocol::CONFIGURE_MEM_SLOTS
                    | Protocol::REPLY_ACK
                    | Protocol::INFLIGHT_SHMFD
                    | Protocol::LOG_SHMFD
                    | Protocol::DEVICE_STATE
                    | Protocol::BACKEND_REQ;
                self.protocol = known & vhost.get_protocol_features().unwrap();
                // With others there were more messages.
                let expected =
                    Protocol::CONFIG | Protocol::MQ | Protocol::REPLY_ACK | Protocol::BACKEND_REQ;
                assert_eq!(self.protocol, expected);
            }
            SetProtocolFeatures => {
                vhost.set_protocol_features(self.protocol).unwrap();
                vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
            GetQueueNum => assert_eq!(vhost.get_queue_num().unwrap(), QUEUES as u64),
            SetFeatures => vhost.set_features(GENERIC).unwrap(),
            SetMemTable => self.set_memory_table(),
            SetBackendReqFd => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                vhost.set_backend_request_fd(&theirs).unwrap();
                ours.set_nonblocking(true).unwrap();
                self.requests = Some(ours);
            }
            Queues(messages) => {
                (0..QUEUES).for_each(|queue| {
                    messages.iter().for_each(|message| self.say_of_queue(queue, *message));
                });
            }
            Probe => {
                front_end.clear_rings();
                assert_eq!(front_end.config(0, 4).len(), 4);
                front_end.feed_events(EARLY.into());
            }
            Grow => self.is_grown = true,
        }
    }

    fn say_of_queue(&mut self, index: usize, message: SayOfQueue) {
        let FrontEnd { vhost, queues, memory, .. } = &mut self.front_end;
        let queue = &queues[index];
        match message {
            Num => vhost.set_vring_num(index, QUEUE_SIZE).unwrap(),
            Addr => vhost.set_vring_addr(index, &addresses(queue)).unwrap(),
            Base => {
                let base: u16 = memory.read_obj(GuestAddress(queue.avail + 2)).unwrap();
                vhost.set_vring_base(index, base).unwrap();
            }
            Call => vhost.set_vring_call(index, &queue.call).unwrap(),
            Kick => vhost.set_vring_kick(index, &queue.kick).unwrap(),
            Enable => vhost.set_vring_enable(index, true).unwrap(),
            Disable => vhost.set_vring_enable(index, false).unwrap(),
            GetBase => drop(vhost.get_vring_base(index).unwrap()),
        }
    }

    fn set_memory_table(&mut self) {
        let more = memfd(MEMORY, false);
        let region = |start, file: &std::fs::File| VhostUserMemoryRegionInfo {
            guest_phys_addr: start,
            memory_size: MEMORY,
            userspace_addr: start,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        let all = [region(BASE, &self.file), region(BASE + MEMORY, &more)];
        let count = 1 + usize::from(self.is_grown);
        self.vhost.set_mem_table(&all[..count]).unwrap();
    }

    /// A request of the device would end the monitor's thread for the device.
    fn assert_no_requests(&self) {
        let mut requests = self.requests.as_ref().unwrap();
        let none = requests.read(&mut [0; 1]).map_err(|error| error.kind());
        assert_eq!(none, Err(std::io::ErrorKind::WouldBlock));
    }
}

fn connect(place: &Place, name: &str) -> (Monitor, Gid) {
    let mut monitor = Monitor::start(place.path(name));
    let gid = monitor.hello();
    (monitor, gid)
}

/// A DMB of each of two guests, for the other one.
struct Dmbs {
    of_a: u64,
    of_b: u64,
}

impl Dmbs {
    fn new((a, gid_a): (&mut Monitor, Gid), (b, gid_b): (&mut Monitor, Gid)) -> Dmbs {
        let of_a = a.register_in_memory(gid_b, 1, DMB).token.get();
        Dmbs { of_a, of_b: b.register_in_memory(gid_a, 1, DMB).token.get() }
    }

    fn carry_bytes(&self, a: &mut Monitor, b: &mut Monitor, what: &str) {
        let way = |from: &mut Monitor, to: &mut Monitor, token| {
            to.memory.write_slice(&[0; 5], GuestAddress(DMB_AT + 100)).unwrap();
            assert_eq!(from.transfer(token, &[(100, b"bytes")], true), Status::Ok, "{what}");
            assert_eq!(to.read_buffer(DMB_AT + 100, 5), b"bytes", "{what}");
            // Events of former sessions are in front.
            while !matches!(to.event(TIMEOUT).expect(what), Event::DmbSignal(_)) {}
        };
        way(a, b, self.of_b);
        way(b, a, self.of_a);
    }
}

#[test]
fn the_acts_of_cloud_hypervisor_are_served_by_moves() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let ((mut a, gid_a), (mut b, gid_b)) = (connect(&place, "a"), connect(&place, "b"));
    let mut dmbs = Dmbs::new((&mut a, gid_a), (&mut b, gid_b));
    for (name, messages, session) in ACTS {
        dmbs.carry_bytes(&mut a, &mut b, name);
        a.say(messages);
        if session == Session::IsOver {
            assert_eq!(a.transfer(dmbs.of_b, &[(100, b"old")], true), Status::Estate, "{name}");
            let query = QueryGidRequest { gid: gid_b, ..QueryGidRequest::new_zeroed() };
            assert_eq!(a.command(Op::QueryGid, query.as_bytes()).0, Status::Estate, "{name}");
            a.say(&[RESET, &[Probe], ACTIVATE]);
        }
        if session != Session::GoesOn {
            a.feed_events(8);
            let gid_a = a.hello();
            let old = TokenRequest { token: dmbs.of_b.into() };
            assert_eq!(b.command(Op::Unregister, old.as_bytes()).0, Status::Ok, "{name}");
            dmbs = Dmbs::new((&mut a, gid_a), (&mut b, gid_b));
        }
        dmbs.carry_bytes(&mut a, &mut b, name);
        let window = register_request(gid_b, 2, DMB, BACKING_WINDOW);
        assert_eq!(a.command(Op::Register, window.as_bytes()).0, Status::Enotsup, "{name}");
        a.assert_no_requests();
    }
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
