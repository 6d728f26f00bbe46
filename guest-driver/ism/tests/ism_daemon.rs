// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver against the daemon itself.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use smc_test_support::{TIMEOUT, TestDir, eventually};
use vhost_device_ism::config::{FabricSpec, GuestSpec};
use vhost_device_ism::{Config, Daemon};
use virtio_ism::transport::TransportError;
use virtio_ism::virtqueue::QueueError;
use virtio_ism::{
    DeliverError, IsmDevice, IsmError, IsmEvent, OpenOptions, OwnDmb, PeerDmb, Prefer,
};
use virtio_ism_abi::{Chid, Gid, Status, Token};

const LEN: u32 = 64 << 10;

/// A daemon in this process with sockets `a` and `b`.
struct World {
    daemon: Option<Daemon>,
    dir: TestDir,
}

fn config(dir: &TestDir, chid: Chid) -> Config {
    let port = |name| GuestSpec { chid, ..GuestSpec::new(dir.path(name)) };
    Config {
        fabrics: vec![FabricSpec::new(chid)],
        guests: vec![port("a"), port("b")],
        ..Config::default()
    }
}

impl World {
    fn new() -> World {
        World::on(Chid::VIRTIO_FIRST)
    }

    fn on(chid: Chid) -> World {
        let dir = TestDir::new();
        let daemon = Daemon::start(config(&dir, chid)).unwrap();
        World { daemon: Some(daemon), dir }
    }

    fn open(&self, name: &str, prefer: Prefer) -> Arc<IsmDevice> {
        let options = OpenOptions { prefer, ..OpenOptions::new(self.dir.path(name)) };
        IsmDevice::open(options).unwrap()
    }

    fn pair(&self, prefer: Prefer) -> (Arc<IsmDevice>, Arc<IsmDevice>) {
        (self.open("a", prefer), self.open("b", prefer))
    }
}

fn dmb(owner: &Arc<IsmDevice>, user: &Arc<IsmDevice>) -> (OwnDmb, PeerDmb) {
    let own = owner.register(user.gid(), LEN, 0).unwrap();
    let peer = user.attach(own.token(), LEN).unwrap();
    (own, peer)
}

/// Waits for an event accepted by `wanted`.
fn await_event(device: &IsmDevice, mut wanted: impl FnMut(&IsmEvent) -> bool) {
    let start = Instant::now();
    let mut found = false;
    while !found {
        assert!(start.elapsed() < TIMEOUT, "the event does not come");
        device.poll_events(&mut |event| found |= wanted(&event)).unwrap();
        if !found {
            device.wait_events(Duration::from_secs(1)).unwrap();
        }
    }
}

#[test]
fn a_device_is_opened_through_a_daemon_of_the_wanted_user_or_of_root() {
    let world = World::new();
    let user = rustix::process::geteuid().as_raw();
    let open =
        |owner| IsmDevice::open(OpenOptions { owner, ..OpenOptions::new(world.dir.path("a")) });
    for wanted in [None, Some(user)] {
        assert_eq!(open(wanted).unwrap().owner(), Some(user));
    }
    match open(Some(user + 1)) {
        Ok(_) => assert_eq!(user, 0),
        Err(IsmError::Transport(TransportError::OtherOwner { uid, before })) => {
            assert_eq!((uid, before), (user, user + 1));
        }
        Err(error) => panic!("{error}"),
    }
}

// Shows: EISM-31.
#[test]
fn devices_meet_on_a_fabric() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Auto);
    assert_eq!(a.chid(), Chid::VIRTIO_FIRST);
    assert_ne!(a.gid(), b.gid());
    assert!(a.query_gid(b.gid()).unwrap().unwrap().window);
    assert_eq!(a.query_gid(Gid([9; 16])).unwrap(), None);
    a.signal_event(b.gid(), 5, 6).unwrap();
    await_event(
        &b,
        |event| matches!(event, IsmEvent::SwEvent { gid, code: 5, info: 6 } if *gid == a.gid()),
    );
    assert!(a.stats().unwrap().iter().any(|counter| *counter != 0));
}

// Shows: EISM-31.
#[test]
fn bytes_cross_on_the_window() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Auto);
    let (own, peer) = dmb(&a, &b);
    assert!(peer.is_window() && own.slab_id().is_some());
    assert_eq!((peer.owner(), own.user()), (a.gid(), b.gid()));
    let message: Vec<u8> = (0..50_000u32).map(|i| (i * 7) as u8).collect();
    peer.deliver(&[(32, &message)], [1, 2], true).unwrap();
    assert_eq!(own.words(), [1, 2]);
    let mut seen = vec![0; message.len()];
    own.memory().copy_out(32, &mut seen).unwrap();
    assert_eq!(seen, message);
    assert_eq!(own.line().unwrap().take(), 1 << own.bit().unwrap());
}

