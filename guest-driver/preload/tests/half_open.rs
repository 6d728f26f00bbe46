// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clients that send a part of a message and stay, at no cost of threads or processor time for
//! their server, clients that end their direction as soon as possible, and event loops with many
//! handshakes at a time.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/c.rs"]
mod c;
mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Fabric, await_listener, free_port, my_role, role};
use smc_core::handshake::{Config, IsmDevice, start};
use smc_core::time::Tick;
use smc_core::wire::ids::{Chid, Eid, Gid, PeerId};

/// Number of staying clients.
const CLIENTS: usize = 200;
/// The first byte of a Proposal.
const BEGINNING: [u8; 1] = [0xe2];

/// An event loop, like nginx's.
fn serve(listener: &TcpListener) {
    listener.set_nonblocking(true).unwrap();
    let set = c::Epoll::new();
    set.add(listener, libc::EPOLLIN, 0);
    let mut clients: HashMap<u64, TcpStream> = HashMap::new();
    loop {
        for (data, _) in set.wait(-1) {
            if data == 0 {
                while let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true).unwrap();
                    let number = u64::try_from(stream.as_raw_fd()).unwrap();
                    set.add(&stream, libc::EPOLLIN, number);
                    clients.insert(number, stream);
                }
                continue;
            }
            let Some(mut stream) = clients.get(&data) else { continue };
            let mut buf = [0; 100];
            match stream.read(&mut buf) {
                Ok(0) => drop(clients.remove(&data)),
                Ok(_) if buf.starts_with(b"cost") => {
                    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
                    let millis = processor_time().as_millis();
                    stream.write_all(format!("{threads} {millis}").as_bytes()).unwrap();
                }
                Ok(_) if buf.starts_with(b"stop") => return,
                Ok(n) => stream.write_all(&buf[..n]).unwrap(),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => drop(clients.remove(&data)),
            }
        }
    }
}

/// The processor time of all threads of this process.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // utime and stime, in ticks of 10 ms; the first field here is the third.
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

fn ask(port: u16, what: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(smc_test_support::TIMEOUT)).unwrap();
    stream.write_all(what.as_bytes()).unwrap();
    let mut answer = [0; 100];
    let n = stream.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..n]).into_owned()
}

/// Number of threads of the server, and the server's processor time so far.
fn cost(port: u16) -> (usize, Duration) {
    let answer = ask(port, "cost");
    let (threads, millis) = answer.split_once(' ').expect(&answer);
    (threads.parse().unwrap(), Duration::from_millis(millis.parse().unwrap()))
}

#[test]
fn half_open_clients_cost_no_thread_and_no_processor() {
    const TEST: &str = "half_open_clients_cost_no_thread_and_no_processor";
    match my_role() {
        Some((role, port)) if role == "server" => {
            return serve(&TcpListener::bind(("127.0.0.1", port)).unwrap());
        }
        Some((_, port)) => return assert_eq!(ask(port, "hello"), "hello"),
        None => {}
    }
    let fabric = Fabric::new(2);
    let program = || fabric.smc(std::env::current_exe().unwrap());
    let port = free_port();
    let server = role(&mut program(), TEST, "server", port);
    await_listener(port);
    let (threads, _) = cost(port);
    let half_open: Vec<TcpStream> = (0..CLIENTS)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(&BEGINNING).unwrap();
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    let (first, begun) = cost(port);
    assert_eq!(ask(port, "plain"), "plain");
    std::thread::sleep(Duration::from_secs(3));
    let (last, ended) = cost(port);
    role(&mut program(), TEST, "client", port).finish();
    // One thread waits for all of them.
    assert!(first <= threads + 1 && last <= threads + 1, "{threads}, {first}, {last} threads");
    assert!(ended - begun < Duration::from_millis(500), "{begun:?}, {ended:?}");
    assert_eq!(fabric.decided().0, 2, "the client that proposed SMC has it");
    drop(half_open);
    ask_to_stop(port);
    server.finish();
}

