// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of a flooding guest for two other guests: a measurement.
//!
//! `cargo test --release -p vhost-device-ism --test vhost -- --ignored --nocapture floods`

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{
    PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, getpid, getrlimit, pidfd_getfd, pidfd_open,
    setrlimit,
};
use virtio_ism_abi::Gid;
use virtio_ism_abi::command::{BACKING_WINDOW, Op};

use super::front_end::*;
use super::program::Program;

const DMB: u32 = 1 << 20;
const ROUNDS: usize = 3_000;
/// Ends a flood, also when the measurement fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Number of epolls on a call descriptor, and watches of each.
const WATCHERS: (usize, usize) = (10, 10_000);

/// A user and an owner exchanging pings.
struct Pair {
    user: FrontEnd,
    owner: FrontEnd,
    gid: Gid,
    token: u64,
}

impl Pair {
    fn new(place: &Place, user: &str, owner: &str) -> Pair {
        let (user, gid) = FrontEnd::greet(&place.path(user));
        let (mut owner, _) = FrontEnd::greet(&place.path(owner));
        let token = owner.register(gid, 1, DMB, BACKING_WINDOW).token.get();
        Pair { user, owner, gid, token }
    }

    /// Time from the user's kick to the owner's record, after `before` in each round.
    fn ping(&mut self, rounds: usize, mut before: impl FnMut(&mut FrontEnd)) -> Ping {
        let began = Instant::now();
        let mut times: Vec<Duration> = (0..rounds)
            .map(|_| {
                before(&mut self.user);
                self.owner.want_call(EVENTS);
                let start = Instant::now();
                self.user.send_move(MOVES, self.token, &[], true);
                assert!(self.owner.event(TIMEOUT).is_some());
                let took = start.elapsed();
                assert!(self.user.used(MOVES, TIMEOUT).is_some());
                took
            })
            .collect();
        let rate = rounds as f64 / began.elapsed().as_secs_f64();
        times.sort();
        Ping { p50: times[rounds / 2], p99: times[rounds * 99 / 100], rate }
    }
}

struct Ping {
    p50: Duration,
    p99: Duration,
    /// Rounds per second.
    rate: f64,
}

type Flood = fn(&Place, &AtomicBool);

fn is_on(end: &AtomicBool) -> bool {
    !end.load(Ordering::Relaxed)
}

fn kicks(place: &Place, end: &AtomicBool) {
    let (m, _) = FrontEnd::greet(&place.path("m"));
    while is_on(end) {
        (0..QUEUES).for_each(|queue| m.kick(queue));
    }
}

fn spin(end: &AtomicBool) {
    while is_on(end) {
        std::hint::spin_loop();
    }
}

fn moves(place: &Place, end: &AtomicBool) {
    let mut pair = Pair::new(place, "m", "n");
    let bytes = vec![1; 64 << 10];
    while is_on(end) {
        for _ in 0..8 {
            pair.user.send_move(MOVES, pair.token, &[(0, &bytes)], false);
        }
        (0..8).for_each(|_| assert!(pair.user.used(MOVES, TIMEOUT).is_some()));
    }
}

fn commands(place: &Place, end: &AtomicBool) {
    let (mut m, _) = FrontEnd::greet(&place.path("m"));
    while is_on(end) {
        for _ in 0..30 {
            m.send_command(Op::Stats, &[]);
        }
        for _ in 0..30 {
            let _ = m.reply();
        }
    }
}

fn wakes(place: &Place, end: &AtomicBool) {
    let mut pair = Pair::new(place, "m", "n");
    while is_on(end) {
        pair.user.transfer(pair.token, &[], true);
        while pair.owner.event(Duration::ZERO).is_some() {}
    }
}

fn reconnects(place: &Place, end: &AtomicBool) {
    let address = SocketAddrUnix::new(place.path("m")).unwrap();
    while is_on(end) {
        // A blocking connect would wait for the daemon, and flood it less.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let _ = connect(&socket, &address);
    }
}

/// Watches `m`'s call descriptor a hundred thousand times. `None`: too few descriptors.
fn watch(m: &FrontEnd) -> Option<(Vec<OwnedFd>, Vec<OwnedFd>)> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let call = m.queues[EVENTS].call.as_raw_fd();
    let copy = || pidfd_getfd(&this, call, PidfdGetfdFlags::empty()).ok();
    let copies: Option<Vec<OwnedFd>> = (0..WATCHERS.1).map(|_| copy()).collect();
    let copies = copies?;
    let set = || epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let sets: Vec<OwnedFd> = (0..WATCHERS.0).map(|_| set()).collect();
    for set in &sets {
        for copy in &copies {
            epoll::add(set, copy, epoll::EventData::new_u64(0), epoll::EventFlags::IN).ok()?;
        }
    }
    Some((copies, sets))
}

