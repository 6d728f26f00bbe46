// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmodified programs on TCP sockets, with and without the library at either end. What a program
//! does must have the same result in all cases.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use combinations::{connect, in_each_combination};
use common::pattern;
use smc_test_support::TestDir;

/// Runs a server and a client, with and without the library at either end: in all four
/// combinations.
fn in_all_combinations<S, C>(connections: usize, server: S, client: C)
where
    S: Fn(TcpListener),
    C: Fn(u16),
{
    run((2 * connections, 0), server, client);
}

/// Like `in_all_combinations`, with the ends of connections on SMC and on TCP if both ends have the
/// library.
fn run<S, C>(decided: (usize, usize), server: S, client: C)
where
    S: Fn(TcpListener),
    C: Fn(u16),
{
    let connections = (decided.0 + decided.1) / 2;
    in_each_combination(server, client, |fabric, ends| {
        let (smc, tcp) = fabric.decided();
        match ends {
            (true, true) => assert_eq!((smc, tcp), decided, "{:?}", fabric.broken()),
            // A program executed for a client finds the client's first bytes already there.
            (true, false) => assert!(smc == 0 && tcp <= connections, "{smc} {tcp}"),
            _ => assert_eq!((smc, tcp), (0, 0)),
        }
    });
}

#[test]
fn bytes_come_as_they_went_and_a_half_close_is_an_end_of_data() {
    const N: usize = 3_000_000;
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert!(all == pattern(N));
        stream.write_all(&all).unwrap();
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        assert_eq!(stream.peer_addr().unwrap().port(), port);
        let data = pattern(N);
        let (head, tail) = data.split_at(1000);
        let n = stream.write_vectored(&[IoSlice::new(&head[..300]), IoSlice::new(&head[300..])]);
        assert_eq!(n.unwrap(), 1000);
        stream.write_all(tail).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        let mut back = Vec::new();
        stream.read_to_end(&mut back).unwrap();
        assert!(back == data);
    }
    in_all_combinations(1, server, client);
}

#[test]
fn flags_of_recv_and_what_ioctl_knows() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"hello world").unwrap();
        let mut go = [0];
        stream.read_exact(&mut go).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        stream.write_all(b"12345").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        stream.write_all(b"67890").unwrap();
        assert_eq!(c::sendmsg(&stream, [b"abc", b"defg"]).unwrap(), 7);
        stream.read_exact(&mut go).unwrap();
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        let mut buf = [0; 64];
        assert_eq!(c::recv(&stream, &mut buf[..5], libc::MSG_PEEK).unwrap(), 5);
        assert_eq!(&buf[..5], b"hello");
        while c::number(&stream, libc::FIONREAD).unwrap() < 11 {}
        assert_eq!(stream.read(&mut buf).unwrap(), 11);
        assert_eq!(&buf[..11], b"hello world");
        let empty = c::recv(&stream, &mut buf, libc::MSG_DONTWAIT).unwrap_err();
        assert_eq!(empty.kind(), ErrorKind::WouldBlock);
        stream.write_all(b"x").unwrap();
        assert_eq!(c::recv(&stream, &mut buf[..10], libc::MSG_WAITALL).unwrap(), 10);
        assert_eq!(&buf[..10], b"1234567890");
        let (a, b) = buf.split_at_mut(3);
        let n = c::recvmsg(&stream, [a, &mut b[..4]], libc::MSG_WAITALL).unwrap();
        assert_eq!((n, &buf[..7]), (7, &b"abcdefg"[..]));
        stream.write_all(b"x").unwrap();
    }
    in_all_combinations(1, server, client);
}

