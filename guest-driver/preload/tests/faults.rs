// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults below unmodified programs. A program must see correct data or an ordinary error, and
//! soon. A time limit finds programs that hang.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/c.rs"]
mod c;
mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Fabric, Running, await_listener, free_port, my_role, role};
use smc_test_support::Stopwatch;

/// Bytes whose values show their position.
fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i / 251 + i * 7) as u8).collect()
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Runs the role of this process, if the process is one of the test's programs.
fn is_program(server: fn(TcpListener), client: fn(u16)) -> bool {
    let Some((role, port)) = my_role() else { return false };
    match &*role {
        "server" => server(TcpListener::bind(("127.0.0.1", port)).unwrap()),
        _ => client(port),
    }
    true
}

fn program(fabric: &Fabric) -> Command {
    fabric.smc(std::env::current_exe().unwrap())
}

/// Runs a server and a client, both with the library.
fn meet(test: &str, server: &mut Command, client: &mut Command) {
    meet_within(common::TIMEOUT, test, server, client);
}

fn meet_within(timeout: Duration, test: &str, server: &mut Command, client: &mut Command) {
    let port = free_port();
    let server = role(server, test, "server", port).within(timeout);
    await_listener(port);
    let client = role(client, test, "client", port).within(timeout);
    client.finish_beside(&[&server]);
    server.finish();
}

/// Echoes on `CONNECTIONS` connections, each in a thread of its own.
fn echo(listener: TcpListener) {
    thread::scope(|scope| {
        for _ in 0..number("CONNECTIONS", 1) {
            let (mut stream, _) = listener.accept().unwrap();
            scope.spawn(move || {
                let mut buf = vec![0; 64 << 10];
                loop {
                    match stream.read(&mut buf) {
                        Ok(0) | Err(_) => return,
                        Ok(n) if stream.write_all(&buf[..n]).is_err() => return,
                        Ok(_) => {}
                    }
                }
            });
        }
    });
}

/// Sends bytes and reads them back: right bytes, or an error.
fn round_trip(stream: TcpStream, n: usize) -> std::io::Result<()> {
    let data = pattern(n);
    let mut back = vec![0; n];
    let (mut reader, mut writer) = (&stream, &stream);
    let (written, read) = thread::scope(|scope| {
        let written = scope.spawn(|| {
            writer.write_all(&data)?;
            writer.shutdown(Shutdown::Write)
        });
        let read = read_exact(&mut reader, &data, &mut back);
        (written.join().unwrap(), read)
    });
    written.and(read)
}

fn read_exact(reader: &mut impl Read, data: &[u8], back: &mut [u8]) -> std::io::Result<()> {
    let mut at = 0;
    while at < back.len() {
        let n = reader.read(&mut back[at..])?;
        assert!(back[at..at + n] == data[at..at + n], "wrong bytes near {at}");
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        at += n;
    }
    assert_eq!(reader.read(&mut [0])?, 0, "more than was sent");
    Ok(())
}

fn one_round_trip(port: u16) {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    round_trip(stream, number("BYTES", 100_000)).unwrap();
}

#[test]
fn without_a_daemon_connections_are_tcp_and_with_one_later_they_are_smc() {
    fn twice(port: u16) {
        one_round_trip(port);
        let daemon = std::env::var_os("DAEMON").unwrap();
        common::eventually(|| std::fs::exists(&daemon).unwrap());
        // The library tries to open a device again after a second.
        thread::sleep(Duration::from_millis(1500));
        one_round_trip(port);
    }
    if is_program(echo, twice) {
        return;
    }
    let mut fabric = Fabric::new(2);
    fabric.kill_daemon();
    let test = "without_a_daemon_connections_are_tcp_and_with_one_later_they_are_smc";
    let port = free_port();
    let server = role(program(&fabric).env("CONNECTIONS", "2"), test, "server", port);
    await_listener(port);
    let running = fabric.file("running");
    let client = role(program(&fabric).env("DAEMON", &running), test, "client", port);
    common::eventually(|| fabric.decided().1 >= 1);
    fabric.start_daemon(2);
    std::fs::write(running, "").unwrap();
    client.finish();
    server.finish();
    let (smc, tcp) = fabric.decided();
    assert!(tcp >= 1, "{smc} {tcp}");
    assert_eq!(smc, 2, "the second connection is SMC at both ends; {tcp} ends were TCP");
}