#[test]
fn a_sleeping_owner_is_woken_every_time() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Window);
    let (own, peer) = dmb(&a, &b);
    let rounds = 500;
    let sender = {
        // One message per echo, so the owner goes to sleep before most messages.
        let (echo, back) = dmb(&b, &a);
        let sender = thread::spawn(move || {
            for i in 1..=rounds {
                peer.deliver(&[(64, &[i as u8])], [i, 0], true).unwrap();
                eventually("no echo", || echo.words()[0] == i);
            }
            drop(peer);
        });
        (sender, back)
    };
    let line = own.line().unwrap();
    for i in 1..=rounds {
        let start = Instant::now();
        while own.words()[0] != i {
            line.take();
            if line.arm() && own.words()[0] != i {
                a.wait_events(Duration::from_secs(1)).unwrap();
            }
            line.disarm();
            a.poll_events(&mut |_| ()).unwrap();
            assert!(start.elapsed() < TIMEOUT, "message {i} lost");
        }
        sender.1.deliver(&[], [i, 0], true).unwrap();
    }
    sender.0.join().unwrap();
}

// Shows: EISM-31.
#[test]
fn bytes_cross_by_moves() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Move);
    let (own, peer) = dmb(&a, &b);
    assert!(!peer.is_window() && own.slab_id().is_none());
    let message: Vec<u8> = (0..60_000u32).map(|i| (i * 7) as u8).collect();
    for i in 1..=100u64 {
        peer.deliver(&[(32, &message[i as usize..])], [i, 2 * i], true).unwrap();
    }
    eventually("the moves", || own.words() == [100, 200]);
    await_event(
        &a,
        |event| matches!(event, IsmEvent::DmbSignal(s) if s.entries[0].idx.get() == own.idx()),
    );
    let mut seen = vec![0; message.len() - 100];
    own.memory().copy_out(32, &mut seen).unwrap();
    assert!(seen == message[100..]);
    assert!(!peer.is_failed());
}

#[test]
fn a_move_of_several_parts_arrives_whole() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Move);
    let own = a.register(b.gid(), 1 << 20, 0).unwrap();
    let peer = b.attach(own.token(), 1 << 20).unwrap();
    let message: Vec<u8> = (0..(1 << 20) - 64u32).map(|i| (i / 3) as u8).collect();
    peer.deliver(&[(64, &message)], [7, 8], false).unwrap();
    eventually("the words", || own.words() == [7, 8]);
    let mut seen = vec![0; message.len()];
    own.memory().copy_out(64, &mut seen).unwrap();
    assert!(seen == message, "the words came before the bytes");
}

#[test]
fn an_attacher_that_prefers_moves_writes_a_window_dmb_through_the_device() {
    let world = World::new();
    let (a, b) = (world.open("a", Prefer::Window), world.open("b", Prefer::Move));
    let (own, peer) = dmb(&a, &b);
    assert!(own.slab_id().is_some() && !peer.is_window());
    let line = own.line().unwrap();
    assert!(line.arm() && a.arm_interrupts());
    peer.deliver(&[(64, b"moved")], [1, 1], true).unwrap();
    await_event(&a, |event| matches!(event, IsmEvent::SlabWake(_)));
    assert_eq!(own.words(), [1, 1]);
    assert_eq!(line.take(), 1 << own.bit().unwrap());
}

// Shows: EISM-27, RMB-33, SEC-7.
#[test]
fn a_token_is_only_good_for_its_user() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Auto);
    let own = a.register(b.gid(), LEN, 0).unwrap();
    for token in [Token(1), own.token()] {
        let refused = a.attach(token, LEN);
        assert!(matches!(refused, Err(IsmError::Refused { status: Status::Enoent, .. })));
    }
    assert!(matches!(b.attach(own.token(), 2 * LEN), Err(IsmError::PeerLength { got: LEN, .. })));
    b.attach(own.token(), LEN).unwrap();
    let nobody = a.register(Gid([9; 16]), LEN, 0);
    assert!(matches!(nobody, Err(IsmError::Refused { status: Status::Enodev, .. })));
}

#[test]
fn an_unregistered_dmb_is_told_to_its_user() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Auto);
    let (own, peer) = dmb(&a, &b);
    let (_own, other) = dmb(&a, &b);
    let gone = own.token();
    drop(own);
    await_event(&b, |event| matches!(event, IsmEvent::DmbGone { token, .. } if *token == gone));
    assert!(peer.is_failed() && !other.is_failed());
    assert!(matches!(peer.deliver(&[], [1, 1], true), Err(DeliverError::Failed)));
    other.deliver(&[], [1, 1], true).unwrap();
}

