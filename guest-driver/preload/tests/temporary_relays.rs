// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection gets a relay because of a started program, and loses it again when the program has
//! closed the connection or has ended. No byte is lost or comes in another order, with any other
//! use of the connection meanwhile.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::ffi::CString;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::process::Command;
use std::time::{Duration, Instant};

use combinations::{accept_and_greet, connect_and_greet, exchange_as_client, in_all_combinations};
use common::{eventually, pattern};

const N: usize = 3 << 20;

/// Whether a Unix socket is in the place of a connection.
fn has_relay(stream: &TcpStream) -> bool {
    let target = std::fs::read_link(format!("/proc/self/fd/{}", stream.as_raw_fd())).unwrap();
    let target = target.to_str().unwrap().to_owned();
    let inode = target.strip_prefix("socket:[").unwrap().strip_suffix(']').unwrap();
    let sockets = std::fs::read("/proc/self/net/unix").unwrap();
    let sockets = String::from_utf8_lossy(&sockets);
    sockets.lines().any(|line| line.split_whitespace().nth(6) == Some(inode))
}

/// Has programs inherit the connection, as most programs in C or Java do.
fn leave_open(stream: &TcpStream) -> RawFd {
    let fd = stream.as_raw_fd();
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }, 0);
    fd
}

fn system(command: &str) -> i32 {
    let command = CString::new(command).unwrap();
    unsafe { libc::system(command.as_ptr()) }
}

/// Exchanges words until the connection has no relay.
fn exchange_until_direct(stream: &mut TcpStream) {
    eventually(|| {
        exchange_as_client(stream);
        !has_relay(stream)
    });
}

/// Sends back all bytes up to the end, and ends then.
fn echo(mut stream: TcpStream) {
    let mut room = [0; 60000];
    loop {
        match stream.read(&mut room).unwrap() {
            0 => return stream.shutdown(Shutdown::Write).unwrap(),
            n => stream.write_all(&room[..n]).unwrap(),
        }
    }
}

/// A server of so many connections: words first, and then all is sent back.
fn words_and_echo(listener: &TcpListener, times: usize) {
    for _ in 0..times {
        let (mut stream, _) = listener.accept().unwrap();
        let mut word = [0; 5];
        loop {
            stream.read_exact(&mut word).unwrap();
            match &word {
                b"hello" => stream.write_all(b"there").unwrap(),
                b"child" => {}
                b"echo:" => break,
                other => panic!("{other:?}"),
            }
        }
        echo(stream);
    }
}

/// Both directions at once, up to the end.
fn finish_by_echo(stream: &TcpStream) {
    let mut from = stream;
    from.write_all(b"echo:").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut to = stream;
            to.write_all(&pattern(N)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut all = Vec::new();
        from.read_to_end(&mut all).unwrap();
        assert!(all == pattern(N), "{} bytes came", all.len());
    });
}

type Start = fn(RawFd);

/// Ways to start a program that inherits the connection.
const STARTS: [Start; 5] = [
    |_| assert_eq!(system("true"), 0),
    |_| unsafe {
        let pipe = libc::popen(c"true".as_ptr(), c"r".as_ptr());
        assert_eq!(libc::pclose(pipe), 0);
    },
    // `std` calls posix_spawn.
    |_| assert!(Command::new("true").status().unwrap().success()),
    |_| {
        c::wait(c::fork(|| unsafe {
            libc::execlp(c"true".as_ptr(), c"true".as_ptr(), std::ptr::null::<i8>());
        }));
    },
    // A child that writes to the connection.
    |fd| {
        c::wait(c::fork(move || {
            assert_eq!(unsafe { libc::write(fd, b"child".as_ptr().cast(), 5) }, 5);
        }));
    },
];

