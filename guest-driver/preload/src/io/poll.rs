// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `poll`, `ppoll`, `select` and `pselect` with SMC connections among the descriptors.

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use guest_driver::interpose::{SignalMask, Woken};
use guest_driver::{ChangeToken, SmcStream};

use crate::relay::take_back;
use crate::selection::resolve::resolve;
use crate::selection::{Selected, Wait, waiting};
use crate::socket::epoll_members::epoll_events;
use crate::socket::registrations::{self, hand_to_kernel};
use crate::socket::sleeper::Sleeper;
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::fork_lock::ForkMutex;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::{left_of, timespec};

/// Sleepers that no call uses.
static IDLE_SLEEPERS: ForkMutex<Vec<Sleeper>> = ForkMutex::new(Vec::new());
/// A call on a descriptor that was closed before it returns sooner than this.
const MILLISECOND: Duration = Duration::from_millis(1);
/// Number of unused sleepers that the library keeps at most.
const MAX_IDLE: usize = 16;

/// An SMC connection among the descriptors, and its place in the program's list.
struct Polled {
    at: usize,
    descriptor: DescriptorRef,
    token: ChangeToken,
}

impl Polled {
    fn stream(&self) -> Option<&SmcStream> {
        self.descriptor.stream().and_then(StreamSocket::smc)
    }
}

/// Whether the library knows one of the descriptors.
pub(crate) fn has_known(fds: &[libc::pollfd]) -> bool {
    fds.iter().any(|fd| DESCRIPTORS.has(fd.fd))
}

/// `ppoll`. Writes `revents`.
pub(crate) fn poll(
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> SysResult {
    let end = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        // At every turn, because a handshake may be complete by now. The references in `_held`
        // keep the decision descriptors open that `native` refers to, and temporary relays what
        // they are.
        let (mut polled, mut native, _held) = sort(fds);
        waiting::watch_all();
        if polled.is_empty() && native.iter().zip(&*fds).all(|(ours, theirs)| ours.fd == theirs.fd)
        {
            return raw_poll(fds, left_of(end), mask);
        }
        // When the time is over it looks once more, as the kernel does: a descriptor may have been
        // closed meanwhile.
        if let Some(n) = poll_once(fds, &mut polled, &mut native, end, mask)? {
            return Ok(n);
        }
    }
}