#[test]
fn poll_reports_a_nonblocking_connect() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buf = [0; 5];
        stream.read_exact(&mut buf).unwrap();
        stream.write_all(&buf).unwrap();
        assert_eq!(stream.read(&mut buf).unwrap(), 0);
    }
    fn client(port: u16) {
        let mut stream = c::connect_nonblocking(port);
        let shown = c::poll(&stream, libc::POLLOUT, 5000).unwrap();
        assert_eq!(shown, libc::POLLOUT);
        assert!(stream.take_error().unwrap().is_none());
        stream.write_all(b"hello").unwrap();
        let mut buf = [0; 5];
        for wait in 0..3 {
            let shown = match wait {
                0 => c::poll(&stream, libc::POLLIN, 5000).unwrap(),
                1 => c::ppoll(&stream, libc::POLLIN, 5000).unwrap(),
                _ => i16::from(c::select(&stream, 5000).unwrap()) * libc::POLLIN,
            };
            assert_eq!(shown, libc::POLLIN, "wait {wait}");
        }
        stream.read_exact(&mut buf).unwrap();
        assert_eq!(stream.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        for (shown, wait) in [
            (c::poll(&stream, libc::POLLIN, 20).unwrap(), "poll"),
            (c::ppoll(&stream, libc::POLLIN, 20).unwrap(), "ppoll"),
        ] {
            assert_eq!(shown, 0, "{wait}");
        }
        assert!(!c::select(&stream, 20).unwrap());
        // No process listens there.
        let refused = c::connect_nonblocking(common::free_port());
        let shown = c::poll(&refused, libc::POLLOUT, 5000).unwrap();
        assert!(shown & (libc::POLLERR | libc::POLLHUP) != 0, "{shown:x}");
        let error = refused.take_error().unwrap().unwrap();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }
    in_all_combinations(1, server, client);
}

/// Erlang's lists of buffers have such entries.
#[test]
fn lists_may_have_empty_entries_without_an_address() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buf = [0; 10];
        stream.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"helloworld");
        assert_eq!(c::writev_with_gaps(&stream, [b"12345", b"67890"]).unwrap(), 10);
        assert_eq!(stream.read(&mut buf).unwrap(), 0);
    }
    fn client(port: u16) {
        let stream = connect(port);
        assert_eq!(c::writev_with_gaps(&stream, [b"hello", b"world"]).unwrap(), 10);
        c::poll(&stream, libc::POLLIN, 5000).unwrap();
        let (mut first, mut second) = ([0; 4], [0; 9]);
        assert_eq!(c::readv_with_gaps(&stream, [&mut first, &mut second]).unwrap(), 10);
        assert_eq!((&first, &second[..6]), (b"1234", &b"567890"[..]));
        assert_eq!(c::writev_with_gaps(&stream, [b"", b""]).unwrap(), 0);
    }
    in_all_combinations(1, server, client);
}

/// Apache's programs call `connect` again when `poll` has reported that the socket is writable.
#[test]
fn a_second_connect_returns_what_became_of_the_first() {
    fn server(listener: TcpListener) {
        // Until then no handshake is complete.
        std::thread::sleep(Duration::from_millis(300));
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"hello").unwrap();
    }
    fn client(port: u16) {
        let mut stream = c::connect_nonblocking(port);
        assert_eq!(c::poll(&stream, libc::POLLOUT, 5000).unwrap(), libc::POLLOUT);
        let again = || c::connect(&stream, std::net::Ipv4Addr::LOCALHOST, port);
        assert_eq!(again().unwrap(), 0);
        assert_eq!(again().unwrap_err().raw_os_error(), Some(libc::EISCONN));
        stream.set_nonblocking(false).unwrap();
        let mut buf = [0; 5];
        stream.read_exact(&mut buf).unwrap();
    }
    in_all_combinations(1, server, client);
}

/// The error comes while the thread about to propose SMC may not have seen it yet.
#[test]
fn a_connect_that_is_refused_says_so_each_time() {
    fn server(listener: TcpListener) {
        assert_eq!(listener.accept().unwrap().0.read(&mut [0]).unwrap(), 1);
    }
    fn client(port: u16) {
        let nobody = common::free_port();
        for _ in 0..300 {
            let refused = c::connect_nonblocking(nobody);
            let epoll = c::Epoll::new();
            epoll.add(&refused, libc::EPOLLIN | libc::EPOLLOUT, 7);
            let shown = epoll.wait(5000);
            let error = refused.take_error().unwrap().map(|error| error.kind());
            assert_eq!(error, Some(ErrorKind::ConnectionRefused), "{shown:x?}");
        }
        TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"!").unwrap();
    }
    in_all_combinations(1, server, client);
}

