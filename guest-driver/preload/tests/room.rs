// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How much a program may write before its peer reads, without any loss: as on TCP, with and
//! without the library at either end.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::io::{ErrorKind, Read, Seek, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use combinations::{
    accept_and_greet, connect, connect_and_greet, exchange_as_client, exchange_as_server,
    in_all_combinations,
};
use common::{eventually, pattern};

use smc_test_support::TestDir;
/// More than all rings hold, and less than TCP's buffers.
const MUCH: usize = 7 << 19;
/// More than TCP's buffers hold.
const MOST: usize = 12 << 20;
/// How long a server does not read.
const PAUSE: Duration = Duration::from_millis(300);

/// Reads to the end, and compares.
fn read_all(stream: &mut TcpStream, expected: &[u8]) {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    assert!(all == expected, "{} bytes came of {}", all.len(), expected.len());
}

/// A server that reads after a pause.
fn read_late(listener: TcpListener) {
    let mut stream = accept_and_greet(&listener);
    std::thread::sleep(PAUSE);
    read_all(&mut stream, &pattern(MUCH));
}

/// A server that accepts after its client has written, and then reads.
fn accept_late(listener: TcpListener) {
    await_word(listener.local_addr().unwrap().port());
    let (mut stream, _) = listener.accept().unwrap();
    read_all(&mut stream, &pattern(MUCH));
}

unsafe extern "C" {
    fn quick_exit(status: i32) -> !;
}

#[test]
fn what_waits_arrives_although_the_process_has_ended() {
    fn server(listener: TcpListener) {
        for _ in 0..3 {
            let mut stream = accept_and_greet(&listener);
            std::thread::sleep(PAUSE);
            read_all(&mut stream, &pattern(MUCH));
        }
    }
    fn client(port: u16) {
        for end in [libc::_exit, libc::exit, quick_exit] {
            let child = c::fork(move || {
                let mut stream = connect_and_greet(port);
                stream.write_all(&pattern(MUCH)).unwrap();
                std::mem::forget(stream);
                unsafe { end(0) }
            });
            c::wait(child);
        }
    }
    in_all_combinations(server, client);
}

/// TCP's kernel sends all bytes. SMC loses the bytes still waiting in the killed process, without
/// an end of data.
#[test]
fn a_process_that_is_killed_does_not_end_its_data_early() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        std::thread::sleep(PAUSE);
        let mut all = Vec::new();
        match stream.read_to_end(&mut all) {
            Ok(_) => assert!(all == pattern(MUCH), "an end after {} bytes", all.len()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        assert!(all == pattern(MUCH)[..all.len()]);
    }
    fn client(port: u16) {
        let child = c::fork(move || {
            let mut stream = connect_and_greet(port);
            stream.write_all(&pattern(MUCH)).unwrap();
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        });
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    }
    in_all_combinations(server, client);
}

#[test]
fn what_waits_arrives_although_the_process_executes_a_program() {
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        stream.write_all(&pattern(MUCH)).unwrap();
        std::mem::forget(stream);
        use std::os::unix::process::CommandExt;
        panic!("{}", Command::new("true").exec());
    }
    in_all_combinations(read_late, client);
}

#[test]
fn what_waits_arrives_although_the_process_has_forked() {
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        stream.write_all(&pattern(MUCH - 7)).unwrap();
        let child = c::fork(|| stream.write_all(&pattern(MUCH)[MUCH - 7..]).unwrap());
        c::wait(child);
    }
    in_all_combinations(read_late, client);
}

#[test]
fn a_program_writes_by_the_megabyte_before_its_server_accepts() {
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(&pattern(MUCH)).unwrap();
        say_word(port);
    }
    in_all_combinations(accept_late, client);
}

#[test]
fn a_time_limit_is_no_error_before_the_server_accepts() {
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        for piece in pattern(MUCH).chunks(100_000) {
            stream.write_all(piece).unwrap();
        }
        say_word(port);
    }
    in_all_combinations(accept_late, client);
}

#[test]
fn a_file_is_sent_before_the_server_accepts() {
    fn client(port: u16) {
        let stream = connect(port);
        let own = TestDir::new();
        let mut file = std::fs::File::create_new(own.path("file")).unwrap();
        file.write_all(&pattern(MUCH)).unwrap();
        file.rewind().unwrap();
        let mut left = MUCH;
        while left > 0 {
            let (to, from) = (stream.as_raw_fd(), file.as_raw_fd());
            let n = unsafe { libc::sendfile(to, from, std::ptr::null_mut(), left) };
            left -= usize::try_from(n).unwrap();
        }
        say_word(port);
    }
    in_all_combinations(accept_late, client);
}

