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
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::fork;
use crate::socket::epoll_members::{EpollMember, EpollMembers, OUT};
use crate::socket::sleeper::Sleeper;
use crate::socket::states::SocketStage;
use crate::socket::stream::{Registration, SocketRole};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};
use crate::sys::raw::{self, Errno, SysResult};

/// An epoll set.
#[derive(Debug)]
pub(crate) struct EpollSet {
    members: ForkMutex<EpollMembers>,
    /// Number of SMC connections polled by the library.
    polled: AtomicUsize,
    /// Number of sockets whose handshakes are left to the waits for the set.
    undecided: AtomicUsize,
    /// The kernel's set has everything.
    native: AtomicBool,
    /// A thread polls the connections.
    busy: AtomicBool,
    /// Number of threads waiting in the kernel, begun while the set had no SMC connections.
    kernel_waits: AtomicUsize,
    sleeper: OnceLock<Sleeper>,
    /// The generation of the process (see `fork`) that has made it.
    generation: u32,
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
        if self.is_native() || descriptor.stream().is_none_or(|socket| socket.owner.is_inherited())
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

    /// Whether waits for the set go on with handshakes of its sockets.
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
        // Before the kernel can report the socket to another thread.
        self.lock().add(EpollMember::new(descriptor, registration, true));
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
        if !members.decide(fd, &sleeper.watch) {
            return false;
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
        let member = self.lock().remove(fd)?;
        if member.undecided {
            self.undecided.fetch_sub(1, Ordering::SeqCst);
            return Some(member.events);
        }
        self.polled.fetch_sub(1, Ordering::SeqCst);
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
        Some(members.iter().map(|member| (member.fd, member.descriptor.clone())).collect())
    }

    /// Whether the kernel's set has everything, for good.
    pub(crate) fn is_native(&self) -> bool {
        self.native.load(Ordering::SeqCst)
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
