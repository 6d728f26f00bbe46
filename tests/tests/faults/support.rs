//! What these tests have in common.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use guest_driver::SmcStream;
use smc_tests::leaks::Devices;
use smc_tests::{Bench, PATIENCE, Pair, eventually, note, pattern, read_exactly, send_all};

/// A survivor has to hear of an end "within a second"; a loaded machine gets three.
pub(crate) const SOON: Duration = Duration::from_secs(3);

/// The helper program.
pub(crate) const PEER: &str = env!("CARGO_BIN_EXE_smc-test-peer");

/// Reads until the connection fails; returns the kind of the error and how long that took.
#[track_caller]
pub(crate) fn read_until_it_fails(stream: &SmcStream) -> ErrorKind {
    note("reads until it fails");
    let start = Instant::now();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buf = vec![0; 8 << 10];
    let error = loop {
        match stream.recv(&mut buf) {
            Ok(0) => panic!("an orderly end"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    println!("reader heard after {:?}: {error}", start.elapsed());
    error.kind()
}

/// Writes until the connection fails.
#[track_caller]
pub(crate) fn write_until_it_fails(stream: &SmcStream) -> ErrorKind {
    note("writes until it fails");
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    loop {
        if let Err(error) = stream.send(&[1; 4096]) {
            println!("writer heard: {error}");
            return error.kind();
        }
    }
}

pub(crate) fn is_broken(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe
    )
}

/// A connection of the pair works, in both directions.
#[track_caller]
pub(crate) fn works(client: &SmcStream, server: &SmcStream) {
    let bytes = pattern(42, 5000);
    send_all(client, &bytes);
    assert!(read_exactly(server, bytes.len()) == bytes);
    send_all(server, &bytes);
    assert!(read_exactly(client, bytes.len()) == bytes);
}

/// A new connection of the pair works.
#[track_caller]
pub(crate) fn serves(pair: &Pair) {
    let (client, server) = pair.connect();
    works(&client, &server);
}

/// What the devices hold comes back to `before`.
#[track_caller]
pub(crate) fn nothing_is_left(bench: &Bench, before: Devices) {
    let start = Instant::now();
    let mut now = Devices::of(bench.daemon()).levels();
    while (now.dmbs, now.attached) != (before.dmbs, before.attached) {
        assert!(start.elapsed() < PATIENCE, "{now:?} is left, before: {before:?}");
        std::thread::sleep(Duration::from_millis(5));
        now = Devices::of(bench.daemon()).levels();
    }
}

/// Waits until neither side has connections that are still closing.
#[track_caller]
pub(crate) fn all_closed(pair: &Pair) {
    eventually("closed connections are gone", || {
        pair.client.totals().closing + pair.server.totals().closing == 0
    });
}
