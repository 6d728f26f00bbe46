// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Daemons end, one after the other, under connections between two lasting processes: requests and
//! answers beside streams in bulk, over the window and by moves.
//!
//! `SMC_DEATHS=1000` is the number of deaths of daemons, half in order as at SIGTERM and half by kill
//! -9; `SMC_SEED` chooses the times. `SMC_DEATHS_PER_SET=10` is the number of deaths survived by the
//! same connections; by default each death has new ones, on their rings. A run in full, with its
//! figures:
//!
//! ```text
//! SMC_DEATHS=1000 SMC_SEED=7 cargo test -p smc-tests --test faults deaths -- --nocapture
//! ```

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::socket::CurrentCarrier;
use guest_driver::{SmcStream, Stack};
use smc_tests::bytes::{difference, fill};
use smc_tests::helper::Helper;
use smc_tests::outlive::{Held, PATHS, stack};
use smc_tests::watch::LIMIT;
use smc_tests::{Dir, TIMEOUT, eventually, note, watched};

use crate::support::{PEER, StopAtEnd};

/// Streams of either kind on each path.
const STREAMS: usize = 4;
/// Bytes of a request, and of its answer.
const REQUEST: usize = 100;
/// Requests of each stream around a death, and as many before for comparison.
const REQUESTS: usize = 50;
/// Blocks sent by a bulk stream in one go: more than a ring holds.
const BURST: usize = 10;
/// Tolerated growth of a process's memory after the first set, KiB: an allocator keeps some.
const SLACK: usize = 32 << 10;
/// Tolerated growth of a process's descriptors after the first set: some are made late.
const FEW: usize = 4;
/// How long connections may take to come back to a device before the next death.
const RETURN: Duration = Duration::from_secs(3);

/// How a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    /// The daemon asks every connection to leave, and then ends.
    InOrder,
    /// kill -9.
    Killed,
}

/// Four devices of a daemon: two of this process, the client, and two of the peer.
struct Scene {
    dir: Dir,
    daemon: Option<Helper>,
    peer: Helper,
    stacks: Vec<Arc<Stack>>,
    servers: Vec<SocketAddr>,
}

impl Scene {
    fn new() -> Scene {
        let dir = Dir::new();
        let daemon = Some(daemon(&dir));
        let devices = [0, 1, 2, 3].map(|n| dir.socket(n).display().to_string());
        let (peer, addresses) = Helper::start(PEER, &["outlive", &devices[0], &devices[1]]);
        let servers = addresses.split(' ').map(|address| address.parse().unwrap()).collect();
        let stacks = (0..2).map(|pair| stack(pair, &devices[2 + pair]).unwrap()).collect();
        Scene { dir, daemon, peer, stacks, servers }
    }

    fn peer(&mut self) -> Held {
        self.peer.feed("held\n");
        Held::from_line(&self.peer.line())
    }

    fn end_daemon(&mut self, death: Death) {
        let mut daemon = self.daemon.take().unwrap();
        if death == Death::InOrder {
            daemon.feed("leave\n");
            let left = daemon.line();
            let numbers: Vec<&str> = left.split(' ').collect();
            assert_eq!(numbers[1], numbers[3], "{left}");
            daemon.feed("stop\n");
            assert_eq!(daemon.line(), "stopped");
        }
        daemon.kill();
    }

    /// Starts the next daemon, and waits until all stacks have their devices again.
    fn start_daemon(&mut self) {
        self.daemon = Some(daemon(&self.dir));
        eventually("this process has devices", || Held::now(&self.stacks).devices == 2);
        eventually("the peer has devices", || self.peer().devices == 2);
    }

    /// A connection of each path begun without a daemon.
    fn ask_by_tcp(&self) -> Result<(), String> {
        for (stack, server) in self.stacks.iter().zip(&self.servers) {
            let stream = SmcStream::connect(stack, server).map_err(|e| format!("connect: {e}"))?;
            assert!(!stream.is_smc(), "{}", stream.info());
            let asked = Asked::default();
            ask(&stream, 0, &asked)?;
            close(&stream)?;
        }
        Ok(())
    }

