//! epoll sets that have SMC connections in them.
//!
//! A set looks its SMC connections up in shared memory, and asks the kernel for everything else; it
//! meets the kernel to sleep, with the program's signal mask if there is one. Where a set is used in a
//! way that only the kernel can carry out (it is itself polled), its SMC connections are put into the
//! kernel's set, by their readiness objects, for good.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_driver::{Look, Seen, SignalMask, SmcStream, Watch, Woken};

use crate::selection::session;
use crate::socket::registrations;
use crate::socket::stream::{Registration, Socket, Target};
use crate::sys::raw::{self, Errno, Sys};
use crate::sys::table::{self, Ref};

/// How long a busy set leaves the kernel unasked.
const KERNEL_PAUSE: Duration = Duration::from_micros(200);
/// How often a thread looks whether it may look connections up itself, while another one does.
const TURN: Duration = Duration::from_millis(5);

const IN: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
const OUT: u32 = libc::EPOLLOUT as u32 | libc::EPOLLWRNORM as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONCE: u32 = libc::EPOLLONESHOT as u32;

/// An epoll set.
#[derive(Debug)]
pub(crate) struct Set {
    inner: Mutex<Inner>,
    /// SMC connections that are looked up.
    looked_up: AtomicUsize,
    /// The kernel's set has everything.
    native: AtomicBool,
    /// A thread looks connections up.
    busy: AtomicBool,
    /// Threads that wait in the kernel for the set as it was without SMC connections.
    in_kernel: AtomicUsize,
    sleeper: std::sync::OnceLock<Sleeper>,
}

/// How the waiting thread sleeps.
#[derive(Debug)]
pub(crate) struct Sleeper {
    pub(crate) watch: Watch,
    /// The kernel's set, and the bell.
    pub(crate) outer: OwnedFd,
}

impl Sleeper {
    /// One that sleeps on nothing but its bell yet.
    pub(crate) fn new() -> std::io::Result<Sleeper> {
        Self::that_spins(session::config().map_or(Duration::ZERO, |config| config.spin))
    }

    /// One that looks at shared memory for so long before it sleeps.
    pub(crate) fn that_spins(spin: Duration) -> std::io::Result<Sleeper> {
        let watch = Watch::new(spin)?;
        let outer = raw::epoll_create1(libc::EPOLL_CLOEXEC)
            .map_err(|Errno(error)| std::io::Error::from_raw_os_error(error))?;
        let outer = crate::sys::owned(outer as c_int);
        let bell = watch.bell().as_raw_fd();
        raw::epoll_ctl(outer.as_raw_fd(), libc::EPOLL_CTL_ADD, bell, libc::EPOLLIN as u32, 0)
            .map_err(|Errno(error)| std::io::Error::from_raw_os_error(error))?;
        Ok(Sleeper { watch, outer })
    }

    /// Has it wake when `fd` shows one of `events`.
    pub(crate) fn add(&self, fd: c_int, events: u32) -> Sys {
        raw::epoll_ctl(self.outer.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, events, 0)
    }

    /// Takes [`Sleeper::add`] back.
    pub(crate) fn remove(&self, fd: c_int) {
        let _ = raw::epoll_ctl(self.outer.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, 0, 0);
    }
}

#[derive(Debug, Default)]
struct Inner {
    members: Vec<Member>,
    /// Where the next look begins, so that nobody starves.
    first: usize,
    ask_kernel: Option<Instant>,
    ask_tcp: Option<Instant>,
}

