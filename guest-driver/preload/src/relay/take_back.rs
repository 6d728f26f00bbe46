// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Relays that are taken back.
//!
//! A relay that is there because other processes may use the connection is a [`TemporaryRelay`].
//! The thread that runs the relays looks whether another process still has the program's end: soon
//! at first, and then after pauses that become longer (see `holders`). If none has, the next call
//! of the program on the connection takes the relay back, at a moment when no byte is on its way
//! and no other thread is in a call on it. From then on the connection is as before.
//!
//! - Calls that the kernel carries out on a temporary relay have a reference to its entry in the
//!   table ([`hold`]). A thread that takes it back announces that first, and then counts the
//!   references. So no call is ever on the wrong socket.
//! - A program that begins to run meanwhile would inherit what the number is at that time. So
//!   whoever starts one says so before ([`begin_spawn`]).
//! - A child is counted before it is there and again afterwards ([`fork::note_child`]): a look in
//!   between does not find it, and holds for nobody after the second count.
//! - When the numbers are those of the TCP socket again, the kernel tells whether the end of the
//!   pair is closed indeed. If a process has it that was not seen, the connection is reset: nobody
//!   reads or writes past the other.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::flow::Relay;
use super::{forward, holders};
use crate::fork;
use crate::socket::registrations;
use crate::socket::stream::{StreamSocket, TemporaryRelay};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS};
use crate::sys::{borrowed, raw};

/// Pause between the beginning of a temporary relay and the first look.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause between two looks.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A pause is so many times longer than a look takes.
const PAUSE_PER_LOOK: u32 = 50;
/// How long the kernel may take to close a socket that no process has, milliseconds.
const CLOSES: i64 = 1000;
/// Room for what the program has written and the relay has not sent yet.
const ROOM: usize = 64 << 10;

/// A temporary relay, and when the thread looks whether another process has it.
pub(super) struct RunningTemporary {
    temporary: Arc<TemporaryRelay>,
    next: Instant,
    pause: Duration,
}

impl RunningTemporary {
    pub(super) fn new(temporary: Arc<TemporaryRelay>) -> RunningTemporary {
        RunningTemporary { temporary, next: Instant::now() + FIRST_PAUSE, pause: FIRST_PAUSE }
    }

    /// Whether no other process had the end when the thread looked.
    pub(super) fn is_alone(&self) -> bool {
        self.temporary.was_alone()
    }

    /// When the next look is due; `None`: no other process had the end.
    fn next(&self) -> Option<Instant> {
        (!self.is_alone()).then_some(self.next)
    }
}

/// Looks after the temporary relays whose time has come. Returns how long the thread may sleep, of
/// `pause`.
pub(super) fn look(pause: Duration) -> Duration {
    let now = Instant::now();
    let is_due = |running: &&RunningTemporary| running.next().is_some_and(|next| next <= now);
    let due: Vec<_> = {
        let relays = forward::lock();
        let temporaries = relays.list.iter().filter_map(|relay| relay.temporary.as_ref());
        temporaries.filter(is_due).map(|running| running.temporary.clone()).collect()
    };
    if !due.is_empty() {
        // A child that is made from here on changes the number.
        let children = fork::children();
        let held = holders::may_have(&due.iter().map(Arc::as_ref).collect::<Vec<_>>());
        let free = due.iter().zip(held).filter(|(_, held)| !held);
        free.for_each(|(temporary, _)| temporary.set_alone(children));
    }
    let took = now.elapsed();
    let mut relays = forward::lock();
    let mut pause = pause;
    for running in relays.list.iter_mut().filter_map(|relay| relay.temporary.as_mut()) {
        if is_due(&&*running) {
            let doubled = running.pause.max(took * PAUSE_PER_LOOK).saturating_mul(2);
            running.pause = doubled.min(LONGEST_PAUSE);
            running.next = now + running.pause;
        }
        if let Some(next) = running.next() {
            pause = pause.min(next.saturating_duration_since(now));
        }
    }
    pause
}

/// Number of programs that are being started.
static SPAWNS: AtomicUsize = AtomicUsize::new(0);

/// No relay is taken back until [`end_spawn`]: a program is being started. It inherits what the
/// numbers are now.
pub(crate) fn begin_spawn() {
    SPAWNS.fetch_add(1, Ordering::SeqCst);
    // A thread that takes one back has finished.
    drop(NUMBERS.lock());
}

/// The program has been started.
pub(crate) fn end_spawn() {
    SPAWNS.fetch_sub(1, Ordering::SeqCst);
}

/// The entry of a descriptor for a call that the kernel may carry out: as long as the caller has
/// it, the number stays what it is. A relay that can be taken back is taken back before.
pub(crate) fn hold(fd: c_int) -> Option<DescriptorRef> {
    loop {
        let descriptor = DESCRIPTORS.get(fd)?;
        let Some(temporary) = descriptor.stream().and_then(StreamSocket::temporary_relay) else {
            return Some(descriptor);
        };
        // The program first reads what the relay has brought.
        let may_come = temporary.was_alone() && raw::queued_bytes(fd) == Ok(0);
        if may_come && take_back(temporary, &descriptor) {
            continue;
        }
        if !temporary.is_being_taken() {
            return Some(descriptor);
        }
        drop(descriptor);
        drop(NUMBERS.lock());
    }
}