#[test]
fn a_connection_is_without_a_relay_when_the_program_has_ended() {
    fn server(listener: TcpListener) {
        words_and_echo(&listener, STARTS.len());
    }
    fn client(port: u16) {
        for start in STARTS {
            let mut stream = connect_and_greet(port);
            start(leave_open(&stream));
            exchange_until_direct(&mut stream);
            // And again.
            start(stream.as_raw_fd());
            exchange_until_direct(&mut stream);
            finish_by_echo(&stream);
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn a_program_that_lives_on_keeps_the_relay_and_shares_the_stream() {
    fn server(listener: TcpListener) {
        words_and_echo(&listener, 2);
    }
    fn client(port: u16) {
        // Once with the library in the program, once without: then with the connection as its
        // standard input, and no other descriptors.
        for plain in [false, true] {
            let mut stream = connect_and_greet(port);
            let fd = leave_open(&stream);
            let had_none = has_relay(&stream);
            let (one, end) = std::io::pipe().unwrap();
            let gate = one.as_raw_fd();
            unsafe { libc::fcntl(gate, libc::F_SETFD, 0) };
            // The program waits, asks for a word, and takes a byte after the other.
            let ask = "read line <&G; printf hello >&0; w=$(dd bs=1 count=5 2>/dev/null); \
                       test $w = there || exit 1";
            let ask = ask.replace('G', &gate.to_string());
            let command = match plain {
                false => format!("sh -c '{ask}' <&{fd}"),
                true => format!("env -i PATH=$PATH sh -c '{ask}' <&{fd} {fd}<&-"),
            };
            std::thread::scope(|scope| {
                let program = scope.spawn(move || system(&command));
                let was_relayed = || has_relay(&stream) && !had_none;
                let begun = Instant::now();
                let mut relayed = false;
                while begun.elapsed() < Duration::from_secs(2) {
                    let mut to = &stream;
                    to.write_all(b"hello").unwrap();
                    let mut word = [0; 5];
                    to.read_exact(&mut word).unwrap();
                    assert_eq!(&word, b"there");
                    // The library knows of the program, and no thread takes the relay back before
                    // the program's end.
                    assert!(!relayed || was_relayed());
                    relayed |= was_relayed();
                    std::thread::sleep(Duration::from_millis(5));
                }
                (&end).write_all(b"go\n").unwrap();
                assert_eq!(program.join().unwrap(), 0);
            });
            exchange_until_direct(&mut stream);
            finish_by_echo(&stream);
        }
    }
    in_all_combinations(server, client);
}

/// How a program reads.
#[derive(Clone, Copy, Debug)]
enum Reads {
    Blocking,
    Poll,
    Epoll(i32),
}

/// Reads a pattern of so many bytes.
fn read_pattern(stream: &TcpStream, reads: Reads, n: usize) {
    let expected = pattern(n);
    let (mut at, mut room, mut from) = (0, vec![0; 30011], stream);
    let set = unsafe { libc::epoll_create1(0) };
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
    if let Reads::Epoll(flags) = reads {
        event.events |= flags as u32;
        let fd = stream.as_raw_fd();
        assert_eq!(unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &mut event) }, 0);
    }
    while at < n {
        match reads {
            Reads::Blocking => {}
            Reads::Poll => assert!(c::poll(stream, libc::POLLIN, 100_000).unwrap() != 0),
            Reads::Epoll(flags) => {
                let mut found = [libc::epoll_event { events: 0, u64: 0 }; 4];
                let found = unsafe { libc::epoll_wait(set, found.as_mut_ptr(), 4, 100_000) };
                if found == -1 {
                    // Another thread has SIGCHLD blocked in `system`, and this one is interrupted.
                    let error = std::io::Error::last_os_error();
                    assert_eq!(error.kind(), ErrorKind::Interrupted);
                    continue;
                }
                assert_eq!(found, 1, "{at} of {n} bytes");
                if flags & libc::EPOLLONESHOT != 0 {
                    let mut again = [libc::epoll_event { events: 0, u64: 0 }; 4];
                    // The EPOLLONESHOT is used up, on any carrier of the connection.
                    let found = unsafe { libc::epoll_wait(set, again.as_mut_ptr(), 4, 0) };
                    assert_eq!(found, 0);
                }
            }
        }
        loop {
            match from.read(&mut room) {
                Ok(got) => {
                    assert!(got > 0, "the end came after {at} of {n} bytes");
                    assert!(room[..got] == expected[at..at + got], "wrong bytes at {at}");
                    at += got;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{reads:?}: {error} after {at} bytes"),
            }
            if matches!(reads, Reads::Blocking) || at == n {
                break;
            }
        }
        if let Reads::Epoll(flags) = reads
            && flags & libc::EPOLLONESHOT != 0
        {
            let fd = stream.as_raw_fd();
            assert_eq!(unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_MOD, fd, &mut event) }, 0);
        }
    }
    unsafe { libc::close(set) };
}

const WAYS: [Reads; 6] = [
    Reads::Blocking,
    Reads::Poll,
    Reads::Epoll(0),
    Reads::Epoll(libc::EPOLLET),
    Reads::Epoll(libc::EPOLLONESHOT),
    Reads::Epoll(libc::EPOLLET | libc::EPOLLONESHOT),
];