/// The library cannot tell such a client from one proposing SMC, until more bytes have come.
#[test]
fn a_client_whose_only_byte_begins_an_eye_catcher_is_answered_soon() {
    const TEST: &str = "a_client_whose_only_byte_begins_an_eye_catcher_is_answered_soon";
    if let Some((role, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        return if role == "blocks" { echo(&listener) } else { serve(&listener) };
    }
    let fabric = Fabric::new(1);
    for kind in ["blocks", "waits for events"] {
        let port = free_port();
        let server = role(&mut fabric.smc(std::env::current_exe().unwrap()), TEST, kind, port);
        await_listener(port);
        let begun = smc_test_support::Stopwatch::start();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(smc_test_support::TIMEOUT)).unwrap();
        stream.write_all(&BEGINNING).unwrap();
        let mut answer = [0];
        stream.read_exact(&mut answer).unwrap();
        let took = begun.elapsed();
        println!("{kind}: answered after {took:?}");
        assert_eq!(answer, BEGINNING);
        // 200 ms, and not the 5 s of a server that only reads.
        assert!(took < Duration::from_secs(3), "{kind}: {took:?}");
        drop(stream);
        ask_to_stop(port);
        server.finish();
    }
}

fn ask_to_stop(port: u16) {
    TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"stop").unwrap();
}

/// Echoes each connection until its end, one after the other.
fn echo(listener: &TcpListener) {
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut buf = [0; 100];
        while let Ok(n @ 1..) = stream.read(&mut buf) {
            match buf[..n].starts_with(b"stop") {
                true => return,
                false => stream.write_all(&buf[..n]).unwrap(),
            }
        }
    }
}

/// A Proposal with a device that no server has.
fn proposal() -> Vec<u8> {
    let mut config = Config::new(PeerId([7; 8]));
    config.ueids = vec![Eid::new("NOBODY").unwrap()];
    config.devices = vec![IsmDevice { chid: Chid(0xff01), gid: Gid([7; 16]) }];
    start(Arc::new(config), Tick(0)).unwrap().1
}

/// Such a client has read all bytes of the server, so the client's end is a FIN. The server's
/// program sees the end of data.
#[test]
fn a_client_that_leaves_before_it_answers_breaks_nothing() {
    const TEST: &str = "a_client_that_leaves_before_it_answers_breaks_nothing";
    if let Some((_, port)) = my_role() {
        return echo(&TcpListener::bind(("127.0.0.1", port)).unwrap());
    }
    let fabric = Fabric::new(2);
    let device = fabric.file("devices/01.sock");
    let stack = guest_driver::Stack::open(guest_driver::Config::new(device)).unwrap();
    let (chid, gid) = stack.devices()[0];
    let mut config = Config::new(PeerId([7; 8]));
    config.ueids = vec![Eid::new("VIRTIO-ISM").unwrap()];
    config.devices = vec![IsmDevice { chid: Chid(chid.0), gid: Gid(gid.0) }];
    let (_, proposal) = start(Arc::new(config), Tick(0)).unwrap();
    let port = free_port();
    let server = role(&mut fabric.smc(std::env::current_exe().unwrap()), TEST, "server", port);
    await_listener(port);
    for n in 0..3 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(smc_test_support::TIMEOUT)).unwrap();
        stream.write_all(&proposal).unwrap();
        let mut header = [0; 8];
        stream.read_exact(&mut header).unwrap();
        assert_eq!(header[4], 2, "connection {n}: Accept");
        let length = usize::from(u16::from_be_bytes([header[5], header[6]]));
        stream.read_exact(&mut vec![0; length - header.len()]).unwrap();
    }
    ask_to_stop(port);
    server.finish();
    assert_eq!(fabric.broken(), Vec::<String>::new());
    assert_eq!(fabric.said("\"left\""), 3);
}

/// The server still does its own part after the Decline has reached the client. An end coming
/// meanwhile is of a client awaiting its answer, not of a killed one.
#[test]
fn a_client_that_is_declined_sends_its_request_and_ends_its_direction() {
    const TEST: &str = "a_client_that_is_declined_sends_its_request_and_ends_its_direction";
    if let Some((_, port)) = my_role() {
        return echo(&TcpListener::bind(("127.0.0.1", port)).unwrap());
    }
    let fabric = Fabric::new(1);
    let port = free_port();
    let server = role(&mut fabric.smc(std::env::current_exe().unwrap()), TEST, "server", port);
    await_listener(port);
    for n in 0..300 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(smc_test_support::TIMEOUT)).unwrap();
        stream.write_all(&proposal()).unwrap();
        let mut header = [0; 8];
        stream.read_exact(&mut header).unwrap();
        let length = usize::from(u16::from_be_bytes([header[5], header[6]]));
        stream.read_exact(&mut vec![0; length - header.len()]).unwrap();
        stream.write_all(b"request").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, b"request", "connection {n}");
    }
    ask_to_stop(port);
    server.finish();
}