/// Cost of a flood, in seconds.
struct Cost {
    /// Processor time of the daemon.
    daemon: f64,
    /// Processor time of the flooding thread.
    attacker: f64,
    elapsed: f64,
}

fn thread_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Cost of two seconds of a flood.
fn cost(flood: impl FnOnce(&Place, &AtomicBool) + Send) -> Cost {
    let place = Place::new();
    let program = Program::start(&place, &["m", "n"], &[]);
    let end = AtomicBool::new(false);
    let (start, before) = (Instant::now(), program.ticks());
    let attacker = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            flood(&place, &end);
            thread_time()
        });
        let end = End(&end);
        std::thread::sleep(Duration::from_secs(2));
        drop(end);
        flood.join().unwrap()
    });
    let daemon = (program.ticks() - before) as f64 / 100.0;
    let elapsed = start.elapsed().as_secs_f64();
    println!("daemon {daemon:.2} s, attacker {attacker:.2} s, of {elapsed:.2} s");
    Cost { daemon, attacker, elapsed }
}

/// The speed of both attacker and daemon depends on the machine's other load.
#[test]
fn kicks_without_work_cost_the_daemon_less_than_the_front_end() {
    let cost = cost(kicks);
    // The initial burst, and the connection.
    assert!(cost.daemon < 0.15 + cost.attacker / 3.0);
}

#[test]
fn a_front_end_that_floods_all_threads_gets_one_processor() {
    let cost = cost(|place, end| {
        let (mut m, gid) = FrontEnd::greet(&place.path("m"));
        let token = m.register(gid, 1, DMB, BACKING_WINDOW).token.get();
        let bytes = vec![1; 64 << 10];
        while is_on(end) {
            for _ in 0..8 {
                m.send_move(MOVES, token, &[(0, &bytes)], false);
                m.send_command(Op::Stats, &[]);
            }
            (0..8).for_each(|_| assert!(m.used(MOVES, TIMEOUT).is_some()));
            (0..8).for_each(|_| drop(m.reply()));
        }
    });
    assert!(cost.daemon < 0.15 + 1.1 * cost.elapsed);
}

#[test]
#[ignore = "a measurement"]
fn floods_cost_a_bystander_little() {
    let place = Place::new();
    let program = Program::start(&place, &["a", "b", "m", "n"], &[]);
    let mut pair = Pair::new(&place, "a", "b");
    pair.ping(ROUNDS, |_| ());
    let print = |name: &str, without: Ping, with: Ping, daemon: f64| {
        println!(
            "{name:12} p50 {:8.1?} -> {:8.1?}   p99 {:8.1?} -> {:8.1?}   per second {:6.0} -> \
             {:6.0}   the daemon uses {daemon:.2} processors",
            without.p50, with.p50, without.p99, with.p99, without.rate, with.rate
        );
    };
    let floods: [(&str, Flood); 7] = [
        // The processor share left by one or two busy threads, without the daemon.
        ("1 thread", |_, end| spin(end)),
        ("2 threads", |_, end| {
            std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(|| spin(end)))));
        }),
        ("kicks", kicks),
        ("moves", moves),
        ("commands", commands),
        ("wakes", wakes),
        ("reconnects", reconnects),
    ];
    for (name, flood) in floods {
        let end = AtomicBool::new(false);
        let without = pair.ping(ROUNDS, |_| ());
        let with = std::thread::scope(|scope| {
            scope.spawn(|| flood(&place, &end));
            let _end = End(&end);
            std::thread::sleep(Duration::from_millis(200));
            let (start, before) = (Instant::now(), program.ticks());
            let with = pair.ping(ROUNDS, |_| ());
            (with, (program.ticks() - before) as f64 / 100.0 / start.elapsed().as_secs_f64())
        });
        print(name, without, with.0, with.1);
    }
    // A peer with slow wakes, before each ping of the same user.
    let (mut m, _) = FrontEnd::greet(&place.path("m"));
    let token = m.register(pair.gid, 1, DMB, BACKING_WINDOW).token.get();
    let wake = |m: &mut FrontEnd, user: &mut FrontEnd| {
        m.want_call(EVENTS);
        user.transfer(token, &[], true);
        while m.event(Duration::ZERO).is_some() {}
    };
    let without = pair.ping(ROUNDS / 10, |user| wake(&mut m, user));
    match watch(&m) {
        Some(_watchers) => {
            let (start, before) = (Instant::now(), program.ticks());
            let with = pair.ping(ROUNDS / 10, |user| wake(&mut m, user));
            let used = (program.ticks() - before) as f64 / 100.0 / start.elapsed().as_secs_f64();
            print("watchers", without, with, used);
        }
        None => eprintln!("SKIPPED: too few descriptors for watchers"),
    }
}
