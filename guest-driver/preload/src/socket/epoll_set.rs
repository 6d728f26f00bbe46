//! An epoll set of the program that has SMC connections in it.
//!
//! The library polls the SMC connections of a set in shared memory, and leaves all other
//! descriptors to the kernel's set; see `io/epoll_wait.rs`. If the program uses a set in a way that
//! only the kernel can carry out (it polls the set itself), the SMC connections move into the
//! kernel's set by their readiness descriptors, for good.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use guest_driver::{ChangeToken, Readiness, SmcStream};

use crate::fork;
use crate::socket::sleeper::Sleeper;
use crate::socket::states::SocketStage;
use crate::socket::stream::{Registration, SocketRole, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};
use crate::sys::raw::{self, Errno, SysResult};

/// How long the library polls the connections of a busy set without asking the kernel.
const KERNEL_PAUSE: Duration = Duration::from_micros(200);
/// How often the library looks at the TCP connections underneath.
const TCP_PAUSE: Duration = Duration::from_secs(1);

const IN: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
const OUT: u32 = libc::EPOLLOUT as u32 | libc::EPOLLWRNORM as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONCE: u32 = libc::EPOLLONESHOT as u32;

/// An epoll set.
#[derive(Debug)]
pub(crate) struct EpollSet {
    members: ForkMutex<EpollMembers>,
    /// Number of SMC connections that the library polls.
    polled: AtomicUsize,
    /// Number of sockets whose handshakes the waits for the set go on with.
    undecided: AtomicUsize,
    /// The kernel's set has everything.
    native: AtomicBool,
    /// A thread polls the connections.
    busy: AtomicBool,
    /// Number of threads that wait in the kernel for the set as it was without SMC connections.
    kernel_waits: AtomicUsize,
    sleeper: OnceLock<Sleeper>,
    /// The generation of the process (see `fork`) that has made it.
    generation: u32,
}

/// The SMC connections of a set that the library polls.
#[derive(Debug, Default)]
pub(crate) struct EpollMembers {
    list: Vec<EpollMember>,
    /// Where the next poll begins, so that no connection starves.
    first: usize,
    ask_kernel: Option<Instant>,
    ask_tcp: Option<Instant>,
}

/// An SMC connection in a set. The reference keeps it as long as the registration lasts, which ends
/// with the last descriptor.
struct EpollMember {
    fd: c_int,
    descriptor: DescriptorRef,
    events: u32,
    data: u64,
    /// The state at the last poll, if there is nothing to report until it changes.
    idle: Option<ChangeToken>,
    /// The state when the last event was reported.
    reported: Option<ChangeToken>,
    /// The handshake is not complete. The kernel's set has the socket, with the library's mark.
    undecided: bool,
    /// TCP takes bytes, as the kernel has said during the handshake.
    has_room: bool,
    /// The program has been told so.
    room_reported: bool,
}

impl std::fmt::Debug for EpollMember {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EpollMember").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl EpollMember {
    fn new(descriptor: &DescriptorRef, registration: &Registration, undecided: bool) -> Self {
        EpollMember {
            fd: registration.fd,
            descriptor: descriptor.clone(),
            events: registration.events,
            data: registration.data,
            idle: None,
            reported: None,
            undecided,
            has_room: false,
            room_reported: false,
        }
    }

    fn stream(&self) -> Option<(&StreamSocket, &SmcStream)> {
        let socket = self.descriptor.stream()?;
        Some((socket, socket.smc()?))
    }

    /// Whether to report that the program may write, although the handshake is not complete.
    fn is_writable_early(&self) -> bool {
        self.has_room
            && self.events & OUT != 0
            && !(self.room_reported && self.events & EDGE != 0)
            && self.descriptor.stream().is_some_and(StreamSocket::is_writable_early)
    }