/// How often this thread has slept.
fn sleeps() -> usize {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Number of connections of an event loop at a time.
const AT_ONCE: usize = 60;

/// Echoes on many connections at a time, from one event loop.
fn connect_many(port: u16) {
    // The first one opens the device.
    assert_eq!(ask(port, "hello"), "hello");
    let set = c::Epoll::new();
    let before = sleeps();
    let mut streams: Vec<TcpStream> = Vec::new();
    for n in 0..AT_ONCE {
        let stream = c::connect_nonblocking(port);
        set.add(&stream, libc::EPOLLOUT, u64::try_from(n).unwrap());
        streams.push(stream);
    }
    let slept = sleeps() - before;
    // The thread may sleep for a lock or two.
    assert!(slept < AT_ONCE / 2, "slept {slept} times in {AT_ONCE} calls that must not wait");
    let mut done = 0;
    while done < AT_ONCE {
        for (n, events) in set.wait(100_000) {
            let mut stream = streams.get(usize::try_from(n).unwrap()).unwrap();
            if events & libc::EPOLLOUT != 0 {
                stream.write_all(format!("hello {n}").as_bytes()).unwrap();
                set.control(libc::EPOLL_CTL_MOD, stream, libc::EPOLLIN, n).unwrap();
            } else {
                let mut answer = [0; 100];
                let len = stream.read(&mut answer).unwrap();
                assert_eq!(answer[..len], *format!("hello {n}").as_bytes());
                set.control(libc::EPOLL_CTL_DEL, stream, 0, n).unwrap();
                done += 1;
            }
        }
    }
}

/// A call to enter a connection in a set does not wait for the handshake: the waits for the set go
/// on with all handshakes.
#[test]
fn connections_of_an_event_loop_do_not_wait_for_each_other() {
    const TEST: &str = "connections_of_an_event_loop_do_not_wait_for_each_other";
    match my_role() {
        Some((role, port)) if role == "server" => {
            return serve(&TcpListener::bind(("127.0.0.1", port)).unwrap());
        }
        Some((_, port)) => return connect_many(port),
        None => {}
    }
    let fabric = Fabric::new(2);
    let program = || fabric.smc(std::env::current_exe().unwrap());
    let port = free_port();
    let server = role(&mut program(), TEST, "server", port);
    await_listener(port);
    role(&mut program(), TEST, "client", port).finish();
    ask_to_stop(port);
    server.finish();
    assert_eq!(fabric.broken(), Vec::<String>::new());
    assert_eq!(fabric.decided().0, 2 * (AT_ONCE + 1));
}

/// New half-open clients, per second.
const RATE: u32 = 1_000;
/// Half of the requests are served before so many more half-open clients have come. On an idle
/// machine this number takes 300 ms, and the measurement shows far less; a loaded machine slows the
/// flood, too.
const PROMPT: f64 = 300.0;
/// Requests of a client beside the flood.
const REQUESTS: usize = 60;

/// p50 and p99 of the time of a request on a new connection.
fn ask_often(port: u16, mut enough: impl FnMut(usize) -> bool) -> (Duration, Duration) {
    let mut times = Vec::new();
    while !enough(times.len()) {
        let begun = Instant::now();
        assert_eq!(ask(port, "hello"), "hello");
        times.push(begun.elapsed());
        std::thread::sleep(Duration::from_millis(10));
    }
    times.sort();
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

/// p50 and p99 of the time of a request of a client that proposes SMC, in a process of its own.
fn ask_by_smc(fabric: &Fabric, test: &str, port: u16) -> (Duration, Duration) {
    let program = fabric.smc(std::env::current_exe().unwrap());
    let said = role(&mut { program }, test, "client", port).finish();
    let line = said.lines().find_map(|line| line.strip_prefix("times: ")).expect(&said);
    let mut times = line.split(' ').map(|n| Duration::from_micros(n.parse().unwrap()));
    (times.next().unwrap(), times.next().unwrap())
}

/// A number of /proc/PID/status of another process.
fn status_of(pid: u32, key: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Floods a server under the library with clients that send a part of a Proposal, or all of it, and
/// stay.
fn flood(test: &str, bytes: usize, count: usize) {
    use guest_driver::{Config as Driver, Stack};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let enough = Some(3 * count as u64 + 4_000);
    let limit = getrlimit(Resource::Nofile);
    if limit.current < enough {
        let maximum = limit.maximum.max(enough);
        let raised = setrlimit(Resource::Nofile, Rlimit { current: enough, maximum });
        // Without the right to raise the limit, the present one has to do.
        if raised.is_err() {
            setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
        }
    }
    let fabric = Fabric::new(3);
    let port = free_port();
    let mut program = fabric.smc(std::env::current_exe().unwrap());
    let server = role(&mut program, test, "server", port);
    await_listener(port);
    // The attacker has a device within the server's reach.
    let stack = Stack::open(Driver::new(fabric.devices().join("02.sock"))).unwrap();
    let mut config = Config::new(PeerId([7; 8]));
    config.ueids = vec![Eid::new("VIRTIO-ISM").unwrap()];
    let (chid, gid) = stack.devices()[0];
    config.devices = vec![IsmDevice { chid: Chid(chid.0), gid: Gid(gid.0) }];
    let proposal = start(Arc::new(config), Tick(0)).unwrap().1;
    let part = &proposal[..bytes.min(proposal.len())];

    let plain = ask_often(port, |n| n >= REQUESTS);
    let smc = ask_by_smc(&fabric, test, port);
    let of_server = |key: &str| status_of(server.pid(), key);
    let (memory, threads) = (of_server("VmRSS"), of_server("Threads"));
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let begun = Instant::now();
            let clients: Vec<TcpStream> = (0..count)
                .map(|_| {
                    let due = Instant::now() + Duration::from_secs(1) / RATE;
                    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                    stream.write_all(part).unwrap();
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    stream
                })
                .collect();
            (clients, begun.elapsed())
        });
        let by_smc = scope.spawn(|| ask_by_smc(&fabric, test, port));
        let beside = ask_often(port, |_| flood.is_finished());
        let (grown, more) = (of_server("VmRSS").saturating_sub(memory), of_server("Threads"));
        let smc_beside = by_smc.join().unwrap();
        let (clients, took) = flood.join().unwrap();
        let rate = clients.len() as f64 / took.as_secs_f64();
        println!("{} clients of {} bytes, {rate:.0} per second:", clients.len(), part.len());
        for (name, without, with) in [("TCP", plain, beside), ("SMC", smc, smc_beside)] {
            println!(
                "  {name}: p50 {:.1?} -> {:.1?}, p99 {:.1?} -> {:.1?}",
                without.0, with.0, without.1, with.1
            );
            let others = with.0.as_secs_f64() * rate;
            assert!(others < PROMPT, "{name}: {others:.0} others came before half were served");
        }
        println!("  memory grew by {grown} KiB, threads from {threads} to {more}");
        assert!(more <= threads + 1, "{threads} threads, then {more}");
        assert!(grown / count <= 32, "{grown} KiB for {count} clients");
    });
    ask_to_stop(port);
    server.finish();
}

/// One byte, the header, all of a Proposal.
fn flood_in_each_way(test: &str, count: usize) {
    match my_role() {
        Some((role, port)) if role == "server" => {
            serve(&TcpListener::bind(("127.0.0.1", port)).unwrap());
        }
        Some((_, port)) => {
            let (p50, p99) = ask_often(port, |n| n >= REQUESTS);
            println!("\ntimes: {} {}", p50.as_micros(), p99.as_micros());
        }
        None => [1, 8, usize::MAX].into_iter().for_each(|bytes| flood(test, bytes, count)),
    }
}

#[test]
fn a_thousand_half_open_clients_a_second_delay_nobody() {
    flood_in_each_way("a_thousand_half_open_clients_a_second_delay_nobody", 1_500);
}

#[test]
#[ignore = "a measurement: cargo test --release -p smc-preload --test half_open -- --ignored --nocapture"]
fn ten_thousand_half_open_clients_delay_nobody() {
    flood_in_each_way("ten_thousand_half_open_clients_delay_nobody", 10_000);
}