/// The file by which a client permits its server to read.
fn word_for(port: u16) -> PathBuf {
    PathBuf::from(std::env::var_os("FILES").unwrap()).join(format!("word-{port}"))
}

fn say_word(port: u16) {
    std::fs::write(word_for(port), "").unwrap();
}

fn await_word(port: u16) {
    eventually(|| word_for(port).exists());
    std::fs::remove_file(word_for(port)).unwrap();
}

/// Writes without waiting until a write fails. Returns the number of written bytes.
fn fill(stream: &TcpStream) -> usize {
    stream.set_nonblocking(true).unwrap();
    let (bytes, mut at) = (pattern(MOST), 0);
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        match (&mut &*stream).write(&rest[..rest.len().min(100_000)]) {
            Ok(n) => at += n,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                break;
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    at
}

#[test]
fn a_write_that_must_not_wait_finds_room() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        await_word(listener.local_addr().unwrap().port());
        // The client writes this number after filling the buffers.
        let mut word = [0; 8];
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        word.copy_from_slice(&all[all.len() - 8..]);
        let n = u64::from_ne_bytes(word) as usize;
        assert!(all[..all.len() - 8] == pattern(MOST)[..n], "{n} of {}", all.len());
        assert!(n > 2 << 20, "room for {n} bytes");
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        let n = fill(&stream);
        assert!(c::number(&stream, libc::TIOCOUTQ).unwrap() > 0);
        assert_eq!(c::poll(&stream, libc::POLLOUT, 0).unwrap() & libc::POLLOUT, 0);
        say_word(port);
        stream.write_all(&(n as u64).to_ne_bytes()).unwrap();
    }
    in_all_combinations(server, client);
}

fn set_buffer(socket: &impl AsRawFd, name: libc::c_int, bytes: libc::c_int) {
    let (fd, level, at) = (socket.as_raw_fd(), libc::SOL_SOCKET, std::ptr::from_ref(&bytes).cast());
    assert_eq!(unsafe { libc::setsockopt(fd, level, name, at, 4) }, 0);
}

#[test]
fn buffers_that_the_program_sets_bound_what_is_written() {
    // TCP takes about 170 kB at most with a small send buffer, and 30 kB with two small buffers.
    const LIMITS: [usize; 3] = [200_000, 200_000, 60_000];
    fn server(listener: TcpListener) {
        for at in 0..LIMITS.len() {
            let (mut stream, _) = listener.accept().unwrap();
            if at == 1 {
                // For the next client, which comes after the word.
                set_buffer(&listener, libc::SO_RCVBUF, 8192);
            }
            exchange_as_server(&mut stream);
            await_word(listener.local_addr().unwrap().port());
        }
    }
    fn client(port: u16) {
        for (at, most) in LIMITS.into_iter().enumerate() {
            let mut stream = connect(port);
            if at != 1 {
                set_buffer(&stream, libc::SO_SNDBUF, 8192);
            }
            exchange_as_client(&mut stream);
            if at == 1 {
                set_buffer(&stream, libc::SO_SNDBUF, 8192);
            }
            let n = fill(&stream);
            assert!(n <= most, "{n} bytes in round {at}");
            say_word(port);
        }
    }
    in_all_combinations(server, client);
}

/// Fills the buffers. Returns the number of bytes, and the number of unsent ones.
fn fill_with_limit(stream: &TcpStream) -> (usize, i32) {
    const SIOCOUTQNSD: u64 = 0x894b;
    let n = fill(stream);
    (n, c::number(stream, SIOCOUTQNSD).unwrap())
}

