// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `epoll_wait` on a set with SMC connections.
//!
//! The library polls the SMC connections of the set in shared memory, continues handshakes of the set's
//! sockets when the kernel reports bytes of their peers, and asks the kernel for everything else.
//! Without an event the thread sleeps in the kernel, with the program's signal mask if there is one.

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use guest_driver::interpose::{ArmedLines, SignalMask, Woken};

use crate::selection::waiting;
use crate::socket::epoll_members::EpollMembers;
use crate::socket::epoll_set::{EpollSet, is_own};
use crate::socket::registrations;
use crate::socket::sleeper::Sleeper;
use crate::socket::states::SocketStage;
use crate::socket::stream::StreamSocket;
use crate::socket::table::DESCRIPTORS;
use crate::sys::raw::{self, Errno, SignalGuard, SysResult};
use crate::sys::{epoll_wait, left_of, timespec};

/// Interval for a thread to check whether another thread still polls the connections.
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
    if out.is_empty() {
        return None;
    }
    let end = timeout.map(|timeout| Instant::now() + timeout);
    if !registrations::may_poll(fd, set) {
        return set.is_inherited().then(|| wait_in_child(fd, out, (end, mask)));
    }
    let begun = Instant::now();
    let signals = &mut Signals { wanted: mask, blocked: SignalGuard::none() };
    let result = loop {
        let result = match set.has_members() {
            false => wait_in_kernel(set, fd, out, end, signals),
            true if timeout == Some(Duration::ZERO) => look_once(set, fd, out, signals),
            true => wait_here(set, fd, out, end, signals),
        };
        if let Some(result) = result.transpose() {
            break result;
        }
    };
    Some(match result {
        // Another thread has closed the set. In the kernel the set lives on until this call returns,
        // and has no events.
        Err(Errno(libc::EBADF)) if begun.elapsed() >= MILLISECOND => {
            raw::ppoll(&mut [], left_of(end).map(timespec).as_ref(), signals.mask())
        }
        result => result,
    })
}

/// A call on a descriptor closed before the call returns sooner than this.
const MILLISECOND: Duration = Duration::from_millis(1);

/// The signals of a call.
struct Signals {
    /// The program's mask for the sleep.
    wanted: Option<SignalMask>,
    /// Blocks all signals once the call has continued a handshake.
    blocked: SignalGuard,
}

impl Signals {
    /// The mask for a sleep; `None`: the present one.
    fn mask(&self) -> Option<SignalMask> {
        self.blocked.mask(self.wanted)
    }
}

/// The kernel's events of a set.
struct Reported {
    /// Number of events for the program, at the front of the list.
    events: usize,
    /// Whether there were events of handshakes besides.
    handshakes: bool,
}

/// Takes the library's own events out of the first `n`, and continues their handshakes.
fn sort_events(
    set: &EpollSet,
    out: &mut [libc::epoll_event],
    n: usize,
    signals: &mut Signals,
) -> Reported {
    let handshakes = out.iter().take(n).any(is_own);
    if !handshakes {
        return Reported { events: n, handshakes };
    }
    // The caller checks for a new connection after any event.
    set.silence();
    let (mut events, mut due) = (0, Vec::new());
    for at in 0..n {
        let Some(mut event) = out.get(at).copied() else { break };
        if let Some(sockets) = is_own(&event).then(|| set.handshakes_of(event.u64)).flatten() {
            let found = event.events as c_int;
            // The kernel reports an error by itself, once the handshake has failed.
            let has_failed = found & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
            let has_room = found & libc::EPOLLWRNORM != 0 && !has_failed;
            let mut room = None;
            for socket in sockets {
                let known = DESCRIPTORS.get(socket);
                let is_connected = known.as_ref().is_none_or(|known| {
                    known.stream().is_none_or(|known| known.stage() == SocketStage::Proposing)
                });
                if !is_connected || found & !libc::EPOLLWRNORM != 0 {
                    due.extend(known);
                }
                room = has_room.then(|| set.note_room(socket)).flatten().or(room);
            }
            match room {
                Some(room) => event = room,
                None => continue,
            }
        }
        if let Some(place) = out.get_mut(events) {
            *place = event;
            events += 1;
        }
    }
    if !due.is_empty() {
        // A signal during the handshakes ends the next sleep.
        signals.blocked.block();
        due.iter().for_each(waiting::go_on);
    }
    Reported { events, handshakes }
}

/// Waits for a set of the parent process, maybe with handshakes of the parent.
fn wait_in_child(
    fd: c_int,
    out: &mut [libc::epoll_event],
    (end, mask): (Option<Instant>, Option<SignalMask>),
) -> SysResult {
    loop {
        let n = epoll_wait(fd, out, left_of(end), mask)?;
        let mut events = 0;
        for at in 0..n {
            let Some(event) = out.get(at).copied() else { break };
            if !is_own(&event)
                && let Some(place) = out.get_mut(events)
            {
                *place = event;
                events += 1;
            }
        }
        if events > 0 || end.is_some_and(|end| Instant::now() >= end) {
            return Ok(events);
        }
    }
}