    /// Connections of this process with a device left behind, and how many of them are on a device
    /// again.
    fn changed(&self) -> [usize; 2] {
        let all = self.stacks.iter().flat_map(|stack| stack.connections());
        let changes: Vec<_> = all.filter_map(|one| one.changes).filter(|c| c.count > 0).collect();
        let back = changes.iter().filter(|change| change.now == CurrentCarrier::Device).count();
        [changes.len(), back]
    }

    /// Waits a while for connections to come back to their devices. Returns how many have.
    fn await_return(&self) -> usize {
        let begun = Instant::now();
        loop {
            let [left, back] = self.changed();
            if back == left || begun.elapsed() > RETURN {
                return back;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn daemon(dir: &Dir) -> Helper {
    let sockets = (0..4).map(|n| dir.socket(n).display().to_string());
    let args: Vec<String> = ["daemon".to_owned()].into_iter().chain(sockets).collect();
    let (daemon, ready) = Helper::start(PEER, &args);
    assert_eq!(ready, "ready");
    daemon
}

/// The work done by a stream of requests.
#[derive(Default)]
struct Asked {
    answers: AtomicUsize,
    /// The longest time to an answer since this was taken last, nanoseconds.
    longest: AtomicU64,
    has_ended: AtomicBool,
}

/// Sends one request and reads its answer.
fn ask(stream: &SmcStream, seed: u64, asked: &Asked) -> Result<(), String> {
    let at = asked.answers.load(Ordering::Relaxed) * REQUEST;
    let failed = |what: &dyn std::fmt::Display| format!("request {seed} at {at}: {what}");
    let mut sent = [0; REQUEST];
    fill(seed, at, &mut sent);
    let begun = Instant::now();
    let n = stream.send(&sent).map_err(|error| failed(&error))?;
    if n != REQUEST {
        return Err(failed(&format!("{n} bytes were sent")));
    }
    let (mut got, mut len) = ([0; REQUEST], 0);
    while len < REQUEST {
        match stream.recv(&mut got[len..]).map_err(|error| failed(&error))? {
            0 => return Err(failed(&"an end of data")),
            n => len += n,
        }
    }
    asked.longest.fetch_max(begun.elapsed().as_nanos() as u64, Ordering::SeqCst);
    asked.answers.fetch_add(1, Ordering::SeqCst);
    if got == sent { Ok(()) } else { Err(failed(&"wrong bytes")) }
}

/// Ends the own direction, and reads the end of the other.
fn close(stream: &SmcStream) -> Result<(), String> {
    stream.shutdown(Shutdown::Write).map_err(|error| format!("shutdown: {error}"))?;
    match stream.recv(&mut [0]).map_err(|error| format!("at its end: {error}"))? {
        0 => Ok(()),
        _ => Err("bytes behind the last answer".to_owned()),
    }
}

fn ask_on(stream: &SmcStream, seed: u64, asked: &Asked, stop: &AtomicBool) -> Result<(), String> {
    let all = || {
        while !stop.load(Ordering::Relaxed) {
            ask(stream, seed, asked)?;
            // Think between two requests like a program, so bulk has the processor, too.
            thread::sleep(Duration::from_micros(200));
        }
        close(stream)
    };
    let result = all();
    asked.has_ended.store(true, Ordering::SeqCst);
    result
}

/// Sends bytes until `stop`, and reads them back. Returns how many.
fn pour(stream: &SmcStream, seed: u64, stop: &AtomicBool) -> Result<usize, String> {
    let sent = thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let (mut block, mut done) = (vec![0; 10_000], 0);
            for burst in 1.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                if burst % BURST == 0 {
                    // Rings are full by then. Others need a processor, too.
                    thread::sleep(Duration::from_millis(2));
                }
                fill(seed, done, &mut block);
                done += stream.send(&block).map_err(|e| format!("bulk {seed} at {done}: {e}"))?;
            }
            stream.shutdown(Shutdown::Write).map_err(|e| format!("bulk {seed}, shutdown: {e}"))?;
            Ok::<_, String>(done)
        });
        let (mut got, mut expected, mut done) = (vec![0; 7000], vec![0; 7000], 0);
        let received = loop {
            let n = match stream.recv(&mut got) {
                Ok(0) => break Ok(done),
                Ok(n) => n,
                Err(error) => break Err(format!("bulk {seed} at {done}: {error}")),
            };
            fill(seed, done, &mut expected[..n]);
            if let Some((at, ..)) = difference(&got[..n], &expected[..n]) {
                break Err(format!("bulk {seed}: byte {} is wrong", done + at));
            }
            done += n;
        };
        // After the reader's failure the sender must not wait for room.
        if received.is_err() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok::<_, String>([sender.join().unwrap()?, received?])
    })?;
    match sent {
        [sent, received] if sent == received => Ok(sent),
        [sent, received] => Err(format!("bulk {seed}: {received} of {sent} bytes came back")),
    }
}

