// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thousand short streams beside busy loops, in both directions, with each way of reading and of
//! ending: none may stand. For a standing stream the states of both ends are shown.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use guest_driver::socket::tokio::AsyncSmcStream;
use guest_driver::{Interest, Poller, SmcStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smc_tests::helper::Helper;
use smc_tests::watch::{fewer, slowly};
use smc_tests::{Bench, Fabric, Pair, note, pattern, send_all, watched};
use tokio::io::AsyncReadExt;

/// Streams of each way to read.
const STREAMS: usize = 250;
/// Processes killed in the middle of a stream.
const KILLED: usize = 20;
const BUSY_LOOPS: usize = 3;
/// A call with a longer wait stands.
const STANDS: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(300);

/// Less than the ring, exactly the ring, and more than the ring.
const LENGTHS: [usize; 5] = [1, 20_000, 65_504, 100_000, 300_000];

#[derive(Clone, Copy, Debug)]
enum Read {
    Blocking,
    Poll,
    Epoll,
    Tokio,
}

#[derive(Clone, Copy, Debug)]
enum End {
    /// Ends its direction, and reads until its peer closes.
    Shutdown,
    ShutdownBoth,
    Close,
    Linger,
}

const ENDS: [End; 4] = [End::Shutdown, End::ShutdownBoth, End::Close, End::Linger];

/// Reads to the end of data, and returns how many bytes came; `None`: the stream stands.
fn read_to_end(stream: &SmcStream, how: Read) -> Option<usize> {
    if let Read::Tokio = how {
        return read_by_tokio(stream);
    }
    let timeout = slowly(STANDS);
    stream.set_nonblocking(!matches!(how, Read::Blocking)).unwrap();
    stream.set_read_timeout(Some(timeout)).unwrap();
    let poller = matches!(how, Read::Epoll).then(|| Poller::new(Duration::ZERO).unwrap());
    if let Some(poller) = &poller {
        poller.add(stream, 1, Interest::READ).unwrap();
    }
    let (mut room, mut all, mut ready) = (vec![0; 30_000], 0, Vec::new());
    loop {
        match stream.recv(&mut room) {
            Ok(0) => return Some(all),
            Ok(n) => all += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let is_ready = match (how, &poller) {
                    (_, Some(poller)) => {
                        poller.wait(&mut ready, 1, Some(timeout)).unwrap();
                        !ready.is_empty()
                    }
                    (Read::Poll, _) => {
                        let flags = PollFlags::IN | PollFlags::RDHUP;
                        let fd = stream.pollable().unwrap();
                        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), flags)];
                        let time = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: 0 };
                        poll(&mut fds, Some(&time)).unwrap() > 0
                    }
                    _ => false,
                };
                if !is_ready {
                    return None;
                }
            }
            Err(error) => panic!("{error} after {all} bytes"),
        }
    }
}

fn read_by_tokio(stream: &SmcStream) -> Option<usize> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut stream = AsyncSmcStream::new(stream.try_clone().unwrap()).unwrap();
        let mut all = Vec::new();
        let read = stream.read_to_end(&mut all);
        tokio::time::timeout(slowly(STANDS), read).await.ok().map(|n| n.unwrap())
    })
}

/// The states of both ends.
fn states(pair: &Pair) -> String {
    let of = |stack: &guest_driver::Stack| format!("{:#?}", stack.connections());
    format!("client: {}\nserver: {}", of(&pair.client), of(&pair.server))
}

/// One stream from `sender` to `reader`.
fn stream(pair: &Pair, how: Read, n: usize) {
    let (client, server) = pair.connect();
    let (sender, reader) = if n.is_multiple_of(2) { (client, server) } else { (server, client) };
    let (end, len) = (ENDS[n / 2 % ENDS.len()], LENGTHS[n / 8 % LENGTHS.len()]);
    let name = format!("{how:?} {n}: {end:?} after {len} bytes");
    note(name.as_str());
    thread::scope(|scope| {
        scope.spawn(|| {
            let sender = sender;
            send_all(&sender, &pattern(n as u64, len));
            match end {
                End::Shutdown => {
                    sender.shutdown(Shutdown::Write).unwrap();
                    let rest = read_to_end(&sender, how);
                    assert_eq!(rest, Some(0), "{name}: the sender stands\n{}", states(pair));
                }
                End::ShutdownBoth => sender.shutdown_both().unwrap(),
                End::Close => {}
                End::Linger => sender.set_linger(Some(slowly(STANDS))).unwrap(),
            }
        });
        let came = read_to_end(&reader, how);
        assert_eq!(came, Some(len), "{name}: the reader stands\n{}", states(pair));
        drop(reader);
    });
}

/// Streams of processes, each killed behind so many bytes.
fn killed_streams(bench: &Bench, pair: &Pair) {
    let device = bench.socket(2).display().to_string();
    for n in 0..fewer(KILLED) {
        let (address, limit) = (pair.addr().to_string(), (1 + n * 20_000).to_string());
        note(format!("killed behind {limit} bytes"));
        let args = ["pour", "window", &device, &address, "1", &limit];
        let _peer = Helper::spawn(env!("CARGO_BIN_EXE_smc-test-peer"), &args);
        let (reader, _) = pair.listener.accept().unwrap();
        reader.set_read_timeout(Some(slowly(STANDS))).unwrap();
        let mut room = vec![0; 10_000];
        loop {
            match reader.recv(&mut room) {
                Ok(1..) => {}
                Ok(0) => break,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) => panic!("{error}\n{}", states(pair)),
            }
        }
    }
}

#[test]
fn none_of_a_thousand_short_streams_stands_beside_busy_loops() {
    watched(slowly(LIMIT), || {
        let bench = Bench::new(Fabric::Window, 3);
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..BUSY_LOOPS {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            // Ends the loops however the streams end.
            let _done = Done(&is_done);
            let pair = bench.pair();
            for n in 0..fewer(STREAMS) {
                for how in [Read::Blocking, Read::Poll, Read::Epoll, Read::Tokio] {
                    stream(&pair, how, n);
                }
            }
            killed_streams(&bench, &pair);
        });
    });
}

struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
