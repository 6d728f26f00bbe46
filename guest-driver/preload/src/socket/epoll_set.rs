// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An epoll set of the program with SMC connections.
//!
//! The library polls the SMC connections of a set in shared memory, and leaves all other
//! descriptors to the kernel's set; see `io/epoll_wait.rs`. Polling begins with the first wait
//! through the library, since a program may wait by an instruction of its own. Until then the SMC
//! connections are in the kernel's set by their readiness descriptors. If the program uses a set in
//! a way that only the kernel can carry out (polling the set itself), the connections move there
//! for good.
//!
//! The data of each entry in the kernel's set are the program's, also in entries of the library.
//! The library knows events of its own entries by event bits not used otherwise ([`is_own`]).

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use crate::fork;
use crate::socket::epoll_members::{EpollMember, EpollMembers, OUT};
use crate::socket::sleeper::Sleeper;
use crate::socket::states::SocketStage;
use crate::socket::stream::{Registration, SocketRole};
use crate::socket::table::DescriptorRef;
use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};
use crate::sys::raw::{self, Errno, SysResult};
use ism_sys::OnceBox;

/// An epoll set.
#[derive(Debug)]
pub(crate) struct EpollSet {
    members: ForkMutex<EpollMembers>,
    /// Number of SMC connections polled by the library. SeqCst: counted before `kernel_waits` is read.
    polled: AtomicUsize,
    /// Number of sockets whose handshakes are left to the waits for the set. SeqCst: counted before the
    /// kernel can report the socket, in one order with `mode`.
    undecided: AtomicUsize,
    /// The poller of the connections: [`UNSEEN`] and the following values. SeqCst: changed before a look at
    /// the members, in one order with their counts.
    mode: AtomicU8,
    /// A thread polls the connections.
    busy: AtomicBool,
    /// Number of threads waiting in the kernel, begun while the set had no SMC connections. SeqCst: counted
    /// before `polled` is read.
    kernel_waits: AtomicUsize,
    sleeper: OnceBox<Sleeper>,
    /// The entry that ends waits in the kernel because of a new connection: the descriptor of the
    /// set and the connection's. [`NO_BELL`]: no entry. SeqCst, in one order with `kernel_waits`.
    bell: AtomicU64,
    /// The generation (see `fork`) of the process that made the set.
    generation: u32,
}

/// No wait has come through the library. Handshakes go on for a moment as if a wait will come.
const UNSEEN: u8 = 0;
/// No wait has come in time: the kernel's set has everything, until a wait comes.
const UNSEEN_FOR_LONG: u8 = 1;
/// The library polls the connections.
const POLLED: u8 = 2;
/// The kernel's set has everything, for good.
const NATIVE: u8 = 3;

const NO_BELL: u64 = u64::MAX;

/// The event bits of the library's entries for handshakes, instead of EPOLLIN and EPOLLOUT.
const ROOM: u32 = libc::EPOLLWRNORM as u32;
const NORMAL: u32 = libc::EPOLLRDNORM as u32 | ROOM;
const USUAL: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLPRI) as u32;

/// Whether an event is of an entry made by the library, or by a program asking for nothing but
/// these bits.
pub(crate) fn is_own(event: &libc::epoll_event) -> bool {
    event.events & NORMAL != 0 && event.events & USUAL == 0
}

impl EpollSet {
    /// An empty set.
    pub(crate) fn new() -> EpollSet {
        EpollSet {
            members: ForkMutex::new(EpollMembers::default()),
            polled: AtomicUsize::new(0),
            undecided: AtomicUsize::new(0),
            mode: AtomicU8::new(UNSEEN),
            busy: AtomicBool::new(false),
            kernel_waits: AtomicUsize::new(0),
            sleeper: OnceBox::new(),
            bell: AtomicU64::new(NO_BELL),
            generation: fork::generation(),
        }
    }

    /// Whether the set belongs to an ancestor of this process.
    pub(crate) fn is_inherited(&self) -> bool {
        self.generation != fork::generation()
    }

