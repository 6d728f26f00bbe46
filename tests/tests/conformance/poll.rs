// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Readiness: the kernel's poll and epoll on `pollable()`, and the library's own `Poller`.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::interpose::{Watch, Woken};
use guest_driver::{Interest, Poller, SmcStream};
use rustix::event::epoll::{self, EventData, EventFlags};
use smc_test_support::Stopwatch;
use smc_tests::Fabric;
use smc_tests::end::{End, Pair, Site};
use smc_tests::watch::assert_prompt;
use smc_tests::{note, pattern, read_exactly, send_all, test_timeout};

with_the_server_here! {
    level_triggered_readable_comes_and_goes
    edge_triggered_readable_comes_once_per_arrival
    the_peers_half_close_is_rdhup
    the_end_of_both_halves_is_hup
    a_reset_is_readable_and_hup
    a_listener_is_readable_when_somebody_comes
    one_thread_serves_many_connections_by_epoll
    one_thread_serves_many_connections_by_poller
    a_poller_may_be_changed_while_somebody_waits
}

/// Waits without descriptors.
mod lines {
    use super::a_thread_sleeps_on_the_lines_of_several_connections;

    on_smc_in_this_process! {
        a_thread_sleeps_on_the_lines_of_several_connections
    }
}

/// Polls of the client's descriptors.
mod client {
    use super::{
        a_poller_sees_end_and_room, edge_triggered_writable_comes_after_a_full_ring,
        writable_goes_with_a_full_ring_and_comes_back,
    };

    with_the_client_here! {
        writable_goes_with_a_full_ring_and_comes_back
        edge_triggered_writable_comes_after_a_full_ring
        a_poller_sees_end_and_room
    }
}

/// More devices than a machine has.
mod several {
    use super::a_poller_watches_connections_of_several_stacks;

    with_several_devices! {
        a_poller_watches_connections_of_several_stacks
    }
}

const R: EventFlags = EventFlags::IN;
const W: EventFlags = EventFlags::OUT;
const RDHUP: EventFlags = EventFlags::RDHUP;
const HUP: EventFlags = EventFlags::HUP;

/// An epoll set.
struct Set(OwnedFd);

impl Set {
    fn new() -> Set {
        Set(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap())
    }

    fn of(stream: &End, flags: EventFlags) -> Set {
        let set = Set::new();
        set.add(stream.stream().pollable().unwrap(), 0, flags);
        set
    }

    fn add(&self, fd: impl AsFd, key: u64, flags: EventFlags) {
        epoll::add(&self.0, fd, EventData::new_u64(key), flags).unwrap();
    }

    fn wait(&self, timeout: Duration) -> Vec<(u64, EventFlags)> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 64];
        let timeout = rustix::event::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let (events, _) = epoll::wait(&self.0, &mut events, Some(&timeout)).unwrap();
        events.iter().map(|event| (event.data.u64(), event.flags)).collect()
    }

    /// The events shown right now.
    fn now(&self) -> EventFlags {
        self.wait(Duration::ZERO).first().map_or(EventFlags::empty(), |(_, flags)| *flags)
    }

    /// Waits until all of `flags` are shown.
    #[track_caller]
    fn until(&self, flags: EventFlags) {
        note(format!("waits for {flags:?}"));
        let start = Instant::now();
        let mut last = EventFlags::empty();
        while !last.contains(flags) {
            assert!(start.elapsed() < test_timeout(), "{last:?} instead of {flags:?}");
            last = self
                .wait(Duration::from_secs(1))
                .first()
                .map_or(EventFlags::empty(), |(_, flags)| *flags);
        }
    }

    /// Nothing is shown for a while.
    #[track_caller]
    fn stays_quiet(&self) {
        let shown = self.wait(Duration::from_millis(50));
        assert!(shown.is_empty(), "{shown:?}");
    }
}