/// The streams of requests of a set, grouped by path.
struct Requests(Vec<Asked>);

impl Requests {
    /// Waits until each stream has had so many answers more.
    fn go_on(&self) {
        let before: Vec<_> = self.0.iter().map(|one| one.answers.load(Ordering::SeqCst)).collect();
        eventually("requests are answered", || {
            self.0.iter().zip(&before).all(|(one, before)| {
                let answers = one.answers.load(Ordering::SeqCst);
                answers >= before + REQUESTS || one.has_ended.load(Ordering::SeqCst)
            })
        });
    }

    /// The longest times to an answer since the last call, by path.
    fn longest(&self) -> Vec<(usize, Duration)> {
        let take = |one: &Asked| Duration::from_nanos(one.longest.swap(0, Ordering::SeqCst));
        self.0.iter().enumerate().map(|(n, one)| (n / STREAMS, take(one))).collect()
    }
}

/// Results so far.
#[derive(Default)]
struct Found {
    deaths: [usize; 2],
    streams: usize,
    bytes: usize,
    by_tcp: usize,
    back: usize,
    wrong: Vec<String>,
    /// Pauses by the kind of work and the path.
    pauses: BTreeMap<(String, usize), Vec<Duration>>,
}

impl Found {
    fn note(&mut self, what: &str, longest: Vec<(usize, Duration)>) {
        for (path, pause) in longest {
            self.pauses.entry((what.to_owned(), path)).or_default().push(pause);
        }
    }

    fn show(&self) {
        let [in_order, killed] = self.deaths;
        println!("{} deaths, {in_order} in order, {killed} by kill -9", in_order + killed);
        println!(
            "{} streams on SMC, {} connections by TCP meanwhile, {} bytes in bulk; {} came back to a \
             device; {} resets and errors",
            self.streams,
            self.by_tcp,
            self.bytes,
            self.back,
            self.wrong.len()
        );
        for ((what, path), pauses) in &self.pauses {
            let mut pauses = pauses.clone();
            pauses.sort();
            let at = |part: usize| pauses[(pauses.len() - 1) * part / 100];
            println!(
                "{what}, {:?}: median {:.1?}, p99 {:.1?}, longest {:.1?}",
                PATHS[*path],
                at(50),
                at(99),
                at(100)
            );
        }
    }
}

