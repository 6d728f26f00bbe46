// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processes that fork, or end, while threads are at work: a child, or a keeper, never waits for a
//! thread that it does not have. `SMC_STORM=20000 cargo test -p smc-preload --test forks storm`
//! makes a storm of so many programs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/c.rs"]
mod c;
mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use guest_driver::statistics;

use common::{Fabric, Running, await_listener, compiled, eventually, free_port, my_role, role};

/// Programs of the storm, unless the environment says how many.
const STORM: usize = 240;
const WAYS: [&str; 6] = ["exit", "_exit", "quick_exit", "exec", "beside", "exec_open"];
const DEVICES: usize = 48;
/// Programs at the same time.
const AT_ONCE: usize = 8;
/// After so long a silence a server misses a message.
const SILENCE: i32 = 60_000;

fn storm() -> usize {
    std::env::var("SMC_STORM").ok().and_then(|number| number.parse().ok()).unwrap_or(STORM)
}

/// The messages of a program.
fn messages_of(number: usize) -> Vec<String> {
    let beside = 0..if WAYS[number % WAYS.len()] == "beside" { 3 } else { 0 };
    [number.to_string()].into_iter().chain(beside.map(|at| format!("{number}.{at}"))).collect()
}

/// Processes with the fabric's directory in their environment: programs of the test, and keepers.
fn processes_of(fabric: &Fabric) -> Vec<String> {
    let name = fabric.devices().display().to_string();
    let is_named = |text: Vec<u8>| text.windows(name.len()).any(|part| part == name.as_bytes());
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let ours = all.filter(|entry| std::fs::read(entry.path().join("environ")).is_ok_and(is_named));
    let told = ours.map(|entry| {
        let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        format!("{} {}", entry.file_name().display(), comm.trim())
    });
    told.collect()
}

/// Every program's message comes, each once, and no process is left.
#[test]
fn a_storm_of_programs_that_end_at_once_loses_no_message() {
    const TEST: &str = "a_storm_of_programs_that_end_at_once_loses_no_message";
    if let Some((_, port)) = my_role() {
        return collect(TcpListener::bind(("127.0.0.1", port)).unwrap());
    }
    let fabric = Fabric::new(DEVICES);
    let port = free_port();
    let mut command = fabric.smc(std::env::current_exe().unwrap());
    command.env("SMC_RUN_DETECT_MS", "10000");
    let time = Duration::from_secs(120) + Duration::from_millis(storm() as u64 * 1500);
    let server = role(&mut command, TEST, "server", port).within(time);
    await_listener(port);
    let program = compiled("one_message", &[]);
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= storm() {
                        return;
                    }
                    let mut client = fabric.smc(&program);
                    let way = WAYS[number % WAYS.len()];
                    client.args([&port.to_string(), &number.to_string(), way]);
                    let told = client.output().unwrap();
                    if !told.status.success() {
                        let why = String::from_utf8_lossy(&told.stderr).into_owned();
                        failed.lock().unwrap().push(format!("{number}: {} {why}", told.status));
                    }
                }
            });
        }
    });
    assert_eq!(failed.into_inner().unwrap(), [""; 0]);
    server.finish();
    println!("{} programs on SMC, {} keepers", fabric.decided().0, fabric.said("keeper"));
    eventually(|| processes_of(&fabric).is_empty());
}