const IN: i32 = libc::EPOLLIN;

#[test]
fn epoll_reports_levels_edges_and_one_shots() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut go = [0];
        while stream.read(&mut go).unwrap() == 1 {
            stream.write_all(&[go[0]; 3]).unwrap();
        }
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.set_nonblocking(true).unwrap();
        // Until a busy server has answered the handshake, a write would have to wait.
        assert_eq!(c::poll(&stream, libc::POLLOUT, 100_000).unwrap(), libc::POLLOUT);
        let ask = |what: &[u8]| (&stream).write_all(what).unwrap();
        let take = |n: usize| assert_eq!((&stream).read(&mut vec![0; n]).unwrap(), n);
        let level = c::Epoll::new();
        level.add(&stream, IN, 1);
        let twice = level.control(libc::EPOLL_CTL_ADD, &stream, IN, 1).unwrap_err();
        assert_eq!(twice.kind(), ErrorKind::AlreadyExists);
        assert_eq!(level.wait(20), []);
        ask(b"a");
        assert_eq!(level.wait(5000), [(1, IN)]);
        assert_eq!(level.wait(5000), [(1, IN)]);
        take(3);
        assert_eq!(level.wait(20), []);
        level.control(libc::EPOLL_CTL_MOD, &stream, IN | libc::EPOLLOUT, 2).unwrap();
        assert_eq!(level.wait(5000), [(2, libc::EPOLLOUT)]);
        level.control(libc::EPOLL_CTL_DEL, &stream, 0, 0).unwrap();
        assert_eq!(level.wait(20), []);

        let edge = c::Epoll::new();
        edge.add(&stream, IN | libc::EPOLLET, 3);
        assert_eq!(edge.wait(20), []);
        ask(b"b");
        assert_eq!(edge.wait(5000), [(3, IN)]);
        assert_eq!(edge.wait(20), []);
        ask(b"c");
        assert_eq!(edge.wait(5000), [(3, IN)]);
        take(6);
        edge.control(libc::EPOLL_CTL_DEL, &stream, 0, 0).unwrap();

        let once = c::Epoll::new();
        once.add(&stream, IN | libc::EPOLLONESHOT, 4);
        ask(b"d");
        assert_eq!(once.wait(5000), [(4, IN)]);
        assert_eq!(once.wait(20), []);
        once.control(libc::EPOLL_CTL_MOD, &stream, IN | libc::EPOLLONESHOT, 5).unwrap();
        assert_eq!(once.wait(5000), [(5, IN)]);
        take(3);

        // The kernel polls a set in a set.
        let (inner, outer) = (c::Epoll::new(), c::Epoll::new());
        inner.add(&stream, IN, 6);
        outer.add(&inner, IN, 7);
        assert_eq!(outer.wait(20), []);
        ask(b"e");
        assert_eq!(outer.wait(5000), [(7, IN)]);
        assert_eq!(inner.wait(5000), [(6, IN)]);
        take(3);
        stream.flush().unwrap();
    }
    in_all_combinations(1, server, client);
}

