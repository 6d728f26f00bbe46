// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A blocked sender soon learns of its peer's reads, although the peer's application is in no call.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::io::{Read, Write};
use std::time::Duration;

use guest_driver::{Config, DataPath, SmcListener, SmcStream, Stack};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

/// Bytes of the receiver's ring: its buffer without the control block.
const RING: usize = (64 << 10) - 32;
/// Less than the peer is told of at once, a tenth of the ring.
const READ: usize = 3000;

/// How long the sender is blocked, the median of ten times.
fn median_block(path: DataPath) -> Duration {
    let dir = smc_test_support::TestDir::new();
    let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
    let open = |name: &str| {
        daemon.add_guest(GuestSpec::new(dir.join(name))).unwrap();
        Stack::open(Config { path, ..Config::new(dir.join(name)) }).unwrap()
    };
    let (server, client) = (open("a"), open("b"));
    let listener = SmcListener::bind(&server, "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();

    let mut blocked = Vec::new();
    for _ in 0..10 {
        let connecting = std::thread::spawn({
            let client = client.clone();
            move || SmcStream::connect(&client, addr).unwrap()
        });
        let (mut receiver, _) = listener.accept().unwrap();
        let mut sender = connecting.join().unwrap();
        assert!(sender.is_smc() && receiver.is_smc());
        sender.write_all(&vec![1; RING - 1000]).unwrap();
        receiver.read_exact(&mut [0; READ]).unwrap();
        // No thread calls the receiver from here on.
        let start = smc_test_support::Stopwatch::start();
        sender.write_all(&vec![2; 1000 + READ]).unwrap();
        blocked.push(start.elapsed());
    }
    daemon.stop();
    blocked.sort_unstable();
    blocked[blocked.len() / 2]
}

#[test]
fn a_blocked_sender_is_told_of_what_was_read_by_an_application_that_stays_away() {
    for path in [DataPath::Window, DataPath::Move] {
        let median = median_block(path);
        // 20 ms with the message; a second without.
        assert!(median < Duration::from_millis(500), "{path:?}: blocked for {median:?}");
        println!("{path:?}: blocked for {median:?}");
    }
}
