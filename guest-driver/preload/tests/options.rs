// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of TCP only. Set before a connection is decided, such an option keeps the connection on
//! TCP, with the usual effect; afterwards the call fails, and no option is accepted and ignored.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::ffi::c_int;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

use combinations::{
    accept_and_greet, connect, connect_and_greet, exchange_as_client, exchange_as_server,
    in_each_combination,
};

/// The level and the number of an option.
type Name = (c_int, c_int);
const TIMESTAMP: Name = (libc::SOL_SOCKET, libc::SO_TIMESTAMP);
const TIMESTAMPNS: Name = (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS);
const ZEROCOPY: Name = (libc::SOL_SOCKET, libc::SO_ZEROCOPY);
const USER_TIMEOUT: Name = (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT);

/// Options open to any program, each with a value to turn it on and one to turn it off.
const OPTIONS: [(Name, c_int, c_int); 5] = [
    (TIMESTAMP, 1, 0),
    (TIMESTAMPNS, 1, 0),
    ((libc::SOL_SOCKET, libc::SO_TIMESTAMPING), 16, 0),
    ((libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE), 100_000_000, -1),
    (ZEROCOPY, 1, 0),
];

fn set(socket: &impl AsRawFd, (level, name): Name, value: c_int) -> Result<(), c_int> {
    let at = (&raw const value).cast();
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, at, 4) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error().raw_os_error().unwrap()),
    }
}

fn get(socket: &impl AsRawFd, (level, name): Name) -> c_int {
    let (mut value, mut len): (c_int, libc::socklen_t) = (0, 4);
    let (at, room) = ((&raw mut value).cast(), &raw mut len);
    let fd = socket.as_raw_fd();
    assert_eq!(unsafe { libc::getsockopt(fd, level, name, at, room) }, 0);
    value
}

fn serve(listener: &TcpListener, n: usize) {
    for _ in 0..n {
        exchange_as_server(&mut listener.accept().unwrap().0);
    }
}

/// A socket not connected yet.
fn fresh() -> TcpStream {
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    unsafe { TcpStream::from_raw_fd(fd) }
}

fn connect_it(stream: &TcpStream, port: u16) {
    let mut to: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    to.sin_family = libc::AF_INET as u16;
    to.sin_port = port.to_be();
    to.sin_addr.s_addr = u32::from_be_bytes([127, 0, 0, 1]).to_be();
    let (at, len) = ((&raw const to).cast(), size_of_val(&to) as u32);
    assert_eq!(unsafe { libc::connect(stream.as_raw_fd(), at, len) }, 0);
}

#[test]
fn an_option_that_only_tcp_has_keeps_a_connection_there() {
    in_each_combination(
        |listener| serve(&listener, OPTIONS.len()),
        |port| {
            for (name, on, _) in OPTIONS {
                let mut stream = fresh();
                assert_eq!(set(&stream, name, on), Ok(()), "{name:?}");
                connect_it(&stream, port);
                exchange_as_client(&mut stream);
                assert_eq!(get(&stream, name), on, "{name:?}");
            }
        },
        |fabric, _| assert_eq!(fabric.decided().0, 0, "connections were on SMC"),
    );
}

#[test]
fn an_option_that_only_tcp_has_is_refused_on_smc_and_may_be_switched_off() {
    in_each_combination(
        |listener| serve(&listener, 2),
        |port| {
            let mut stream = fresh();
            for (name, _, off) in OPTIONS {
                assert_eq!(set(&stream, name, off), Ok(()), "{name:?}");
            }
            connect_it(&stream, port);
            exchange_as_client(&mut stream);
            let other = connect_and_greet(port);
            let results = OPTIONS.map(|(name, on, _)| set(&other, name, on));
            let all = |wanted| results.iter().all(|result| *result == wanted);
            // On SMC all are refused, on TCP none.
            assert!(all(Ok(())) || all(Err(libc::EOPNOTSUPP)), "{results:?}");
            assert_eq!(all(Ok(())), get(&other, TIMESTAMPNS) == 1);
            for (name, _, off) in OPTIONS {
                assert_eq!(set(&other, name, off), Ok(()), "{name:?}");
            }
        },
        |fabric, ends| {
            let expected = if ends == (true, true) { 4 } else { 0 };
            assert_eq!(fabric.decided().0, expected);
        },
    );
}