#[test]
fn a_daemon_that_dies_in_mid_transfer_ends_connections_and_new_ones_work() {
    fn endless(port: u16) {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let block = pattern(251 * 256);
        let (mut reader, mut writer) = (&stream, &stream);
        let (written, read) = thread::scope(|scope| {
            // Until the daemon closes the connection.
            let written = scope.spawn(|| {
                loop {
                    if let Err(error) = writer.write_all(&block) {
                        return error;
                    }
                }
            });
            let mut back = vec![0; block.len()];
            let read = loop {
                match reader.read_exact(&mut back) {
                    Ok(()) => assert!(back == block, "wrong bytes"),
                    Err(error) => break error,
                }
            };
            (written.join().unwrap(), read)
        });
        for error in [written.kind(), read.kind()] {
            let ends = [ErrorKind::ConnectionReset, ErrorKind::ConnectionAborted];
            let ends = [&ends[..], &[ErrorKind::BrokenPipe, ErrorKind::UnexpectedEof]].concat();
            assert!(ends.contains(&error), "{error}");
        }
        let begun = Stopwatch::start();
        one_round_trip(port);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }
    if is_program(echo, endless) {
        return;
    }
    let mut fabric = Fabric::new(2);
    let test = "a_daemon_that_dies_in_mid_transfer_ends_connections_and_new_ones_work";
    let port = free_port();
    let mut server = program(&fabric);
    server.env("CONNECTIONS", "2").env("SMC_RUN_OUTLIVE", "false");
    let server = role(&mut server, test, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric), test, "client", port);
    common::eventually(|| fabric.decided().0 == 2);
    thread::sleep(Duration::from_millis(300));
    fabric.kill_daemon();
    client.finish();
    server.finish();
}

/// Makes many connections at once. Connections without resources for SMC stay on TCP.
fn crowd(port: u16) {
    let all = number("CONNECTIONS", 1);
    let bytes = number("BYTES", 1000);
    let streams: Vec<_> = (0..all)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(b"!").unwrap();
            let mut echoed = [0];
            stream.read_exact(&mut echoed).unwrap();
            stream
        })
        .collect();
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for part in streams.chunks(all.div_ceil(8)) {
            let done = &done;
            scope.spawn(move || {
                for stream in part {
                    round_trip(stream.try_clone().unwrap(), bytes).unwrap();
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), all);
}

#[test]
fn a_device_that_is_full_leaves_tcp() {
    if is_program(echo, crowd) {
        return;
    }
    let fabric = Fabric::with(2, |quotas| quotas.max_dmbs = Some(3));
    let test = "a_device_that_is_full_leaves_tcp";
    let set = |mut command: Command| {
        command.env("CONNECTIONS", "10");
        command
    };
    meet(test, &mut set(program(&fabric)), &mut set(program(&fabric)));
    let (smc, tcp) = fabric.decided();
    assert_eq!((smc, tcp), (6, 14), "{:?}", fabric.broken());
    assert_eq!(fabric.left_behind(), Vec::<String>::new(), "both programs have ended");
}

/// A server waits for first bytes only for a short time. The program would read a later Proposal as
/// data.
#[test]
fn a_device_that_takes_long_to_open_does_not_make_the_proposal_late() {
    if is_program(echo, one_round_trip) {
        return;
    }
    let fabric = Fabric::new(2);
    let slow = fabric.file("slow.sock");
    let listener = std::os::unix::net::UnixListener::bind(&slow).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::sleep(Duration::from_millis(700));
            drop(stream);
        }
    });
    let mut client = program(&fabric);
    client.env("SMC_RUN_DEVICES", format!("{}:{}", slow.display(), fabric.devices().display()));
    let test = "a_device_that_takes_long_to_open_does_not_make_the_proposal_late";
    meet(test, &mut program(&fabric), &mut client);
    assert_eq!(fabric.decided(), (2, 0), "{:?}", fabric.broken());
}