/// Writes until nothing more goes in, and returns how much did.
fn stuff(stream: &End) -> usize {
    stream.set_nonblocking(true).unwrap();
    let (piece, mut sent, mut refused) = (pattern(1, 100_000), 0, 0);
    while refused < 10 {
        match stream.send(&piece) {
            Ok(n) => (sent, refused) = (sent + n, 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                refused += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    sent
}

fn level_triggered_readable_comes_and_goes(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    server.set_nonblocking(true).unwrap();
    let set = Set::of(&server, R);
    for round in 0..20 {
        set.stays_quiet_unless(round > 3);
        send_all(&client, b"abc");
        set.until(R);
        assert_eq!(set.now(), R, "level triggered: it stays");
        assert_eq!(server.recv(&mut [0; 2]).unwrap(), 2);
        assert_eq!(set.now(), R, "a byte is left");
        assert_eq!(server.recv(&mut [0; 2]).unwrap(), 1);
        assert_eq!(server.recv(&mut [0; 2]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(set.now(), EventFlags::empty(), "all was read, round {round}");
    }
}

impl Set {
    #[track_caller]
    fn stays_quiet_unless(&self, hurry: bool) {
        if !hurry {
            self.stays_quiet();
        }
    }
}

fn edge_triggered_readable_comes_once_per_arrival(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    server.set_nonblocking(true).unwrap();
    let set = Set::of(&server, R | EventFlags::ET);
    set.stays_quiet();
    for round in 0..50 {
        note(format!("round {round}"));
        send_all(&client, b"abc");
        set.until(R);
        // An edge-triggered program reads up to a refusal.
        let mut got = 0;
        loop {
            match server.recv(&mut [0; 2]) {
                Ok(n) => got += n,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    break;
                }
            }
        }
        assert_eq!(got, 3);
        assert_eq!(set.now(), EventFlags::empty());
    }
}

fn writable_goes_with_a_full_ring_and_comes_back(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let set = Set::of(&client, W);
    assert_eq!(set.now(), W);
    for _ in 0..3 {
        let sent = stuff(&client);
        if site.is_smc() {
            // Only on SMC: TCP's buffers may grow meanwhile.
            set.stays_quiet();
        }
        read_exactly(&server, sent);
        set.until(W);
        assert!(client.send(b"y").unwrap() == 1);
        read_exactly(&server, 1);
    }
}

fn edge_triggered_writable_comes_after_a_full_ring(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let set = Set::of(&client, W | EventFlags::ET);
    set.until(W);
    for round in 0..5 {
        let sent = stuff(&client);
        // Drop the events from before the full ring.
        set.wait(Duration::ZERO);
        note(format!("round {round}"));
        read_exactly(&server, sent);
        set.until(W);
    }
}

fn the_peers_half_close_is_rdhup(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let set = Set::of(&server, R | RDHUP);
    send_all(&client, b"last");
    // The data is shown already, and stays, when the end comes.
    set.until(R);
    thread::sleep(Duration::from_millis(20));
    client.shutdown(Shutdown::Write).unwrap();
    set.until(R | RDHUP);
    assert!(!set.now().contains(HUP), "half of it is open");
    assert_eq!(read_exactly(&server, 4), b"last");
    assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
    assert!(set.now().contains(R | RDHUP), "the end of data stays readable");
    send_all(&server, b"bye");
    assert_eq!(read_exactly(&client, 3), b"bye");
}

fn the_end_of_both_halves_is_hup(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let set = Set::of(&server, R | RDHUP);
    server.shutdown(Shutdown::Write).unwrap();
    drop(client);
    set.until(R | RDHUP | HUP);
    assert_eq!(server.recv(&mut [0; 1]).unwrap(), 0);
}

fn a_reset_is_readable_and_hup(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let set = Set::of(&server, R | RDHUP);
    client.set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    set.until(R | HUP);
    assert_eq!(server.recv(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

fn a_listener_is_readable_when_somebody_comes(site: &Site) {
    let pair = site.pair();
    pair.listener.set_nonblocking(true).unwrap();
    let set = Set::new();
    set.add(pair.listener.listener().pollable(), 0, R);
    for _ in 0..3 {
        set.stays_quiet();
        thread::scope(|scope| {
            let connecting = scope.spawn(|| pair.client.connect(pair.addr()).unwrap());
            let server = loop {
                set.until(R);
                match pair.listener.accept() {
                    Ok((server, _)) => break server,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            };
            let client = connecting.join().unwrap();
            send_all(&server, b"ok");
            assert_eq!(read_exactly(&client, 2), b"ok");
        });
    }
}

const MANY: usize = 16;

/// Clients sending numbered messages and checking their echo.
fn clients(streams: Vec<End>) -> Vec<thread::JoinHandle<()>> {
    let talk = |(n, stream): (usize, End)| {
        thread::spawn(move || {
            for round in 0..30 {
                let message = pattern((n * 1000 + round) as u64, 1 + n * 97 % 700);
                send_all(&stream, &message);
                assert!(read_exactly(&stream, message.len()) == message, "client {n}");
            }
        })
    };
    streams.into_iter().enumerate().map(talk).collect()
}

/// Echoes the bytes present. `false`: the end.
fn echo(stream: &End) -> bool {
    let mut buf = [0; 512];
    loop {
        match stream.recv(&mut buf) {
            Ok(0) => return false,
            Ok(n) => assert_eq!(stream.send(&buf[..n]).unwrap(), n, "there is room for an echo"),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
            Err(error) => panic!("{error}"),
        }
    }
}

fn one_thread_serves_many_connections_by_epoll(site: &Site) {
    let pair = site.pair();
    for flags in [R, R | EventFlags::ET] {
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..MANY).map(|_| pair.connect()).unzip();
        let set = Set::new();
        for (key, stream) in theirs.iter().enumerate() {
            stream.set_nonblocking(true).unwrap();
            // Two kinds of descriptors, whose lines the background thread watches in different ways.
            let fd = match key % 2 {
                0 => stream.stream().pollable(),
                _ => stream.stream().pollable_exact(),
            };
            set.add(fd.unwrap(), key as u64, flags);
        }
        let clients = clients(ours);
        let mut open = [true; MANY];
        let start = Instant::now();
        while open.contains(&true) {
            assert!(start.elapsed() < test_timeout(), "{open:?}");
            for (key, _) in set.wait(Duration::from_secs(1)) {
                let key = key as usize;
                if open[key] && !echo(&theirs[key]) {
                    open[key] = false;
                    epoll::delete(&set.0, theirs[key].stream().pollable().unwrap()).unwrap();
                }
            }
        }
        clients.into_iter().for_each(|client| client.join().unwrap());
    }
}

fn one_thread_serves_many_connections_by_poller(site: &Site) {
    let pair = site.pair();
    for spin in [Duration::ZERO, Duration::from_micros(50)] {
        let poller = Poller::new(spin).unwrap();
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..MANY).map(|_| pair.connect()).unzip();
        for (key, stream) in theirs.iter().enumerate() {
            stream.set_nonblocking(true).unwrap();
            poller.add(stream.stream(), key as u64, Interest::READ).unwrap();
        }
        let error = poller.add(theirs[0].stream(), 0, Interest::READ).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        let clients = clients(ours);
        let mut open = MANY;
        let start = Instant::now();
        let mut ready = Vec::new();
        while open > 0 {
            assert!(start.elapsed() < test_timeout(), "{open} are still open");
            poller.wait(&mut ready, 64, Some(Duration::from_secs(1))).unwrap();
            for readied in &ready {
                assert!(readied.readable || readied.hang_up);
                if !echo(&theirs[readied.key as usize]) {
                    poller.remove(readied.key).unwrap();
                    open -= 1;
                }
            }
        }
        clients.into_iter().for_each(|client| client.join().unwrap());
    }
}

fn a_poller_sees_end_and_room(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let poller = Poller::new(Duration::ZERO).unwrap();
    poller.add(client.stream(), 7, Interest::WRITE).unwrap();
    let mut ready = Vec::new();
    poller.wait(&mut ready, 64, Some(test_timeout())).unwrap();
    assert!(ready.len() == 1 && ready[0].key == 7 && ready[0].writable);
    let sent = stuff(&client);
    poller.wait(&mut ready, 64, Some(Duration::from_millis(50))).unwrap();
    if site.is_smc() {
        // Only on SMC: TCP's buffers may grow meanwhile.
        assert!(ready.is_empty(), "{ready:?}");
    }
    ready.clear();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            read_exactly(&server, sent);
        });
        let start = Instant::now();
        while ready.is_empty() {
            assert!(start.elapsed() < test_timeout(), "no room is seen");
            poller.wait(&mut ready, 64, Some(Duration::from_secs(1))).unwrap();
        }
        assert!(ready[0].writable);
    });
    poller.remove(7).unwrap();
    poller.add(client.stream(), 8, Interest::READ).unwrap();
    drop(server);
    let start = Instant::now();
    loop {
        poller.wait(&mut ready, 64, Some(Duration::from_secs(1))).unwrap();
        if ready.iter().any(|readied| readied.key == 8 && readied.readable) {
            break;
        }
        assert!(start.elapsed() < test_timeout(), "the end is not seen");
    }
}

fn a_poller_watches_connections_of_several_stacks(site: &Site) {
    let pairs = [
        Pair::new(site.server(0), site.client(1), site.is_smc()),
        Pair::new(site.server(2), site.client(3), site.is_smc()),
    ];
    let poller = Poller::new(Duration::ZERO).unwrap();
    let streams: Vec<_> = pairs.iter().map(Pair::connect).collect();
    for (key, (_, server)) in streams.iter().enumerate() {
        server.set_nonblocking(true).unwrap();
        poller.add(server.stream(), key as u64, Interest::READ).unwrap();
    }
    let mut wakes = Vec::new();
    for round in 0..10 {
        let key = round % 2;
        let (client, server) = &streams[key];
        let woken = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                note("waits in a poller");
                let (mut ready, start) = (Vec::new(), Instant::now());
                while ready.is_empty() {
                    assert!(start.elapsed() < test_timeout(), "nothing is seen");
                    poller.wait(&mut ready, 64, Some(Duration::from_secs(5))).unwrap();
                }
                assert_eq!((ready.len(), ready[0].key), (1, key as u64));
            });
            thread::sleep(Duration::from_millis(20));
            let sent = Stopwatch::start();
            send_all(client, b"x");
            waiting.join().unwrap();
            sent.elapsed()
        });
        wakes.push(woken);
        let mut byte = [0];
        while server.recv(&mut byte).is_err() {}
    }
    assert_prompt(&wakes);
}

