// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs see the same of a connection leaving its device and coming back as of a TCP connection:
//! each step of a script is done on both, and the results are compared. Many connections run the
//! script at once, and the daemon's end and its successor come at another step for each.

use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;

use guest_driver::socket::CurrentCarrier;
use guest_driver::{SmcStream, Stack};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use smc_tests::watch::LIMIT;
use smc_tests::{eventually, note, pattern, watched};

use crate::outlive::{Loss, Scene};

/// The connecting end, and the accepting one.
const C: usize = 0;
const S: usize = 1;

/// A step of a script, done by an end.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Sends so many bytes.
    Send(usize, usize),
    /// Sends an urgent byte.
    Urgent(usize),
    /// Reads into a buffer of this length, after the arrival of every byte sent.
    Recv(usize, usize),
    /// Peeks into a buffer of this length.
    Peek(usize, usize),
    /// Takes the urgent byte.
    TakeUrgent(usize),
    /// Asks poll for everything but room.
    Poll(usize),
    /// Ends the own direction.
    Shut(usize),
}

use Step::{Peek, Poll, Recv, Send, Shut, TakeUrgent, Urgent};

/// Bytes, half closes and ends.
const BYTES: [Step; 26] = [
    Poll(C),
    Send(C, 3000),
    Peek(S, 100),
    Poll(S),
    Recv(S, 1000),
    Send(S, 20_000),
    Peek(C, 50_000),
    Recv(C, 7),
    Send(C, 10),
    Peek(S, 9999),
    Recv(S, 1500),
    Send(S, 3000),
    Peek(C, 22_000),
    Peek(C, 50_000),
    Recv(C, 50_000),
    Recv(C, 1),
    Poll(C),
    Shut(C),
    Recv(S, 600),
    Send(S, 5),
    Recv(S, 9999),
    Recv(S, 9),
    Poll(S),
    Shut(S),
    Recv(C, 9),
    Recv(C, 9),
];

/// An urgent byte in the middle. A program waiting by poll goes on behind the urgent byte.
const MARK: [Step; 15] = [
    Send(S, 10),
    Send(C, 100),
    Urgent(C),
    Poll(S),
    Send(C, 50),
    Recv(S, 400),
    TakeUrgent(S),
    Poll(S),
    Recv(S, 400),
    Poll(S),
    Recv(C, 400),
    Send(C, 30),
    Recv(S, 400),
    Send(S, 20),
    Recv(C, 400),
];

/// The calls of an end, on SMC and on TCP.
trait Program {
    fn send(&self, bytes: &[u8]) -> io::Result<usize>;
    fn send_urgent(&self) -> io::Result<()>;
    fn recv(&self, buf: &mut [u8], peek: bool) -> io::Result<usize>;
    fn take_urgent(&self) -> io::Result<u8>;
    fn shut(&self);
    fn poll(&self) -> PollFlags;
}

fn poll_of(fd: impl AsFd) -> PollFlags {
    let all = PollFlags::IN | PollFlags::PRI | PollFlags::RDHUP;
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), all)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    fds[0].revents()
}

impl Program for SmcStream {
    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        SmcStream::send(self, bytes)
    }

    fn send_urgent(&self) -> io::Result<()> {
        SmcStream::send_urgent(self, b'!')
    }

    fn recv(&self, buf: &mut [u8], peek: bool) -> io::Result<usize> {
        if peek { self.peek(buf) } else { SmcStream::recv(self, buf) }
    }

    fn take_urgent(&self) -> io::Result<u8> {
        self.recv_urgent()
    }

    fn shut(&self) {
        self.shutdown(Shutdown::Write).unwrap();
    }

    fn poll(&self) -> PollFlags {
        // The descriptor knows nothing of urgent bytes.
        let urgent = if self.has_urgent().unwrap() { PollFlags::PRI } else { PollFlags::empty() };
        poll_of(self.pollable_exact().unwrap()) | urgent
    }
}

impl Program for TcpStream {
    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self, bytes, SendFlags::NOSIGNAL)?)
    }

    fn send_urgent(&self) -> io::Result<()> {
        send(self, b"!", SendFlags::OOB)?;
        Ok(())
    }

    fn recv(&self, buf: &mut [u8], peek: bool) -> io::Result<usize> {
        let flags = if peek { RecvFlags::PEEK } else { RecvFlags::empty() };
        Ok(recv(self, buf, flags)?.0)
    }

    fn take_urgent(&self) -> io::Result<u8> {
        let mut byte = [0];
        recv(self, &mut byte[..], RecvFlags::OOB)?;
        Ok(byte[0])
    }

    fn shut(&self) {
        self.shutdown(Shutdown::Write).unwrap();
    }

    fn poll(&self) -> PollFlags {
        poll_of(self)
    }
}

/// A connection on SMC, and one on TCP with the same calls.
struct Both {
    smc: [SmcStream; 2],
    tcp: [TcpStream; 2],
    /// Bytes sent by each end.
    sent: [usize; 2],
    /// Steps done.
    done: usize,
}

/// Waits until `look` returns two equal values, and returns the value.
#[track_caller]
fn same<T: PartialEq + Debug>(what: &str, mut look: impl FnMut() -> [T; 2]) -> T {
    let mut last = look();
    eventually(what, || {
        last = look();
        last[0] == last[1]
    });
    let [one, _] = last;
    one
}