/// Forwards the bytes for a port, after a delay.
fn delay(to: u16, by: Duration) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
        thread::sleep(by);
        let pump = |mut from: TcpStream, mut to: TcpStream| {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        };
        let (from, back) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || pump(back, client));
        pump(from, server);
    });
    port
}

/// A Proposal may be late, because of a busy client or a lost packet. While the server's program
/// only reads, the library waits for the Proposal.
#[test]
fn a_proposal_that_comes_late_is_not_taken_for_data() {
    if is_program(echo, one_round_trip) {
        return;
    }
    let fabric = Fabric::new(2);
    let test = "a_proposal_that_comes_late_is_not_taken_for_data";
    let port = free_port();
    let server = role(&mut program(&fabric), test, "server", port);
    await_listener(port);
    let late = delay(port, Duration::from_millis(1000));
    role(&mut program(&fabric), test, "client", late).finish();
    server.finish();
    assert_eq!(fabric.decided(), (2, 0), "{:?}", fabric.broken());
}

#[test]
fn a_server_that_speaks_first_is_not_held_up_by_a_client_that_listens() {
    fn serve(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        // Accepts as soon as possible, like servers waiting for events.
        if std::env::var_os("POLLS").is_some() {
            stream.set_nonblocking(true).unwrap();
            assert_eq!(c::poll(&stream, libc::POLLOUT, 100_000).unwrap(), libc::POLLOUT);
        }
        stream.write_all(b"220").unwrap();
    }
    fn listen(port: u16) {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let begun = Stopwatch::start();
        stream.read_exact(&mut [0; 3]).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }
    if is_program(serve, listen) {
        return;
    }
    let test = "a_server_that_speaks_first_is_not_held_up_by_a_client_that_listens";
    for polls in [false, true] {
        let fabric = Fabric::new(1);
        let mut server = program(&fabric);
        if polls {
            server.env("POLLS", "1");
        }
        meet(test, &mut server, &mut Command::new(std::env::current_exe().unwrap()));
    }
}

#[test]
fn more_programs_than_devices_and_the_rest_is_on_tcp_and_says_so_once() {
    /// Replaces standard error by a file, like a daemon.
    fn server(listener: TcpListener) {
        if let Some(path) = std::env::var_os("ERRORS") {
            c::replace(2, &path);
        }
        echo(listener);
    }
    fn client(port: u16) {
        (0..number("CONNECTIONS", 1)).for_each(|_| one_round_trip(port));
    }
    if is_program(server, client) {
        return;
    }
    let test = "more_programs_than_devices_and_the_rest_is_on_tcp_and_says_so_once";
    for replaced in [false, true] {
        let fabric = Fabric::new(1);
        let (port, file) = (free_port(), fabric.file("errors"));
        let mut server = program(&fabric);
        server.env("CONNECTIONS", "3");
        if replaced {
            server.env("ERRORS", &file);
        }
        let server = role(&mut server, test, "server", port);
        await_listener(port);
        let said = role(program(&fabric).env("CONNECTIONS", "3"), test, "client", port).finish();
        assert!(!said.contains("stays on TCP"), "{said}");
        // The client has the only device, so the server must decline.
        assert_eq!(fabric.decided(), (0, 6), "{:?}", fabric.broken());
        assert!(fabric.said("no_device") > 0);
        let notice = ": it is in use by another process";
        let ended = || server.said().contains("test result");
        common::eventually(|| ended() && (replaced || server.said().contains(notice)));
        let said = server.said();
        assert_eq!(said.matches(notice).count(), usize::from(!replaced), "{said}");
        if replaced {
            assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
        }
    }
}