/// Waits for one of several connections as `poll` does under `smc run`. `None`: not all of the peers
/// can wake a thread by a word.
fn sleep_on_lines(watch: &Watch, streams: &[&SmcStream]) -> Option<usize> {
    let start = Instant::now();
    streams.iter().for_each(|stream| stream.watch(watch));
    let found = loop {
        let count = watch.count();
        let tokens: Vec<_> = streams.iter().map(|stream| stream.change_token()).collect();
        let readable = |stream: &&SmcStream| stream.readiness(false).readable;
        if let Some(at) = streams.iter().position(readable) {
            break Some(at);
        }
        assert!(start.elapsed() < test_timeout(), "nothing is seen");
        let changed = || streams.iter().zip(tokens).any(|(one, token)| one.changed_since(token));
        let Some(woken) = watch.sleep_on_lines(streams, count, Duration::MAX, changed) else {
            break None;
        };
        assert_eq!(woken, Woken::Changed, "no signal has come");
    };
    streams.iter().for_each(|stream| stream.unwatch(watch));
    found
}

fn a_thread_sleeps_on_the_lines_of_several_connections(site: &Site) {
    let pairs = [
        Pair::new(site.server(0), site.client(1), site.is_smc()),
        Pair::new(site.server(2), site.client(3), site.is_smc()),
    ];
    let ends: Vec<_> = pairs.iter().map(Pair::connect).collect();
    let streams: Vec<_> = ends.iter().map(|(_, server)| server.stream()).collect();
    let watch = Watch::new(Duration::ZERO).unwrap();
    let mut wakes = Vec::new();
    for round in 0..10 {
        let key = round % 2;
        let woken = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                note("sleeps on lines");
                sleep_on_lines(&watch, &streams)
            });
            thread::sleep(Duration::from_millis(20));
            let sent = Stopwatch::start();
            // The last one ends its direction.
            match round {
                9 => ends[key].0.shutdown(Shutdown::Write).unwrap(),
                _ => send_all(&ends[key].0, b"x"),
            }
            let found = waiting.join().unwrap();
            let woken = sent.elapsed();
            if site.fabric() == Fabric::Window && site.is_one_host() {
                assert_eq!(found, Some(key), "round {round}");
            } else if found.is_none() {
                return None;
            }
            Some(woken)
        });
        // Otherwise the device wakes, the case of `Watch::sleep`.
        let Some(woken) = woken else { return };
        wakes.push(woken);
        let mut byte = [0];
        while streams[key].recv(&mut byte).is_err() {}
    }
    assert_prompt(&wakes);
}

fn a_poller_may_be_changed_while_somebody_waits(site: &Site) {
    let pair = site.pair();
    let (quiet, quiet_server) = pair.connect();
    let (client, server) = pair.connect();
    let poller = Poller::new(Duration::ZERO).unwrap();
    poller.add(quiet_server.stream(), 0, Interest::READ).unwrap();
    send_all(&client, b"x");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut ready = Vec::new();
            poller.wait(&mut ready, 64, Some(test_timeout())).unwrap();
            ready
        });
        thread::sleep(Duration::from_millis(50));
        let start = Stopwatch::start();
        poller.add(server.stream(), 1, Interest::READ).unwrap();
        let ready = waiting.join().unwrap();
        assert_prompt(&[start.elapsed()]);
        assert_eq!((ready.len(), ready[0].key), (1, 1));
    });
    poller.remove(0).unwrap();
    assert_eq!(poller.remove(0).unwrap_err().kind(), ErrorKind::NotFound);
    drop(quiet);
}
