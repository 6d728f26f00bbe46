//! `epoll_wait` on a set that has SMC connections in it.
//!
//! The library polls the SMC connections of the set in shared memory, and asks the kernel for
//! everything else. A thread that finds nothing sleeps in the kernel, with the program's signal
//! mask if it gave one.

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use guest_driver::{SignalMask, Woken};

use crate::selection::waiting;
use crate::socket::epoll_set::EpollSet;
use crate::socket::registrations;
use crate::socket::sleeper::Sleeper;
use crate::socket::stream::StreamSocket;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::{epoll_wait, left_of, timespec};

/// How often a thread looks whether it may poll the connections itself, while another thread does.
const TURN: Duration = Duration::from_millis(5);

/// `epoll_pwait2` on `set`, whose descriptor is `fd`. `None`: the kernel carries out the call.
pub(crate) fn wait(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> Option<SysResult> {
    waiting::watch_all();
    if out.is_empty() || !registrations::may_poll(fd, set) {
        return None;
    }
    let end = timeout.map(|timeout| Instant::now() + timeout);
    let begun = Instant::now();
    let result = match set.has_members() {
        false => wait_in_kernel(set, fd, out, end, mask),
        true => wait_here(set, fd, out, end, mask),
    };
    Some(match result {
        // Another thread has closed the set. In the kernel it lives on until this call returns, and
        // shows nothing.
        Err(Errno(libc::EBADF)) if begun.elapsed() >= MILLISECOND => {
            raw::ppoll(&mut [], left_of(end).map(timespec).as_ref(), mask)
        }
        result => result,
    })
}

/// A call on a descriptor that was closed before it returns sooner than this.
const MILLISECOND: Duration = Duration::from_millis(1);

/// Waits without SMC connections. One may come meanwhile, from another thread.
fn wait_in_kernel(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    end: Option<Instant>,
    mask: Option<SignalMask>,
) -> SysResult {
    loop {
        let found = set.without_members(|| epoll_wait(fd, out, left_of(end), mask))?;
        let n = set.remove_mark(fd, out, found);
        if n > 0 || end.is_some_and(|end| Instant::now() >= end) {
            return Ok(n);
        }
        if set.has_members() {
            return wait_here(set, fd, out, end, mask);
        }
    }
}

/// Waits with SMC connections: one thread polls them, others wait for the kernel's part meanwhile.
fn wait_here(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    end: Option<Instant>,
    mask: Option<SignalMask>,
) -> SysResult {
    while !set.start_polling() {
        let turn = left_of(end).map_or(TURN, |left| left.min(TURN));
        let n = epoll_wait(fd, out, Some(turn), mask)?;
        let n = set.remove_mark(fd, out, n);
        if n > 0 || end.is_some_and(|end| Instant::now() >= end) {
            return Ok(n);
        }
    }
    let result = wait_alone(set, fd, out, end, mask);
    set.stop_polling();
    result
}

fn wait_alone(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    end: Option<Instant>,
    mask: Option<SignalMask>,
) -> SysResult {
    let sleeper = set.sleeper(fd)?;
    loop {
        let count = sleeper.watch.count();
        let mut members = set.lock();
        let mut n = members.poll(out);
        let now = Instant::now();
        if n == 0 || members.kernel_is_due(now) {
            members.kernel_asked(now);
            if let Some(stream) = members.first_stream() {
                stream.poll_events();
            }
            drop(members);
            if let Some(rest) = out.get_mut(n..).filter(|rest| !rest.is_empty()) {
                let found = epoll_wait(fd, rest, Some(Duration::ZERO), None)?;
                n += set.remove_mark(fd, rest, found);
            }
        } else {
            drop(members);
        }
        if n > 0 || end.is_some_and(|end| now >= end) {
            return Ok(n);
        }
        if !set.has_members() || set.is_native() {
            // The last connection was removed, or all have moved: only the kernel's part is left.
            let left = left_of(end).map_or(TURN, |left| left.min(TURN));
            let found = epoll_wait(fd, out, Some(left), mask)?;
            n = set.remove_mark(fd, out, found);
            if n > 0 {
                return Ok(n);
            }
            continue;
        }
        let begun = Instant::now();
        if sleeper.watch.spin_until(|| set.lock().have_changed()) {
            continue;
        }
        if sleep(set, sleeper, count, left_of(end), mask) == Woken::Interrupted {
            return Err(Errno(libc::EINTR));
        }
        sleeper.watch.slept(begun.elapsed());
    }
}

/// Sleeps until a connection or the kernel's set may have events. `count`: the sleeper's count of
/// wake-ups before the last poll.
fn sleep(
    set: &EpollSet,
    sleeper: &Sleeper,
    count: u32,
    left: Option<Duration>,
    mask: Option<SignalMask>,
) -> Woken {
    let members = set.lock();
    let armed = members.streams().all(|stream| stream.arm());
    if !armed || members.have_changed() {
        members.streams().for_each(|stream| stream.disarm());
        return Woken::Changed;
    }
    // A reference of its own keeps the stream while the lock is not held.
    let any = members.first_descriptor();
    drop(members);
    let stream =
        any.as_ref().and_then(|descriptor| descriptor.stream()).and_then(StreamSocket::smc);
    let timeout = left.unwrap_or(Duration::MAX);
    let woken = sleeper.watch.sleep_with_mask(mask, stream, count, timeout, sleeper.outer.as_fd());
    sleeper.watch.clear_notifier();
    let mut members = set.lock();
    let late = members.tcp_is_due();
    for stream in members.streams() {
        stream.disarm();
        if late {
            stream.check_tcp();
        }
    }
    woken
}
