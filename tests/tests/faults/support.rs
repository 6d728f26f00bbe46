// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parts shared by these tests.

use std::cell::RefCell;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use guest_driver::SmcStream;
use smc_test_support::Stopwatch;
use smc_tests::hostile::Hostile;
use smc_tests::leaks::Devices;
use smc_tests::raw::Device;
use smc_tests::{Bench, Fabric, Pair, TIMEOUT, eventually, note, pattern, read_exactly, send_all};

/// Limit for a survivor's notice of an end, promised "within a second"; a [`Stopwatch`] gives three.
pub(crate) const SOON: Duration = Duration::from_secs(3);

/// The helper program.
pub(crate) const PEER: &str = env!("CARGO_BIN_EXE_smc-test-peer");

/// Ends a thread's loop, also if the test fails meanwhile.
pub(crate) struct StopAtEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A server, an honest connection of its, and a hostile peer's device.
pub(crate) struct Stage {
    pub(crate) bench: Bench,
    pub(crate) pair: Pair,
    pub(crate) honest: (SmcStream, SmcStream),
    pub(crate) device: Device,
}

pub(crate) fn stage(fabric: Fabric) -> Stage {
    let bench = Bench::new(fabric, 4);
    let pair = bench.pair_with(|config| config.testing.close_timeout = Duration::from_secs(1));
    let honest = pair.connect();
    let device = Device::open(&bench, 2);
    Stage { bench, pair, honest, device }
}

impl Stage {
    #[track_caller]
    pub(crate) fn attack(&self) -> (Hostile, SmcStream) {
        Hostile::connect(&self.pair, &self.device)
    }

    #[track_caller]
    pub(crate) fn nobody_else_is_harmed(&self) {
        self.honest_works();
        serves(&self.pair);
    }

    #[track_caller]
    pub(crate) fn honest_works(&self) {
        works(&self.honest.0, &self.honest.1);
    }
}

/// Reads until the connection fails; returns the kind of the error.
#[track_caller]
pub(crate) fn read_until_it_fails(stream: &SmcStream) -> ErrorKind {
    read_until_it_ends(stream).expect("an error")
}

/// Reads until the connection ends: the error, or `None` for an end of data. TCP knows the end of a
/// process as an end of data, if the process had read everything.
pub(crate) fn read_until_it_ends(stream: &SmcStream) -> Option<ErrorKind> {
    note("reads until the connection ends");
    let start = Instant::now();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut buf = vec![0; 8 << 10];
    let error = loop {
        match stream.recv(&mut buf) {
            Ok(0) => {
                println!("reader saw the end after {:?}", start.elapsed());
                return None;
            }
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    println!("reader heard after {:?}: {error}", start.elapsed());
    Some(error.kind())
}

/// Writes until the connection fails.
#[track_caller]
pub(crate) fn write_until_it_fails(stream: &SmcStream) -> ErrorKind {
    note("writes until it fails");
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
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

/// Waits until the devices' resources are back at `before`.
#[track_caller]
pub(crate) fn nothing_is_left(bench: &Bench, before: Devices) {
    let start = Instant::now();
    let mut now = Devices::of(bench.daemon()).levels();
    while (now.dmbs, now.attached) != (before.dmbs, before.attached) {
        assert!(start.elapsed() < TIMEOUT, "{now:?} is left, before: {before:?}");
        thread::sleep(Duration::from_millis(5));
        now = Devices::of(bench.daemon()).levels();
    }
}

/// Waits until neither side has closing connections left.
#[track_caller]
pub(crate) fn all_closed(pair: &Pair) {
    eventually("closed connections are gone", || {
        pair.client.totals().closing + pair.server.totals().closing == 0
    });
}

/// A server accepting every connection in the background, like real servers.
pub(crate) struct Door {
    pub(crate) pair: Arc<Pair>,
    accepted: Receiver<SmcStream>,
    /// Connections over TCP accepted before one over SMC.
    aside: RefCell<Vec<SmcStream>>,
    open: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    pub(crate) fn new(pair: Pair) -> Door {
        let (pair, open) = (Arc::new(pair), Arc::new(AtomicBool::new(true)));
        let (tell, accepted) = mpsc::channel();
        let thread = {
            let (pair, open) = (pair.clone(), open.clone());
            thread::spawn(move || {
                while open.load(Ordering::Relaxed) {
                    let (stream, _) = pair.listener.accept().unwrap();
                    let _ = tell.send(stream);
                }
            })
        };
        Door { pair, accepted, aside: RefCell::default(), open, thread: Some(thread) }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.pair.addr()
    }

    /// The next accepted connection.
    #[track_caller]
    pub(crate) fn next(&self) -> SmcStream {
        note("waits for a connection to be accepted");
        self.accepted.recv_timeout(TIMEOUT).unwrap()
    }

    /// The next accepted SMC connection; others are kept for [`Door::next_tcp`].
    #[track_caller]
    pub(crate) fn next_smc(&self) -> SmcStream {
        loop {
            let stream = self.next();
            if stream.is_smc() {
                return stream;
            }
            self.aside.borrow_mut().push(stream);
        }
    }

    /// A kept TCP connection, or the next connection, required to be TCP.
    #[track_caller]
    pub(crate) fn next_tcp(&self) -> SmcStream {
        let stream = self.aside.borrow_mut().pop().unwrap_or_else(|| self.next());
        assert!(!stream.is_smc(), "{}", stream.info());
        stream
    }

    /// A connection accepted against expectations.
    pub(crate) fn soon(&self) -> Option<SmcStream> {
        self.accepted.recv_timeout(Duration::from_millis(20)).ok()
    }

    /// Counts accepted connections not asked for so far.
    pub(crate) fn others(&self) -> usize {
        self.accepted.try_iter().count()
    }

    /// The same, themselves, after a while.
    pub(crate) fn drain(&self) -> Vec<SmcStream> {
        thread::sleep(Duration::from_millis(100));
        self.accepted.try_iter().collect()
    }

    /// An honest client is served, and soon.
    #[track_caller]
    pub(crate) fn serves(&self) {
        let start = Stopwatch::start();
        let client = SmcStream::connect(&self.pair.client, self.addr()).unwrap();
        assert!(client.is_smc(), "{}", client.info());
        let server = self.next_smc();
        works(&client, &server);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.open.store(false, Ordering::Relaxed);
        // Ends the thread's last wait in `accept`.
        if let Ok(mut last) = TcpStream::connect(self.addr()) {
            let _ = last.write_all(b"bye");
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
