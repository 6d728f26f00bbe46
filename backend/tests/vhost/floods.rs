//! What a guest that floods the daemon costs two others: a measurement.
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

/// Epolls that watch a call descriptor, and how often each does.
const WATCHERS: (usize, usize) = (10, 10_000);

/// A user and an owner that ping.
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

    /// From the user's kick to the owner's record, after `before` in each round: p50 and p99.
    fn ping(
        &mut self,
        rounds: usize,
        mut before: impl FnMut(&mut FrontEnd),
    ) -> (Duration, Duration) {
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
        times.sort();
        (times[rounds / 2], times[rounds * 99 / 100])
    }
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
        // One that waits would wait for the daemon, and flood it less.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let _ = connect(&socket, &address);
    }
}

/// Watches `m`'s call descriptor a hundred thousand times. `None`: there are too few descriptors.
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

#[test]
#[ignore = "a measurement"]
fn floods_cost_a_bystander_little() {
    let place = Place::new();
    let _program = Program::start(&place, &["a", "b", "m", "n"], &[]);
    let mut pair = Pair::new(&place, "a", "b");
    pair.ping(ROUNDS, |_| ());
    let print = |name: &str, without: (Duration, Duration), with: (Duration, Duration)| {
        println!(
            "{name:12} p50 {:8.1?} -> {:8.1?}   p99 {:8.1?} -> {:8.1?}",
            without.0, with.0, without.1, with.1
        );
    };
    let floods: [(&str, Flood); 5] = [
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
            pair.ping(ROUNDS, |_| ())
        });
        print(name, without, with);
    }
    // A peer whose wakes take long, before each ping of the same user.
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
            print("watchers", without, pair.ping(ROUNDS / 10, |user| wake(&mut m, user)))
        }
        None => eprintln!("SKIPPED: too few descriptors for watchers"),
    }
}