    /// The events to report during the handshake; 0: none.
    fn poll_undecided(&mut self) -> u32 {
        if !self.is_writable_early() {
            return 0;
        }
        let found = self.events & OUT;
        self.room_reported = true;
        if self.events & ONCE != 0 {
            self.events &= EDGE | ONCE;
        }
        found
    }

    /// The events to report now; 0: none.
    fn poll(&mut self) -> u32 {
        if self.undecided {
            return self.poll_undecided();
        }
        let (socket, stream) = match self.descriptor.stream().and_then(|s| Some((s, s.smc()?))) {
            Some(found) => found,
            None => return 0,
        };
        if self.idle.is_some_and(|token| !stream.changed_since(token)) {
            return 0;
        }
        let token = stream.change_token();
        if self.events & !(EDGE | ONCE) == 0 && self.events & ONCE != 0 {
            self.idle = Some(token);
            return 0;
        }
        let readiness = socket.readiness(stream, self.events & PRI != 0);
        let found = epoll_events(readiness) & (self.events | ALWAYS);
        if found == 0 {
            self.idle = Some(token);
            return 0;
        }
        if self.events & EDGE != 0 {
            let arrived = self.reported.is_none_or(|reported| !token.same_for_reader(reported));
            let room = found & OUT != 0 && socket.write_blocked.swap(false, Ordering::Relaxed);
            self.idle = Some(token);
            // What was reported during the handshake is no news.
            let is_known = self.room_reported && self.reported.is_none() && found & !OUT == 0;
            if is_known && !room {
                self.reported = Some(token);
            }
            if (!arrived || is_known) && !room {
                return 0;
            }
            self.reported = Some(token);
        } else {
            self.idle = None;
        }
        if self.events & ONCE != 0 {
            self.events &= EDGE | ONCE;
            self.idle = Some(token);
        }
        found
    }

    fn has_changed(&self) -> bool {
        if self.undecided {
            return self.is_writable_early();
        }
        let Some((_, stream)) = self.stream() else { return false };
        self.idle.is_none_or(|token| stream.changed_since(token))
    }
}

/// Readiness as epoll and poll encode it.
pub(crate) fn epoll_events(readiness: Readiness) -> u32 {
    let mut events = 0;
    let mut set = |on, event: u32| events |= if on { event } else { 0 };
    set(readiness.readable, IN);
    set(readiness.writable, OUT);
    set(readiness.urgent, PRI);
    set(readiness.read_closed, RDHUP);
    set(readiness.hang_up, libc::EPOLLHUP as u32);
    set(readiness.failed, libc::EPOLLERR as u32);
    events
}

impl EpollSet {
    /// An empty set.
    pub(crate) fn new() -> EpollSet {
        EpollSet {
            members: ForkMutex::new(EpollMembers::default()),
            polled: AtomicUsize::new(0),
            undecided: AtomicUsize::new(0),
            native: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            kernel_waits: AtomicUsize::new(0),
            sleeper: OnceLock::new(),
            generation: fork::generation(),
        }
    }

    /// Whether it belongs to an ancestor of this process.
    pub(crate) fn is_inherited(&self) -> bool {
        self.generation != fork::generation()
    }