#[test]
fn a_peer_that_leaves_is_told_apart_from_one_that_vanishes() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Auto);
    let (own, peer) = dmb(&a, &b);
    let gid = a.gid();
    drop(own);
    drop(a);
    await_event(
        &b,
        |event| matches!(event, IsmEvent::PeerDown { gid: g, failed: false } if *g == gid),
    );
    assert!(peer.is_failed());
}

#[test]
fn a_thousand_dmbs_share_a_few_mappings() {
    let world = World::new();
    let (a, b) = world.pair(Prefer::Auto);
    let dmbs: Vec<_> = (0..1000)
        .map(|_| {
            let own = a.register(b.gid(), 16 << 10, 0).unwrap();
            let peer = b.attach(own.token(), 16 << 10).unwrap();
            (own, peer)
        })
        .collect();
    for (i, (_, peer)) in dmbs.iter().enumerate() {
        peer.deliver(&[(64, &(i as u32).to_le_bytes())], [i as u64, 0], true).unwrap();
    }
    for (i, (own, _)) in dmbs.iter().enumerate() {
        let mut bytes = [0; 4];
        own.memory().copy_out(64, &mut bytes).unwrap();
        assert_eq!((own.words()[0], u32::from_le_bytes(bytes)), (i as u64, i as u32));
    }
    drop(dmbs);
    let released = a.release_idle_slabs().unwrap();
    assert!((1..=8).contains(&released), "{released} slabs");
    b.release_idle_slabs().unwrap();
    let (own, peer) = dmb(&a, &b);
    peer.deliver(&[], [5, 5], false).unwrap();
    assert_eq!(own.words(), [5, 5]);
}

#[test]
fn many_devices_live_in_one_process() {
    let dir = TestDir::new();
    let guests = (0..12).map(|i| GuestSpec::new(dir.path(format!("p{i}")))).collect();
    let _daemon = Daemon::start(Config { guests, ..Config::default() }).unwrap();
    let devices: Vec<_> = (0..12)
        .map(|i| IsmDevice::open(OpenOptions::new(dir.path(format!("p{i}")))).unwrap())
        .collect();
    for pair in devices.windows(2) {
        let (own, peer) = dmb(&pair[0], &pair[1]);
        peer.deliver(&[(64, b"hi")], [1, 1], true).unwrap();
        assert_eq!(own.words(), [1, 1]);
    }
}

#[test]
fn the_loopback_fabric_works_with_one_gid() {
    let world = World::on(Chid::LOOPBACK);
    let (a, b) = world.pair(Prefer::Auto);
    assert!(a.chid().is_loopback());
    let (own, peer) = dmb(&a, &b);
    peer.deliver(&[(64, b"x")], [1, 2], true).unwrap();
    assert_eq!(own.words(), [1, 2]);
    let (own, peer) = dmb(&b, &a);
    peer.deliver(&[(64, b"x")], [3, 4], true).unwrap();
    assert_eq!(own.words(), [3, 4]);
}

#[test]
fn a_stopped_daemon_is_noticed_at_once() {
    let mut world = World::new();
    let (a, b) = world.pair(Prefer::Auto);
    let (own, peer) = dmb(&a, &b);
    let sleeper = {
        let a = a.clone();
        thread::spawn(move || {
            let start = Instant::now();
            while !a.is_gone() && start.elapsed() < TIMEOUT {
                let _ = a.poll_events(&mut |_| ());
                let _ = a.wait_events(TIMEOUT);
            }
        })
    };
    drop(world.daemon.take());
    sleeper.join().unwrap();
    assert!(a.is_gone());
    eventually("b does not notice", || b.is_gone());
    let gone = a.register(b.gid(), LEN, 0);
    assert!(matches!(gone, Err(IsmError::Queue(QueueError::Gone))));
    assert!(a.wait_events(Duration::ZERO).unwrap(), "the descriptor stays readable");
    // The memory stays: a polling pair goes on.
    peer.deliver(&[(64, b"x")], [1, 1], false).unwrap();
    assert_eq!(own.words(), [1, 1]);
}

#[test]
fn a_socket_without_a_daemon_is_an_error() {
    let dir = TestDir::new();
    let missing = IsmDevice::open(OpenOptions::new(dir.path("nobody")));
    assert!(matches!(missing, Err(IsmError::Transport(TransportError::Connect { .. }))));
}

/// The other process of the tests below: this program again, with a role in its environment.
struct Other(Child);

