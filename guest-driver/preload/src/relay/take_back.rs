// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Relays taken back.
//!
//! A relay made because of other processes is a [`TemporaryRelay`]. The thread of the relays checks
//! whether another process still has the program's end: soon at first, and then after growing pauses
//! (see `holders`). If no other process has the end, the program's next call on the connection takes
//! the relay back, at a moment without bytes on their way and without other threads in calls on the
//! connection. From then on the connection is as before.
//!
//! - Calls of the kernel on a temporary relay have a reference to its entry in the table ([`hold`]). A
//!   thread about to take the relay back first announces this, and then counts the references. So no
//!   call is ever on the wrong socket.
//! - A program starting meanwhile would inherit the number's meaning at that time. So the start of a
//!   program is announced before ([`begin_spawn`]).
//! - A child is counted before its start and again afterwards ([`fork::note_child`]): a check in
//!   between misses the child, and is void after the second count.
//! - When the numbers are the TCP socket's again, the kernel tells whether the end of the pair is
//!   closed indeed. If an unseen process has the end, the connection is reset: no two readers or
//!   writers pass each other.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::flow::Relay;
use super::{holders, list};
use crate::fork;
use crate::socket::stream::{StreamSocket, TemporaryRelay};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS};
use crate::socket::{descriptors, registrations};
use crate::sys::{borrowed, raw};

/// Limit for the kernel to close a socket without processes, in milliseconds.
const CLOSES: i64 = 1000;
/// Buffer for bytes of the program not yet sent by the relay.
const ROOM: usize = 64 << 10;

/// Checks the temporary relays with a due check. Returns the limit of the thread's sleep, at most
/// `pause`.
pub(super) fn look(pause: Duration) -> Duration {
    let now = Instant::now();
    let due: Vec<_> = {
        let relays = list::lock();
        let temporaries = relays.list.iter().filter_map(|relay| relay.temporary.as_ref());
        temporaries.filter(|running| running.is_due(now)).map(|r| r.relay().clone()).collect()
    };
    if !due.is_empty() {
        // A child made from here on changes the number.
        let children = fork::children();
        let held = holders::may_have(&due.iter().map(Arc::as_ref).collect::<Vec<_>>());
        let free = due.iter().zip(held).filter(|(_, held)| !held);
        free.for_each(|(temporary, _)| temporary.set_alone(children));
    }
    let took = now.elapsed();
    let mut relays = list::lock();
    let mut pause = pause;
    for running in relays.list.iter_mut().filter_map(|relay| relay.temporary.as_mut()) {
        if running.is_due(now) {
            running.checked(now, took);
        }
        if let Some(next) = running.next() {
            pause = pause.min(next.saturating_duration_since(now));
        }
    }
    pause
}

/// Number of programs being started. The lock of `NUMBERS` orders the word: [`begin_spawn`] takes the lock
/// behind the store, and [`take_back`] has the lock.
static SPAWNS: AtomicUsize = AtomicUsize::new(0);

/// Keeps all relays until [`end_spawn`]: a program is being started, and inherits the present meaning
/// of the numbers.
pub(crate) fn begin_spawn() {
    SPAWNS.fetch_add(1, Ordering::Release);
    // A thread about to take a relay back has finished.
    drop(NUMBERS.lock());
}

/// Ends [`begin_spawn`]: the program has been started.
pub(crate) fn end_spawn() {
    SPAWNS.fetch_sub(1, Ordering::Release);
}

/// The entry of a descriptor for a call possibly carried out by the kernel: as long as the caller has
/// the entry, the number keeps its meaning. A relay ready to be taken back is taken back first.
pub(crate) fn hold(fd: c_int) -> Option<DescriptorRef> {
    loop {
        let descriptor = DESCRIPTORS.get(fd)?;
        let Some(temporary) = descriptor.stream().and_then(StreamSocket::temporary_relay) else {
            return Some(descriptor);
        };
        // The program first reads the bytes forwarded by the relay.
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

/// Takes a relay back. `descriptor`: the caller's reference to one of the relay's entries. `true`: the
/// number has another entry now.
fn take_back(temporary: &Arc<TemporaryRelay>, descriptor: &DescriptorRef) -> bool {
    let _numbers = NUMBERS.lock();
    if temporary.is_being_taken() {
        // Another thread has taken the relay back while this thread waited for the lock.
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
    let done = SPAWNS.load(Ordering::Acquire) == 0
        && entries.iter().all(|(_, entry)| is_unused(entry))
        && put_back(temporary, &entries);
    if !done {
        temporary.stop_taking();
    }
    done
}

/// Gives the numbers back to the TCP socket and to SMC. The caller has made sure that no thread of this
/// process uses them.
fn put_back(temporary: &Arc<TemporaryRelay>, entries: &[(c_int, DescriptorRef)]) -> bool {
    let mut relays = list::lock();
    let is_it = |relay: &Relay| {
        relay.temporary.as_ref().is_some_and(|running| Arc::ptr_eq(running.relay(), temporary))
    };
    let Some(at) = relays.list.iter().position(is_it) else { return false };
    let Some(relay) = relays.list.get_mut(at) else { return false };
    if !temporary.is_still_alone() {
        temporary.forget_alone();
        if let Some(running) = &mut relay.temporary {
            running.check_soon();
        }
        list::wake();
        return false;
    }
    let tcp_of = |(fd, entry): &(c_int, DescriptorRef)| Some((*fd, entry.stream()?.tcp_fd()?));
    let Some(numbers) = entries.iter().map(tcp_of).collect::<Option<Vec<_>>>() else {
        return false;
    };
    let Some(&(first, tcp)) = numbers.first() else { return false };
    // Bytes written by other threads go first, and the program must have read the forwarded bytes
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
    list::leave(&relay);
    // A write unseen by the library may have come since.
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
        descriptors::lend_number_locked(&relay.descriptor, first);
    }
    // The thread has a reference to the connection while asleep.
    list::wake();
    true
}

/// Applies the program's options of the meantime to the connection. `tcp`: the TCP socket; `flags`: the
/// status flags of its descriptors.
fn follow_options(socket: &StreamSocket, tcp: c_int, flags: c_int) {
    let (options, limit) = (&socket.options, |name| Some(raw::timeout_of(tcp, name)));
    options.set_nonblocking(flags & libc::O_NONBLOCK != 0);
    options.set_timeouts(limit(libc::SO_RCVTIMEO), limit(libc::SO_SNDTIMEO));
    let number = |name| raw::socket_option(tcp, libc::SOL_SOCKET, name).unwrap_or(0);
    options.set_low_water(u32::try_from(number(libc::SO_RCVLOWAT)).unwrap_or(0));
    if let Some(stream) = socket.smc() {
        let _ = stream.set_oob_inline(number(libc::SO_OOBINLINE) != 0);
        let timeout = raw::socket_option(tcp, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT);
        stream.set_user_timeout(timeout.ok().and_then(|ms| ms.try_into().ok()).unwrap_or(0));
        if stream.programs_linger().is_none()
            && let Ok(linger) = rustix::net::sockopt::socket_linger(borrowed(tcp))
        {
            let _ = stream.set_linger(linger);
        }
    }
}