    /// The connections that the library polls, locked.
    pub(crate) fn lock(&self) -> ForkMutexGuard<'_, EpollMembers> {
        self.members.lock()
    }

    /// What a thread sleeps on that waits for this set. `set`: the set's descriptor.
    pub(crate) fn sleeper(&self, set: c_int) -> Result<&Sleeper, Errno> {
        if let Some(sleeper) = self.sleeper.get() {
            return Ok(sleeper);
        }
        let sleeper = Sleeper::new()?;
        sleeper.add(set, libc::EPOLLIN as u32)?;
        let _ = self.sleeper.set(sleeper);
        self.sleeper.get().ok_or(Errno(libc::ENOMEM))
    }

    /// Wakes the thread that waits, because the members have changed.
    fn wake(&self) {
        if let Some(sleeper) = self.sleeper.get() {
            sleeper.watch.wake();
        }
    }

    /// Adds a connection to those that the library polls. `false`: the kernel must poll it.
    pub(crate) fn add(
        &self,
        set: c_int,
        descriptor: &DescriptorRef,
        registration: &Registration,
    ) -> bool {
        if self.is_native() || descriptor.stream().is_none_or(StreamSocket::is_inherited) {
            return false;
        }
        let Ok(sleeper) = self.sleeper(set) else { return false };
        let Some(stream) = descriptor.stream().and_then(StreamSocket::smc) else { return false };
        stream.watch(&sleeper.watch);
        self.lock().list.push(EpollMember::new(descriptor, registration, false));
        self.count_polled(set, sleeper);
        true
    }

    /// One connection more is polled by the library.
    fn count_polled(&self, set: c_int, sleeper: &Sleeper) {
        if self.polled.fetch_add(1, Ordering::SeqCst) == 0
            && self.kernel_waits.load(Ordering::SeqCst) > 0
        {
            self.interrupt_kernel_waits(set, sleeper);
        }
        sleeper.watch.wake();
    }

    /// Whether waits for the set go on with handshakes of sockets in it.
    pub(crate) fn can_go_on_with_handshakes(&self) -> bool {
        !self.is_native() && !self.is_inherited()
    }

    /// Has the waits for the set go on with the handshake of a socket. `false`: the set cannot.
    pub(crate) fn add_undecided(
        &self,
        set: c_int,
        descriptor: &DescriptorRef,
        registration: &Registration,
    ) -> bool {
        if !self.can_go_on_with_handshakes() {
            return false;
        }
        let fd = registration.fd;
        // Before the kernel can report it to another thread.
        self.lock().list.push(EpollMember::new(descriptor, registration, true));
        self.undecided.fetch_add(1, Ordering::SeqCst);
        let added = watch_handshake(set, libc::EPOLL_CTL_ADD, descriptor, registration);
        if added.is_err() {
            self.remove(fd);
        }
        added.is_ok()
    }

    /// The handshake of a socket has ended with SMC: the library polls the connection from now on.
    /// `false`: the set has it no more, or the kernel must poll it.
    pub(crate) fn decide(&self, set: c_int, fd: c_int) -> bool {
        let Ok(sleeper) = self.sleeper(set) else {
            self.remove(fd);
            return false;
        };
        let mut members = self.lock();
        let undecided = |member: &&mut EpollMember| member.fd == fd && member.undecided;
        let Some(member) = members.list.iter_mut().find(undecided) else { return false };
        member.undecided = false;
        if let Some((_, stream)) = member.stream() {
            stream.watch(&sleeper.watch);
        }
        drop(members);
        self.undecided.fetch_sub(1, Ordering::SeqCst);
        self.count_polled(set, sleeper);
        true
    }

    /// Takes note of what the kernel says of a socket whose handshake is not complete. Returns what
    /// the program learns of it now.
    pub(crate) fn note_room(&self, fd: c_int) -> Option<libc::epoll_event> {
        let mut members = self.lock();
        let known = |member: &&mut EpollMember| member.fd == fd && member.undecided;
        let member = members.list.iter_mut().find(known)?;
        if std::mem::replace(&mut member.has_room, true) {
            // The next poll reports it.
            return None;
        }
        let events = member.poll_undecided();
        (events != 0).then_some(libc::epoll_event { events, u64: member.data })
    }

    /// Whether the waits for the set go on with handshakes.
    pub(crate) fn has_undecided(&self) -> bool {
        self.undecided.load(Ordering::SeqCst) > 0
    }

    /// Makes threads that wait for the kernel's set alone come back: the sleeper's eventfd becomes
    /// part of the kernel's set.
    fn interrupt_kernel_waits(&self, set: c_int, sleeper: &Sleeper) {
        let eventfd = sleeper.watch.notifier();
        let _ = raw::epoll_ctl(
            set,
            libc::EPOLL_CTL_ADD,
            eventfd.as_raw_fd(),
            libc::EPOLLIN as u32,
            self.mark(),
        );
        let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
    }

    /// The data of the sleeper's eventfd in the kernel's set: an address that no program has.
    fn mark(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    /// Removes the sleeper's eventfd from what the kernel reported. Returns how many events are
    /// left.
    pub(crate) fn remove_mark(
        &self,
        set: c_int,
        out: &mut [libc::epoll_event],
        mut n: usize,
    ) -> usize {
        let mark = self.mark();
        let mut at = 0;
        while at < n {
            if out.get(at).is_some_and(|event| { event.u64 } == mark) {
                out.copy_within(at + 1..n, at);
                n -= 1;
                if let Some(sleeper) = self.sleeper.get() {
                    let eventfd = sleeper.watch.notifier().as_raw_fd();
                    let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_DEL, eventfd, 0, 0);
                    sleeper.watch.clear_notifier();
                }
            } else {
                at += 1;
            }
        }
        n
    }

    /// Changes the mask and the data of a connection.
    pub(crate) fn modify(&self, fd: c_int, events: u32, data: u64) {
        if let Some(member) = self.lock().list.iter_mut().find(|member| member.fd == fd) {
            (member.events, member.data) = (events, data);
            (member.idle, member.reported) = (None, None);
            member.room_reported = false;
        }
        self.wake();
    }

    /// Polls a connection again although no word of the peer has changed.
    pub(crate) fn recheck(&self, fd: c_int) {
        if let Some(member) = self.lock().list.iter_mut().find(|member| member.fd == fd) {
            (member.idle, member.reported) = (None, None);
        }
        self.wake();
    }

    /// Removes a connection. Returns its mask as it is now: an EPOLLONESHOT may have been used up.
    pub(crate) fn remove(&self, fd: c_int) -> Option<u32> {
        let mut members = self.lock();
        let at = members.list.iter().position(|member| member.fd == fd)?;
        let member = members.list.swap_remove(at);
        drop(members);
        if member.undecided {
            self.undecided.fetch_sub(1, Ordering::SeqCst);
            return Some(member.events);
        }
        self.polled.fetch_sub(1, Ordering::SeqCst);
        if let (Some(sleeper), Some((_, stream))) = (self.sleeper.get(), member.stream()) {
            stream.unwatch(&sleeper.watch);
        }
        self.wake();
        Some(member.events)
    }

    /// Leaves everything to the kernel's set from now on. Returns the connections that must move
    /// there; `None`: they have moved already.
    pub(crate) fn make_native(&self) -> Option<Vec<(c_int, DescriptorRef)>> {
        if self.native.swap(true, Ordering::SeqCst) {
            return None;
        }
        let members = self.lock();
        Some(members.list.iter().map(|member| (member.fd, member.descriptor.clone())).collect())
    }

    /// Whether the kernel's set has everything.
    pub(crate) fn is_native(&self) -> bool {
        self.native.load(Ordering::SeqCst)
    }

    /// Whether there are connections that the library polls.
    pub(crate) fn has_members(&self) -> bool {
        self.polled.load(Ordering::SeqCst) > 0
    }

    /// Runs `wait`, which waits for the kernel's set, unless there are connections that the library
    /// polls. If one comes meanwhile, [`EpollSet::add`] ends the wait.
    pub(crate) fn without_members<T: Default, E>(
        &self,
        wait: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.kernel_waits.fetch_add(1, Ordering::SeqCst);
        let result = if self.has_members() { Ok(T::default()) } else { wait() };
        self.kernel_waits.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Makes the caller the thread that polls the connections. `false`: another thread is.
    pub(crate) fn start_polling(&self) -> bool {
        !self.busy.swap(true, Ordering::Acquire)
    }

    /// Ends what [`EpollSet::start_polling`] has begun.
    pub(crate) fn stop_polling(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// Closes the set: its sockets remove their registrations in it.
    pub(crate) fn close(&self, set: c_int) {
        loop {
            let member = self.lock().list.first().map(|m| (m.fd, m.descriptor.clone()));
            let Some((fd, descriptor)) = member else { return };
            self.remove(fd);
            if let Some(socket) = descriptor.stream() {
                socket.registrations().retain(|r| r.set != set);
            }
        }
    }
}

/// Enters a socket whose handshake is not complete in the kernel's set, or changes its entry there.
/// The kernel then reports at once what is there already.
pub(crate) fn watch_handshake(
    set: c_int,
    op: c_int,
    descriptor: &DescriptorRef,
    registration: &Registration,
) -> SysResult {
    let Some(mark) = DESCRIPTORS.address_of(registration.fd) else {
        return Err(Errno(libc::EBADF));
    };
    // The handshake of a client may wait until TCP is connected.
    let room = match descriptor.stream() {
        Some(socket) if socket.role() == SocketRole::Client => {
            let connected = socket.stage() == SocketStage::Proposing;
            if connected && registration.events & OUT == 0 { 0 } else { libc::EPOLLOUT }
        }
        _ => 0,
    };
    let events = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET | room;
    raw::epoll_ctl(set, op, registration.fd, events as u32, mark)
}

impl EpollMembers {
    /// Polls the sockets whose handshakes are not complete. Returns how many events were written to
    /// `out`.
    pub(crate) fn poll_undecided(&mut self, out: &mut [libc::epoll_event]) -> usize {
        let mut reported = 0;
        for member in self.list.iter_mut().filter(|member| member.undecided) {
            let Some(place) = out.get_mut(reported) else { break };
            let events = member.poll_undecided();
            if events != 0 {
                *place = libc::epoll_event { events, u64: member.data };
                reported += 1;
            }
        }
        reported
    }

    /// Polls every connection once, beginning behind the one whose events came last. Returns how
    /// many events were written to `out`.
    pub(crate) fn poll(&mut self, out: &mut [libc::epoll_event]) -> usize {
        let n = self.list.len();
        let start = if self.first < n { self.first } else { 0 };
        let mut reported = 0;
        for step in 0..n {
            let at = if start + step < n { start + step } else { start + step - n };
            let Some(member) = self.list.get_mut(at) else { break };
            let Some(place) = out.get_mut(reported) else {
                self.first = at;
                break;
            };
            let events = member.poll();
            if events != 0 {
                *place = libc::epoll_event { events, u64: member.data };
                reported += 1;
            }
        }
        reported
    }

    /// Whether a connection may have events that the last poll did not report.
    pub(crate) fn have_changed(&self) -> bool {
        self.list.iter().any(EpollMember::has_changed)
    }

    /// The connections.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &SmcStream> {
        self.list.iter().filter_map(|member| Some(member.stream()?.1))
    }

    /// The first SMC connection's stream, if it is one of this process.
    pub(crate) fn first_stream(&self) -> Option<&SmcStream> {
        self.streams().next()
    }

    /// A reference of the caller's own to the first SMC connection.
    pub(crate) fn first_descriptor(&self) -> Option<DescriptorRef> {
        let first = self.list.iter().find(|member| member.stream().is_some());
        first.map(|member| member.descriptor.clone())
    }

    /// Whether the kernel was not asked for [`KERNEL_PAUSE`].
    pub(crate) fn kernel_is_due(&mut self, now: Instant) -> bool {
        self.ask_kernel.is_none_or(|at| now >= at)
    }

    /// Notes that the kernel is being asked.
    pub(crate) fn kernel_asked(&mut self, now: Instant) {
        self.ask_kernel = Some(now + KERNEL_PAUSE);
    }

    /// Whether it is time to look at the TCP connections underneath. If so, the next pause begins.
    pub(crate) fn tcp_is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = self.ask_tcp.is_none_or(|at| now >= at);
        if due {
            self.ask_tcp = Some(now + TCP_PAUSE);
        }
        due
    }
}