#[test]
fn programs_take_devices_of_a_pool_until_their_share_is_in_use() {
    if is_program(echo, one_round_trip) {
        return;
    }
    let test = "programs_take_devices_of_a_pool_until_their_share_is_in_use";
    // A namespace has half of the devices.
    for (devices, decided) in [(4, (2, 0)), (2, (0, 2))] {
        let fabric = Fabric::with_pool(devices);
        let port = free_port();
        let mut server = program(&fabric);
        let server = role(&mut server, test, "server", port);
        await_listener(port);
        role(&mut program(&fabric), test, "client", port).finish();
        server.finish();
        assert_eq!(fabric.decided(), decided, "{:?}", fabric.broken());
    }
}

#[test]
fn enterprise_ids_that_do_not_match_leave_tcp() {
    if is_program(echo, one_round_trip) {
        return;
    }
    let fabric = Fabric::new(2);
    let test = "enterprise_ids_that_do_not_match_leave_tcp";
    let with = |eid: &str| {
        let mut command = program(&fabric);
        command.env("SMC_RUN_EIDS", eid);
        command
    };
    meet(test, &mut with("ONE"), &mut with("OTHER"));
    assert_eq!(fabric.decided(), (0, 2), "{:?}", fabric.broken());
}

#[test]
fn a_fork_during_the_handshake_harms_neither_side() {
    /// Forks during the handshakes: an idle child, and a child that uses the connections.
    fn forking(port: u16) {
        for round in 0..number("CONNECTIONS", 1) {
            let stream = c::connect_nonblocking(port);
            if round % 3 == 1 {
                thread::sleep(Duration::from_micros(200 * round as u64));
            }
            let child = c::fork(|| {});
            c::poll(&stream, libc::POLLOUT, 100_000).unwrap();
            stream.set_nonblocking(false).unwrap();
            round_trip(stream, 10_000).unwrap();
            c::wait(child);
        }
    }
    if is_program(echo, forking) {
        return;
    }
    let fabric = Fabric::new(2);
    let test = "a_fork_during_the_handshake_harms_neither_side";
    let set = |mut command: Command| {
        command.env("CONNECTIONS", "12");
        command
    };
    meet(test, &mut set(program(&fabric)), &mut set(program(&fabric)));
    assert_eq!(fabric.broken(), Vec::<String>::new());
}

#[test]
fn few_descriptors_mean_tcp_or_an_ordinary_error() {
    fn limited(port: u16) {
        let most = number("LIMIT", 64) as u64;
        c::limit_descriptors(most);
        let mut streams = Vec::new();
        let error = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => streams.push(stream),
                Err(error) => break error,
            }
            assert!((streams.len() as u64) < most);
        };
        assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
        println!("{} connections", streams.len());
        drop(streams);
        // Each connection begins a handshake, and a handshake has descriptors until it is complete.
        common::eventually(|| std::fs::File::open("/dev/null").is_ok());
        let mut stream = None;
        common::eventually(|| {
            stream = TcpStream::connect(("127.0.0.1", port)).ok();
            stream.is_some()
        });
        round_trip(stream.unwrap(), number("BYTES", 100_000)).unwrap();
        // The report of the server counts.
        for _ in 0..number("CONNECTIONS", 1) {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
    if is_program(echo, limited) {
        return;
    }
    let test = "few_descriptors_mean_tcp_or_an_ordinary_error";
    // A process with a limit below 256 gets no device.
    for limit in ["16", "20", "22", "24", "26", "28", "36", "64", "150", "255", "256", "300"] {
        let fabric = Fabric::new(2);
        let port = free_port();
        let server = role(program(&fabric).env("CONNECTIONS", "100000"), test, "server", port);
        await_listener(port);
        role(program(&fabric).env("LIMIT", limit), test, "client", port).finish();
        drop(server);
        let (smc, _) = fabric.decided();
        let limit: usize = limit.parse().unwrap();
        assert_eq!(smc > 0, limit >= 256, "{limit}: {smc} ends on SMC");
        // A smaller limit may leave no number for a report.
        let reports = fabric.said("too few descriptors");
        assert!(limit < 150 || reports == usize::from(limit < 256), "{limit}: {reports} reports");
    }
}

