// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ends of connections at the same moment as steps of other threads.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use guest_driver::interpose::AfterFork;
use guest_driver::{Config, SmcListener, SmcStream, Stack};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

/// More than the ring, and less than twice as much.
const WRITTEN: usize = 100 << 10;
/// A longer call waits for ever.
const LONG: Duration = Duration::from_secs(20);

/// Writes more than the ring holds, has the peer read the ring's bytes, and ends the stream, before any
/// thread of the writer has moved the rest into the ring. `end` ends the stream, and the returned stream is
/// dropped after its peer has read everything.
fn end_with_a_queue_that_may_leave(end: impl Fn(SmcStream) -> Option<SmcStream>, name: &str) {
    let dir = std::env::temp_dir().join(format!("smc-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
    let open = |name: &str| {
        daemon.add_guest(GuestSpec::new(dir.join(name))).unwrap();
        Stack::open(Config::new(dir.join(name))).unwrap()
    };
    let (server, client) = (open("a"), open("b"));
    let listener = SmcListener::bind(&server, "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    for round in 0..20 {
        let connecting = std::thread::spawn({
            let client = client.clone();
            move || SmcStream::connect(&client, addr).unwrap()
        });
        let (mut receiver, _) = listener.accept().unwrap();
        let mut sender = connecting.join().unwrap();
        assert!(sender.is_smc() && receiver.is_smc());
        receiver.set_read_timeout(Some(LONG)).unwrap();
        sender.write_all(&vec![7; WRITTEN]).unwrap();
        let in_ring = receiver.readable().unwrap();
        assert!(in_ring < WRITTEN, "nothing is in the queue");
        // While the queues are held, no thread of the writer notices the peer's read.
        let read = || AfterFork::Release(receiver.read_exact(&mut vec![0; in_ring]));
        client.hold_devices(LONG, read).unwrap().unwrap();
        let sender = end(sender);
        let mut rest = Vec::new();
        let all = receiver.read_to_end(&mut rest).map(|n| n + in_ring);
        assert_eq!(all.unwrap_or_else(|error| panic!("round {round}: {error}")), WRITTEN);
        drop(sender);
    }
    daemon.stop();
    std::fs::remove_dir_all(&dir).unwrap();
}

/// One test, because queues are held for the whole process.
#[test]
fn an_end_that_moves_the_last_bytes_itself_is_an_end_of_data_for_the_peer() {
    let shutdown = |sender: SmcStream| {
        sender.shutdown(Shutdown::Write).unwrap();
        Some(sender)
    };
    let shutdown_both = |sender: SmcStream| {
        sender.shutdown_both().unwrap();
        Some(sender)
    };
    let close = |sender: SmcStream| {
        drop(sender);
        None
    };
    end_with_a_queue_that_may_leave(shutdown, "end-write");
    end_with_a_queue_that_may_leave(shutdown_both, "end-both");
    end_with_a_queue_that_may_leave(close, "end-close");
}
