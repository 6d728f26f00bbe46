// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `poll`, `ppoll`, `select` and `pselect` with SMC connections among the descriptors.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use guest_driver::interpose::{SignalMask, Watch, Woken};
use guest_driver::{ChangeToken, SmcStream};

use crate::config;
use crate::relay::take_back;
use crate::selection::resolve::resolve;
use crate::selection::{Selected, Wait, waiting};
use crate::socket::epoll_members::epoll_events;
use crate::socket::registrations::{self, hand_to_kernel};
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::fork_lock::ForkMutex;
use crate::sys::own_copies::PairPlace;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::{borrowed, left_of, timespec};

/// Unused watches without descriptors.
static IDLE_WATCHES: ForkMutex<Vec<Watch>> = ForkMutex::new(Vec::new());
/// Unused watches with a descriptor, for calls with descriptors of the kernel, too.
static IDLE_SLEEPERS: ForkMutex<Vec<(Watch, PairPlace)>> = ForkMutex::new(Vec::new());
/// A call on a descriptor closed before the call returns sooner than this.
const MILLISECOND: Duration = Duration::from_millis(1);
/// Maximum number of unused watches.
const MAX_IDLE_WATCHES: usize = 16;
/// Maximum number of unused watches with a descriptor.
const MAX_IDLE_SLEEPERS: usize = 4;
/// Longest sleep of a call without a descriptor for all of its events.
const SLICE: Duration = Duration::from_millis(5);
/// Longest sleep of any other call before the next check.
const LONGEST: Duration = Duration::from_secs(1);

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

