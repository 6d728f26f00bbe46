// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of a stream socket, in parts: each has its own file and its own methods. The methods
//! here need more than one part.

mod decision;
mod end;
mod options;
mod owner;
mod relayed;
mod side;
mod undecided;

use std::ffi::c_int;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_driver::{Readiness, SmcStream};
use ism_sys::OnceBox;

use self::decision::Decision;
use self::end::ConnectionEnd;
use self::options::SocketOptions;
use self::owner::SocketOwner;
pub(crate) use self::relayed::{RelayState, TemporaryRelay};
use self::side::Side;
pub(crate) use self::side::{ServerSide, SocketRole};
use self::undecided::HandshakeState;
pub(crate) use crate::socket::registration::{EpollTarget, Registration};
pub(crate) use crate::socket::states::SocketState;
use crate::socket::states::{SocketEvent, SocketStage};
use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};

/// A stream socket.
#[derive(Debug)]
pub(crate) struct StreamSocket {
    /// The state, and the threads waiting for the decision between SMC and TCP.
    pub(crate) decision: Decision,
    /// The process that owns the connection.
    pub(crate) owner: SocketOwner,
    /// The client's or the server's side of the connection.
    pub(crate) side: Side,
    /// The state of a connection that is not decided.
    pub(crate) undecided: HandshakeState,
    /// The options set by the program.
    pub(crate) options: SocketOptions,
    /// The SMC connection.
    stream: OnceBox<SmcStream>,
    /// The end of the connection, as far as known to the program.
    pub(crate) end: ConnectionEnd,
    /// The state of a connection carried by another process.
    pub(crate) relayed: RelayState,
    /// Registrations in epoll sets.
    registrations: ForkMutex<Vec<Registration>>,
    /// The last write did not fit, so an edge-triggered set must report when there is room.
    pub(crate) write_blocked: AtomicBool,
}

impl StreamSocket {
    /// A socket that is not connected.
    pub(crate) fn unconnected(nonblocking: bool) -> StreamSocket {
        let (side, none) = (Side::new(SocketRole::Client), RelayState::new(-1));
        StreamSocket::new(SocketState::Unconnected, side, nonblocking, none)
    }

    /// A connection that was accepted.
    pub(crate) fn accepted(server: ServerSide, nonblocking: bool) -> StreamSocket {
        let none = RelayState::new(-1);
        StreamSocket::new(SocketState::Undecided, Side::Server(server), nonblocking, none)
    }

    /// A connection carried by another process.
    pub(crate) fn relayed(role: SocketRole, relayed: RelayState) -> StreamSocket {
        StreamSocket::new(SocketState::Relayed, Side::new(role), false, relayed)
    }

    fn new(state: SocketState, side: Side, nonblocking: bool, relayed: RelayState) -> StreamSocket {
        StreamSocket {
            decision: Decision::new(state),
            owner: SocketOwner::new(),
            side,
            undecided: HandshakeState::new(),
            options: SocketOptions::new(nonblocking),
            stream: OnceBox::new(),
            end: ConnectionEnd::default(),
            relayed,
            registrations: ForkMutex::default(),
            write_blocked: AtomicBool::new(false),
        }
    }

    /// The row of the table of states.
    #[inline]
    pub(crate) fn stage(&self) -> SocketStage {
        self.decision.stage()
    }

    /// The carrier of the connection.
    #[inline]
    pub(crate) fn state(&self) -> SocketState {
        self.stage().state()
    }

    /// Whether the program is the client or the server.
    #[inline]
    pub(crate) fn role(&self) -> SocketRole {
        self.side.role()
    }

    /// The SMC connection, if it belongs to this process.
    #[inline]
    pub(crate) fn smc(&self) -> Option<&SmcStream> {
        (self.decision.is_smc() && !self.owner.is_inherited()).then(|| self.stream.get()).flatten()
    }

    /// The SMC connection, also while the handshake is being completed.
    pub(crate) fn stream(&self) -> Option<&SmcStream> {
        self.stream.get()
    }

    /// Like [`Self::stream`], if the connection belongs to this process.
    pub(crate) fn own_stream(&self) -> Option<&SmcStream> {
        self.stream.get().filter(|_| !self.owner.is_inherited())
    }

    /// Stores the SMC connection. The caller then stores [`SocketEvent::EndOnSmc`].
    pub(crate) fn set_stream(&self, stream: SmcStream) {
        self.owner.adopt();
        if let Err(stream) = self.stream.set(stream) {
            // Only one thread does the handshake. Closing the stream informs the peer.
            drop(stream);
        }
    }