/// The same connections live through these deaths, each after a time.
fn live_through(scene: &mut Scene, deaths: &[(Death, Duration)], found: &mut Found) {
    let connect = |path: usize| {
        let stream = SmcStream::connect(&scene.stacks[path], scene.servers[path]).unwrap();
        assert!(stream.is_smc(), "{}", stream.info());
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        stream
    };
    let both = || (0..2 * STREAMS).map(|n| connect(n / STREAMS)).collect::<Vec<_>>();
    let (asking, pouring) = (both(), both());
    found.streams += asking.len() + pouring.len();
    let requests = Requests(asking.iter().map(|_| Asked::default()).collect());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let end = StopAtEnd(&stop);
        let (requests, stop) = (&requests, &stop);
        let asking: Vec<_> = (asking.iter().zip(&requests.0).zip(1000..))
            .map(|((stream, asked), seed)| scope.spawn(move || ask_on(stream, seed, asked, stop)))
            .collect();
        let pouring: Vec<_> = (pouring.iter().zip(2000..))
            .map(|(stream, seed)| scope.spawn(move || pour(stream, seed, stop)))
            .collect();
        for (death, after) in deaths {
            requests.go_on();
            requests.longest();
            requests.go_on();
            found.note("no death", requests.longest());
            thread::sleep(*after);
            requests.longest();
            note(format!("{death:?}"));
            scene.end_daemon(*death);
            requests.go_on();
            found.note(&format!("{death:?}"), requests.longest());
            found.deaths[*death as usize] += 1;
            match scene.ask_by_tcp() {
                Ok(()) => found.by_tcp += 2,
                Err(error) => found.wrong.push(format!("without a daemon: {error}")),
            }
            scene.start_daemon();
            if deaths.len() > 1 {
                found.back += scene.await_return();
            }
        }
        drop(end);
        let mut done = Vec::new();
        done.extend(asking.into_iter().map(|one| one.join().unwrap().map(|()| 0)));
        done.extend(pouring.into_iter().map(|one| one.join().unwrap()));
        for one in done {
            match one {
                Ok(bytes) => found.bytes += bytes,
                Err(error) => found.wrong.push(error),
            }
        }
    });
}

/// Resources of both processes after the close of every connection.
fn settled(scene: &mut Scene) -> [Held; 2] {
    eventually("closed connections are gone", || {
        Held::now(&scene.stacks).closing + scene.peer().closing == 0
    });
    [Held::now(&scene.stacks), scene.peer()]
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

#[test]
fn connections_live_through_daemons_that_end_one_after_the_other() {
    let (deaths, seed) = (number("SMC_DEATHS", 2), number("SMC_SEED", 1));
    let per_set = number("SMC_DEATHS_PER_SET", 1).max(1);
    let mut random = seed as u64;
    let deaths: Vec<_> = (0..deaths)
        .map(|n| {
            // Knuth's generator; its high bits are the good ones.
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let after = Duration::from_micros((random >> 33) % 20_000);
            ([Death::InOrder, Death::Killed][n % 2], after)
        })
        .collect();
    let mut scene = Scene::new();
    let (mut found, mut begin) = (Found::default(), None);
    for (n, deaths) in deaths.chunks(per_set).enumerate() {
        note(format!("seed {seed}, set {n}"));
        watched(LIMIT * per_set as u32, || live_through(&mut scene, deaths, &mut found));
        if !found.wrong.is_empty() {
            break;
        }
        begin = begin.or_else(|| Some(settled(&mut scene)));
    }
    println!("seed {seed}");
    found.show();
    assert_eq!(found.wrong, Vec::<String>::new());
    let end = settled(&mut scene);
    let begin = begin.unwrap_or_default();
    for (who, begin, end) in [("this process", begin[0], end[0]), ("peer", begin[1], end[1])] {
        println!(
            "{who}: {} descriptors and {} KiB after the first set, {} and {} at the end",
            begin.descriptors, begin.memory_kib, end.descriptors, end.memory_kib
        );
    }
    let peer = end[1];
    assert_eq!((peer.whole, peer.failed), (found.streams + found.by_tcp, 0));
    // Other tests run in this process, but not in the peer. Threads close descriptors of ended
    // connections.
    eventually("descriptors are closed", || scene.peer().descriptors <= begin[1].descriptors + FEW);
    assert!(peer.memory_kib <= begin[1].memory_kib + SLACK, "{:?} {peer:?}", begin[1]);
}