impl Other {
    fn start(role: &str, dir: &TestDir) -> Other {
        let me = std::env::current_exe().unwrap();
        let child = Command::new(me)
            .args(["--exact", "role_of_another_process", "--nocapture"])
            .env("ISM_ROLE", role)
            .env("ISM_DIR", dir)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        Other(child)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn role_of_another_process() {
    let Ok(role) = std::env::var("ISM_ROLE") else { return };
    let dir = PathBuf::from(std::env::var_os("ISM_DIR").unwrap());
    match role.as_str() {
        "daemon" => {
            let guests = vec![GuestSpec::new(dir.join("a")), GuestSpec::new(dir.join("b"))];
            let _daemon = Daemon::start(Config { guests, ..Config::default() }).unwrap();
            std::fs::write(dir.join("ready"), "").unwrap();
            thread::sleep(Duration::from_secs(60));
        }
        "peer" => {
            let b = IsmDevice::open(OpenOptions::new(dir.join("b"))).unwrap();
            std::fs::write(dir.join("gid.new"), b.gid().0).unwrap();
            std::fs::rename(dir.join("gid.new"), dir.join("gid")).unwrap();
            let token = || std::fs::read(dir.join("token")).ok()?.try_into().ok();
            let start = Instant::now();
            let token = loop {
                assert!(start.elapsed() < TIMEOUT);
                match token() {
                    Some(token) => break Token(u64::from_le_bytes(token)),
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            let peer = b.attach(token, LEN).unwrap();
            peer.deliver(&[(64, b"from another process")], [1, 1], true).unwrap();
            thread::sleep(Duration::from_secs(60));
        }
        role => panic!("{role}"),
    }
}

#[test]
fn bytes_cross_between_processes_and_a_killed_one_is_noticed() {
    let world = World::new();
    let a = world.open("a", Prefer::Auto);
    let mut other = Other::start("peer", &world.dir);
    let gid_file = world.dir.path("gid");
    eventually("the other process", || gid_file.exists());
    let gid = Gid(std::fs::read(gid_file).unwrap().try_into().unwrap());
    let own = a.register(gid, LEN, 0).unwrap();
    std::fs::write(world.dir.path("token"), own.token().0.to_le_bytes()).unwrap();
    eventually("the bytes", || own.words() == [1, 1]);
    let mut bytes = [0; 20];
    own.memory().copy_out(64, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from another process");

    other.0.kill().unwrap();
    await_event(
        &a,
        |event| matches!(event, IsmEvent::PeerDown { gid: g, failed: true } if *g == gid),
    );
    drop(own);
    assert!(!a.is_gone());
}

#[test]
fn a_killed_daemon_is_noticed_at_once() {
    let dir = TestDir::new();
    let mut other = Other::start("daemon", &dir);
    eventually("the daemon", || dir.path("ready").exists());
    let a = IsmDevice::open(OpenOptions::new(dir.path("a"))).unwrap();
    assert!(a.arm_interrupts());
    other.0.kill().unwrap();
    let start = Instant::now();
    assert!(a.wait_events(TIMEOUT).unwrap());
    assert!(a.is_gone());
    assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
}

/// Opens the device of a socket, possibly in use by another process.
fn try_open(world: &World, name: &str, timeout: Duration) -> Result<Arc<IsmDevice>, IsmError> {
    IsmDevice::open(OpenOptions { timeout, ..OpenOptions::new(world.dir.path(name)) })
}

#[test]
fn a_device_in_use_is_awaited_as_long_as_the_caller_says() {
    let world = World::new();
    let first = world.open("a", Prefer::Auto);
    for timeout in [0, 30].map(Duration::from_millis) {
        let start = Instant::now();
        assert!(try_open(&world, "a", timeout).unwrap_err().is_in_use());
        assert!(start.elapsed() >= timeout);
    }
    thread::scope(|scope| {
        let waiting = [(); 2].map(|()| {
            scope.spawn(|| {
                let device = try_open(&world, "a", TIMEOUT).unwrap();
                thread::sleep(Duration::from_millis(20));
                drop(device);
            })
        });
        thread::sleep(Duration::from_millis(50));
        assert!(waiting.iter().all(|thread| !thread.is_finished()));
        drop(first);
    });
    // No process waits, and nothing is left behind.
    drop(try_open(&world, "a", TIMEOUT).unwrap());
    assert_eq!(std::fs::read_dir(&world.dir).unwrap().count(), 2);
}

#[test]
fn processes_that_search_for_a_device_find_each_free_one_and_no_other() {
    let world = World::new();
    let owners = AtomicU32::new(0);
    let try_both = || {
        ["a", "b"].into_iter().find_map(|name| match try_open(&world, name, Duration::ZERO) {
            Ok(device) => Some(device),
            Err(error) if error.is_in_use() => None,
            Err(error) => panic!("{error}"),
        })
    };
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for _ in 0..5 {
                    let mut device = None;
                    eventually("a free device", || {
                        device = try_both();
                        device.is_some()
                    });
                    assert!(owners.fetch_add(1, Ordering::SeqCst) < 2);
                    thread::sleep(Duration::from_millis(1));
                    owners.fetch_sub(1, Ordering::SeqCst);
                    drop(device);
                }
            });
        }
    });
}