#[test]
fn a_thousand_connections() {
    if is_program(echo, crowd) {
        return;
    }
    let fabric = Fabric::new(2);
    let set = |mut command: Command| {
        command.env("CONNECTIONS", "1000").env("SMC_RUN_BUFFER", "16384");
        command
    };
    let begun = Instant::now();
    // A server's handshakes and threads run one after the other, which takes long on a busy
    // machine.
    let timeout = 6 * common::TIMEOUT;
    let test = "a_thousand_connections";
    meet_within(timeout, test, &mut set(program(&fabric)), &mut set(program(&fabric)));
    println!("{:?}: {:?}", fabric.decided(), begun.elapsed());
    let (smc, tcp) = fabric.decided();
    assert_eq!(smc + tcp, 2000, "{:?}", fabric.broken());
    assert!(smc >= 2 * 100, "{smc} ends on SMC, {tcp} on TCP");
}

/// If a program is killed in mid-transfer, its peer sees an end of data or a reset.
#[test]
fn a_program_that_is_killed_ends_its_connections() {
    fn victim(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let block = [7u8; 4096];
        while stream.write_all(&block).is_ok() {}
    }
    fn survivor(port: u16) {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut buf = [0; 4096];
        while matches!(stream.read(&mut buf), Ok(n) if n > 0) {}
    }
    if is_program(victim, survivor) {
        return;
    }
    let fabric = Fabric::new(2);
    let test = "a_program_that_is_killed_ends_its_connections";
    let port = free_port();
    let server: Running = role(&mut program(&fabric), test, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric), test, "client", port);
    common::eventually(|| fabric.decided().0 == 2);
    thread::sleep(Duration::from_millis(100));
    drop(server);
    client.finish();
}

/// A killed peer sends no close. Its end must be noticed in another way.
#[test]
fn an_epoll_set_tells_once_of_a_peer_that_was_killed_and_sleeps_then() {
    const ENDED: i32 = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLERR | libc::EPOLLHUP;
    fn server(listener: TcpListener) {
        let events = libc::EPOLLIN | libc::EPOLLRDHUP;
        let [edge, once, level] = [libc::EPOLLET, libc::EPOLLONESHOT, 0].map(|how| {
            let set = c::Epoll::new();
            let (stream, _) = listener.accept().unwrap();
            set.add(&stream, events | how, 1);
            assert_eq!(set.wait(100_000), [(1, libc::EPOLLIN)]);
            (&stream).read_exact(&mut [0]).unwrap();
            stream.set_nonblocking(true).unwrap();
            assert_eq!((&stream).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
            (set, stream)
        });
        println!("kill it");
        for (set, stream) in [&edge, &level] {
            let reported = set.wait(100_000);
            assert!(matches!(reported[..], [(1, shown)] if shown & ENDED != 0), "{reported:?}");
            assert!(!matches!((&*stream).read(&mut [0]), Ok(1..)));
        }
        // The one-shot is used up, and the edge was reported.
        for (set, _) in [&once, &edge] {
            let before = c::processor_time();
            assert_eq!(set.wait(400), []);
            let used = c::processor_time() - before;
            assert!(used < Duration::from_millis(100), "{used:?} to wait for 400 ms");
        }
    }
    fn client(port: u16) {
        let streams = [(); 3].map(|()| {
            let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            (&stream).write_all(b"!").unwrap();
            stream
        });
        loop {
            thread::park();
            let _ = &streams;
        }
    }
    if is_program(server, client) {
        return;
    }
    let fabric = Fabric::new(2);
    let test = "an_epoll_set_tells_once_of_a_peer_that_was_killed_and_sleeps_then";
    let port = free_port();
    let server = role(&mut program(&fabric), test, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric), test, "client", port);
    common::eventually(|| server.said().contains("kill it"));
    assert_eq!(fabric.decided(), (6, 0), "{:?}", fabric.broken());
    drop(client);
    server.finish();
}