/// An SMC connection in a set. The reference keeps it as long as the registration lasts, which ends
/// with the last descriptor.
struct Member {
    fd: c_int,
    sock: Ref,
    events: u32,
    data: u64,
    /// What was seen at the last look, if nothing is to be told until that changes.
    quiet: Option<Seen>,
    /// What was seen when something was told last.
    told: Option<Seen>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl Member {
    fn stream(&self) -> Option<(&Socket, &SmcStream)> {
        let socket = self.sock.stream()?;
        Some((socket, socket.smc()?))
    }

    /// What is to be told now, if anything.
    fn look(&mut self) -> u32 {
        let (socket, stream) = match self.sock.stream().and_then(|s| Some((s, s.smc()?))) {
            Some(found) => found,
            None => return 0,
        };
        if self.quiet.is_some_and(|seen| !stream.news_since(seen)) {
            return 0;
        }
        let seen = stream.seen();
        if self.events & !(EDGE | ONCE) == 0 && self.events & ONCE != 0 {
            self.quiet = Some(seen);
            return 0;
        }
        let found = flags(stream.look(self.events & PRI != 0)) & (self.events | ALWAYS);
        if found == 0 {
            self.quiet = Some(seen);
            return 0;
        }
        if self.events & EDGE != 0 {
            let arrived = self.told.is_none_or(|told| !seen.same_for_reader(told));
            let room = found & OUT != 0 && socket.write_blocked.swap(false, Ordering::Relaxed);
            self.quiet = Some(seen);
            if !arrived && !room {
                return 0;
            }
            self.told = Some(seen);
        } else {
            self.quiet = None;
        }
        if self.events & ONCE != 0 {
            self.events &= EDGE | ONCE;
            self.quiet = Some(seen);
        }
        found
    }

    fn has_news(&self) -> bool {
        let Some((_, stream)) = self.stream() else { return false };
        self.quiet.is_none_or(|seen| stream.news_since(seen))
    }
}

/// Readiness as epoll says it.
pub(crate) fn flags(look: Look) -> u32 {
    let mut flags = 0;
    let mut set = |on, flag: u32| flags |= if on { flag } else { 0 };
    set(look.readable, IN);
    set(look.writable, OUT);
    set(look.urgent, PRI);
    set(look.read_closed, RDHUP);
    set(look.hang_up, libc::EPOLLHUP as u32);
    set(look.failed, libc::EPOLLERR as u32);
    flags
}

/// The set of a descriptor, made known if need be; `None`: it is nothing that we know of.
pub(crate) fn set_of(fd: c_int) -> Option<Ref> {
    table::get(fd).filter(|found| found.set().is_some())
}

impl Set {
    /// An empty set.
    pub(crate) fn new() -> Set {
        Set {
            inner: Mutex::default(),
            looked_up: AtomicUsize::new(0),
            native: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            in_kernel: AtomicUsize::new(0),
            sleeper: std::sync::OnceLock::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleeper(&self, set: c_int) -> Result<&Sleeper, Errno> {
        if let Some(sleeper) = self.sleeper.get() {
            return Ok(sleeper);
        }
        let sleeper = Sleeper::new()?;
        sleeper.add(set, libc::EPOLLIN as u32)?;
        let _ = self.sleeper.set(sleeper);
        self.sleeper.get().ok_or(Errno(libc::ENOMEM))
    }

    /// Wakes the thread that waits, because what is watched has changed.
    fn wake(&self) {
        if let Some(sleeper) = self.sleeper.get() {
            sleeper.watch.wake();
        }
    }

    /// Adds a connection to those that are looked up. `false`: the kernel must do it.
    pub(crate) fn add(&self, set: c_int, sock: &Ref, registration: &Registration) -> bool {
        if self.native.load(Ordering::SeqCst) || sock.stream().is_none_or(Socket::is_foreign) {
            return false;
        }
        let Ok(sleeper) = self.sleeper(set) else { return false };
        let Some(stream) = sock.stream().and_then(Socket::smc) else { return false };
        stream.watch(&sleeper.watch);
        self.lock().members.push(Member {
            fd: registration.fd,
            sock: sock.clone(),
            events: registration.events,
            data: registration.data,
            quiet: None,
            told: None,
        });
        if self.looked_up.fetch_add(1, Ordering::SeqCst) == 0
            && self.in_kernel.load(Ordering::SeqCst) > 0
        {
            self.call_back(set, sleeper);
        }
        sleeper.watch.wake();
        true
    }

    /// Has threads that wait for the kernel's set alone come back: the bell becomes part of it.
    fn call_back(&self, set: c_int, sleeper: &Sleeper) {
        let bell = sleeper.watch.bell();
        let _ = raw::epoll_ctl(
            set,
            libc::EPOLL_CTL_ADD,
            bell.as_raw_fd(),
            libc::EPOLLIN as u32,
            self.mark(),
        );
        let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
    }

    /// The data of the bell in the kernel's set: an address that no program has.
    fn mark(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    pub(crate) fn modify(&self, fd: c_int, events: u32, data: u64) {
        if let Some(member) = self.lock().members.iter_mut().find(|member| member.fd == fd) {
            (member.events, member.data) = (events, data);
            (member.quiet, member.told) = (None, None);
        }
        self.wake();
    }

    pub(crate) fn remove(&self, fd: c_int) -> Option<Registration> {
        let mut inner = self.lock();
        let at = inner.members.iter().position(|member| member.fd == fd)?;
        let member = inner.members.swap_remove(at);
        drop(inner);
        self.looked_up.fetch_sub(1, Ordering::SeqCst);
        if let (Some(sleeper), Some((_, stream))) = (self.sleeper.get(), member.stream()) {
            stream.unwatch(&sleeper.watch);
        }
        self.wake();
        let (events, data, target) = (member.events, member.data, Target::Shared);
        Some(Registration { set: -1, fd, events, data, target })
    }

    /// From now on the kernel's set has everything.
    pub(crate) fn go_native(&self, set: c_int) {
        if self.native.swap(true, Ordering::SeqCst) {
            return;
        }
        let socks: Vec<_> =
            self.lock().members.iter().map(|member| (member.fd, member.sock.clone())).collect();
        for (fd, sock) in socks {
            let Some(socket) = sock.stream() else { continue };
            let mut registrations = socket.registrations();
            let Some(known) = registrations.iter_mut().find(|r| r.set == set && r.fd == fd) else {
                continue;
            };
            // The mask as it is now: a ONESHOT may have been used up.
            if let Some(now) = self.remove(fd) {
                known.events = now.events;
            }
            known.target = registrations::put(self, set, &sock, socket, known);
        }
    }

    /// `epoll_pwait2`. `None`: the kernel does it all.
    pub(crate) fn wait(
        &self,
        set: c_int,
        out: &mut [libc::epoll_event],
        timeout: Option<Duration>,
        mask: Option<SignalMask>,
    ) -> Option<Sys> {
        if self.native.load(Ordering::SeqCst) || out.is_empty() {
            return None;
        }
        if self.looked_up.load(Ordering::SeqCst) == 0 {
            return Some(self.wait_in_kernel(set, out, timeout, mask));
        }
        Some(self.wait_here(set, out, timeout, mask))
    }

    /// Without SMC connections; one may come meanwhile, from another thread.
    fn wait_in_kernel(
        &self,
        set: c_int,
        out: &mut [libc::epoll_event],
        timeout: Option<Duration>,
        mask: Option<SignalMask>,
    ) -> Sys {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.in_kernel.fetch_add(1, Ordering::SeqCst);
            let found = match self.looked_up.load(Ordering::SeqCst) {
                0 => crate::sys::epoll_wait(set, out, left_of(end), mask),
                _ => Ok(0),
            };
            self.in_kernel.fetch_sub(1, Ordering::SeqCst);
            let n = self.without_mark(set, out, found?);
            if n > 0 || end.is_some_and(|end| Instant::now() >= end) {
                return Ok(n);
            }
            if self.looked_up.load(Ordering::SeqCst) > 0 {
                return self.wait_here(set, out, left_of(end), mask);
            }
        }
    }

    /// Removes the bell from what the kernel reported.
    fn without_mark(&self, set: c_int, out: &mut [libc::epoll_event], mut n: usize) -> usize {
        let mark = self.mark();
        let mut at = 0;
        while at < n {
            if out.get(at).is_some_and(|event| { event.u64 } == mark) {
                out.copy_within(at + 1..n, at);
                n -= 1;
                if let Some(sleeper) = self.sleeper.get() {
                    let bell = sleeper.watch.bell().as_raw_fd();
                    let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_DEL, bell, 0, 0);
                    sleeper.watch.clear_bell();
                }
            } else {
                at += 1;
            }
        }
        n
    }

    fn wait_here(
        &self,
        set: c_int,
        out: &mut [libc::epoll_event],
        timeout: Option<Duration>,
        mask: Option<SignalMask>,
    ) -> Sys {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        while self.busy.swap(true, Ordering::Acquire) {
            // Another thread has the connections. The kernel's part can be waited for side by side.
            let turn = left_of(end).map_or(TURN, |left| left.min(TURN));
            let n = crate::sys::epoll_wait(set, out, Some(turn), mask)?;
            let n = self.without_mark(set, out, n);
            if n > 0 || end.is_some_and(|end| Instant::now() >= end) {
                return Ok(n);
            }
        }
        let result = self.wait_alone(set, out, end, mask);
        self.busy.store(false, Ordering::Release);
        result
    }

    fn wait_alone(
        &self,
        set: c_int,
        out: &mut [libc::epoll_event],
        end: Option<Instant>,
        mask: Option<SignalMask>,
    ) -> Sys {
        let sleeper = self.sleeper(set)?;
        loop {
            let count = sleeper.watch.count();
            let mut inner = self.lock();
            let mut n = inner.look(out);
            let now = Instant::now();
            if n == 0 || inner.ask_kernel.is_none_or(|at| now >= at) {
                inner.ask_kernel = Some(now + KERNEL_PAUSE);
                if let Some((_, stream)) = inner.members.first().and_then(Member::stream) {
                    stream.tend();
                }
                drop(inner);
                if let Some(rest) = out.get_mut(n..).filter(|rest| !rest.is_empty()) {
                    let found = crate::sys::epoll_wait(set, rest, Some(Duration::ZERO), None)?;
                    n += self.without_mark(set, rest, found);
                }
            } else {
                drop(inner);
            }
            if n > 0 || end.is_some_and(|end| now >= end) {
                return Ok(n);
            }
            if self.looked_up.load(Ordering::SeqCst) == 0 || self.native.load(Ordering::SeqCst) {
                // The last one has gone, or they have all moved: the kernel's part is all there is.
                let left = left_of(end).map_or(TURN, |left| left.min(TURN));
                let found = crate::sys::epoll_wait(set, out, Some(left), mask)?;
                n = self.without_mark(set, out, found);
                if n > 0 {
                    return Ok(n);
                }
                continue;
            }
            let begun = Instant::now();
            let news = || self.lock().members.iter().any(Member::has_news);
            if sleeper.watch.spin_until(news) {
                continue;
            }
            if self.sleep(sleeper, count, left_of(end), mask) == Woken::Interrupted {
                return Err(Errno(libc::EINTR));
            }
            sleeper.watch.slept(begun.elapsed());
        }
    }

    /// Once a second: whether to look at the TCP connections underneath.
    fn tcp_due(&self) -> bool {
        let mut inner = self.lock();
        let now = Instant::now();
        let due = inner.ask_tcp.is_none_or(|at| now >= at);
        if due {
            inner.ask_tcp = Some(now + Duration::from_secs(1));
        }
        due
    }

    fn sleep(
        &self,
        sleeper: &Sleeper,
        count: u32,
        left: Option<Duration>,
        mask: Option<SignalMask>,
    ) -> Woken {
        let inner = self.lock();
        let streams = || inner.members.iter().filter_map(|m| Some((m, m.stream()?.1)));
        let armed = streams().all(|(_, stream)| stream.arm());
        if !armed || inner.members.iter().any(Member::has_news) {
            streams().for_each(|(_, stream)| stream.disarm());
            return Woken::Look;
        }
        // Kept by a reference of its own while the lock is not held.
        let any = inner.members.first().map(|member| member.sock.clone());
        drop(inner);
        let stream = any.as_ref().and_then(|sock| sock.stream()).and_then(Socket::smc);
        let timeout = left.unwrap_or(Duration::MAX);
        use std::os::fd::AsFd;
        let outer = sleeper.outer.as_fd();
        let woken = sleeper.watch.sleep_with_mask(mask, stream, count, timeout, outer);
        sleeper.watch.clear_bell();
        let late = self.tcp_due();
        let inner = self.lock();
        for (_, stream) in inner.members.iter().filter_map(|m| Some((m, m.stream()?.1))) {
            stream.disarm();
            if late {
                stream.look_at_tcp();
            }
        }
        woken
    }
}

impl Inner {
    /// Looks at every connection once, beginning behind the one that came last.
    fn look(&mut self, out: &mut [libc::epoll_event]) -> usize {
        let n = self.members.len();
        let start = if self.first < n { self.first } else { 0 };
        let mut told = 0;
        for step in 0..n {
            let at = if start + step < n { start + step } else { start + step - n };
            let Some(member) = self.members.get_mut(at) else { break };
            let Some(place) = out.get_mut(told) else {
                self.first = at;
                break;
            };
            let events = member.look();
            if events != 0 {
                *place = libc::epoll_event { events, u64: member.data };
                told += 1;
            }
        }
        told
    }
}

fn left_of(end: Option<Instant>) -> Option<Duration> {
    end.map(|end| end.saturating_duration_since(Instant::now()))
}

/// The set is being closed: sockets forget their registrations in it.
pub(crate) fn forget_set(found: &Set, set: c_int) {
    loop {
        let member = found.lock().members.first().map(|m| (m.fd, m.sock.clone()));
        let Some((fd, sock)) = member else { return };
        found.remove(fd);
        if let Some(socket) = sock.stream() {
            socket.registrations().retain(|r| r.set != set);
        }
    }
}

/// A set is used where only the kernel can look into it.
pub(crate) fn hand_to_kernel(fd: c_int) {
    if let Some(found) = set_of(fd)
        && let Some(set) = found.set()
    {
        set.go_native(fd);
    }
}
