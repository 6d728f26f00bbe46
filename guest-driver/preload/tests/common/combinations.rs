// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server and a client, with and without the library at either end, and how both begin.
#![allow(unreachable_pub, reason = "each test is a crate of its own")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]
#![allow(dead_code, reason = "not every test uses all of it")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;

use crate::common::{Fabric, await_listener, eventually, free_port, my_role, role, test_of};

/// Runs a server and a client, with and without the library at either end: in all four
/// combinations. At least one of both is a function of the test.
pub fn in_all_combinations<S: Fn(TcpListener), C: Fn(u16)>(server: S, client: C) {
    in_each_combination(server, client, |fabric, _| {
        // No process with a device is left behind.
        eventually(|| fabric.open_devices().is_empty());
    });
}

/// Like [`in_all_combinations`]. `check` gets whether the server and the client had the library.
pub fn in_each_combination<S: Fn(TcpListener), C: Fn(u16)>(
    server: S,
    client: C,
    check: impl Fn(&Fabric, (bool, bool)),
) {
    let test = test_of::<S>().or(test_of::<C>()).expect("a function of the test");
    if let Some((role, port)) = my_role() {
        match &*role {
            "server" => server(TcpListener::bind(("127.0.0.1", port)).unwrap()),
            _ => client(port),
        }
        return;
    }
    for (server_smc, client_smc) in [(false, false), (true, true), (true, false), (false, true)] {
        let fabric = Fabric::new(6);
        let port = free_port();
        let this = std::env::current_exe().unwrap();
        let mut command = fabric.on(server_smc, &this);
        command.env("FILES", fabric.file(""));
        if client_smc {
            // A server whose program writes first waits 200 ms for a Proposal. On a busy machine
            // the Proposal may take longer, and the program would then read it as data.
            command.env("SMC_RUN_DETECT_MS", "10000");
        }
        let server = role(&mut command, test, "server", port);
        await_listener(port);
        let mut command = fabric.on(client_smc, &this);
        command.env("FILES", fabric.file(""));
        if !server_smc {
            // The settings say which servers speak SMC.
            command.env("SMC_RUN_CONNECT", "");
        }
        let client = role(&mut command, test, "client", port);
        client.finish_beside(&[&server]);
        server.finish();
        check(&fabric, (server_smc, client_smc));
    }
}

pub fn connect(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).unwrap()
}

/// One exchange, so that the connection is decided and in use.
pub fn exchange_as_server(stream: &mut TcpStream) {
    let mut word = [0; 5];
    stream.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"hello");
    stream.write_all(b"there").unwrap();
}

pub fn exchange_as_client(stream: &mut TcpStream) {
    stream.write_all(b"hello").unwrap();
    let mut word = [0; 5];
    stream.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"there");
}

/// A connection accepted, decided and in use.
pub fn accept_and_greet(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    exchange_as_server(&mut stream);
    stream
}

/// A connection made, decided and in use.
pub fn connect_and_greet(port: u16) -> TcpStream {
    let mut stream = connect(port);
    exchange_as_client(&mut stream);
    stream
}

pub fn pass(socket: &UnixStream, fd: RawFd) {
    let mut control = [0u8; 64];
    let mut iov = libc::iovec { iov_base: c"x".as_ptr().cast_mut().cast(), iov_len: 1 };
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut iov, 1);
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    unsafe {
        let first = libc::CMSG_FIRSTHDR(&header);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(first).cast::<i32>().write_unaligned(fd);
    }
    assert_eq!(unsafe { libc::sendmsg(socket.as_raw_fd(), &header, 0) }, 1);
}

pub fn take(socket: &UnixStream) -> TcpStream {
    let (mut control, mut byte) = ([0u8; 64], [0u8]);
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut iov, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), 64);
    assert_eq!(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, 0) }, 1);
    unsafe {
        let first = libc::CMSG_FIRSTHDR(&header);
        assert!(!first.is_null(), "no descriptor came");
        TcpStream::from_raw_fd(libc::CMSG_DATA(first).cast::<i32>().read_unaligned())
    }
}