    /// The polled connections, locked.
    pub(crate) fn lock(&self) -> ForkMutexGuard<'_, EpollMembers> {
        self.members.lock()
    }

    /// The sleeper of threads waiting for this set, if one was made.
    pub(crate) fn known_sleeper(&self) -> Option<&Sleeper> {
        self.sleeper.get()
    }

    /// The sleeper of threads waiting for this set, made on the first call. `set`: the set's
    /// descriptor.
    pub(crate) fn sleeper(&self, set: c_int) -> Result<&Sleeper, Errno> {
        if let Some(sleeper) = self.sleeper.get() {
            return Ok(sleeper);
        }
        let sleeper = Sleeper::new()?;
        sleeper.add(set, libc::EPOLLIN as u32)?;
        let _ = self.sleeper.set(sleeper);
        self.sleeper.get().ok_or(Errno(libc::ENOMEM))
    }

    /// Wakes the waiting thread, because the members have changed.
    fn wake(&self) {
        if let Some(sleeper) = self.sleeper.get() {
            sleeper.watch.wake();
        }
    }

    /// Adds a connection to the polled ones. `false`: the kernel must poll the connection.
    pub(crate) fn add(
        &self,
        set: c_int,
        descriptor: &DescriptorRef,
        registration: &Registration,
    ) -> bool {
        if !self.is_polled() || descriptor.stream().is_none_or(|socket| socket.owner.is_inherited())
        {
            return false;
        }
        let Ok(sleeper) = self.sleeper(set) else { return false };
        let mut members = self.lock();
        let number = members.add(EpollMember::new(descriptor, registration, false));
        if !members.watch(number, &sleeper.watch) {
            members.remove(registration.fd);
            return false;
        }
        drop(members);
        self.count_polled(set, sleeper, registration);
        true
    }

    /// One connection more is polled by the library.
    fn count_polled(&self, set: c_int, sleeper: &Sleeper, registration: &Registration) {
        if self.polled.fetch_add(1, Ordering::SeqCst) == 0
            && self.kernel_waits.load(Ordering::SeqCst) > 0
        {
            self.interrupt_kernel_waits(set, registration.fd, registration.data);
        }
        sleeper.watch.wake();
    }

    /// Whether waits for the set go on with handshakes of its sockets.
    pub(crate) fn can_go_on_with_handshakes(&self) -> bool {
        matches!(self.mode(), UNSEEN | POLLED) && !self.is_inherited()
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
        // Before the kernel can report the socket to another thread.
        self.lock().add(EpollMember::new(descriptor, registration, true));
        self.undecided.fetch_add(1, Ordering::SeqCst);
        let added = self.watch_handshake(set, libc::EPOLL_CTL_ADD, descriptor, registration);
        if added.is_err() {
            self.remove(fd);
        }
        added.is_ok()
    }

    /// The handshake of a socket has ended with SMC: the library polls the connection from now on.
    /// `false`: the connection is not in the set any more, or the kernel must poll it.
    pub(crate) fn decide(&self, registration: &Registration) -> bool {
        let Registration { set, fd, .. } = *registration;
        let sleeper = self.sleeper(set);
        let (Ok(sleeper), true) = (sleeper, self.is_polled()) else {
            self.remove(fd);
            return false;
        };
        let mut members = self.lock();
        if !members.decide(fd, &sleeper.watch) {
            return false;
        }
        drop(members);
        self.undecided.fetch_sub(1, Ordering::SeqCst);
        self.count_polled(set, sleeper, registration);
        true
    }

    /// The sockets whose handshakes may have caused an event with these data; none if the handshake
    /// has ended meanwhile. `None`: no known socket has these data.
    pub(crate) fn handshakes_of(&self, data: u64) -> Option<Vec<c_int>> {
        let members = self.lock();
        let found: Vec<_> = members.undecided_with(data).collect();
        (!found.is_empty() || members.iter().any(|member| member.data == data)).then_some(found)
    }

    /// Notes the kernel's report of room to write for a socket with an incomplete handshake.
    /// Returns the event for the program.
    pub(crate) fn note_room(&self, fd: c_int) -> Option<libc::epoll_event> {
        let mut members = self.lock();
        let member = members.undecided(fd)?;
        if std::mem::replace(&mut member.has_room, true) {
            // The next poll reports the room.
            return None;
        }
        let events = member.poll_undecided();
        (events != 0).then_some(libc::epoll_event { events, u64: member.data })
    }

    /// Whether the waits for the set go on with handshakes.
    pub(crate) fn has_undecided(&self) -> bool {
        self.undecided.load(Ordering::SeqCst) > 0
    }

    /// Makes threads return from a wait for the kernel's set alone: the set gets an entry for the
    /// TCP socket of a connection, which has room for bytes.
    fn interrupt_kernel_waits(&self, set: c_int, fd: c_int, data: u64) {
        if raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, ROOM, data).is_ok() {
            let bell = (set as u32 as u64) << 32 | u64::from(fd as u32);
            self.bell.store(bell, Ordering::SeqCst);
        }
    }

    /// Takes the entry of [`EpollSet::interrupt_kernel_waits`] back, once all threads have returned.
    /// Without the entry, a thread woken but not running yet would sleep again.
    pub(crate) fn silence(&self) {
        if self.kernel_waits.load(Ordering::SeqCst) == 0 {
            let _ = self.silence_if(|_| true);
        }
    }

    /// Takes the entry back if `of` returns `true` for its descriptor. Returns the set's descriptor
    /// then.
    fn silence_if(&self, of: impl FnOnce(c_int) -> bool) -> Option<c_int> {
        let bell = self.bell.load(Ordering::SeqCst);
        if bell == NO_BELL || !of(bell as u32 as c_int) {
            return None;
        }
        self.bell.compare_exchange(bell, NO_BELL, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        let set = (bell >> 32) as c_int;
        let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_DEL, bell as u32 as c_int, 0, 0);
        Some(set)
    }

    /// Changes the mask and the data of a connection.
    pub(crate) fn modify(&self, fd: c_int, events: u32, data: u64) {
        self.lock().modify(fd, events, data);
        self.wake();
    }

    /// Polls a connection again although no word of the peer has changed.
    pub(crate) fn recheck(&self, fd: c_int) {
        self.lock().recheck(fd);
        self.wake();
    }

    /// Removes a connection. Returns the current mask: an EPOLLONESHOT may have been used up.
    pub(crate) fn remove(&self, fd: c_int) -> Option<u32> {
        let interrupted = self.silence_if(|of| of == fd);
        let mut members = self.lock();
        let member = members.remove(fd)?;
        let next =
            members.iter().find(|other| !other.undecided).map(|other| (other.fd, other.data));
        drop(members);
        if let (Some(set), Some((fd, data))) = (interrupted, next) {
            // Another connection's entry, for threads not running yet.
            self.interrupt_kernel_waits(set, fd, data);
        }
        if member.undecided {
            self.undecided.fetch_sub(1, Ordering::SeqCst);
            return Some(member.events);
        }
        self.polled.fetch_sub(1, Ordering::SeqCst);
        self.wake();
        Some(member.events)
    }

    fn mode(&self) -> u8 {
        self.mode.load(Ordering::SeqCst)
    }

    /// Whether the library polls connections: a wait has come through the library, and no use of
    /// the set that only the kernel can carry out.
    pub(crate) fn is_polled(&self) -> bool {
        self.mode() == POLLED
    }

    /// Notes a wait through the library. `true`: the first one.
    pub(crate) fn note_wait(&self) -> bool {
        let unseen = |mode| (mode < POLLED).then_some(POLLED);
        self.mode.fetch_update(Ordering::SeqCst, Ordering::SeqCst, unseen).is_ok()
    }

    /// Leaves everything to the kernel's set until a wait comes through the library. `false`: a
    /// wait has come.
    pub(crate) fn leave_unseen(&self) -> bool {
        let unseen = |mode| (mode < POLLED).then_some(UNSEEN_FOR_LONG);
        self.mode.fetch_update(Ordering::SeqCst, Ordering::SeqCst, unseen).is_ok()
    }

    /// Leaves everything to the kernel's set from now on. Returns the connections to move; `None`:
    /// all have moved already.
    pub(crate) fn make_native(&self) -> Option<Vec<(c_int, DescriptorRef)>> {
        if self.mode.swap(NATIVE, Ordering::SeqCst) == NATIVE {
            return None;
        }
        let members = self.lock();
        Some(members.iter().map(|member| (member.fd, member.descriptor.clone())).collect())
    }

    /// Whether the kernel's set has everything, for good.
    pub(crate) fn is_native(&self) -> bool {
        self.mode() == NATIVE
    }

    /// Whether the library polls any connections.
    pub(crate) fn has_members(&self) -> bool {
        self.polled.load(Ordering::SeqCst) > 0
    }

    /// Runs `wait` for the kernel's set, unless the library polls connections. If a connection
    /// comes meanwhile, [`EpollSet::add`] ends the wait.
    pub(crate) fn without_members<T: Default, E>(
        &self,
        wait: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.kernel_waits.fetch_add(1, Ordering::SeqCst);
        let result = if self.has_members() { Ok(T::default()) } else { wait() };
        self.kernel_waits.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Makes the caller the polling thread. `false`: another thread polls.
    pub(crate) fn start_polling(&self) -> bool {
        !self.busy.swap(true, Ordering::Acquire)
    }

    /// Undoes [`EpollSet::start_polling`].
    pub(crate) fn stop_polling(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// Closes the set: its sockets remove their registrations in it.
    pub(crate) fn close(&self, set: c_int) {
        loop {
            let member = self.lock().iter().next().map(|m| (m.fd, m.descriptor.clone()));
            let Some((fd, descriptor)) = member else { return };
            self.remove(fd);
            if let Some(socket) = descriptor.stream() {
                socket.registrations().retain(|r| r.set != set);
            }
        }
    }

    /// Enters a socket with an incomplete handshake in the kernel's set, or changes its entry
    /// there. The kernel then reports earlier bytes at once. Before the first wait of the library
    /// the entry is for the program's own waits.
    pub(crate) fn watch_handshake(
        &self,
        set: c_int,
        op: c_int,
        descriptor: &DescriptorRef,
        registration: &Registration,
    ) -> SysResult {
        let Registration { fd, events: wanted, data, .. } = *registration;
        let client = descriptor.stream().filter(|socket| socket.role() == SocketRole::Client);
        if !self.is_polled() {
            let events = client.map_or(0, |_| writable_only(wanted));
            return raw::epoll_ctl(set, op, fd, events, data);
        }
        // The handshake of a client may wait until TCP is connected.
        let room = match client {
            Some(socket) if socket.stage() != SocketStage::Proposing || wanted & OUT != 0 => ROOM,
            _ => 0,
        };
        let edges = (libc::EPOLLRDNORM | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
        raw::epoll_ctl(set, op, fd, edges | room, data)
    }
}

/// The kernel's mask for an undecided client: the next bytes belong to the handshake.
pub(crate) fn writable_only(events: u32) -> u32 {
    let kept = libc::EPOLLOUT | libc::EPOLLWRNORM | libc::EPOLLET | libc::EPOLLONESHOT;
    events & kept as u32
}
