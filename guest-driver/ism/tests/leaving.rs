// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver and a device about to go, or gone: the owner's notices and remaining memory.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_test_support::{TIMEOUT, TestDir};
use vhost_device_ism::config::GuestSpec;
use vhost_device_ism::{Config, Daemon, LeaveInfo};
use virtio_ism::{IsmDevice, IsmError, IsmEvent, OpenOptions, OwnDmb, PeerDmb};
use virtio_ism_abi::Status;
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::LeaveReason;

const LEN: u32 = 64 << 10;
const HOUR: Duration = Duration::from_secs(3600);

/// A daemon in this process with guests "a" and "b", and the directory of their sockets.
struct World {
    daemon: Option<Arc<Daemon>>,
    dir: TestDir,
}

impl World {
    fn new() -> World {
        let dir = TestDir::new();
        let daemon = Daemon::start(Config::default()).unwrap();
        for name in ["a", "b"] {
            daemon.add_guest(GuestSpec::new(dir.join(name))).unwrap();
        }
        World { daemon: Some(Arc::new(daemon)), dir }
    }

    fn open(&self, name: &str, leaves: bool) -> Arc<IsmDevice> {
        IsmDevice::open(OpenOptions { leaves, ..OpenOptions::new(self.dir.join(name)) }).unwrap()
    }

    /// Asks the driver of "a" to leave, on another thread.
    fn drain(&self, within: Duration) -> std::thread::JoinHandle<LeaveInfo> {
        let daemon = self.daemon.clone().unwrap();
        std::thread::spawn(move || daemon.drain("a", LeaveReason::Migration, within).unwrap())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        drop(self.daemon.take());
    }
}

fn dmb(owner: &Arc<IsmDevice>, user: &Arc<IsmDevice>) -> (OwnDmb, PeerDmb) {
    let own = owner.register(user.gid(), LEN, 0).unwrap();
    let peer = user.attach(own.token(), LEN).unwrap();
    (own, peer)
}

/// The next request to leave: its number, reason and time.
fn asked(device: &IsmDevice) -> (u32, LeaveReason, Duration) {
    let start = Instant::now();
    loop {
        let mut found = None;
        let mut handle = |event| {
            if let IsmEvent::Leave { number, reason, within } = event {
                found = Some((number, reason, within));
            }
        };
        device.poll_events(&mut handle).unwrap();
        if let Some(found) = found {
            return found;
        }
        assert!(start.elapsed() < TIMEOUT, "nobody asks");
        device.wait_events(Duration::from_secs(1)).unwrap();
    }
}

#[test]
fn an_owner_hears_why_and_how_soon_it_is_to_leave_and_says_when_it_has() {
    let world = World::new();
    let (a, b) = (world.open("a", true), world.open("b", true));
    let (own, theirs) = dmb(&a, &b);
    assert!(!a.is_leaving());
    let drain = world.drain(HOUR);
    let (number, reason, within) = asked(&a);
    assert_eq!((number, reason), (1, LeaveReason::Migration));
    assert!(within > HOUR / 2 && within <= HOUR, "{within:?}");
    assert!(a.is_leaving() && !b.is_leaving());

    // Nothing new, at once and not after tries; the peer writes on.
    let refused = a.register(b.gid(), LEN, 0).map(drop).unwrap_err();
    assert!(matches!(refused, IsmError::Refused { status: Status::Estate, .. }), "{refused}");
    theirs.deliver(&[(64, b"late")], [4, 0], true).unwrap();
    assert_eq!(own.words(), [4, 0]);

    assert!(!a.left(number + 1).unwrap(), "nobody has asked that");
    assert!(a.left(number).unwrap());
    assert_eq!(drain.join().unwrap(), LeaveInfo { asked: 1, left: 1, taken_back: 0 });
    assert!(!a.left(number).unwrap(), "it has an answer");
    assert_eq!(own.words(), [4, 0], "and what is mapped stays");
    assert!(!a.is_gone());
}

#[test]
fn an_owner_that_lets_all_dmbs_go_need_not_say_that_it_has_left() {
    let world = World::new();
    let (a, b) = (world.open("a", true), world.open("b", true));
    let (own, theirs) = dmb(&a, &b);
    let (others, mine) = dmb(&b, &a);
    let drain = world.drain(HOUR);
    asked(&a);
    drop((own, mine));
    assert_eq!(drain.join().unwrap(), LeaveInfo { asked: 1, left: 1, taken_back: 0 });
    drop((theirs, others));
}

#[test]
fn an_owner_that_does_not_want_to_know_is_neither_asked_nor_waited_for() {
    let world = World::new();
    let (a, b) = (world.open("a", false), world.open("b", true));
    assert!(!a.features().contains(Features::LEAVE));
    let (_own, _theirs) = dmb(&a, &b);
    assert_eq!(world.drain(HOUR).join().unwrap(), LeaveInfo::default());
    a.poll_events(&mut |event| panic!("{event:?}")).unwrap();
    assert!(matches!(a.left(1), Err(IsmError::Transport(_))));
}

#[test]
fn an_owner_that_stays_is_waited_for_as_long_as_the_operator_says() {
    let world = World::new();
    let (a, b) = (world.open("a", true), world.open("b", true));
    let (_own, _theirs) = dmb(&a, &b);
    let start = Instant::now();
    let within = Duration::from_millis(50);
    assert_eq!(world.drain(within).join().unwrap(), LeaveInfo { asked: 1, left: 0, taken_back: 0 });
    assert!(start.elapsed() >= within);
}

#[test]
fn bytes_cross_through_the_window_when_the_device_has_gone_without_a_word() {
    let mut world = World::new();
    let (a, b) = (world.open("a", true), world.open("b", true));
    let (own, theirs) = dmb(&a, &b);
    theirs.deliver(&[(64, b"before")], [6, 0], false).unwrap();
    let daemon = Arc::into_inner(world.daemon.take().unwrap()).unwrap();
    daemon.stop();
    let start = Instant::now();
    while !(a.is_gone() && b.is_gone()) {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(a.has_memory() && b.has_memory());
    for round in 1..100u64 {
        theirs.deliver(&[(64, &round.to_le_bytes())], [round, 1], false).unwrap();
        assert_eq!(own.words(), [round, 1]);
        let mut bytes = [0; 8];
        own.memory().copy_out(64, &mut bytes).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), round);
    }
    // Until the owner's let_go, also if the device is closed before.
    drop((a, b));
    theirs.deliver(&[(64, b"closed")], [200, 1], false).unwrap();
    assert_eq!(own.words(), [200, 1]);
}
