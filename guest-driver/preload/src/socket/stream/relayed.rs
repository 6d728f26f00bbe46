// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection carried by another process. Its descriptor is a Unix socket (see `relay`).

use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering, fence};

use rustix::time::ClockId;

use crate::fork;
use crate::socket::pair::AddressPair;
use crate::sys::own_numbers;

/// Ticks per second of the times in `/proc` (USER_HZ).
const TICKS: u64 = 100;

/// A relay needed only as long as other processes may use the connection. The library takes the
/// relay back when the other processes have closed the connection or have ended (see
/// `relay::take_back`). All the program's descriptors of the connection have the same temporary
/// relay.
#[derive(Debug)]
pub(crate) struct TemporaryRelay {
    /// The inode of the program's end of the pair.
    pub(crate) inode: u64,
    /// Start of the relay: ticks since the machine was started. Any process with an inherited end
    /// is younger.
    pub(crate) begun: u64,
    /// No other process had the end when [`fork::children`] returned this number less one; 0:
    /// others may have the end. SeqCst: the count of children is read behind this word.
    alone: AtomicU64,
    /// A thread tries to take the relay back, or has done so. SeqCst: set before the references are
    /// counted; read behind the making of a reference.
    being_taken: AtomicBool,
    /// The descriptor is in a use that only the kernel can carry out. The reference of the caller orders
    /// the word: no thread takes the relay back meanwhile.
    kept: AtomicBool,
}

impl TemporaryRelay {
    /// A temporary relay of the end of a pair; `None`: the kernel does not tell the inode or the
    /// time.
    pub(crate) fn new(program_end: &OwnedFd) -> Option<Arc<TemporaryRelay>> {
        let now = u64::try_from(ism_sys::read_clock(ClockId::Boottime).tv_sec).ok()?;
        Some(Arc::new(TemporaryRelay {
            inode: rustix::fs::fstat(program_end).ok()?.st_ino,
            // The tick before is early enough for all rounding.
            begun: now.saturating_mul(TICKS).saturating_sub(1),
            alone: AtomicU64::new(0),
            being_taken: AtomicBool::new(false),
            kept: AtomicBool::new(false),
        }))
    }

    /// Stores that no other process has the end, if there were so many children at that time.
    pub(crate) fn set_alone(&self, children: u32) {
        self.alone.store(u64::from(children) + 1, Ordering::SeqCst);
    }

    /// Forgets [`TemporaryRelay::set_alone`].
    pub(crate) fn forget_alone(&self) {
        self.alone.store(0, Ordering::SeqCst);
    }

    /// Whether no other process had the end at the last look. There may be a new child since:
    /// [`TemporaryRelay::is_still_alone`].
    pub(crate) fn was_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed) != 0
    }

    /// Whether no other process has the end.
    pub(crate) fn is_still_alone(&self) -> bool {
        self.alone.load(Ordering::SeqCst) == u64::from(fork::children()) + 1
    }

    /// From now on [`TemporaryRelay::is_being_taken`] returns `true` to any thread with a new
    /// reference to the socket.
    pub(crate) fn begin_taking(&self) {
        self.being_taken.store(true, Ordering::SeqCst);
        // Orders the word before the count of references; partner of the fence in `is_being_taken`.
        fence(Ordering::SeqCst);
    }

    /// Undoes [`TemporaryRelay::begin_taking`]. A temporary relay that was taken back stays so.
    pub(crate) fn stop_taking(&self) {
        self.being_taken.store(false, Ordering::Release);
    }

    /// Whether a thread takes the relay back. If not, no thread will while the caller has its
    /// reference to the socket.
    pub(crate) fn is_being_taken(&self) -> bool {
        // Orders the caller's reference before the load; partner of the fence in `begin_taking`.
        fence(Ordering::SeqCst);
        self.being_taken.load(Ordering::SeqCst)
    }

    /// From now on the relay is not temporary, but stays.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }
}

/// The library's record of a connection carried by another process.
#[derive(Debug)]
pub(crate) struct RelayState {
    /// The TCP socket, for names and options; -1: none.
    tcp_fd: AtomicI32,
    /// Whether the owner was asked to carry the connection, or no owner can be asked.
    owner_requested: AtomicBool,
    /// The addresses of a connection without a TCP socket in this process.
    names: Option<AddressPair>,
    /// This process has the relay and will take it back.
    temporary: Option<Arc<TemporaryRelay>>,
}

impl RelayState {
    /// A connection not carried by any process yet, or whose owner must be asked. Takes over the
    /// TCP socket `tcp_fd`; -1: none.
    pub(crate) fn new(tcp_fd: c_int) -> RelayState {
        let owner_requested = AtomicBool::new(false);
        let tcp = AtomicI32::new(-1);
        let relayed = RelayState { tcp_fd: tcp, owner_requested, names: None, temporary: None };
        relayed.set_tcp_fd(tcp_fd);
        relayed
    }

    /// A connection carried by this process. `tcp_fd` as for [`RelayState::new`].
    pub(crate) fn served(tcp_fd: c_int, temporary: Option<Arc<TemporaryRelay>>) -> RelayState {
        let mut relayed = RelayState::new(tcp_fd);
        relayed.temporary = temporary;
        relayed.request_owner_once();
        relayed
    }

    /// A connection carried by a process that this one cannot ask.
    pub(crate) const fn named(names: AddressPair) -> RelayState {
        let (tcp_fd, owner_requested) = (AtomicI32::new(-1), AtomicBool::new(true));
        RelayState { tcp_fd, owner_requested, names: Some(names), temporary: None }
    }

    /// Stores the TCP socket, and takes it over.
    pub(super) fn set_tcp_fd(&self, tcp_fd: c_int) {
        if tcp_fd >= 0 {
            own_numbers::enter(tcp_fd);
        }
        own_numbers::close(self.tcp_fd.swap(tcp_fd, Ordering::Relaxed));
    }

    /// The TCP socket.
    pub(super) fn tcp_fd(&self) -> Option<c_int> {
        let fd = self.tcp_fd.load(Ordering::Relaxed);
        own_numbers::contains(fd).then_some(fd)
    }

    /// The addresses of a connection without a TCP socket in this process.
    pub(crate) fn names(&self) -> Option<&AddressPair> {
        self.names.as_ref()
    }

    /// The relay, if still temporary.
    pub(super) fn temporary_relay(&self) -> Option<&Arc<TemporaryRelay>> {
        self.temporary.as_ref().filter(|temporary| !temporary.kept.load(Ordering::Acquire))
    }

    /// Whether the owner must still be asked to carry the connection. Only the first call returns
    /// `true`.
    pub(crate) fn request_owner_once(&self) -> bool {
        !self.owner_requested.swap(true, Ordering::Relaxed)
    }

    /// Whether the owner was asked to carry the connection, or there is none.
    pub(super) fn is_owner_requested(&self) -> bool {
        self.owner_requested.load(Ordering::Relaxed)
    }
}

impl Drop for RelayState {
    fn drop(&mut self) {
        own_numbers::close(*self.tcp_fd.get_mut());
    }
}