impl Both {
    fn new(scene: &Scene, client: &Arc<Stack>, tcp: &TcpListener) -> Both {
        let smc = scene.connect(client);
        let connected = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        let tcp = [connected, tcp.accept().unwrap().0];
        for end in [C, S] {
            assert!(smc[end].is_smc(), "{}", smc[end].info());
            smc[end].set_nonblocking(true).unwrap();
            tcp[end].set_nonblocking(true).unwrap();
        }
        Both { smc, tcp, sent: [0; 2], done: 0 }
    }

    fn ends(&self, end: usize) -> [&dyn Program; 2] {
        [&self.smc[end], &self.tcp[end]]
    }

    /// Does steps of the script up to this one.
    fn run(&mut self, script: &[Step], to: usize) {
        for step in &script[self.done.min(to)..to] {
            note(format!("{step:?} at {}", self.done));
            self.step(*step);
            self.done += 1;
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Send(end, n) => {
                let bytes = pattern(self.sent[end] as u64, n);
                for program in self.ends(end) {
                    let mut done = 0;
                    eventually("all is sent", || {
                        match program.send(&bytes[done..]) {
                            Ok(n) => done += n,
                            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                        }
                        done == n
                    });
                }
                self.sent[end] += n;
            }
            Urgent(end) => {
                for program in self.ends(end) {
                    eventually("the urgent byte is sent", || match program.send_urgent() {
                        Ok(()) => true,
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::WouldBlock);
                            false
                        }
                    });
                }
            }
            Peek(end, len) => drop(self.read(end, len, true)),
            Recv(end, len) => {
                let wanted = self.read(end, len, true);
                let got = self.read(end, len, false);
                assert_eq!(wanted, got, "{step:?} at {}", self.done);
            }
            TakeUrgent(end) => {
                for program in self.ends(end) {
                    eventually("the urgent byte is there", || match program.take_urgent() {
                        Ok(byte) => byte == b'!',
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::WouldBlock);
                            false
                        }
                    });
                }
            }
            Poll(end) => {
                same("poll says the same", || self.ends(end).map(|program| program.poll()));
            }
            Shut(end) => self.ends(end).iter().for_each(|program| program.shut()),
        }
    }

    /// Reads or peeks like a program after a poll: TCP says how much there is.
    fn read(&self, end: usize, len: usize, peek: bool) -> Result<Vec<u8>, ErrorKind> {
        let [smc, tcp] = self.ends(end);
        let read = |program: &dyn Program, peek| {
            let mut buf = vec![0; len];
            let result = program.recv(&mut buf, peek).map_err(|error| error.kind());
            result.map(|n| {
                buf.truncate(n);
                buf
            })
        };
        if peek {
            // Bytes of both may still be on their way.
            return same("a peek finds the same", || [smc, tcp].map(|one| read(one, true)));
        }
        let [of_smc, of_tcp] = [smc, tcp].map(|one| read(one, false));
        assert_eq!(of_smc, of_tcp, "end {end}, step {}", self.done);
        of_smc
    }
}

/// Connections of the stack on a device.
fn on_device(stack: &Arc<Stack>) -> usize {
    let all = stack.connections().into_iter().filter_map(|one| one.changes);
    all.filter(|changes| changes.now == CurrentCarrier::Device).count()
}

/// The daemon ends after each number of steps of some connection, and has a successor after up to
/// `most` more. `comes_back`: whether a connection returns to a device after so many steps.
fn compare(loss: Loss, script: &[Step], most: usize, comes_back: impl Fn(usize, usize) -> bool) {
    let mut scene = Scene::new();
    let (client, first, second) = scene.pair(true);
    drop((first, second));
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let places: Vec<_> = (0..=script.len())
        .flat_map(|lost| (0..=most).map(move |more| (lost, (lost + more).min(script.len()))))
        .collect();
    let mut all: Vec<_> = places.iter().map(|_| Both::new(&scene, &client, &tcp)).collect();
    for (both, (lost, _)) in all.iter_mut().zip(&places) {
        both.run(script, *lost);
    }
    scene.lose(loss);
    for (both, (_, back)) in all.iter_mut().zip(&places) {
        both.run(script, *back);
    }
    scene.restart();
    let wanted = places.iter().filter(|(lost, back)| comes_back(*lost, *back)).count();
    note(format!("{wanted} of {} come back", places.len()));
    for stack in [&client, &scene.stack] {
        eventually("they are back", || on_device(stack) >= wanted);
    }
    for both in &mut all {
        both.run(script, script.len());
    }
    drop(all);
    eventually("nothing is left", || client.totals().closing + scene.stack.totals().closing == 0);
}

#[test]
fn reads_peeks_half_closes_and_ends_are_those_of_tcp() {
    let shut = BYTES.iter().position(|step| matches!(step, Shut(_))).unwrap();
    for loss in [Loss::Killed, Loss::Left] {
        watched(LIMIT, || compare(loss, &BYTES, 3, |_, back| back <= shut));
    }
}

#[test]
fn urgent_bytes_are_those_of_tcp() {
    let urgent = MARK.iter().position(|step| matches!(step, Urgent(_))).unwrap();
    let take = MARK.iter().position(|step| matches!(step, TakeUrgent(_))).unwrap();
    // Not after an urgent byte by TCP, nor while the program has not read one.
    let comes_back = |lost, back| back <= urgent || lost > urgent && back > take;
    for loss in [Loss::Killed, Loss::Left] {
        watched(LIMIT, || compare(loss, &MARK, 3, comes_back));
    }
}