fn raw_poll(
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> SysResult {
    let time = timeout.map(timespec);
    raw::ppoll(fds, time.as_ref(), mask)
}

/// Divides the descriptors. First come the connections that the library polls. Second comes the
/// list for the kernel, in which those are negative, and which ends with the decision descriptors
/// of clients that may write already. Third come the sockets that stay as they are meanwhile:
/// undecided ones, whose decision descriptors are in the kernel's list, and temporary relays.
fn sort(fds: &[libc::pollfd]) -> (Vec<Polled>, Vec<libc::pollfd>, Vec<DescriptorRef>) {
    let (mut polled, mut held) = (Vec::new(), Vec::new());
    let mut native = fds.to_vec();
    let mut decisions = Vec::new();
    for (at, (fd, native)) in fds.iter().zip(&mut native).enumerate() {
        native.revents = 0;
        if !DESCRIPTORS.has(fd.fd) {
            continue;
        }
        let Some(descriptor) = take_back::hold(fd.fd) else { continue };
        let Some(socket) = descriptor.stream() else {
            hand_to_kernel(fd.fd);
            continue;
        };
        if fd.events & libc::POLLOUT != 0 {
            socket.undecided.note_write();
        }
        if socket.state() == SocketState::Undecided && socket.side.is_plain_if_silent() {
            // The program's next call checks the client.
            continue;
        }
        match resolve(&descriptor, fd.fd, Wait::Short) {
            Selected::Tcp if socket.temporary_relay().is_some() => held.push(descriptor),
            Selected::Tcp | Selected::Failed => {}
            Selected::Pending => {
                if registrations::is_in_a_set(socket) {
                    waiting::watch(&descriptor);
                }
                let decided = libc::pollfd {
                    fd: socket.decision.readable_fd().unwrap_or(-1),
                    events: libc::POLLIN,
                    revents: 0,
                };
                if fd.events & libc::POLLOUT != 0 && socket.is_writable_early() {
                    // The kernel reports the connected TCP socket. From then on the library keeps the
                    // program's bytes.
                    native.events = fd.events & (libc::POLLOUT | libc::POLLWRNORM);
                    decisions.push(decided);
                } else {
                    // The socket has no events. The decision descriptor is readable when the handshake
                    // is complete.
                    *native = decided;
                }
                held.push(descriptor);
            }
            Selected::Smc if socket.smc().is_some() => {
                native.fd = -1;
                polled.push(Polled { at, descriptor, token: ChangeToken::default() });
            }
            Selected::Smc => {}
        }
    }
    native.extend(decisions);
    (polled, native, held)
}

/// A connection's events, restricted to the requested ones.
fn revents_of(socket: &StreamSocket, stream: &SmcStream, events: i16) -> i16 {
    let readiness = socket.readiness(stream, events & libc::POLLPRI != 0);
    let asked = events as u16 as u32 | (libc::POLLERR | libc::POLLHUP) as u32;
    // poll and epoll encode their common events in the same way.
    (epoll_events(readiness) & asked) as i16
}

/// Polls the connections, asks the kernel about the rest, and sleeps if there are no events, until
/// `end` and for at most `slice`. `None`: the caller must poll again.
fn poll_once(
    fds: &mut [libc::pollfd],
    polled: &mut [Polled],
    native: &mut [libc::pollfd],
    end: Option<Instant>,
    mask: Option<SignalMask>,
) -> Result<Option<usize>, Errno> {
    let others = native.iter().any(|fd| fd.fd >= 0);
    let sleeper = take_sleeper()?;
    let mut any = false;
    let count = sleeper.watch.count();
    for one in polled.iter_mut() {
        let Some(stream) = one.stream() else { continue };
        one.token = stream.change_token();
    }
    for one in polled.iter() {
        let (Some(stream), Some(fd)) = (one.stream(), fds.get_mut(one.at)) else { continue };
        let Some(socket) = one.descriptor.stream() else { continue };
        fd.revents = revents_of(socket, stream, fd.events);
        any |= fd.revents != 0;
    }
    if others {
        any |= raw_poll(native, Some(Duration::ZERO), None)? > 0;
    }
    if any {
        release_sleeper(sleeper);
        return Ok(merge(fds, polled, native));
    }
    if end.is_some_and(|end| Instant::now() >= end) {
        release_sleeper(sleeper);
        fds.iter_mut().for_each(|fd| fd.revents = 0);
        return Ok(Some(0));
    }
    let changed =
        || polled.iter().any(|one| one.stream().is_some_and(|s| s.changed_since(one.token)));
    let begun = Instant::now();
    if !polled.is_empty() && sleeper.watch.spin_until(changed) {
        release_sleeper(sleeper);
        return Ok(None);
    }
    for one in polled.iter() {
        if let Some(stream) = one.stream() {
            stream.watch(&sleeper.watch);
        }
    }
    let left = left_of(end).unwrap_or(Duration::MAX);
    let mut woken = None;
    if !others && mask.is_none() {
        let streams: Vec<_> = polled.iter().filter_map(Polled::stream).collect();
        woken = sleeper.watch.sleep_on_lines(&streams, count, left, changed);
        if woken.is_some() {
            sleeper.watch.slept(begun.elapsed());
        }
    }
    let woken = woken.unwrap_or_else(|| {
        let native = native.iter().filter(|fd| fd.fd >= 0);
        sleep_beside(&sleeper, polled, native, (count, left, mask), changed)
    });
    let late = begun.elapsed() >= Duration::from_millis(900);
    for one in polled.iter() {
        if let Some(stream) = one.stream() {
            stream.unwatch(&sleeper.watch);
            if late {
                stream.check_tcp();
            }
        }
    }
    release_sleeper(sleeper);
    if woken == Woken::Interrupted { Err(Errno(libc::EINTR)) } else { Ok(None) }
}

/// Sleeps until a connection changes, which the peers tell by the device, or until the kernel has an
/// event of one of the other descriptors. `count`: wake-ups before the connections were looked at.
fn sleep_beside<'a>(
    sleeper: &Sleeper,
    polled: &[Polled],
    native: impl Iterator<Item = &'a libc::pollfd>,
    (count, left, mask): (u32, Duration, Option<SignalMask>),
    changed: impl Fn() -> bool,
) -> Woken {
    let mut added = Vec::new();
    for fd in native {
        if sleeper.add(fd.fd, fd.events as u16 as u32).is_ok() {
            added.push(fd.fd);
        }
    }
    let armed = polled.iter().all(|one| one.stream().is_none_or(SmcStream::arm));
    let mut woken = Woken::Changed;
    if armed && !changed() {
        let stream = polled.first().and_then(Polled::stream);
        // The mask lets signals in only during the sleep. A signal that is pending ends the sleep
        // at once.
        let outer = sleeper.outer.as_fd();
        let begun = Instant::now();
        woken = sleeper.watch.sleep_with_mask(mask, stream, count, left, outer);
        sleeper.watch.slept(begun.elapsed());
    }
    polled.iter().filter_map(Polled::stream).for_each(SmcStream::disarm);
    added.iter().for_each(|fd| sleeper.remove(*fd));
    sleeper.watch.clear_notifier();
    woken
}

