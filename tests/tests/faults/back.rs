// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections return to a device once there is one again: no byte is lost or doubled, no end is told
//! of a reset, and no resource of the former devices is left.
//!
//! `SMC_BACK=50` is the number of daemons ended under the streams; the default is three. `SMC_SEED`
//! chooses the times.

use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::socket::CurrentCarrier;
use guest_driver::{Interest, Poller, SmcStream, Stack};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Uid;
use smc_core::carrier::BackOff;
use smc_tests::bytes::{check, fill};
use smc_tests::watch::LIMIT;
use smc_tests::{TIMEOUT, eventually, note, pattern, read_exactly, send_all, watched};

use crate::outlive::{Loss, Scene};

const STREAMS: usize = 16;
/// Bytes of a message.
const MESSAGE: usize = 30_000;

pub(crate) fn is_back(stack: &Arc<Stack>) -> bool {
    let on_device = |now| matches!(now, CurrentCarrier::Device);
    stack.connections().iter().all(|c| on_device(c.changes.clone().unwrap_or_default().now))
}

/// Both directions carry bytes.
pub(crate) fn talk(client: &SmcStream, server: &SmcStream) {
    let bytes = pattern(5, 5000);
    send_all(client, &bytes);
    assert!(read_exactly(server, bytes.len()) == bytes);
    send_all(server, &bytes);
    assert!(read_exactly(client, bytes.len()) == bytes);
}

/// How often each connection has changed its carrier.
fn counts(stack: &Arc<Stack>) -> impl Iterator<Item = u32> {
    stack.connections().into_iter().map(|c| c.changes.unwrap_or_default().count)
}

fn changes(stack: &Arc<Stack>) -> (CurrentCarrier, u32, Option<String>) {
    let changes = stack.connections().pop().unwrap().changes.unwrap();
    (changes.now, changes.count, changes.why)
}

#[test]
fn a_connection_comes_back_when_the_daemon_has_a_successor() {
    for loss in [Loss::Killed, Loss::Left] {
        watched(LIMIT, || {
            let mut scene = Scene::new();
            let (stack, client, server) = scene.pair(true);
            talk(&client, &server);
            for round in 1..=2 {
                scene.lose(loss);
                eventually("it is on TCP", || {
                    [&stack, &scene.stack].map(|stack| changes(stack).0) == [CurrentCarrier::Tcp; 2]
                });
                talk(&client, &server);
                // Unread bytes come first.
                send_all(&client, b"sent by TCP");
                send_all(&server, b"answered by TCP");
                scene.restart();
                let begun = Instant::now();
                eventually("it is back", || is_back(&stack) && is_back(&scene.stack));
                println!("back after {:?}", begun.elapsed());
                for stack in [&stack, &scene.stack] {
                    let (_, count, why) = changes(stack);
                    assert_eq!(count, 2 * round);
                    assert_eq!(why.as_deref(), Some("a device is there again"));
                }
                send_all(&client, b" and by the ring");
                assert_eq!(client.peek(&mut [0; 99]).unwrap(), 15);
                assert_eq!(read_exactly(&client, 15), b"answered by TCP");
                assert_eq!(read_exactly(&server, 27), b"sent by TCP and by the ring");
                talk(&client, &server);
                assert!(client.is_smc() && server.is_smc());
            }
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
            send_all(&server, b"last");
            drop(server);
            assert_eq!(read_exactly(&client, 4), b"last");
            assert_eq!(client.recv(&mut [0; 1]).unwrap(), 0);
            drop(client);
            eventually("nothing is left", || {
                stack.totals().closing + scene.stack.totals().closing == 0
            });
        });
    }
}

/// A socket at this path, with a listening process of another user.
fn listen_as_another_user(path: &Path, user: u32) -> UnixListener {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    // A thread has its own user, and the kernel remembers the last caller of listen(2).
    thread::scope(|scope| {
        scope.spawn(|| {
            let user = Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            rustix::net::listen(&listener, 8).unwrap();
        });
    });
    listener
}