/// A socket kept unchanged during a call.
struct Held {
    descriptor: DescriptorRef,
    /// The call waits for the end of the socket's handshake.
    is_undecided: bool,
    /// The call has no descriptor for the end of the handshake.
    is_unseen: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(socket) = self.descriptor.stream().filter(|_| self.is_undecided) {
            socket.decision.release_fd();
        }
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
        // In each round, because a handshake may be complete by now. The references in `held` keep the
        // decision descriptors in `native` open, and keep temporary relays as they are.
        let (mut polled, mut native, held) = sort(fds);
        waiting::watch_all();
        if polled.is_empty() && !held.iter().any(|held| held.is_undecided) {
            return raw_poll(fds, left_of(end), mask);
        }
        let slice = match held.iter().any(|held| held.is_unseen) {
            true => SLICE,
            false => LONGEST,
        };
        // After the time limit the call checks once more, as the kernel does: a descriptor may have
        // been closed meanwhile.
        if let Some(n) = poll_once(fds, &mut polled, &mut native, (end, slice), mask)? {
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

/// Divides the descriptors. First come the connections polled by the library. Second comes the list for
/// the kernel. There the polled connections are negative, and decision descriptors of clients ready for
/// writes are at the end. Third come the sockets kept unchanged: undecided ones, with their decision
/// descriptors in the kernel's list, and temporary relays.
fn sort(fds: &[libc::pollfd]) -> (Vec<Polled>, Vec<libc::pollfd>, Vec<Held>) {
    let (mut polled, mut held) = (Vec::new(), Vec::new());
    let mut native = fds.to_vec();
    let mut decisions = Vec::new();
    let highest = fds.iter().map(|fd| fd.fd).max().unwrap_or(-1);
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
            Selected::Tcp if socket.temporary_relay().is_some() => {
                held.push(Held { descriptor, is_undecided: false, is_unseen: false });
            }
            Selected::Tcp | Selected::Failed => {}
            Selected::Pending => {
                if registrations::is_in_a_set(socket) {
                    waiting::watch(&descriptor);
                }
                let shows = socket.decision.readable_fd(highest);
                let decided =
                    libc::pollfd { fd: shows.unwrap_or(-1), events: libc::POLLIN, revents: 0 };
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
                held.push(Held { descriptor, is_undecided: true, is_unseen: shows.is_none() });
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
    (end, slice): (Option<Instant>, Duration),
    mask: Option<SignalMask>,
) -> Result<Option<usize>, Errno> {
    let others = native.iter().any(|fd| fd.fd >= 0);
    let mut any = false;
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
        return Ok(merge(fds, polled, native));
    }
    if end.is_some_and(|end| Instant::now() >= end) {
        fds.iter_mut().for_each(|fd| fd.revents = 0);
        return Ok(Some(0));
    }
    let left = left_of(end).unwrap_or(Duration::MAX).min(slice);
    if polled.is_empty() {
        raw_poll(native, Some(left), mask)?;
        return Ok(None);
    }
    let changed =
        || polled.iter().any(|one| one.stream().is_some_and(|s| s.changed_since(one.token)));
    let begun = Instant::now();
    let highest = fds.iter().map(|fd| fd.fd).max().unwrap_or(-1);
    let (watch, listed) = (take_watch(), native.len());
    let woken = if watch.spin_until(changed) {
        Woken::Changed
    } else {
        let on_lines = (!others && mask.is_none()).then(|| sleep_on_lines(&watch, polled, left));
        let sleeper = || if fits(listed) { take_sleeper(highest) } else { None };
        let woken = on_lines.flatten().unwrap_or_else(|| match sleeper() {
            Some(sleeper) => {
                let woken = sleep_beside(&sleeper.0, polled, native, (left, mask), changed);
                release_sleeper(sleeper, highest);
                woken
            }
            // Without a descriptor to be woken by connections.
            None => match raw_poll(native, Some(left.min(SLICE)), mask) {
                Err(Errno(libc::EINTR)) => Woken::Interrupted,
                _ => Woken::Changed,
            },
        });
        watch.slept(begun.elapsed());
        woken
    };
    release_watch(watch);
    if begun.elapsed() >= Duration::from_millis(900) {
        polled.iter().filter_map(Polled::stream).for_each(SmcStream::check_tcp);
    }
    if woken == Woken::Interrupted { Err(Errno(libc::EINTR)) } else { Ok(None) }
}

/// Registers a watch with the connections while `sleep` runs. `sleep` gets the number of earlier
/// wake-ups.
fn watched<T>(watch: &Watch, polled: &[Polled], sleep: impl FnOnce(u32) -> T) -> T {
    let count = watch.count();
    let streams = || polled.iter().filter_map(Polled::stream);
    streams().for_each(|stream| stream.watch(watch));
    let result = sleep(count);
    streams().for_each(|stream| stream.unwatch(watch));
    result
}

/// Sleeps until a connection changes, if all peers report changes without a descriptor. `None`: a peer
/// does not.
fn sleep_on_lines(watch: &Watch, polled: &[Polled], left: Duration) -> Option<Woken> {
    let streams: Vec<_> = polled.iter().filter_map(Polled::stream).collect();
    let changed =
        || polled.iter().any(|one| one.stream().is_some_and(|s| s.changed_since(one.token)));
    watched(watch, polled, |count| watch.sleep_on_lines(&streams, count, left, changed))
}

/// Sleeps until a connection changes (reported by the device), or until the kernel has an event of
/// another descriptor.
fn sleep_beside(
    watch: &Watch,
    polled: &[Polled],
    native: &[libc::pollfd],
    (left, mask): (Duration, Option<SignalMask>),
    changed: impl Fn() -> bool,
) -> Woken {
    let others = native.iter().filter(|other| other.fd >= 0);
    let others: Vec<_> = others.map(|other| (borrowed(other.fd), other.events)).collect();
    let woken = watched(watch, polled, |count| {
        let armed = polled.iter().all(|one| one.stream().is_none_or(SmcStream::arm));
        if !armed || changed() {
            return Woken::Changed;
        }
        let stream = polled.first().and_then(Polled::stream);
        // The mask lets signals in only during the sleep. A pending signal ends the sleep at once.
        watch.sleep_beside(mask, stream, count, left, &others)
    });
    polled.iter().filter_map(Polled::stream).for_each(SmcStream::disarm);
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

/// Whether the kernel takes a list of so many descriptors and those of a sleep: a list is at most as long as
/// the limit of descriptors. Shorter lists than the least limit with a device need no check.
fn fits(listed: usize) -> bool {
    const SHORT: usize = 200;
    let most = || ism_sys::resource_limit(libc::RLIMIT_NOFILE).unwrap_or(u64::MAX);
    listed <= SHORT || (listed + ism_sys::POLLED) as u64 <= most()
}

fn spin() -> Duration {
    config::get().map_or(Duration::ZERO, |config| config.spin)
}

fn take_watch() -> Watch {
    IDLE_WATCHES.lock().pop().unwrap_or_else(|| Watch::without_notifier(spin()))
}

fn release_watch(watch: Watch) {
    let mut idle = IDLE_WATCHES.lock();
    if idle.len() < MAX_IDLE_WATCHES {
        idle.push(watch);
    }
}

/// A watch with a descriptor, for a call on numbers up to `highest`. `None`: descriptors are short.
fn take_sleeper(highest: c_int) -> Option<(Watch, PairPlace)> {
    let idle = {
        let mut idle = IDLE_SLEEPERS.lock();
        // The parent of a fork goes on with its sleepers.
        idle.retain(|(_, place)| place.is_own());
        idle.pop()
    };
    idle.or_else(|| {
        let place = PairPlace::take(highest)?;
        Some((Watch::new(spin()).ok()?, place))
    })
}

fn release_sleeper((sleeper, place): (Watch, PairPlace), highest: c_int) {
    let mut idle = IDLE_SLEEPERS.lock();
    if idle.len() < MAX_IDLE_SLEEPERS && place.may_stay(highest) {
        idle.push((sleeper, place));
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