#[test]
fn unsent_bytes_are_bounded_as_the_program_sets_it() {
    // TCP checks the bound once for each filled packet.
    const BOUND: i32 = 20_000;
    const MOST_UNSENT: i32 = BOUND + (64 << 10);
    fn bound(socket: &impl AsRawFd) {
        let (fd, at) = (socket.as_raw_fd(), std::ptr::from_ref(&BOUND).cast());
        let (level, name) = (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT);
        assert_eq!(unsafe { libc::setsockopt(fd, level, name, at, 4) }, 0);
    }
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        // The next accepted connection inherits the bound from its listener.
        bound(&listener);
        exchange_as_server(&mut stream);
        let port = listener.local_addr().unwrap().port();
        await_word(port);
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
        let stream = accept_and_greet(&listener);
        let (n, unsent) = fill_with_limit(&stream);
        assert!(n < 1 << 20 && unsent <= MOST_UNSENT, "{unsent} of {n} bytes");
        say_word(port);
    }
    fn client(port: u16) {
        let stream = connect_and_greet(port);
        bound(&stream);
        let (n, unsent) = fill_with_limit(&stream);
        assert!(n < 1 << 20 && unsent <= MOST_UNSENT, "{unsent} of {n} bytes");
        assert_eq!(c::poll(&stream, libc::POLLOUT, 0).unwrap() & libc::POLLOUT, 0);
        say_word(port);
        assert_eq!(c::poll(&stream, libc::POLLOUT, 100_000).unwrap(), libc::POLLOUT);
        drop(stream);
        let mut stream = connect_and_greet(port);
        await_word(port);
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
    }
    in_all_combinations(server, client);
}

/// A program waiting for more bytes than the buffer holds.
#[test]
fn a_low_water_mark_above_the_buffer_keeps_nobody_waiting() {
    fn server(listener: TcpListener) {
        for way in 0..3 {
            let mut stream = accept_and_greet(&listener);
            set_buffer(&stream, libc::SO_RCVLOWAT, 1 << 20);
            let begun = smc_test_support::Stopwatch::start();
            match way {
                0 => assert_eq!(c::poll(&stream, libc::POLLIN, 100_000).unwrap(), libc::POLLIN),
                1 => {
                    let set = unsafe { libc::epoll_create1(0) };
                    let fd = stream.as_raw_fd();
                    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
                    assert_eq!(unsafe { libc::epoll_ctl(set, 1, fd, &mut event) }, 0);
                    assert_eq!(unsafe { libc::epoll_wait(set, &mut event, 1, 100_000) }, 1);
                    unsafe { libc::close(set) };
                }
                _ => {
                    let mut room = vec![0; 1 << 20];
                    assert_eq!(c::recv(&stream, &mut room, 0).unwrap(), room.len());
                    let mut rest = vec![0; MUCH - room.len()];
                    stream.read_exact(&mut rest).unwrap();
                    room.extend(rest);
                    assert!(room == pattern(MUCH));
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(15), "way {way}");
            read_all(&mut stream, if way < 2 { &EXPECTED } else { &[] });
        }
    }
    static EXPECTED: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| pattern(MUCH));
    fn client(port: u16) {
        for _ in 0..3 {
            let mut stream = connect_and_greet(port);
            stream.write_all(&pattern(MUCH)).unwrap();
        }
    }
    in_all_combinations(server, client);
}

/// A relay with one thread, which writes before it reads again, like many relays.
#[test]
fn a_relay_of_one_thread_passes_an_echo_on() {
    fn server(listener: TcpListener) {
        let (from, _) = listener.accept().unwrap();
        let to = connect(listener.local_addr().unwrap().port());
        let (mut echo, _) = listener.accept().unwrap();
        std::thread::spawn(move || {
            let mut buf = [0; 16 << 10];
            while let Ok(n @ 1..) = echo.read(&mut buf) {
                echo.write_all(&buf[..n]).unwrap();
            }
        });
        let mut buf = [0; 8 << 10];
        let mut left = 2 * MUCH;
        while left > 0 {
            let mut fds = [&from, &to].map(|stream| libc::pollfd {
                fd: stream.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            });
            assert!(unsafe { libc::poll(fds.as_mut_ptr(), 2, 100_000) } > 0, "{left} bytes left");
            for (at, (mut one, mut other)) in [(&from, &to), (&to, &from)].into_iter().enumerate() {
                if fds[at].revents != 0 {
                    let n = one.read(&mut buf).unwrap();
                    other.write_all(&buf[..n]).unwrap();
                    left -= if at == 1 { n } else { 0 };
                }
            }
        }
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(&pattern(2 * MUCH)).unwrap();
        let mut all = vec![0; 2 * MUCH];
        stream.read_exact(&mut all).unwrap();
        assert!(all == pattern(2 * MUCH));
    }
    in_all_combinations(server, client);
}