#[test]
fn a_connection_comes_back_to_no_daemon_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    const OTHER: u32 = 4243;
    watched(LIMIT, || {
        let mut scene = Scene::new();
        // In a directory of its own, a program refuses listeners of other users in any case.
        std::os::unix::fs::chown(scene.dir.path(), Some(OTHER), None).unwrap();
        let (stack, client, server) = scene.pair(true);
        scene.lose(Loss::Killed);
        let others = [0, 1].map(|n| listen_as_another_user(&scene.dir.socket(n), OTHER));
        let why = format!("the daemon of user {OTHER} listens there now");
        for stack in [&stack, &scene.stack] {
            eventually("the device is refused", || {
                let devices = stack.report().devices;
                devices.iter().all(|d| d.problem.as_deref().is_some_and(|p| p.contains(&why)))
            });
            assert_eq!(changes(stack).0, CurrentCarrier::Tcp);
        }
        talk(&client, &server);
        drop(others);
        scene.restart();
        eventually("it is back", || is_back(&stack) && is_back(&scene.stack));
        talk(&client, &server);
    });
}

// Connections stay on TCP for longer and longer, instead of changing their carrier with each daemon.
#[test]
fn connections_stay_on_tcp_while_one_daemon_after_the_other_dies() {
    const DEATHS: usize = 12;
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (stack, client, server) = scene.pair(true);
        let (begun, mut long) = (Instant::now(), 0);
        scene.lose(Loss::Killed);
        for _ in 0..DEATHS {
            let born = Instant::now();
            scene.restart();
            eventually("both have devices", || {
                [&stack, &scene.stack].iter().all(|stack| !stack.devices().is_empty())
            });
            thread::sleep(Duration::from_millis(200));
            scene.lose(Loss::Killed);
            eventually("it is on TCP", || {
                [&stack, &scene.stack].map(|stack| changes(stack).0) == [CurrentCarrier::Tcp; 2]
            });
            long += u32::from(born.elapsed() >= BackOff::SHORTEST);
            talk(&client, &server);
        }
        // Waits of 1, 2, 4 seconds, and so on. A ring lasting a second, on a busy machine, begins them anew.
        let waits = (begun.elapsed().as_secs() + 1).ilog2() + 1;
        let most = 1 + 2 * waits * (1 + long);
        let count = changes(&stack).1;
        println!("{count} changes in {:?}, {long} long lives: {most} at most", begun.elapsed());
        assert!(count <= most, "{count} changes of the carrier, not {most}");
        scene.restart();
        talk(&client, &server);
    });
}

/// Sends messages and reads them back until the stop, and then to the end.
fn echo(stream: &SmcStream, seed: u64, stop: &AtomicBool, done: &AtomicUsize) -> usize {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    thread::scope(|scope| {
        let sent = scope.spawn(|| {
            let (mut block, mut sent) = (vec![0; MESSAGE], 0);
            while !stop.load(Ordering::Relaxed) {
                fill(seed, sent, &mut block);
                send_all(stream, &block);
                sent += MESSAGE;
                // A machine under load has time for the rest.
                thread::sleep(Duration::from_millis(1));
            }
            stream.shutdown(Shutdown::Write).unwrap();
            sent
        });
        let (mut buf, mut got) = (vec![0; 7000], 0);
        loop {
            match stream.recv(&mut buf).unwrap_or_else(|e| panic!("{seed} {got}: {e}")) {
                0 => break,
                n => {
                    check(seed, got, &buf[..n]);
                    got += n;
                    done.fetch_add(n, Ordering::Relaxed);
                }
            }
        }
        assert_eq!(sent.join().unwrap(), got, "{seed}");
        got
    })
}

/// Ends the streams, also on a failure of the test during their flow.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

// Some connections are on their way back then, at each of its steps, and some are back.
#[test]
fn a_device_that_goes_again_while_connections_come_back_costs_no_byte() {
    let mut scene = Scene::with_leave_time(3600);
    let (mut peer, streams) = scene.repeat(STREAMS);
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let echoes: Vec<_> = (0..STREAMS)
            .map(|n| (n as u64, &streams[n], &stop, &done))
            .map(|(n, stream, stop, done)| scope.spawn(move || echo(stream, n, stop, done)))
            .collect();
        let stopping = Stop(&stop);
        for loss in [Loss::Killed, Loss::Left, Loss::Killed] {
            watched(LIMIT, || {
                scene.lose(loss);
                // A connection still unaware of the loss looks like one already back.
                eventually("all have left", || counts(&scene.stack).all(|count| count % 2 == 1));
                scene.restart();
                eventually("one is back", || counts(&scene.stack).any(|count| count % 2 == 0));
            });
        }
        let more = done.load(Ordering::Relaxed) + (STREAMS << 20);
        eventually("the streams flow", || done.load(Ordering::Relaxed) > more);
        drop(stopping);
        assert!(echoes.into_iter().all(|echo| echo.join().unwrap() > 0));
    });
    for _ in 0..STREAMS {
        assert_eq!(peer.line(), "whole");
    }
}