    /// The readiness for the program's poll.
    pub(crate) fn readiness(&self, stream: &SmcStream, urgent: bool) -> Readiness {
        let mut readiness = self.end.shown(stream.readiness(urgent));
        let low_water = self.options.low_water();
        if low_water > 1 && readiness.readable && !readiness.read_closed {
            readiness.readable = stream.has_readable(low_water).unwrap_or(false);
        }
        readiness
    }

    /// The registrations, locked.
    pub(crate) fn registrations(&self) -> ForkMutexGuard<'_, Vec<Registration>> {
        self.registrations.lock()
    }

    /// Keeps bytes of a call that must not wait for the handshake, as TCP keeps bytes, and at most
    /// `limit` bytes in all. Returns the number of kept bytes, with `all` 0 unless there is room
    /// for all; `None`: the connection is decided. `urgent`: the last byte is urgent.
    pub(crate) fn keep_early(
        &self,
        bufs: &[IoSlice<'_>],
        all_and_urgent: (bool, bool),
        limit: impl Fn() -> usize,
    ) -> Option<usize> {
        let mut early = self.undecided.early();
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        match self.state() {
            SocketState::Deciding => {}
            // No peer will read the bytes: see `ConnectionEnd::begin_write_after_close`.
            SocketState::Failed => return Some(wanted),
            _ => return None,
        }
        let kept = self.undecided.keep(&mut early, bufs, all_and_urgent, limit);
        if kept.is_none_or(|kept| kept < wanted) {
            self.write_blocked.store(true, Ordering::Relaxed);
        }
        Some(kept.unwrap_or(0))
    }

    /// Whether a client may write before the decision.
    pub(crate) fn is_writable_early(&self) -> bool {
        self.role() == SocketRole::Client && !self.undecided.is_early_full()
    }

    /// Whether the handshake must come to its end although the program has closed the connection. A
    /// client with an announced Proposal would see a reset instead of an end of data, and bytes
    /// written by the program would be lost. A waiting relay needs the end of the handshake, too.
    pub(crate) fn must_finish(&self) -> bool {
        matches!(self.state(), SocketState::Undecided | SocketState::Deciding)
            && (self.undecided.has_offers()
                || self.undecided.has_early()
                || self.side.server().is_some_and(|server| server.announced)
                    && !self.owner.may_be_shared())
    }

    /// The library's own descriptors for this socket.
    pub(crate) fn own_descriptors(&self) -> impl Iterator<Item = c_int> {
        let copy = Some(self.undecided.copy()).filter(|copy| *copy >= 0 && self.uses_copy());
        self.decision.descriptors().chain(copy)
    }

    /// The duplicate of a connection with present or possible SMC. `connect` makes one before it
    /// begins. Only the first call returns the duplicate.
    pub(crate) fn take_copy(&self) -> Option<c_int> {
        let copy = self.undecided.take_copy();
        (self.uses_copy() && copy >= 0).then_some(copy)
    }

    fn uses_copy(&self) -> bool {
        use SocketState as S;
        matches!(self.state(), S::Unconnected | S::Undecided | S::Deciding | S::Smc)
    }

    /// Stores that another process carries the connection. Takes over the TCP socket `tcp_fd`.
    pub(crate) fn set_relayed(&self, tcp_fd: c_int) {
        self.relayed.set_tcp_fd(tcp_fd);
        self.decision.store(SocketEvent::HandOver);
    }

    /// The TCP socket of a relayed connection.
    pub(crate) fn tcp_fd(&self) -> Option<c_int> {
        self.relayed.tcp_fd().filter(|_| self.state() == SocketState::Relayed)
    }

    /// The temporary relay of a relayed connection, if this process has the relay and will take it
    /// back.
    pub(crate) fn temporary_relay(&self) -> Option<&Arc<TemporaryRelay>> {
        let has_one = self.state() == SocketState::Relayed && !self.owner.is_inherited();
        has_one.then(|| self.relayed.temporary_relay()).flatten()
    }

    /// Whether the connection belongs to an ancestor not asked to carry it yet.
    pub(crate) fn awaits_owner(&self) -> bool {
        self.state() == SocketState::Relayed && !self.relayed.is_owner_requested()
    }
}

impl Drop for StreamSocket {
    fn drop(&mut self) {
        if self.owner.is_inherited()
            && let Some(stream) = self.stream.take()
        {
            // The connection is the parent's. A drop here would close it in the parent, too.
            std::mem::forget(stream);
        }
    }
}