#[test]
fn an_accepted_connection_has_the_option_of_its_listener_on_tcp() {
    in_each_combination(
        |listener| {
            assert_eq!(set(&listener, TIMESTAMP, 1), Ok(()));
            let (mut first, _) = listener.accept().unwrap();
            // The client connects again after the exchange.
            assert_eq!(set(&listener, TIMESTAMP, 0), Ok(()));
            assert_eq!(set(&listener, TIMESTAMPNS, 1), Ok(()));
            exchange_as_server(&mut first);
            assert_eq!(get(&first, TIMESTAMP), 1);
            let second = accept_and_greet(&listener);
            assert_eq!(get(&second, TIMESTAMPNS), 1);
        },
        |port| (0..2).for_each(|_| exchange_as_client(&mut connect(port))),
        |fabric, _| assert_eq!(fabric.decided().0, 0, "the connection was on SMC"),
    );
}

/// Writes until a write fails, and returns the error. After a write without room it waits for room.
fn write_to_error(stream: &mut TcpStream) -> Error {
    let bytes = vec![7; 1 << 16];
    loop {
        match stream.write(&bytes) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let (fd, events) = (stream.as_raw_fd(), libc::POLLOUT);
                let mut list = libc::pollfd { fd, events, revents: 0 };
                assert_eq!(unsafe { libc::poll(&raw mut list, 1, -1) }, 1);
            }
            Err(error) => return error,
        }
    }
}

#[test]
fn a_peer_that_reads_nothing_ends_a_connection_with_user_timeout_and_an_idle_one_stays() {
    const LIMIT: Duration = Duration::from_millis(1500);
    in_each_combination(
        |listener| {
            let milliseconds = LIMIT.as_millis() as c_int;
            assert_eq!(set(&listener, USER_TIMEOUT, milliseconds), Ok(()));
            let mut idle = accept_and_greet(&listener);
            let mut blocking = accept_and_greet(&listener);
            assert_eq!(get(&blocking, USER_TIMEOUT), milliseconds);
            assert_eq!(set(&listener, USER_TIMEOUT, 0), Ok(()));
            let mut polled = accept_and_greet(&listener);
            assert_eq!(set(&polled, USER_TIMEOUT, milliseconds), Ok(()));
            polled.set_nonblocking(true).unwrap();
            for stream in [&mut blocking, &mut polled] {
                let began = Instant::now();
                let error = write_to_error(stream);
                assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT));
                assert!(began.elapsed() >= LIMIT, "{:?}", began.elapsed());
            }
            idle.write_all(b"done").unwrap();
        },
        |port| {
            let mut idle = connect_and_greet(port);
            let _readers_of_nothing = [connect_and_greet(port), connect_and_greet(port)];
            idle.read_exact(&mut [0; 4]).unwrap();
        },
        |fabric, ends| {
            let expected = if ends == (true, true) { 6 } else { 0 };
            assert_eq!(fabric.decided().0, expected);
        },
    );
}

fn send_with_completion(stream: &TcpStream, bytes: &[u8]) -> Result<usize, c_int> {
    let (fd, at) = (stream.as_raw_fd(), bytes.as_ptr().cast());
    match unsafe { libc::send(fd, at, bytes.len(), libc::MSG_ZEROCOPY) } {
        -1 => Err(Error::last_os_error().raw_os_error().unwrap()),
        n => Ok(n as usize),
    }
}

#[test]
fn a_listener_with_zerocopy_is_on_smc_until_the_program_asks_for_a_completion() {
    let bytes = [7; 4096];
    in_each_combination(
        |listener| {
            assert_eq!(set(&listener, ZEROCOPY, 1), Ok(()));
            let mut first = accept_and_greet(&listener);
            assert_eq!(get(&first, ZEROCOPY), 1);
            match send_with_completion(&first, &bytes) {
                Err(libc::ENOBUFS) => first.write_all(&bytes).unwrap(),
                sent => assert_eq!(sent, Ok(bytes.len())),
            }
            let second = accept_and_greet(&listener);
            assert_eq!(send_with_completion(&second, &bytes), Ok(bytes.len()));
        },
        |port| {
            for _ in 0..2 {
                let mut received = [0; 4096];
                connect_and_greet(port).read_exact(&mut received).unwrap();
                assert_eq!(received, bytes);
            }
        },
        |fabric, ends| {
            let expected = if ends == (true, true) { 2 } else { 0 };
            assert_eq!(fabric.decided().0, expected);
        },
    );
}