#[test]
fn no_byte_is_lost_while_threads_send_and_receive_and_programs_come_and_go() {
    fn server(listener: TcpListener) {
        for _ in WAYS {
            let stream = accept_and_greet(&listener);
            echo(stream);
        }
    }
    fn client(port: u16) {
        for reads in WAYS {
            let mut stream = connect_and_greet(port);
            leave_open(&stream);
            stream.set_nonblocking(!matches!(reads, Reads::Blocking)).unwrap();
            let done = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // Slowly at times, so readers sleep.
                    let (bytes, mut to) = (pattern(4 * N), &stream);
                    for (at, piece) in bytes.chunks(9973).enumerate() {
                        let mut rest = piece;
                        while !rest.is_empty() {
                            match to.write(rest) {
                                Ok(n) => rest = &rest[n..],
                                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                                    c::poll(&stream, libc::POLLOUT, 100_000).unwrap();
                                }
                                Err(error) => panic!("{error}"),
                            }
                        }
                        if at % 100 == 0 {
                            std::thread::sleep(Duration::from_millis(15));
                        }
                    }
                });
                scope.spawn(|| {
                    read_pattern(&stream, reads, 4 * N);
                    done.store(true, std::sync::atomic::Ordering::Relaxed);
                });
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(system("true"), 0);
                    std::thread::sleep(Duration::from_millis(60));
                }
            });
            stream.shutdown(Shutdown::Write).unwrap();
            stream.set_nonblocking(false).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn a_stream_that_never_pauses_loses_its_relay_too() {
    /// Sends or receives without a pause until the program without the library has had its time, or
    /// the connection has lost its relay.
    fn stream(stream: &TcpStream, sends: bool) {
        let (mut room, mut end) = (vec![0; 256 << 10], stream);
        let begun = Instant::now();
        let mut has_had_one = false;
        let mut rounds = 0u32;
        while begun.elapsed() < common::TIMEOUT / 2 {
            match sends {
                true => end.write_all(&room).unwrap(),
                false => end.read_exact(&mut room).unwrap(),
            }
            rounds += 1;
            has_had_one |= rounds == 1 && has_relay(stream);
            if rounds > 100 && rounds.is_multiple_of(10) && !has_relay(stream) {
                return;
            }
        }
        assert!(!has_had_one, "it still has its relay after {rounds} rounds");
    }
    fn server(listener: TcpListener) {
        for receives in [true, false] {
            let mut stream = accept_and_greet(&listener);
            let mut room = vec![0; 256 << 10];
            while match receives {
                true => stream.read(&mut room).is_ok_and(|n| n > 0),
                false => stream.write_all(&room).is_ok(),
            } {}
        }
    }
    fn client(port: u16) {
        for sends in [true, false] {
            let to = connect_and_greet(port);
            leave_open(&to);
            assert_eq!(system("true"), 0);
            stream(&to, sends);
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn what_the_program_sets_meanwhile_holds_afterwards() {
    fn server(listener: TcpListener) {
        words_and_echo(&listener, 1);
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        leave_open(&stream);
        assert_eq!(system("true"), 0);
        let limit = Some(Duration::from_secs(8));
        stream.set_read_timeout(limit).unwrap();
        let copy = stream.try_clone().unwrap();
        exchange_until_direct(&mut stream);
        assert!(!has_relay(&copy));
        assert_eq!(copy.read_timeout().unwrap(), limit);
        let error = stream.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert_eq!(system("true"), 0);
        stream.set_read_timeout(None).unwrap();
        stream.set_nonblocking(true).unwrap();
        eventually(|| {
            let error = stream.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            !has_relay(&stream)
        });
        stream.set_nonblocking(false).unwrap();
        drop(copy);
        finish_by_echo(&stream);
    }
    in_all_combinations(server, client);
}

#[test]
fn a_stream_of_stdio_keeps_its_relay() {
    fn server(listener: TcpListener) {
        words_and_echo(&listener, 1);
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        let fd = leave_open(&stream);
        assert_eq!(system("true"), 0);
        let file = unsafe { libc::fdopen(fd, c"r".as_ptr()) };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            stream.write_all(b"hello").unwrap();
            let mut word = [0u8; 6];
            // libc reads.
            assert!(!unsafe { libc::fgets(word.as_mut_ptr().cast(), 6, file) }.is_null());
            assert_eq!(word, *b"there\0");
        }
        finish_by_echo(&stream);
    }
    in_all_combinations(server, client);
}
