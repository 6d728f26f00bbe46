// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmodified programs whose connections outlive their device: the daemon ends, and programs go on,
//! fork, and end.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use combinations::{
    accept_and_greet, connect, connect_and_greet, exchange_as_client, exchange_as_server,
};
use common::{Fabric, Running, await_listener, eventually, free_port, my_role, pattern, role};

/// More than all buffers on the way hold.
const N: usize = 3 << 20;
/// Number of bytes left unsent by a program at its end.
const LAST: usize = 600_000;
/// More than a ring of 16 KiB holds, and less than the kernel takes.
const BEYOND_RING: usize = 60_000;

fn file(name: &str) -> PathBuf {
    Path::new(&std::env::var_os("FILES").unwrap()).join(name)
}

/// Reports that this program has its connections, and waits until the device is gone.
fn lose_the_device(me: &str) {
    std::fs::write(file(me), "").unwrap();
    eventually(|| file("lost").exists());
}

fn send_pattern(mut to: &TcpStream, n: usize) {
    to.write_all(&pattern(n)).unwrap();
    to.shutdown(Shutdown::Write).unwrap();
}

fn expect_pattern(mut from: &TcpStream, n: usize) {
    let mut all = Vec::new();
    from.read_to_end(&mut all).unwrap();
    assert!(all == pattern(n), "{} bytes came", all.len());
}

fn exchange_patterns(stream: &TcpStream) {
    let before = stream.nodelay().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| send_pattern(stream, N));
        expect_pattern(stream, N);
    });
    // The connection has left its device by now, and the library has set the option for itself.
    assert_eq!(stream.nodelay().unwrap(), before);
    for on in [!before, before] {
        stream.set_nodelay(on).unwrap();
        assert_eq!(stream.nodelay().unwrap(), on);
    }
}

fn server(listener: TcpListener) {
    let mut streams = [(); 3].map(|()| listener.accept().unwrap().0);
    streams.iter_mut().for_each(exchange_as_server);
    lose_the_device("server");
    let [own, childs, last] = &streams;
    exchange_patterns(own);
    exchange_patterns(childs);
    // The client has ended by then, and not all of its bytes had room.
    std::thread::sleep(Duration::from_millis(300));
    expect_pattern(last, LAST);
}

fn client(port: u16) {
    let mut streams = [(); 3].map(|()| connect(port));
    streams.iter_mut().for_each(exchange_as_client);
    lose_the_device("client");
    let [own, childs, last] = streams;
    exchange_patterns(&own);
    c::fork(move || {
        // The parent is gone by then.
        std::thread::sleep(Duration::from_millis(150));
        exchange_patterns(&childs);
    });
    (&last).write_all(&pattern(LAST)).unwrap();
    unsafe { libc::_exit(0) }
}

/// Number of bytes sent by a program before its end.
fn length() -> usize {
    std::env::var("LENGTH").unwrap().parse().unwrap()
}

/// Sends more than a ring holds, and ends.
fn last_sender(listener: TcpListener) {
    let mut stream = accept_and_greet(&listener);
    lose_the_device("server");
    stream.write_all(&pattern(length())).unwrap();
}

/// Reads only after it has sent, by the protocol and by its program, to a process that may be gone.
fn late_reader(port: u16) {
    let mut stream = connect_and_greet(port);
    lose_the_device("client");
    eventually(|| file("ended").exists());
    // A later write finds the listener gone.
    for _ in 0..3 {
        if stream.write_all(b"too late").is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut all = vec![0; length()];
    stream.read_exact(&mut all).unwrap();
    assert!(all == pattern(length()));
}

/// Runs two programs. Their daemon dies when both have their connections. `at_end` is called
/// afterwards.
fn run(
    test: &str,
    connections: usize,
    length: usize,
    at_end: impl FnOnce(&Path, Running, Running),
) {
    let mut fabric = Fabric::new(6);
    let port = free_port();
    let this = std::env::current_exe().unwrap();
    let files = fabric.file("files");
    std::fs::create_dir(&files).unwrap();
    let program = |fabric: &Fabric| {
        let mut command = fabric.smc(&this);
        command.env("FILES", &files);
        command.env("SMC_RUN_DETECT_MS", "10000").env("SMC_RUN_BUFFER", "16384");
        command.env("LENGTH", length.to_string());
        command
    };
    let server = role(&mut program(&fabric), test, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric), test, "client", port);
    eventually(|| files.join("server").exists() && files.join("client").exists());
    assert_eq!(fabric.decided(), (2 * connections, 0));
    fabric.kill_daemon();
    std::fs::write(files.join("lost"), "").unwrap();
    at_end(&files, server, client);
}

#[test]
fn programs_go_on_fork_and_end_after_they_have_lost_their_device() {
    const TEST: &str = "programs_go_on_fork_and_end_after_they_have_lost_their_device";
    match my_role() {
        Some((role, port)) if role == "server" => {
            server(TcpListener::bind(("127.0.0.1", port)).unwrap());
        }
        Some((_, port)) => client(port),
        None => run(TEST, 3, 0, |_, server, client| {
            client.finish_beside(&[&server]);
            server.finish();
        }),
    }
}

// An ended process answers a record by RST, and the RST destroys data not yet delivered by the
// receiving kernel. A write that finds the RST is no reason to forget earlier bytes.
#[test]
fn what_a_program_sent_before_its_end_is_read_after_something_was_sent_to_it() {
    const TEST: &str = "what_a_program_sent_before_its_end_is_read_after_something_was_sent_to_it";
    match my_role() {
        Some((role, port)) if role == "server" => {
            last_sender(TcpListener::bind(("127.0.0.1", port)).unwrap());
        }
        Some((_, port)) => late_reader(port),
        None => [LAST, BEYOND_RING].into_iter().for_each(|length| {
            run(TEST, 1, length, |files, server, client| {
                server.finish();
                std::fs::write(files.join("ended"), "").unwrap();
                client.finish();
            });
        }),
    }
}
