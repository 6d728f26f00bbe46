// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers of descriptors belong to the program: a program of one thread closes and replaces free
//! numbers, while threads of the library make descriptors for a moment.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the calls take numbers only")]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use common::{Fabric, await_listener, eventually, free_port, my_role, role};

/// Numbers that a shell or a server in C may use.
const NUMBERS: Range<i32> = 3..30;

fn is_open(fd: i32) -> bool {
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// Takes and closes numbers free at first, until the file exists.
fn use_numbers(until: &Path) {
    let null = File::open("/dev/null").unwrap();
    let null = unsafe { libc::fcntl(null.as_raw_fd(), libc::F_DUPFD, NUMBERS.end) };
    let free: Vec<_> = NUMBERS.filter(|fd| !is_open(*fd)).collect();
    assert!(free.len() > 10, "{free:?}");
    while !until.exists() {
        for fd in &free {
            assert_eq!(unsafe { libc::dup2(null, *fd) }, *fd);
        }
        std::thread::yield_now();
        for fd in &free {
            assert!(is_open(*fd), "{fd} was closed");
            assert_eq!(unsafe { libc::close(*fd) }, 0);
        }
        for fd in &free {
            assert_eq!(unsafe { libc::close(*fd) }, -1, "{fd} was not the program's");
        }
    }
}

#[test]
fn a_program_uses_free_numbers_while_the_library_makes_descriptors() {
    const TEST: &str = "a_program_uses_free_numbers_while_the_library_makes_descriptors";
    let until = |fabric: &str| Path::new(fabric).join("over");
    if let Some((end, port)) = my_role() {
        let mut stream = match end.as_str() {
            "server" => TcpListener::bind(("127.0.0.1", port)).unwrap().accept().unwrap().0,
            _ => TcpStream::connect(("127.0.0.1", port)).unwrap(),
        };
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        use_numbers(&until(&std::env::var("FABRIC").unwrap()));
        stream.write_all(b"y").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        return;
    }
    let mut fabric = Fabric::new(4);
    let directory = fabric.file("").to_string_lossy().into_owned();
    let port = free_port();
    let end = |fabric: &Fabric, name| {
        let mut command = fabric.smc(std::env::current_exe().unwrap());
        role(command.env("FABRIC", &directory), TEST, name, port)
    };
    let server = end(&fabric, "server");
    await_listener(port);
    let client = end(&fabric, "client");
    eventually(|| fabric.decided() == (2, 0));
    for round in 0..40 {
        std::thread::sleep(Duration::from_millis(50));
        match round % 2 {
            0 => fabric.kill_daemon(),
            _ => fabric.start_daemon(4),
        }
    }
    File::create(until(&directory)).unwrap();
    client.finish();
    server.finish();
}
