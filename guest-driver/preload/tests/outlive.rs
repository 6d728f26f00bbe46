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

use combinations::{connect, exchange_as_client, exchange_as_server};
use common::{Fabric, await_listener, eventually, free_port, my_role, pattern, role};

/// More than all buffers on the way hold.
const N: usize = 3 << 20;
/// What a program leaves unsent when it ends.
const LAST: usize = 600_000;

fn file(name: &str) -> PathBuf {
    Path::new(&std::env::var_os("FILES").unwrap()).join(name)
}

/// Says that this program has its connections, and waits until the device is gone.
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

#[test]
fn programs_go_on_fork_and_end_after_they_have_lost_their_device() {
    const TEST: &str = "programs_go_on_fork_and_end_after_they_have_lost_their_device";
    if let Some((role, port)) = my_role() {
        return match &*role {
            "server" => server(TcpListener::bind(("127.0.0.1", port)).unwrap()),
            _ => client(port),
        };
    }
    let mut fabric = Fabric::new(6);
    let port = free_port();
    let this = std::env::current_exe().unwrap();
    let files = fabric.file("files");
    std::fs::create_dir(&files).unwrap();
    let program = |fabric: &Fabric| {
        let mut command = fabric.smc(&this);
        command.env("SMC_RUN_OUTLIVE", "true").env("FILES", &files);
        command.env("SMC_RUN_DETECT_MS", "10000");
        command
    };
    let server = role(&mut program(&fabric), TEST, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric), TEST, "client", port);
    eventually(|| files.join("server").exists() && files.join("client").exists());
    assert_eq!(fabric.decided(), (6, 0));
    fabric.kill_daemon();
    std::fs::write(files.join("lost"), "").unwrap();
    client.finish_beside(&[&server]);
    server.finish();
}