/// A new connection ends waits in the kernel by an entry in its set. Another thread, which only looks
/// at the set, sees the entry earlier than the woken one.
#[test]
fn a_thread_waits_for_a_set_with_a_new_connection_while_another_looks_at_it() {
    const ROUNDS: usize = 50;
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(b"?").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        for round in 0..ROUNDS {
            let (set, is_added) = (c::Epoll::new(), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let (ready, waits) = mpsc::channel();
                let waiter = scope.spawn({
                    let set = &set;
                    move || {
                        // SAFETY: no arguments.
                        ready.send(unsafe { libc::gettid() }).unwrap();
                        set.wait(50_000)
                    }
                });
                await_sleep(waits.recv().unwrap());
                let (looks, has_looked) = mpsc::channel();
                let looker = scope.spawn({
                    let (set, is_added) = (&set, &is_added);
                    move || {
                        assert_eq!(set.wait(0), []);
                        looks.send(()).unwrap();
                        while !is_added.load(Ordering::SeqCst) {
                            assert_eq!(set.wait(0), []);
                        }
                        (0..100).for_each(|_| assert_eq!(set.wait(0), []));
                    }
                });
                has_looked.recv().unwrap();
                set.add(&stream, IN | libc::EPOLLET, 1);
                is_added.store(true, Ordering::SeqCst);
                looker.join().unwrap();
                (&stream).write_all(b"!").unwrap();
                let mut seen = Vec::new();
                while seen.is_empty() && !waiter.is_finished() {
                    seen = set.wait(0);
                }
                if !seen.is_empty() {
                    // One of the two threads reports the edge. The other waits for the next one.
                    assert_eq!(seen, [(1, IN)], "round {round}");
                    (&stream).read_exact(&mut [0]).unwrap();
                    (&stream).write_all(b"!").unwrap();
                }
                assert_eq!(waiter.join().unwrap(), [(1, IN)], "round {round}");
            });
            stream.read_exact(&mut [0]).unwrap();
        }
    }
    in_all_combinations(1, echo, client);
}

/// Waits until a thread of this process sleeps.
fn await_sleep(thread: i32) {
    let sleeps = || {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
    };
    while !sleeps() {
        std::thread::yield_now();
    }
}

#[test]
fn a_set_serves_many_connections_and_reports_their_ends() {
    const N: usize = 100;
    fn server(listener: TcpListener) {
        listener.set_nonblocking(true).unwrap();
        let set = c::Epoll::new();
        set.add(&listener, IN, u64::MAX);
        let mut streams: Vec<Option<TcpStream>> = Vec::new();
        let mut ended = 0;
        while ended < N {
            for (key, _) in set.wait(100_000) {
                if key == u64::MAX {
                    while let Ok((stream, _)) = listener.accept() {
                        stream.set_nonblocking(true).unwrap();
                        set.add(
                            &stream,
                            IN | libc::EPOLLRDHUP | libc::EPOLLET,
                            streams.len() as u64,
                        );
                        streams.push(Some(stream));
                    }
                    continue;
                }
                let slot = &mut streams[key as usize];
                loop {
                    let mut buf = [0; 512];
                    match slot.as_ref().unwrap().read_from(&mut buf) {
                        Ok(0) => {
                            ended += 1;
                            *slot = None;
                            break;
                        }
                        Ok(n) => slot.as_ref().unwrap().write_to(&buf[..n]),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::WouldBlock);
                            break;
                        }
                    }
                }
            }
        }
    }
    fn client(port: u16) {
        let mut streams: Vec<_> = (0..N).map(|_| connect(port)).collect();
        for round in 0..5u8 {
            for stream in &mut streams {
                stream.write_all(&[round; 100]).unwrap();
            }
            for stream in &mut streams {
                let mut buf = [9; 100];
                stream.read_exact(&mut buf).unwrap();
                assert_eq!(buf, [round; 100]);
            }
        }
    }
    in_all_combinations(N, server, client);
}

/// `Read` and `Write` on a shared stream.
trait Shared {
    fn read_from(&self, buf: &mut [u8]) -> std::io::Result<usize>;
    fn write_to(&self, buf: &[u8]);
}

impl Shared for TcpStream {
    fn read_from(&self, buf: &mut [u8]) -> std::io::Result<usize> {
        (&mut &*self).read(buf)
    }

    fn write_to(&self, buf: &[u8]) {
        (&mut &*self).write_all(buf).unwrap();
    }
}

#[test]
fn a_copy_of_a_descriptor_is_the_same_connection() {
    fn server(listener: TcpListener) {
        let (stream, _) = listener.accept().unwrap();
        let mut copy = stream.try_clone().unwrap();
        drop(stream);
        copy.write_all(b"still here").unwrap();
        let mut buf = Vec::new();
        copy.read_to_end(&mut buf).unwrap();
        assert_eq!(buf, b"thanks");
    }
    fn client(port: u16) {
        let stream = connect(port);
        let mut buf = [0; 10];
        stream.try_clone().unwrap().read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"still here");
        (&stream).write_all(b"thanks").unwrap();
    }
    in_all_combinations(1, server, client);
}

