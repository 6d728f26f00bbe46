// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reader's view of a cut stream: the end of data only if the writer's process has ended, or has
//! announced the end of its data. The writer drops its socket at the first error, as programs do.
//!
//! `SMC_ENDS=500` is the number of runs of each case; the default is short.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use guest_driver::{SmcListener, SmcStream, Stack};
use smc_tests::bytes::check;
use smc_tests::helper::Helper;
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Dir, Fabric, TIMEOUT, eventually, note, pattern, send_all, watched};

use crate::support::{PEER, is_broken, read_until_it_ends, write_until_it_fails};

const FABRICS: [Fabric; 2] = [Fabric::Window, Fabric::Move];

/// The cause of a stream's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// kill -9 of the daemon.
    KillDaemon,
    /// The daemon ends in order, as at SIGTERM.
    StopDaemon,
    /// The daemon gives the writer's guest up.
    RemoveWriter,
    /// The daemon gives the reader's guest up.
    RemoveReader,
    /// kill -9 of the writer.
    KillWriter,
}

/// How a reader reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// At full speed.
    Fast,
    /// A pause after each 4 KiB.
    Slow,
    /// Nothing until a moment after the cut.
    Late,
    /// When `poll` says so, in pieces of 4 KiB.
    Polled,
}

const PACES: [Pace; 4] = [Pace::Fast, Pace::Slow, Pace::Late, Pace::Polled];

/// How many times each case runs.
fn runs() -> u64 {
    std::env::var("SMC_ENDS").map_or(1, |text| text.parse().expect("SMC_ENDS is a number"))
}

fn limit() -> Duration {
    LIMIT + Duration::from_secs(20) * runs() as u32
}

/// A daemon in a process of its own, with a guest for the reader and one for the writer.
struct Scene {
    daemon: Option<Helper>,
    dir: Dir,
    fabric: Fabric,
    listener: SmcListener,
    _stack: Arc<Stack>,
}

impl Scene {
    fn new(fabric: Fabric) -> Scene {
        let dir = Dir::new();
        let sockets = [0, 1].map(|n| dir.socket(n).display().to_string());
        let (daemon, ready) = Helper::start(PEER, &["daemon", &sockets[0], &sockets[1]]);
        assert_eq!(ready, "ready");
        let stack = Stack::open(fabric.config(0, dir.socket(0))).unwrap();
        let listener = SmcListener::bind(&stack, "127.0.0.1:0").unwrap();
        Scene { daemon: Some(daemon), dir, fabric, listener, _stack: stack }
    }

    fn tell_daemon(&mut self, line: &str) {
        self.daemon.as_mut().unwrap().feed(line);
    }

    /// A writer in a process of its own, and the reader's end.
    fn pour(&self, seed: u64, limit: u64) -> (Helper, SmcStream) {
        let fabric = if self.fabric == Fabric::Move { "move" } else { "window" };
        let device = self.dir.socket(1).display().to_string();
        let address = self.listener.local_addr().unwrap().to_string();
        let numbers = [seed, limit].map(|number| number.to_string());
        let args = ["pour", fabric, &device, &address, &numbers[0], &numbers[1]];
        let mut writer = Helper::spawn(PEER, &args);
        let (stream, _) = self.listener.accept().unwrap();
        assert!(stream.is_smc(), "{}", stream.info());
        assert_eq!(writer.line(), "connected smc");
        (writer, stream)
    }
}

/// Reads to the end; returns the number of bytes, and the error if there was one.
fn drain(
    stream: &SmcStream,
    seed: u64,
    pace: Pace,
    cut: &AtomicBool,
) -> (usize, Option<ErrorKind>) {
    note(format!("reads until the stream ends, {pace:?}"));
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_nonblocking(pace == Pace::Polled).unwrap();
    let mut buf = vec![0; if pace == Pace::Fast { 64 << 10 } else { 4 << 10 }];
    let mut done = 0;
    loop {
        if pace == Pace::Polled {
            await_readable(stream);
        }
        let n = match stream.recv(&mut buf) {
            Ok(0) => return (done, None),
            Ok(n) => n,
            Err(error) if error.kind() == ErrorKind::WouldBlock && pace == Pace::Polled => continue,
            Err(error) => return (done, Some(error.kind())),
        };
        check(seed, done, &buf[..n]);
        done += n;
        match pace {
            Pace::Slow => thread::sleep(Duration::from_millis(1)),
            Pace::Late => {
                while !cut.load(Ordering::Acquire) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            Pace::Fast | Pace::Polled => {}
        }
    }
}

fn await_readable(stream: &SmcStream) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let pollable = stream.pollable().unwrap();
    let mut fds = [PollFd::from_borrowed_fd(pollable.as_fd(), PollFlags::IN)];
    let limit = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "nothing is reported");
}