/// Takes a relay back. `descriptor`: the caller's reference to one of its entries. `true`: the number
/// has another entry now.
fn take_back(temporary: &Arc<TemporaryRelay>, descriptor: &DescriptorRef) -> bool {
    let _numbers = NUMBERS.lock();
    if temporary.is_being_taken() {
        // Another thread has taken it back while this one waited for the lock.
        return true;
    }
    let has_this = |found: &DescriptorRef| {
        found
            .stream()
            .and_then(StreamSocket::temporary_relay)
            .is_some_and(|other| Arc::ptr_eq(other, temporary))
    };
    let numbers = (0..=DESCRIPTORS.highest()).filter(|fd| DESCRIPTORS.has(*fd));
    let entries: Vec<(c_int, DescriptorRef)> = numbers
        .filter_map(|fd| Some((fd, DESCRIPTORS.get(fd)?)))
        .filter(|(_, found)| has_this(found))
        .collect();
    temporary.begin_taking();
    let is_unused = |entry: &DescriptorRef| {
        let same = entries.iter().filter(|(_, other)| other.is(entry)).count() as u32;
        entry.refs() == entry.handles() + same + u32::from(descriptor.is(entry))
    };
    let done = SPAWNS.load(Ordering::SeqCst) == 0
        && entries.iter().all(|(_, entry)| is_unused(entry))
        && put_back(temporary, &entries);
    if !done {
        temporary.stop_taking();
    }
    done
}

/// Gives the numbers back to the TCP socket and to SMC. The caller has made sure that no thread of
/// this process uses them.
fn put_back(temporary: &Arc<TemporaryRelay>, entries: &[(c_int, DescriptorRef)]) -> bool {
    let mut relays = forward::lock();
    let is_it = |relay: &Relay| {
        relay.temporary.as_ref().is_some_and(|running| Arc::ptr_eq(&running.temporary, temporary))
    };
    let Some(at) = relays.list.iter().position(is_it) else { return false };
    let Some(relay) = relays.list.get_mut(at) else { return false };
    if !temporary.is_still_alone() {
        temporary.forget_alone();
        if let Some(running) = &mut relay.temporary {
            (running.next, running.pause) = (Instant::now() + FIRST_PAUSE, FIRST_PAUSE);
        }
        forward::wake();
        return false;
    }
    let tcp_of = |(fd, entry): &(c_int, DescriptorRef)| Some((*fd, entry.stream()?.tcp_fd()?));
    let Some(numbers) = entries.iter().map(tcp_of).collect::<Option<Vec<_>>>() else {
        return false;
    };
    let Some(&(first, tcp)) = numbers.first() else { return false };
    // What other threads have written by now goes first, and what the relay has brought is read
    // before.
    let settled = relay.settles(&mut vec![0; ROOM]) && raw::queued_bytes(first) == Ok(0);
    if !settled || relay.descriptor.stream().is_none() {
        return false;
    }
    let mut relay = relays.list.swap_remove(at);
    let flags = raw::fcntl(first, libc::F_GETFL, 0).unwrap_or(0);
    let members = registrations::of_kernel(temporary.inode);
    for (fd, tcp) in numbers {
        let is_cloexec = raw::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags != 0);
        let _ = raw::dup3(tcp, fd, if is_cloexec { libc::O_CLOEXEC } else { 0 });
    }
    let _ = raw::fcntl(tcp, libc::F_SETFL, flags as c_int);
    forward::leave(&relay);
    // A write that the library did not see may have come since.
    if !relay.owner_end.is_left(CLOSES) || !relay.send_rest(&mut vec![0; ROOM]) {
        relay.fail();
        relay.end();
    }
    drop(relays);
    if let Some(socket) = relay.descriptor.stream() {
        follow_options(socket, tcp, flags as c_int);
        registrations::attach(&relay.descriptor, socket, members, || {
            for (fd, _) in entries {
                DESCRIPTORS.share(&relay.descriptor, *fd);
            }
        });
    }
    // It has a reference to the connection while it sleeps.
    forward::wake();
    true
}

/// Makes a connection follow what the program has set on its sockets meanwhile. `tcp`: the TCP
/// socket; `flags`: the status flags of its descriptors.
fn follow_options(socket: &StreamSocket, tcp: c_int, flags: c_int) {
    let (options, limit) = (&socket.options, |name| Some(raw::timeout_of(tcp, name)));
    options.set_nonblocking(flags & libc::O_NONBLOCK != 0);
    options.set_timeouts(limit(libc::SO_RCVTIMEO), limit(libc::SO_SNDTIMEO));
    let number = |name| raw::socket_option(tcp, libc::SOL_SOCKET, name).unwrap_or(0);
    options.set_low_water(u32::try_from(number(libc::SO_RCVLOWAT)).unwrap_or(0));
    if let Some(stream) = socket.smc() {
        let _ = stream.set_oob_inline(number(libc::SO_OOBINLINE) != 0);
        if let Ok(linger) = rustix::net::sockopt::socket_linger(borrowed(tcp)) {
            let _ = stream.set_linger(linger);
        }
    }
}