// An event loop informed of the last ring is informed of the new one.
#[test]
fn event_loops_and_sleepers_follow_a_connection_to_its_new_ring() {
    watched(LIMIT, || {
        let mut scene = Scene::new();
        let (stack, client, server) = scene.pair(true);
        let poller = Poller::new(Duration::ZERO).unwrap();
        poller.add(&server, 7, Interest::READ).unwrap();
        let set = client.pollable().unwrap();
        let readable = |limit: i64| {
            let mut fds = [PollFd::from_borrowed_fd(set, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: limit, tv_nsec: 0 })).unwrap() == 1
        };
        let mut ready = Vec::new();
        for _ in 0..2 {
            scene.lose(Loss::Killed);
            eventually("it is on TCP", || {
                [&stack, &scene.stack].map(|stack| changes(stack).0) == [CurrentCarrier::Tcp; 2]
            });
            // Both sleep while the carrier is exchanged.
            let begun = thread::scope(|scope| {
                let asleep = scope.spawn(|| {
                    poller.wait(&mut ready, 8, Some(TIMEOUT)).unwrap();
                    Instant::now()
                });
                scene.restart();
                eventually("it is back", || is_back(&stack) && is_back(&scene.stack));
                send_all(&client, b"x");
                let begun = Instant::now();
                assert!(asleep.join().unwrap() < begun + Duration::from_secs(5));
                begun
            });
            assert_eq!(ready.iter().map(|event| event.key).collect::<Vec<_>>(), [7]);
            assert_eq!(read_exactly(&server, 1), b"x");
            assert!(!readable(0), "{begun:?}");
            send_all(&server, b"y");
            assert!(readable(5));
            assert_eq!(read_exactly(&client, 1), b"y");
        }
    });
}

fn resources() -> (usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    (fds, maps)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Runs a test in its own process, so resources of other tests do not count. `true`: the test ran
/// there.
fn is_run_alone(test: &str) -> bool {
    const ALONE: &str = "SMC_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return false;
    }
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let status = alone.args([test, "--exact", "--nocapture"]).env(ALONE, "1").status().unwrap();
    assert!(status.success(), "{test}: {status}");
    true
}

#[test]
fn streams_come_back_again_and_again_and_lose_nothing() {
    if is_run_alone("back::streams_come_back_again_and_again_and_lose_nothing") {
        return;
    }
    let (rounds, mut random) = (number("SMC_BACK", 3), number("SMC_SEED", 1));
    let mut scene = Scene::with_leave_time(3600);
    let (mut peer, streams) = scene.repeat(STREAMS);
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut longest = Duration::ZERO;
    thread::scope(|scope| {
        let echoes: Vec<_> = (0..STREAMS)
            .map(|n| (n as u64, &streams[n], &stop, &done))
            .map(|(n, stream, stop, done)| scope.spawn(move || echo(stream, n, stop, done)))
            .collect();
        let (stopping, mut first) = (Stop(&stop), None);
        for round in 0..rounds {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let more = done.load(Ordering::Relaxed) + (random >> 33) as usize % (4 << 20);
            watched(LIMIT, || {
                eventually("the streams flow", || done.load(Ordering::Relaxed) > more);
                let loss = [Loss::Killed, Loss::Left][(random >> 40) as usize % 2];
                note(format!("round {round}: {loss:?}"));
                scene.lose(loss);
                eventually("the device is gone", || scene.stack.devices().is_empty());
                scene.restart();
                let begun = Instant::now();
                eventually("all are back", || {
                    !scene.stack.devices().is_empty() && is_back(&scene.stack)
                });
                longest = longest.max(begun.elapsed());
                // A ring with a life as long as the way back counts as a good one.
                thread::sleep(begun.elapsed() + Duration::from_secs(1));
            });
            // Resources released by one end go a moment later.
            let first = *first.get_or_insert_with(resources);
            eventually("nothing grows", || {
                let now = resources();
                now.0 <= first.0 + 8 && now.1 <= first.1 + 16
            });
        }
        drop(stopping);
        assert!(echoes.into_iter().all(|echo| echo.join().unwrap() > 0));
    });
    println!("{rounds} daemons, back after {longest:?} at most");
    for _ in 0..STREAMS {
        assert_eq!(peer.line(), "whole");
    }
}