/// Cuts one stream during its flow.
fn cut_once(fabric: Fabric, cut: Cut, pace: Pace, run: u64) {
    note(format!("{fabric:?}, {cut:?}, {pace:?}, run {run}"));
    let seed = run.wrapping_mul(5) + pace as u64;
    let mut scene = Scene::new(fabric);
    let (writer, stream) = scene.pour(seed, 0);
    let is_cut = AtomicBool::new(false);
    let (count, end) = thread::scope(|scope| {
        let reading = scope.spawn(|| drain(&stream, seed, pace, &is_cut));
        thread::sleep(Duration::from_millis(3 + run * 7 % 40));
        let mut writer = Some(writer);
        match cut {
            Cut::KillDaemon => scene.daemon.take().unwrap().kill(),
            Cut::StopDaemon => scene.tell_daemon("stop\n"),
            Cut::RemoveWriter => scene.tell_daemon("remove port1\n"),
            Cut::RemoveReader => scene.tell_daemon("remove port0\n"),
            Cut::KillWriter => writer.take().unwrap().kill(),
        }
        // Until the writer has dropped its socket, and a moment longer.
        let written = writer.map(|mut writer| writer.line());
        thread::sleep(Duration::from_millis(run % 20));
        is_cut.store(true, Ordering::Release);
        let result = reading.join().unwrap();
        if let Some(said) = written {
            let written: usize = said.strip_prefix("failed ").unwrap().parse().unwrap();
            assert!(result.0 <= written + (16 << 10), "{} of {written}", result.0);
        }
        result
    });
    match cut {
        // As on TCP.
        Cut::KillWriter => assert_eq!(end, None, "after {count} bytes"),
        _ => assert_eq!(end, Some(ErrorKind::ConnectionReset), "after {count} bytes"),
    }
    // The end stays the same, and sending fails.
    assert!(stream.send(b"x").is_err_and(|error| is_broken(error.kind())));
    let again = stream.recv(&mut [0; 1]);
    assert_eq!(again.map_err(|error| error.kind()).err(), end, "{fabric:?} {pace:?} {count}");
}

fn cut_all(cut: Cut) {
    watched(limit(), || {
        for run in 0..runs() {
            for fabric in FABRICS {
                PACES.into_iter().for_each(|pace| cut_once(fabric, cut, pace, run));
            }
        }
    });
}

smc_test_support::tests_of! {
    cut_all:
    fn a_killed_daemon_is_a_reset_for_a_reader_whose_writer_gives_up(Cut::KillDaemon);
    fn a_daemon_that_stops_is_a_reset_for_a_reader_whose_writer_gives_up(Cut::StopDaemon);
    fn a_writer_without_its_device_is_a_reset_for_its_reader(Cut::RemoveWriter);
    fn a_reader_without_its_device_is_told_of_a_reset(Cut::RemoveReader);
    fn a_killed_writer_is_an_end_of_data_for_its_reader(Cut::KillWriter);
}

// As on TCP: the kernel delivers every byte written by a process, even after the process's death.
#[test]
fn a_writer_that_dies_after_its_last_write_has_sent_all_of_it() {
    watched(limit(), || {
        for run in 0..runs() {
            for fabric in FABRICS {
                for (size, pace) in [(200_000, Pace::Slow), (30_000, Pace::Late), (1, Pace::Fast)] {
                    note(format!("{fabric:?}, {size} bytes, {pace:?}, run {run}"));
                    let scene = Scene::new(fabric);
                    let (_writer, stream) = scene.pour(run, size);
                    let (count, end) = drain(&stream, run, pace, &AtomicBool::new(true));
                    assert_eq!(end, None, "after {count} bytes");
                    let whole = (size as usize).next_multiple_of(16 << 10);
                    assert_eq!(count, whole, "{fabric:?}");
                }
            }
        }
    });
}

/// Losses of devices, possibly unnoticed by one end.
const LOSSES: [Cut; 3] = [Cut::StopDaemon, Cut::RemoveWriter, Cut::RemoveReader];

fn lose(bench: &mut Bench, loss: Cut) {
    match loss {
        Cut::RemoveReader => bench.daemon().remove_guest("port0").unwrap(),
        Cut::RemoveWriter => bench.daemon().remove_guest("port1").unwrap(),
        _ => bench.stop_daemon(),
    }
}

/// The writer's announcement before the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Nothing,
    Done,
    Closed,
}

#[test]
fn what_an_end_has_said_holds_when_devices_are_lost() {
    for fabric in FABRICS {
        for said in [Said::Nothing, Said::Done, Said::Closed] {
            for loss in LOSSES {
                watched(LIMIT, || {
                    note(format!("{fabric:?}, {said:?}, {loss:?}"));
                    let mut bench = Bench::new(fabric, 2);
                    let pair = bench.pair();
                    let (writer, reader) = pair.connect();
                    let bytes = pattern(5, 40_000);
                    send_all(&writer, &bytes);
                    let writer = say(writer, said);
                    // Moves are under way for a moment.
                    eventually("all is there", || {
                        reader.readable().unwrap() == bytes.len()
                            && (said == Said::Nothing || reader.peer_has_ended() == Some(true))
                    });
                    lose(&mut bench, loss);
                    if let Some(writer) = &writer {
                        let end = read_until_it_ends(writer);
                        assert_eq!(end, Some(ErrorKind::ConnectionReset), "the writer");
                    }
                    let (count, end) = drain(&reader, 5, Pace::Fast, &AtomicBool::new(true));
                    assert_eq!(count, bytes.len());
                    let expected = (said == Said::Nothing).then_some(ErrorKind::ConnectionReset);
                    assert_eq!(end, expected, "the reader");
                    assert!(is_broken(write_until_it_fails(&reader)));
                });
            }
        }
    }
}

fn say(writer: SmcStream, said: Said) -> Option<SmcStream> {
    match said {
        Said::Nothing => Some(writer),
        Said::Done => {
            writer.shutdown(Shutdown::Write).unwrap();
            Some(writer)
        }
        Said::Closed => {
            drop(writer);
            None
        }
    }
}