#[test]
fn time_limits_and_signals_end_a_wait() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        stream.write_all(b"y").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        let mut buf = [0];
        stream.read_exact(&mut buf).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(60))).unwrap();
        let begun = Instant::now();
        assert_eq!(stream.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(begun.elapsed() >= Duration::from_millis(55));
        stream.set_read_timeout(None).unwrap();
        c::alarm_every(50, false);
        let n = c::recv(&stream, &mut buf, 0);
        assert_eq!(n.unwrap_err().kind(), ErrorKind::Interrupted);
        c::alarm_every(50, true);
        // The server sends the next byte later.
        stream.write_all(b"!").unwrap();
        assert_eq!(c::recv(&stream, &mut buf, 0).unwrap(), 1);
        assert_eq!(buf, *b"y");
    }
    in_all_combinations(1, server, client);
}

/// A server that sends each byte back.
fn echo(listener: TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut go = [0];
    while stream.read(&mut go).unwrap() == 1 {
        stream.write_all(&go).unwrap();
    }
}

#[test]
fn a_wait_with_a_signal_mask_lets_signals_in_and_leaves_the_set_as_it_is() {
    fn client(port: u16) {
        let mut stream = connect(port);
        // The connection is decided when the byte is back.
        stream.write_all(b"a").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        let set = c::Epoll::new();
        set.add(&stream, IN, 1);
        assert_eq!(set.wait(0), []);
        let known = set.known_to_the_kernel();
        c::block_alarms();
        for _ in 0..3 {
            c::alarm_in(1, true);
            assert_eq!(set.wait(30), [], "blocked");
            let pending = set.wait_for_signals(5000);
            assert_eq!(pending.unwrap_err().kind(), ErrorKind::Interrupted);
            c::alarm_in(30, true);
            let later = set.wait_for_signals(5000);
            assert_eq!(later.unwrap_err().kind(), ErrorKind::Interrupted);
            assert_eq!(set.wait_for_signals(20).unwrap(), []);
            stream.write_all(b"a").unwrap();
            assert_eq!(set.wait_for_signals(5000).unwrap(), [(1, IN)]);
            stream.read_exact(&mut [0]).unwrap();
        }
        assert_eq!(set.known_to_the_kernel(), known);
    }
    in_all_combinations(1, echo, client);
}

#[test]
fn urgent_data_is_apart_from_the_rest() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"before").unwrap();
        assert_eq!(c::send(&stream, b"!", libc::MSG_OOB).unwrap(), 1);
        stream.write_all(b"after").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 1);
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        let shown = c::poll(&stream, libc::POLLPRI, 5000).unwrap();
        assert_eq!(shown, libc::POLLPRI);
        let mut buf = [0; 64];
        while c::recv(&stream, &mut buf, libc::MSG_OOB).is_err() {}
        assert_eq!(buf[0], b'!');
        stream.read_exact(&mut buf[..6]).unwrap();
        assert_eq!(&buf[..6], b"before");
        assert_eq!(c::number(&stream, 0x8905).unwrap(), 1);
        stream.read_exact(&mut buf[..5]).unwrap();
        assert_eq!(&buf[..5], b"after");
        stream.write_all(b"x").unwrap();
    }
    in_all_combinations(1, server, client);
}

#[test]
fn files_and_pipes_are_copied_through() {
    const N: usize = 700_000;
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let own = TestDir::new();
        std::fs::write(own.path("file"), pattern(N)).unwrap();
        let file = std::fs::File::open(own.path("file")).unwrap();
        let mut offset = 1000;
        while offset < N as i64 {
            assert!(c::sendfile(&stream, &file, &mut offset, N).unwrap() > 0);
        }
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"through a pipe").unwrap();
        assert_eq!(c::splice(&reader, &stream, 100).unwrap(), 14);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        let mut data = vec![0; N - 1000];
        stream.read_exact(&mut data).unwrap();
        assert!(data == pattern(N)[1000..]);
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut n = 0;
        while n < 14 {
            n += c::splice(&stream, &writer, 100).unwrap();
        }
        let mut buf = [0; 14];
        reader.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"through a pipe");
    }
    in_all_combinations(1, server, client);
}