fn collect(listener: TcpListener) {
    let expected: BTreeSet<String> = (0..storm()).flat_map(messages_of).collect();
    let mut missing = expected.clone();
    let mut wrong = Vec::new();
    while !missing.is_empty() {
        let ready = c::poll(&listener, libc::POLLIN, SILENCE).unwrap();
        assert_eq!(ready, libc::POLLIN, "{} are missing: {missing:?}", missing.len());
        let (mut stream, _) = listener.accept().unwrap();
        let mut text = String::new();
        let end = stream.read_to_string(&mut text);
        // The connections made by a program until its end.
        if text == "-\n" || text.is_empty() {
            continue;
        }
        let message = text.trim_end().to_owned();
        if end.is_err() || !text.ends_with('\n') || !missing.remove(&message) {
            wrong.push((text, end));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn children_of_each_kind_go_on_while_threads_open_the_device() {
    const TEST: &str = "children_of_each_kind_go_on_while_threads_open_the_device";
    if let Some((_, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        loop {
            let (stream, _) = listener.accept().unwrap();
            std::thread::spawn(move || echo(stream));
        }
    }
    let fabric = Fabric::new(DEVICES);
    let port = free_port();
    let mut command = fabric.smc(std::env::current_exe().unwrap());
    command.env("SMC_RUN_DETECT_MS", "10000");
    let server = role(&mut command, TEST, "server", port).within(Duration::from_secs(600));
    await_listener(port);
    let program = compiled("forks_beside", &[]);
    // In short-lived processes each initialisation is at the beginning.
    for round in 0..storm() / 60 {
        let mut command = fabric.smc(&program);
        command.args([port.to_string(), "9".to_owned()]);
        command.env("SMC_LOG", "trace").env("SMC_LOG_FILE", fabric.file("log"));
        let told = Running::start(&mut command).within(Duration::from_secs(120));
        assert_eq!(told.finish_beside(&[&server]), "all children\n", "round {round}");
    }
    server.stop();
    eventually(|| processes_of(&fabric).is_empty());
}

fn echo(mut stream: TcpStream) {
    let mut room = [0; 64];
    while let Ok(n @ 1..) = stream.read(&mut room) {
        if stream.write_all(&room[..n]).is_err() {
            return;
        }
    }
}

/// The socket at which a server waits before its accept.
fn gate(port: u16) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("smc-forks-test-{port}")).unwrap()
}

/// Runs a program with a message to a server, which accepts only after the end of the program's
/// process. So a keeper has the message. `locked`: the function that never returns in the keeper.
/// `before`: the condition for the server to accept.
fn with_keeper(test: &str, locked: &str, before: impl Fn(&Fabric)) -> Fabric {
    let fabric = Fabric::new(4);
    let port = free_port();
    let mut command = fabric.smc(std::env::current_exe().unwrap());
    command.env("SMC_RUN_DETECT_MS", "10000");
    let server = role(&mut command, test, "server", port);
    await_listener(port);
    eventually(|| UnixStream::connect_addr(&gate(port)).is_ok());
    let mut client = fabric.smc(compiled("keeper_alone", &[]));
    client.args([&port.to_string(), locked]).env("SMC_RUN_KEEPER_S", "2");
    client.env("SMC_LOG", "warn").env("SMC_LOG_FILE", fabric.file("log"));
    Running::start(&mut client).finish();
    before(&fabric);
    UnixStream::connect_addr(&gate(port)).unwrap();
    server.finish();
    eventually(|| processes_of(&fabric).is_empty());
    fabric
}

/// The server of [`with_keeper`]. Returns the message of a client.
fn accept_late(port: u16) -> std::io::Result<String> {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let open = UnixListener::bind_addr(&gate(port)).unwrap();
    (0..2).for_each(|_| drop(open.accept().unwrap()));
    let mut text = String::new();
    listener.accept()?.0.read_to_string(&mut text).map(|_| text)
}

/// The thread's bytes would go to TCP, in the middle of the handshake.
#[test]
fn a_thread_that_sends_while_its_program_ends_breaks_no_handshake() {
    const TEST: &str = "a_thread_that_sends_while_its_program_ends_breaks_no_handshake";
    let Some((_, port)) = my_role() else { return drop(with_keeper(TEST, "none", |_| ())) };
    let text = accept_late(port).unwrap();
    let more = text.strip_prefix("the message").unwrap();
    assert!(more.bytes().all(|byte| byte == b'+'), "{more:?}");
}

/// libc takes the program's memory for variables of a thread with destructors.
#[test]
fn a_keeper_takes_no_memory_of_its_program() {
    const TEST: &str = "a_keeper_takes_no_memory_of_its_program";
    match my_role() {
        Some((_, port)) => assert_eq!(accept_late(port).unwrap(), "the message"),
        None => drop(with_keeper(TEST, "malloc", |_| ())),
    }
}

/// The bytes are lost, so their end is a reset. The log and the report say why.
#[test]
#[cfg_attr(target_feature = "crt-static", ignore = "functions of a static program are its own")]
fn a_keeper_whose_thread_does_not_go_on_ends() {
    const TEST: &str = "a_keeper_whose_thread_does_not_go_on_ends";
    if let Some((_, port)) = my_role() {
        let error = accept_late(port).unwrap_err();
        return assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    let fabric = with_keeper(TEST, "getpid", |fabric| {
        eventually(|| read(fabric, "log").contains("its thread has not gone on"));
    });
    let log = read(&fabric, "log");
    assert_eq!(log.lines().count(), 1, "{log}");
}

fn read(fabric: &Fabric, name: &str) -> String {
    std::fs::read_to_string(fabric.file(name)).unwrap_or_default()
}

/// More than the ring holds, and less than the send queue.
const UNREAD: usize = 2 << 20;

/// The keeper gives up like TCP. The peer sees a reset, and no end of data.
#[test]
fn a_keeper_ends_when_its_peer_takes_nothing() {
    const TEST: &str = "a_keeper_ends_when_its_peer_takes_nothing";
    if let Some((role, port)) = my_role() {
        if role == "client" {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.read_exact(&mut [0]).unwrap();
            return stream.write_all(&vec![7; UNREAD]).unwrap();
        }
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"!").unwrap();
        let ended = c::poll(&stream, 0, 60_000).unwrap();
        assert!(ended & libc::POLLERR != 0, "{ended:#x}");
        let mut all = Vec::new();
        let error = stream.read_to_end(&mut all).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        return assert!(all.len() < UNREAD, "{} bytes came", all.len());
    }
    let fabric = Fabric::new(4);
    let port = free_port();
    let this = std::env::current_exe().unwrap();
    let mut command = fabric.smc(&this);
    command.env("SMC_RUN_DETECT_MS", "10000");
    let server = role(&mut command, TEST, "server", port).within(Duration::from_secs(90));
    await_listener(port);
    let mut command = fabric.smc(&this);
    command.env("SMC_RUN_KEEPER_S", "8").env("SMC_RUN_STATISTICS", fabric.file("statistics"));
    command.env("SMC_LOG", "smc_preload=warn").env("SMC_LOG_FILE", fabric.file("log"));
    std::fs::create_dir(fabric.file("statistics")).unwrap();
    role(&mut command, TEST, "client", port).finish_beside(&[&server]);
    // Until then `smc stat` shows the keeper.
    eventually(|| {
        let found = statistics::find(&fabric.file("statistics")).into_iter();
        let told = found.filter_map(|socket| {
            let mut text = String::new();
            UnixStream::connect(socket).ok()?.read_to_string(&mut text).ok()?;
            Some(text)
        });
        told.into_iter().any(|text| text.contains("\"program\":\"smc-keeper\""))
    });
    server.finish();
    assert_eq!(fabric.said("keeper_gives_up"), 1);
    let log = read(&fabric, "log");
    assert!(log.contains("a keeper ends") && log.contains("connections=1"), "{log}");
    eventually(|| processes_of(&fabric).is_empty());
}