/// Waits without SMC connections. `None`: another thread or a handshake has added one meanwhile.
fn wait_in_kernel(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    end: Option<Instant>,
    signals: &mut Signals,
) -> Result<Option<usize>, Errno> {
    loop {
        let n = if set.has_undecided() { set.lock().poll_undecided(out) } else { 0 };
        let Some(rest) = out.get_mut(n..).filter(|rest| !rest.is_empty()) else {
            return Ok(Some(n));
        };
        let found = match n {
            0 => set.without_members(|| epoll_wait(fd, rest, left_of(end), signals.mask()))?,
            _ => epoll_wait(fd, rest, Some(Duration::ZERO), None)?,
        };
        let found = sort_events(set, rest, found, signals);
        let n = n + found.events;
        if n > 0 {
            return Ok(Some(n));
        }
        if set.has_members() {
            return Ok(None);
        }
        if !found.handshakes && end.is_some_and(|end| Instant::now() >= end) {
            return Ok(Some(0));
        }
    }
}

/// Waits with SMC connections: one thread polls the connections, others wait for the kernel's part.
/// `None`: no connection is left.
fn wait_here(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    end: Option<Instant>,
    signals: &mut Signals,
) -> Result<Option<usize>, Errno> {
    while !set.start_polling() {
        let turn = left_of(end).map_or(TURN, |left| left.min(TURN));
        let n = epoll_wait(fd, out, Some(turn), signals.mask())?;
        let found = sort_events(set, out, n, signals);
        let is_over = end.is_some_and(|end| Instant::now() >= end);
        if found.events > 0 || is_over && !found.handshakes {
            return Ok(Some(found.events));
        }
    }
    let result = wait_alone(set, fd, out, end, signals);
    set.stop_polling();
    result
}

/// A call that does not wait, beside the polling thread: the next turn of a thread that waits must not
/// depend on the end of this one.
fn look_once(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    signals: &mut Signals,
) -> Result<Option<usize>, Errno> {
    let sleeper = set.sleeper(fd)?;
    loop {
        let found = look(set, fd, sleeper, out, Instant::now(), signals)?;
        if found.events > 0 || !found.handshakes {
            return Ok(Some(found.events));
        }
    }
}

/// Polls the SMC connections, and asks the kernel for the rest if there is no event or the kernel was not
/// asked lately.
fn look(
    set: &EpollSet,
    fd: c_int,
    sleeper: &Sleeper,
    out: &mut [libc::epoll_event],
    now: Instant,
    signals: &mut Signals,
) -> Result<Reported, Errno> {
    let mut members = set.lock();
    let n = members.poll(&sleeper.watch, out);
    let mut found = Reported { events: n, handshakes: false };
    if n > 0 && !members.kernel_is_due(now) {
        return Ok(found);
    }
    members.kernel_asked(now);
    drop(members);
    sleeper.watch.poll_idle_peers();
    if let Some(rest) = out.get_mut(n..).filter(|rest| !rest.is_empty()) {
        let others = epoll_wait(fd, rest, Some(Duration::ZERO), None)?;
        let others = sort_events(set, rest, others, signals);
        found = Reported { events: n + others.events, handshakes: others.handshakes };
    }
    Ok(found)
}

fn wait_alone(
    set: &EpollSet,
    fd: c_int,
    out: &mut [libc::epoll_event],
    end: Option<Instant>,
    signals: &mut Signals,
) -> Result<Option<usize>, Errno> {
    let sleeper = set.sleeper(fd)?;
    loop {
        let count = sleeper.watch.count();
        let now = Instant::now();
        let found = look(set, fd, sleeper, out, now, signals)?;
        if found.events == 0 && found.handshakes {
            continue;
        }
        if found.events > 0 || end.is_some_and(|end| now >= end) {
            return Ok(Some(found.events));
        }
        if !set.has_members() {
            // The last connection was removed.
            return Ok(None);
        }
        if set.is_native() {
            // All connections have moved: only the kernel's part is left.
            let left = left_of(end).map_or(TURN, |left| left.min(TURN));
            let found = epoll_wait(fd, out, Some(left), signals.mask())?;
            let found = sort_events(set, out, found, signals);
            if found.events > 0 {
                return Ok(Some(found.events));
            }
            continue;
        }
        let begun = Instant::now();
        if sleeper.watch.spin_until(|| set.lock().have_changed(&sleeper.watch)) {
            continue;
        }
        if sleep(set, sleeper, count, left_of(end), signals.mask()) == Woken::Interrupted {
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
    // With other waiters on the same device, a line of a slab would wake for their connections.
    let each = sleeper.watch.arms_each(members.len());
    let lines = (!each).then(|| sleeper.watch.arm_lines());
    let armed = match &lines {
        None => members.streams().all(|stream| stream.arm()) && !members.has_any_changed(),
        Some(lines) => lines.is_quiet() && members.scanned_streams().all(|stream| stream.arm()),
    };
    if !armed || members.have_changed(&sleeper.watch) {
        disarm(&members, lines);
        return Woken::Changed;
    }
    // A reference of the call keeps the stream while the lock is not held.
    let any = members.first_descriptor();
    drop(members);
    let stream =
        any.as_ref().and_then(|descriptor| descriptor.stream()).and_then(StreamSocket::smc);
    let timeout = left.unwrap_or(Duration::MAX);
    let woken = sleeper.watch.sleep_with_mask(mask, stream, count, timeout, sleeper.outer.as_fd());
    sleeper.watch.clear_notifier();
    let mut members = set.lock();
    disarm(&members, lines);
    if members.tcp_is_due() {
        members.streams().for_each(|stream| stream.check_tcp());
    }
    woken
}

/// Undoes the arming for a sleep: of the lines of slabs, or else of each connection.
fn disarm(members: &EpollMembers, lines: Option<ArmedLines>) {
    match lines {
        None => members.streams().for_each(|stream| stream.disarm()),
        Some(lines) => {
            drop(lines);
            members.scanned_streams().for_each(|stream| stream.disarm());
        }
    }
}
