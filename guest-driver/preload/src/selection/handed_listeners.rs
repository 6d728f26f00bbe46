// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Listeners handed on to programs without the library.
//!
//! The kernel answers TCP option 254 for a listener, whichever program accepts. A program without
//! the library would then read Proposals as data. So a listener stops answering before it is handed
//! on, and never answers again: the last close by such a program cannot be observed.
//!
//! Clients answered before, and still queued, would propose all the same. accept(2) cannot take
//! single clients out of the queue. So the library accepts the queue up to the last of them and
//! resets the accepted connections. A client with this library connects again, without the option.
//! Plain clients in front are lost, unless another process accepts them soon.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::net::{SocketFlags, sockopt};
use smc_rendezvous::Rendezvous;

use crate::selection::{answering_listeners, kernel_sockets, option};
use crate::sys::{borrowed, local_address, raw};
use crate::{config, status};

/// How long three-way handshakes under way may take: their clients were answered, too.
const HANDSHAKES: Duration = Duration::from_millis(250);
/// How long other processes may take to accept plain clients.
const OTHERS: Duration = Duration::from_millis(50);
/// How often both are looked at.
const PAUSE: Duration = Duration::from_millis(1);

/// Stops the answers of all listeners which the next executed program inherits. `named`: whether
/// the program gets a listener although exec closes the descriptor. This also runs in a child
/// sharing the memory of its parent.
pub(crate) fn leave_inherited(named: impl Fn(c_int) -> bool) {
    if !answering_listeners::any() {
        return;
    }
    inherited(named).into_iter().for_each(leave);
}

fn inherited(named: impl Fn(c_int) -> bool) -> Vec<c_int> {
    let stays_open = |fd| raw::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags == 0);
    let mut fds = kernel_sockets::open_descriptors();
    fds.retain(|fd| is_listener(*fd) && (named(*fd) || stays_open(*fd)));
    fds
}

/// Stops the answers of a listener: a program possibly without the library gets the listener.
pub(crate) fn leave_listener(fd: c_int) {
    if answering_listeners::any() && is_listener(fd) {
        leave(fd);
    }
}

/// Stops the answers of all listeners of this process: the program accepts without the library.
pub(super) fn leave_all() {
    if answering_listeners::any() {
        kernel_sockets::open_descriptors().into_iter().for_each(leave_listener);
    }
}

fn is_listener(fd: c_int) -> bool {
    raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(1)
}

fn leave(fd: c_int) {
    if config::get().is_none() {
        return;
    }
    let Some(rendezvous) = option::rendezvous() else { return };
    let listener = borrowed(fd);
    if !rendezvous.answers(listener) {
        return;
    }
    raw::without_signals(|| {
        let paused = rendezvous.pause(listener);
        if let Some(local) = local_address(fd) {
            settle(rendezvous, listener, &local);
            status::listener_left(&local, paused.is_ok());
        }
        rendezvous.withdraw(listener);
    });
}

/// Takes the answered clients out of a listener's queue. New clients get no answer.
fn settle(rendezvous: &Rendezvous, listener: BorrowedFd<'_>, local: &SocketAddr) {
    await_handshakes(local);
    let first = kernel_sockets::queued_clients(local);
    let is_answered = |client: &SocketAddr| rendezvous.may_speak_smc(client);
    // How many of the first clients are still queued, and how many of these were answered.
    let left = || {
        let mut queue = kernel_sockets::queued_clients(local);
        queue.retain(|client| first.contains(client));
        (queue.len(), queue.iter().filter(|client| is_answered(client)).count())
    };
    let begun = Instant::now();
    loop {
        match left() {
            (_, 0) => return,
            (all, answered) if all == answered || begun.elapsed() >= OTHERS => break,
            _ => std::thread::sleep(PAUSE),
        }
    }
    // A client may connect again from the same address.
    for _ in &first {
        if left().1 == 0 || !is_readable(listener) {
            return;
        }
        if let Ok(client) = accept_soon(listener) {
            reset(client);
        }
    }
}

/// Accepts without waiting: another process may have been faster. Clients accepted meanwhile would
/// inherit an option with a time limit.
fn accept_soon(listener: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(listener)?;
    rustix::fs::fcntl_setfl(listener, flags | OFlags::NONBLOCK)?;
    let client = rustix::net::accept_with(listener, SocketFlags::CLOEXEC);
    let _ = rustix::fs::fcntl_setfl(listener, flags);
    client
}

/// Waits for the current three-way handshakes.
fn await_handshakes(local: &SocketAddr) {
    let begun = Instant::now();
    let first = kernel_sockets::connecting_clients(local);
    while !first.is_empty() && begun.elapsed() < HANDSHAKES {
        std::thread::sleep(PAUSE);
        let now = kernel_sockets::connecting_clients(local);
        if !first.iter().any(|client| now.contains(client)) {
            return;
        }
    }
}

fn is_readable(listener: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&listener, PollFlags::IN)];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&zero)) == Ok(1)
}

fn reset(client: OwnedFd) {
    let _ = sockopt::set_socket_linger(&client, Some(Duration::ZERO));
    drop(client);
}