#[test]
fn workers_accept_on_a_listener_that_they_inherited() {
    fn server(listener: TcpListener) {
        let worker = || {
            c::fork(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut buf = [0; 4];
                stream.read_exact(&mut buf).unwrap();
                stream.write_all(&buf).unwrap();
                assert_eq!(stream.read(&mut buf).unwrap(), 0);
            })
        };
        let workers = [worker(), worker(), worker()];
        workers.into_iter().for_each(c::wait);
    }
    fn client(port: u16) {
        let mut streams: Vec<_> = (0..3).map(|_| connect(port)).collect();
        for stream in &mut streams {
            stream.write_all(b"ping").unwrap();
            let mut buf = [0; 4];
            stream.read_exact(&mut buf).unwrap();
            assert_eq!(&buf, b"ping");
        }
    }
    in_all_combinations(3, server, client);
}

#[test]
fn a_child_serves_a_client_that_its_parent_accepted() {
    fn server(listener: TcpListener) {
        let children: Vec<_> = (0..2)
            .map(|_| {
                let (mut stream, _) = listener.accept().unwrap();
                // The parent closes its descriptor at once.
                c::fork(move || {
                    let mut buf = [0; 4];
                    stream.read_exact(&mut buf).unwrap();
                    stream.write_all(&buf).unwrap();
                })
            })
            .collect();
        children.into_iter().for_each(c::wait);
    }
    fn client(port: u16) {
        for _ in 0..2 {
            let mut stream = connect(port);
            stream.write_all(b"ping").unwrap();
            let mut buf = Vec::new();
            stream.read_to_end(&mut buf).unwrap();
            assert_eq!(buf, b"ping");
        }
    }
    in_all_combinations(2, server, client);
}

#[test]
fn processes_take_turns_on_a_connection() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let echo = |stream: &mut TcpStream, n| {
            let mut buf = vec![0; n];
            stream.read_exact(&mut buf).unwrap();
            assert!(buf == pattern(n));
            stream.write_all(&buf).unwrap();
        };
        echo(&mut stream, 4);
        // An idle child changes nothing.
        c::wait(c::fork(|| {}));
        echo(&mut stream, 5);
        for turn in 0..2 {
            let mut theirs = stream.try_clone().unwrap();
            c::wait(c::fork(move || {
                assert_eq!(theirs.local_addr().unwrap().ip().to_string(), "127.0.0.1");
                echo(&mut theirs, 300_000);
            }));
            echo(&mut stream, 100 + turn);
        }
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        for n in [4, 5, 300_000, 100, 300_000, 101] {
            let sent = pattern(n);
            let mut copy = stream.try_clone().unwrap();
            let writer = std::thread::spawn(move || copy.write_all(&sent).unwrap());
            let mut buf = vec![0; n];
            stream.read_exact(&mut buf).unwrap();
            assert!(buf == pattern(n));
            writer.join().unwrap();
        }
    }
    in_all_combinations(1, server, client);
}

#[test]
fn a_program_that_is_executed_has_the_connection_as_its_standard_input() {
    fn server(listener: TcpListener) {
        let (stream, _) = listener.accept().unwrap();
        let input = OwnedFd::from(stream.try_clone().unwrap());
        let mut cat = Command::new("cat");
        cat.stdin(input).stdout(OwnedFd::from(stream)).stderr(Stdio::inherit());
        let mut child = cat.spawn().unwrap();
        // The child has copies of this process's descriptors.
        drop(cat);
        assert!(child.wait().unwrap().success());
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(b"meow").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut buf = Vec::new();
        stream.read_to_end(&mut buf).unwrap();
        assert_eq!(buf, b"meow");
    }
    // The program may use stdio, so its standard descriptors stay on TCP.
    run((0, 2), server, client);
}