/// Copies the kernel's answers. Returns the number of ready descriptors; `None`: only decision
/// descriptors.
fn merge(fds: &mut [libc::pollfd], polled: &[Polled], native: &[libc::pollfd]) -> Option<usize> {
    let mut n = 0;
    for (at, (fd, native)) in fds.iter_mut().zip(native).enumerate() {
        if native.fd == fd.fd {
            fd.revents = native.revents;
        } else if !polled.iter().any(|one| one.at == at) {
            fd.revents = 0;
        }
        n += usize::from(fd.revents != 0);
    }
    (n > 0).then_some(n)
}

fn take_sleeper() -> Result<Sleeper, Errno> {
    match IDLE_SLEEPERS.lock().pop() {
        Some(sleeper) => Ok(sleeper),
        None => Ok(Sleeper::new()?),
    }
}

fn release_sleeper(sleeper: Sleeper) {
    let mut idle = IDLE_SLEEPERS.lock();
    if idle.len() < MAX_IDLE {
        idle.push(sleeper);
    }
}

/// A set of `select`, in words of 64 descriptors.
pub(crate) type SelectWords<'a> = Option<&'a mut [u64]>;

fn is_in(set: &SelectWords<'_>, fd: usize) -> bool {
    set.as_ref().is_some_and(|set| set.get(fd / 64).is_some_and(|word| word >> (fd % 64) & 1 != 0))
}

/// `pselect` by way of `ppoll`. `None`: the library knows none of the descriptors.
pub(crate) fn select<'a>(
    n: usize,
    (read, write, except): (&mut SelectWords<'a>, &mut SelectWords<'a>, &mut SelectWords<'a>),
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> Option<SysResult> {
    // Most calls of most programs return here.
    let is_asked = |fd: usize| is_in(read, fd) || is_in(write, fd) || is_in(except, fd);
    if !(0..n).any(|fd| DESCRIPTORS.has(fd as c_int) && is_asked(fd)) {
        return None;
    }
    let mut fds = Vec::new();
    for fd in 0..n {
        let mut events = 0;
        for (set, flag) in
            [(&*read, libc::POLLIN), (&*write, libc::POLLOUT), (&*except, libc::POLLPRI)]
        {
            events |= if is_in(set, fd) { flag } else { 0 };
        }
        if events != 0 {
            fds.push(libc::pollfd { fd: fd as c_int, events, revents: 0 });
        }
    }
    let begun = Instant::now();
    let found = match poll(&mut fds, timeout, mask) {
        Ok(found) => found,
        Err(error) => return Some(Err(error)),
    };
    if found > 0 && fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
        if begun.elapsed() < MILLISECOND {
            return Some(Err(Errno(libc::EBADF)));
        }
        // Another thread has closed the descriptor meanwhile. The kernel sets the number in each set.
        for fd in fds.iter_mut().filter(|fd| fd.revents & libc::POLLNVAL != 0) {
            fd.revents = fd.events;
        }
    }
    let mut count = 0;
    for (set, meaning) in [
        (read, libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR),
        (write, libc::POLLOUT | libc::POLLWRNORM | libc::POLLERR),
        (except, libc::POLLPRI),
    ] {
        let asked = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI]
            .into_iter()
            .find(|flag| meaning & flag != 0)
            .unwrap_or(0);
        let Some(set) = set else { continue };
        set.iter_mut().for_each(|word| *word = 0);
        for fd in &fds {
            if fd.events & asked != 0 && fd.revents & meaning != 0 {
                let at = fd.fd as usize;
                if let Some(word) = set.get_mut(at / 64) {
                    *word |= 1 << (at % 64);
                    count += 1;
                }
            }
        }
    }
    Some(Ok(count))
}
