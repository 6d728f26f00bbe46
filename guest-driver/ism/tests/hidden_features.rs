// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver behind a front end with fewer features than the daemon.
//!
//! The driver is its own front end here. So a relay between driver and daemon takes the part of
//! cloud-hypervisor's generic vhost-user device. The relay hides the feature bits of the device's type and
//! shared memory, and has each queue begin at the driver's index at DRIVER_OK.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use smc_test_support::{TIMEOUT, TestDir};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_device_ism::config::GuestSpec;
use vhost_device_ism::{Config, Daemon};
use virtio_ism::{IsmDevice, IsmEvent, OpenOptions, Prefer};
use virtio_ism_abi::config::Features;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const LEN: u32 = 64 << 10;

// Requests of vhost-user.
const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_PROTOCOL_FEATURES: u32 = 15;

/// Feature bits of the device's type.
const TYPE_BITS: u64 = 0xff_ffff;

/// A message: header (request, flags, length of the rest) and the rest.
struct Message(Vec<u8>, Option<File>);

impl Message {
    /// The next one; `None` at the end.
    fn receive(from: &UnixStream) -> Option<Message> {
        let (mut bytes, mut file) = (vec![0; 12], None);
        let mut filled = 0;
        while filled < 12 {
            match from.recv_with_fd(&mut bytes[filled..]) {
                Ok((0, _)) | Err(_) => return None,
                Ok((n, received)) => {
                    filled += n;
                    file = received.or(file);
                }
            }
        }
        let len = u32::from_le_bytes(bytes[8..].try_into().unwrap()) as usize;
        bytes.resize(12 + len, 0);
        let mut from = from;
        from.read_exact(&mut bytes[12..]).ok()?;
        Some(Message(bytes, file))
    }

    fn send(&self, to: &UnixStream) -> Option<()> {
        let mut sent = 0;
        if let Some(file) = &self.1 {
            sent = to.send_with_fd(&self.0[..], file.as_raw_fd()).ok()?;
        }
        let mut to = to;
        to.write_all(&self.0[sent..]).ok()
    }

    fn request(&self) -> u32 {
        self.u32_at(0)
    }

    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }
}

/// The relay's knowledge of the driver, to find the index of a queue.
#[derive(Default)]
struct Driver {
    /// Address of the memory, offset in its file, and the file.
    memory: Option<(u64, u64, File)>,
    /// Address of the available ring, by queue.
    rings: Vec<(u32, u64)>,
}

impl Driver {
    /// How many chains the driver has made available in a queue so far.
    fn index(&self, queue: u32) -> u16 {
        let (_, ring) = *self.rings.iter().find(|(known, _)| *known == queue).unwrap();
        let (start, offset, file) = self.memory.as_ref().unwrap();
        let mut index = [0; 2];
        file.read_exact_at(&mut index, ring - start + offset + 2).unwrap();
        u16::from_le_bytes(index)
    }
}

fn to_daemon(driver: &UnixStream, daemon: &UnixStream) -> Option<()> {
    let mut known = Driver::default();
    loop {
        let mut message = Message::receive(driver)?;
        match message.request() {
            SET_MEM_TABLE => {
                // After count and padding: guest-physical address, length, address, offset.
                assert_eq!(message.u32_at(12), 1, "one region");
                let file = message.1.as_ref().unwrap().try_clone().unwrap();
                known.memory = Some((message.u64_at(36), message.u64_at(44), file));
            }
            // After queue and flags: descriptors, used ring, available ring.
            SET_VRING_ADDR => known.rings.push((message.u32_at(12), message.u64_at(36))),
            SET_VRING_BASE => {
                let index = known.index(message.u32_at(12));
                message.0[16..20].copy_from_slice(&u32::from(index).to_le_bytes());
            }
            _ => {}
        }
        message.send(daemon)?;
    }
}

fn to_driver(daemon: &UnixStream, driver: &UnixStream) -> Option<()> {
    loop {
        let mut message = Message::receive(daemon)?;
        let hidden = match message.request() {
            GET_FEATURES => TYPE_BITS,
            GET_PROTOCOL_FEATURES => VhostUserProtocolFeatures::SHMEM.bits(),
            _ => 0,
        };
        if hidden != 0 {
            let shown = message.u64_at(12) & !hidden;
            message.0[12..20].copy_from_slice(&shown.to_le_bytes());
        }
        message.send(driver)?;
    }
}

/// A relay in front of a daemon's socket, for one connection; returns its socket.
fn relay(socket: &Path) -> PathBuf {
    let path = socket.with_extension("relay");
    let listener = UnixListener::bind(&path).unwrap();
    let socket = socket.to_owned();
    thread::spawn(move || {
        let driver = listener.accept().unwrap().0;
        let daemon = UnixStream::connect(socket).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                to_driver(&daemon, &driver);
                let _ = driver.shutdown(Shutdown::Both);
            });
            to_daemon(&driver, &daemon);
            let _ = daemon.shutdown(Shutdown::Both);
        });
    });
    path
}

/// Waits for the next event.
fn event(device: &IsmDevice) -> IsmEvent {
    let start = Instant::now();
    let mut found = None;
    while found.is_none() {
        assert!(start.elapsed() < TIMEOUT, "no event comes");
        device.poll_events(&mut |event| found = found.take().or(Some(event))).unwrap();
        if found.is_none() {
            device.wait_events(Duration::from_secs(1)).unwrap();
        }
    }
    found.unwrap()
}

#[test]
fn nothing_but_the_window_is_missing_behind_a_front_end_that_hides_feature_bits() {
    let dir = TestDir::new();
    let sockets = ["a", "b"].map(|name| dir.join(name));
    let guests = sockets.iter().map(GuestSpec::new).collect();
    let daemon = Daemon::start(Config { guests, ..Config::default() }).unwrap();
    let [a, b] = sockets.each_ref().map(|socket| {
        let options = OpenOptions { prefer: Prefer::Auto, ..OpenOptions::new(relay(socket)) };
        IsmDevice::open(options).unwrap()
    });
    assert_eq!(a.features(), Features::MOVE | Features::SW_EVENT | Features::STATS);
    assert_eq!(a.config().window_size.get(), 0);

    // Moves, and the signal at their end.
    let own = b.register(a.gid(), LEN, 0).unwrap();
    let peer = a.attach(own.token(), LEN).unwrap();
    peer.deliver(&[(100, b"by move")], [1, 1], true).unwrap();
    assert!(matches!(event(&b), IsmEvent::DmbSignal(_)));
    let mut bytes = [0; 7];
    own.memory().copy_out(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"by move");

    // Software events, and counters.
    a.signal_event(b.gid(), 5, 6).unwrap();
    let signal = event(&b);
    assert!(matches!(signal, IsmEvent::SwEvent { code: 5, info: 6, .. }), "{signal:?}");
    assert!(a.stats().unwrap()[virtio_ism_abi::command::stat::MOVES] >= 1);

    // The end of a peer.
    drop((peer, a));
    assert!(matches!(event(&b), IsmEvent::PeerDown { .. }));
    drop((own, b));
    daemon.stop();
}
