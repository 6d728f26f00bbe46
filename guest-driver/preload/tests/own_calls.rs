// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs that make some system calls by instructions of their own, beside libc's functions: for
//! example with Rust's `rustix`, the base of the event loops `polling` and `smol`. Such programs
//! behave as on TCP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use combinations::{connect, in_each_combination};
use common::Fabric;
use rustix::event::epoll;

/// An event loop that waits by system calls of its own and reads by libc.
struct Loop(std::os::fd::OwnedFd);

impl Loop {
    fn new() -> Loop {
        Loop(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap())
    }

    fn add(&self, what: impl AsFd) {
        let events = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        epoll::add(&self.0, what, epoll::EventData::new_u64(1), events).unwrap();
    }

    fn wait(&self) {
        let mut events = Vec::with_capacity(8);
        epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut events), None).unwrap();
    }

    /// Echoes until the end of data.
    fn echo(&self, mut stream: TcpStream) {
        stream.set_nonblocking(true).unwrap();
        self.add(&stream);
        let mut room = [0; 1000];
        loop {
            match stream.read(&mut room) {
                Ok(0) => return,
                Ok(n) => stream.write_all(&room[..n]).unwrap(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

const CLIENTS: usize = 5;

#[test]
fn an_event_loop_that_waits_by_its_own_calls() {
    fn server(listener: TcpListener) {
        let event_loop = Loop::new();
        listener.set_nonblocking(true).unwrap();
        event_loop.add(&listener);
        let mut served = 0;
        while served < CLIENTS {
            match listener.accept() {
                Ok((stream, _)) => {
                    event_loop.echo(stream);
                    served += 1;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => event_loop.wait(),
                Err(error) => panic!("{error}"),
            }
        }
    }
    fn client(port: u16) {
        for i in 0..CLIENTS {
            let mut stream = connect(port);
            if i % 2 == 1 {
                // The server finds nothing to read at first.
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            for word in ["one", "two"] {
                stream.write_all(word.as_bytes()).unwrap();
                let mut back = [0; 3];
                stream.read_exact(&mut back).unwrap();
                assert_eq!(&back, word.as_bytes());
            }
        }
    }
    let stays_on_tcp = |fabric: &Fabric, ends: (bool, bool)| {
        assert_eq!(fabric.decided().0, 0);
        // The library in a server finds the own calls before it would open a device.
        assert_eq!(fabric.said("own_calls"), usize::from(ends == (true, true)));
    };
    in_each_combination(server, client, stays_on_tcp);
}

/// A server reading by its own calls gets the Proposal: the first one cannot be avoided. The
/// library finds the calls out, and the server does not wait for bytes already read.
#[test]
fn a_server_that_reads_by_its_own_calls_is_found_out() {
    fn server(listener: TcpListener) {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut room = [0; 1000];
            let n = rustix::io::read(&stream, &mut room).unwrap();
            assert!(n >= 5);
            let begun = smc_test_support::Stopwatch::start();
            if stream.write_all(b"not SMC").is_ok() {
                // By libc. During the wait for the rest of the Proposal the library notices the own
                // read.
                let _ = stream.read(&mut room);
            }
            assert!(begun.elapsed() < std::time::Duration::from_secs(4));
        }
        // Closes at once, after a read of its own.
        let (stream, _) = listener.accept().unwrap();
        rustix::io::read(&stream, &mut [0; 1000]).unwrap();
    }
    fn client(port: u16) {
        for _ in 0..3 {
            // The result depends on the ends with the library.
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            let _ = stream.write_all(b"hello");
            let _ = stream.read(&mut [0; 100]);
        }
    }
    let is_found_out = |fabric: &Fabric, (server, _): (bool, bool)| {
        assert_eq!(fabric.decided().0, 0);
        assert_eq!(fabric.said("own_calls"), usize::from(server));
    };
    in_each_combination(server, client, is_found_out);
}
