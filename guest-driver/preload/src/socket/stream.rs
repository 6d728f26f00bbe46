// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of a stream socket.

mod early;

use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use guest_driver::interpose::ByteQueue;
use guest_driver::{Readiness, SmcStream};

use crate::fork;
use crate::socket::pair::{AddressPair, high};
use crate::socket::proposal_answer::ProposalAnswer;
pub(crate) use crate::socket::registration::{EpollTarget, Registration};
use crate::socket::smc_request::SmcRequest;
pub(crate) use crate::socket::states::SocketState;
use crate::socket::states::{self, SocketEvent, SocketStage, SocketTransition};
use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};
use crate::sys::own_numbers;
use crate::sys::raw::{Errno, SysResult};

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketRole {
    /// Accepted.
    Server,
    /// Connected.
    Client,
}

/// A stream socket.
#[derive(Debug)]
pub(crate) struct StreamSocket {
    /// The number of a [`SocketStage`].
    stage: AtomicU32,
    /// Whether `accept` made it. Otherwise `socket` did, and it is a client.
    server: AtomicBool,
    /// The number of the handshake in the list of those that wait; 0: none.
    pending: AtomicU64,
    /// Number of threads that wait for the decision.
    waiters: AtomicU32,
    stream: OnceLock<SmcStream>,
    /// The generation of the process (see `fork`) that the stream belongs to.
    generation: AtomicU32,
    nonblocking: AtomicBool,
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
    /// The error of a failed handshake. A call of the program takes it.
    error: AtomicI32,
    /// For [`SocketState::Relayed`]: the TCP socket, which provides names and options; -1: none.
    tcp_fd: AtomicI32,
    /// The library's duplicate of the TCP socket, for the handshake and the connection; -1: none.
    copy: AtomicI32,
    /// For [`SocketState::Relayed`]: whether the owner was asked to carry the connection.
    owner_requested: AtomicBool,
    /// The program has ended its own direction.
    write_shut: AtomicBool,
    /// A write went to a peer that has closed.
    wrote_in_vain: AtomicBool,
    /// A call has reported the error that comes of such a write.
    vain_reported: AtomicBool,
    /// The program wants to know how much is queued (TCP_INQ).
    queue_size_wanted: AtomicBool,
    /// A call has reported that the connection was reset.
    reset_reported: AtomicBool,
    /// SO_LINGER when the connection was decided or closed, microseconds; `u64::MAX`: none.
    linger: AtomicU64,
    /// SO_RCVLOWAT, if it is more than a byte.
    low_water: AtomicU32,
    /// For [`SocketState::Relayed`] without a TCP socket: the addresses of the connection.
    names: OnceLock<AddressPair>,
    /// Bytes that the program has written before the connection was decided.
    early: ForkMutex<ByteQueue>,
    /// There was no room for more of them. Apart from the lock, which the registrations may not
    /// take: whoever decides the connection takes it before theirs.
    early_full: AtomicBool,
    /// What [`fork::children`] was when the socket was made.
    children_before: u32,
    /// For a server: the address at which the client has reached its listener.
    listener: OnceLock<SocketAddr>,
    /// The peer has sent TCP option 254, so a client of this server has announced a Proposal.
    announced: AtomicBool,
    /// For a server: a call has postponed the handshake.
    lazy: AtomicBool,
    /// Number of relays that may come to serve the connection.
    offers: AtomicU32,
    /// For a client: how far the server's answer to the Proposal is.
    pub(crate) answer: ProposalAnswer,
    /// The last write did not fit, so an edge-triggered set must report when there is room.
    pub(crate) write_blocked: AtomicBool,
    /// For a server: how long it waits for the client's first bytes, milliseconds.
    detect_timeout: AtomicU32,
    /// Whether the program has called to write, or waits until it can.
    wants_to_write: AtomicBool,
    /// For a client that is not decided: the program has asked for the name of its socket.
    name_known: AtomicBool,
    /// For a client: how it asks its server for SMC.
    pub(crate) request: ForkMutex<Option<SmcRequest>>,
    /// Registrations in epoll sets.
    registrations: ForkMutex<Vec<Registration>>,
    /// A pipe that becomes readable when the handshake is complete, for callers of poll.
    decision: OnceLock<(OwnedFd, OwnedFd)>,
}

impl StreamSocket {
    /// A socket in a state of the caller's choice.
    pub(crate) fn new(state: SocketState, role: SocketRole, nonblocking: bool) -> StreamSocket {
        StreamSocket {
            stage: AtomicU32::new(SocketStage::first(state) as u32),
            server: AtomicBool::new(role == SocketRole::Server),
            pending: AtomicU64::new(0),
            waiters: AtomicU32::new(0),
            stream: OnceLock::new(),
            generation: AtomicU32::new(fork::generation()),
            nonblocking: AtomicBool::new(nonblocking),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
            error: AtomicI32::new(0),
            tcp_fd: AtomicI32::new(-1),
            copy: AtomicI32::new(-1),
            owner_requested: AtomicBool::new(false),
            write_shut: AtomicBool::new(false),
            wrote_in_vain: AtomicBool::new(false),
            vain_reported: AtomicBool::new(false),
            queue_size_wanted: AtomicBool::new(false),
            reset_reported: AtomicBool::new(false),
            linger: AtomicU64::new(u64::MAX),
            low_water: AtomicU32::new(0),
            names: OnceLock::new(),
            early: ForkMutex::new(ByteQueue::default()),
            early_full: AtomicBool::new(false),
            children_before: fork::children(),
            listener: OnceLock::new(),
            announced: AtomicBool::new(false),
            lazy: AtomicBool::new(false),
            offers: AtomicU32::new(0),
            answer: ProposalAnswer::new(),
            write_blocked: AtomicBool::new(false),
            detect_timeout: AtomicU32::new(0),
            wants_to_write: AtomicBool::new(false),
            name_known: AtomicBool::new(false),
            request: ForkMutex::new(None),
            registrations: ForkMutex::new(Vec::new()),
            decision: OnceLock::new(),
        }
    }

    /// The row of the table of states.
    #[inline]
    pub(crate) fn stage(&self) -> SocketStage {
        SocketStage::of(self.stage.load(Ordering::Acquire))
    }

    /// What carries the connection.
    #[inline]
    pub(crate) fn state(&self) -> SocketState {
        self.stage().state()
    }

    /// Stores what an event makes of the state. Returns what is to be done; `None`: nothing happens,
    /// as the table of states says, or another thread was faster.
    pub(crate) fn store(&self, event: SocketEvent) -> Option<SocketTransition> {
        let mut now = self.stage.load(Ordering::Acquire);
        loop {
            let transition = states::next(SocketStage::of(now), event)?;
            let to = transition.to as u32;
            let stored = self.stage.compare_exchange(now, to, Ordering::AcqRel, Ordering::Acquire);
            match stored {
                Ok(_) => return Some(transition),
                Err(other) => now = other,
            }
        }
    }

    /// Wakes the threads that wait for the decision.
    pub(crate) fn wake(&self) {
        // A thread counts itself before it compares the stage: either this sees it, or it sees the
        // new stage.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.decision.get().is_none() && self.waiters.load(Ordering::SeqCst) == 0 {
            return;
        }
        let _ = rustix::thread::futex::wake(
            &self.stage,
            rustix::thread::futex::Flags::PRIVATE,
            i32::MAX as u32,
        );
        if let Some((_, writer)) = self.decision.get() {
            let _ = rustix::io::write(writer, &[1]);
        }
    }

    /// Stores the number of the handshake in the list of those that wait.
    pub(crate) fn set_pending(&self, number: u64) {
        self.pending.store(number, Ordering::Relaxed);
    }

    /// What [`StreamSocket::set_pending`] has stored last; 0: nothing.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.load(Ordering::Relaxed)
    }

    /// Sleeps until the handshake is complete, but not longer than `timeout`. The caller looks at the
    /// state again, whatever ended the sleep.
    pub(crate) fn await_decision(&self, timeout: Duration) -> Result<(), Errno> {
        let timeout = rustix::thread::futex::Timespec {
            tv_sec: timeout.as_secs().min(3600) as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let flags = rustix::thread::futex::Flags::PRIVATE;
        let now = self.stage.load(Ordering::Acquire);
        if SocketStage::of(now).state() == SocketState::Deciding {
            self.waiters.fetch_add(1, Ordering::SeqCst);
            let result = rustix::thread::futex::wait(&self.stage, flags, now, Some(&timeout));
            self.waiters.fetch_sub(1, Ordering::SeqCst);
            result?;
        }
        Ok(())
    }

    /// A descriptor that becomes readable when the handshake is complete.
    pub(crate) fn decision_fd(&self) -> Option<c_int> {
        use std::os::fd::AsRawFd;
        if self.decision.get().is_none() {
            let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
            let (reader, writer) = rustix::pipe::pipe_with(flags).ok()?;
            let _ = self.decision.set((high(reader), high(writer)));
        }
        let fd = self.decision.get().map(|(reader, _)| reader.as_raw_fd());
        if !matches!(self.state(), SocketState::Undecided | SocketState::Deciding)
            && let Some((_, writer)) = self.decision.get()
        {
            let _ = rustix::io::write(writer, &[1]);
        }
        fd
    }

    /// The library's descriptors for this socket, of which nobody else knows.
    pub(crate) fn own_descriptors(&self) -> impl Iterator<Item = c_int> {
        use std::os::fd::AsRawFd;
        let decision =
            self.decision.get().into_iter().flat_map(|(reader, writer)| [reader, writer]);
        let copy = Some(self.copy.load(Ordering::Relaxed)).filter(|_| self.uses_copy());
        decision.map(AsRawFd::as_raw_fd).chain(copy).filter(|fd| *fd >= 0)
    }

    /// How long a server waits for the client's first bytes before it takes it for one without SMC.
    pub(crate) fn detect_timeout(&self) -> Duration {
        Duration::from_millis(self.detect_timeout.load(Ordering::Relaxed).into())
    }

    /// Sets [`StreamSocket::detect_timeout`].
    pub(crate) fn set_detect_timeout(&self, detect_timeout: Duration) {
        let millis = u32::try_from(detect_timeout.as_millis()).unwrap_or(u32::MAX);
        self.detect_timeout.store(millis, Ordering::Relaxed);
    }

    /// Whether the program has called to write, or waits until it can.
    pub(crate) fn wants_to_write(&self) -> bool {
        self.wants_to_write.load(Ordering::Relaxed)
    }

    /// Stores that the program wants to write.
    pub(crate) fn note_write(&self) {
        self.wants_to_write.store(true, Ordering::Relaxed);
    }

    /// Whether the program has asked for the name of its socket.
    pub(crate) fn is_name_known(&self) -> bool {
        self.name_known.load(Ordering::Relaxed)
    }

    /// Stores that the program asks for the name of its socket.
    pub(crate) fn note_name(&self) {
        self.name_known.store(true, Ordering::Relaxed);
    }

    /// Which end of the connection it is.
    pub(crate) fn role(&self) -> SocketRole {
        if self.server.load(Ordering::Relaxed) { SocketRole::Server } else { SocketRole::Client }
    }

    /// The SMC connection, if it is one of this process.
    #[inline]
    pub(crate) fn smc(&self) -> Option<&SmcStream> {
        let stage = self.stage.load(Ordering::Acquire);
        (stage == SocketStage::Smc as u32 && !self.is_inherited())
            .then(|| self.stream.get())
            .flatten()
    }

    /// The SMC connection, also while the handshake is being completed.
    pub(crate) fn stream(&self) -> Option<&SmcStream> {
        self.stream.get()
    }

    /// Whether the connection belongs to an ancestor of this process.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.generation.load(Ordering::Relaxed) != fork::generation()
    }

    /// Makes the connection one of this process, which begins the handshake.
    pub(crate) fn adopt(&self) {
        self.generation.store(fork::generation(), Ordering::Relaxed);
    }

    /// Stores the SMC connection. The caller then stores [`SocketEvent::EndOnSmc`].
    pub(crate) fn set_stream(&self, stream: SmcStream) {
        self.adopt();
        if let Err(stream) = self.stream.set(stream) {
            // Only one thread does the handshake. Closing the stream informs the peer.
            drop(stream);
        }
    }

    /// Whether calls return EAGAIN instead of waiting (O_NONBLOCK).
    #[inline]
    pub(crate) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Stores whether O_NONBLOCK is set.
    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    /// Stores SO_RCVTIMEO and SO_SNDTIMEO, microseconds; 0: none. `None` leaves a value as it is.
    pub(crate) fn set_timeouts(&self, read: Option<u64>, write: Option<u64>) {
        if let Some(read) = read {
            self.read_timeout.store(read, Ordering::Relaxed);
        }
        if let Some(write) = write {
            self.write_timeout.store(write, Ordering::Relaxed);
        }
    }

    /// How long a call may wait; `None`: for ever.
    pub(crate) fn timeout(&self, write: bool) -> Option<Duration> {
        let word = if write { &self.write_timeout } else { &self.read_timeout };
        match word.load(Ordering::Relaxed) {
            0 => None,
            micros => Some(Duration::from_micros(micros)),
        }
    }

    /// Takes the error of a failed handshake; 0: there is none, or a call has taken it.
    pub(crate) fn take_error(&self) -> c_int {
        self.error.swap(0, Ordering::Relaxed)
    }

    /// Stores the error of a failed handshake; 0: the peer has closed.
    pub(crate) fn set_error(&self, error: c_int) {
        self.wrote_in_vain.store(error != 0, Ordering::Relaxed);
        self.error.store(error, Ordering::Relaxed);
    }

    /// Stores that another process carries the connection. `tcp_fd`: the TCP socket, which this
    /// takes over.
    pub(crate) fn set_relayed(&self, tcp_fd: c_int) {
        if tcp_fd >= 0 {
            own_numbers::enter(tcp_fd);
        }
        own_numbers::close(self.tcp_fd.swap(tcp_fd, Ordering::Relaxed));
        self.store(SocketEvent::HandOver);
    }

    /// Stores the number of the library's duplicate of the TCP socket.
    pub(crate) fn set_copy(&self, copy: c_int) {
        self.copy.store(copy, Ordering::Relaxed);
    }

    /// The duplicate of a connection that SMC carries or may carry. `connect` has one before it begins.
    /// Only the first call returns it.
    pub(crate) fn take_copy(&self) -> Option<c_int> {
        let copy = self.copy.swap(-1, Ordering::Relaxed);
        (self.uses_copy() && copy >= 0).then_some(copy)
    }

    fn uses_copy(&self) -> bool {
        use SocketState as S;
        matches!(self.state(), S::Unconnected | S::Undecided | S::Deciding | S::Smc)
    }

    /// Whether the owner must still be asked to carry the connection. Only the first call returns
    /// `true`.
    pub(crate) fn request_owner_once(&self) -> bool {
        !self.owner_requested.swap(true, Ordering::Relaxed)
    }

    /// Whether the connection is one of an ancestor, which has not been asked to carry it.
    pub(crate) fn awaits_owner(&self) -> bool {
        self.state() == SocketState::Relayed && !self.owner_requested.load(Ordering::Relaxed)
    }

    /// Stores the addresses of a relayed connection that has no TCP socket in this process.
    pub(crate) fn set_names(&self, names: AddressPair) {
        let _ = self.names.set(names);
    }

    /// What [`StreamSocket::set_names`] stored.
    pub(crate) fn names(&self) -> Option<&AddressPair> {
        self.names.get()
    }

    /// Whether a child process may have inherited the socket.
    pub(crate) fn may_be_shared(&self) -> bool {
        self.children_before != fork::children() || self.is_inherited()
    }

    /// Stores that the program has ended its own direction.
    pub(crate) fn set_write_shut(&self) {
        self.write_shut.store(true, Ordering::Relaxed);
    }

    /// Whether a write that fails because the peer has closed is the first one, which TCP accepts.
    pub(crate) fn may_write_in_vain(&self) -> bool {
        !self.write_shut.load(Ordering::Relaxed)
            && !self.reset_reported.load(Ordering::Relaxed)
            && !self.wrote_in_vain.swap(true, Ordering::Relaxed)
    }

    /// The result of a call that found the connection reset: only the first one reports that. Later
    /// reads find an end of data.
    pub(crate) fn report_once(&self, error: Errno) -> SysResult {
        let is_reset = matches!(error, Errno(libc::ECONNRESET | libc::ECONNABORTED));
        if is_reset && self.reset_reported.swap(true, Ordering::Relaxed) {
            return Ok(0);
        }
        Err(error)
    }

    /// What a read returns that failed. A peer that ends its direction and then resets the connection
    /// has ended it, as far as TCP's readers know.
    pub(crate) fn read_failed(&self, stream: &SmcStream, error: Errno) -> SysResult {
        match self.pending_error(stream, error) {
            Errno(libc::EPIPE) => Ok(0),
            error => self.report_once(error),
        }
    }

    /// The error of a write that failed. After a reset that was reported, writes fail as on a closed
    /// connection.
    pub(crate) fn write_failed(&self, stream: &SmcStream, error: Errno) -> Errno {
        let error = self.pending_error(stream, error);
        if error == Errno(libc::EPIPE) {
            self.reset_reported.store(true, Ordering::Relaxed);
            return error;
        }
        self.report_once(error).err().unwrap_or(Errno(libc::EPIPE))
    }

    /// The error that a reset leaves: for a writer whose peer had ended its direction before, that
    /// is EPIPE.
    pub(crate) fn pending_error(&self, stream: &SmcStream, error: Errno) -> Errno {
        let is_reset = matches!(error, Errno(libc::ECONNRESET | libc::ECONNABORTED));
        match is_reset && stream.peer_has_ended() == Some(true) {
            true => Errno(libc::EPIPE),
            false => error,
        }
    }

    /// Takes the error that comes of a write to a peer that has closed; 0: there is none.
    pub(crate) fn take_error_of_vain_write(&self) -> c_int {
        let wrote = self.wrote_in_vain.load(Ordering::Relaxed);
        if wrote && !self.vain_reported.swap(true, Ordering::Relaxed) { libc::EPIPE } else { 0 }
    }

    /// Whether a write went to a peer that has closed, which ends the connection.
    pub(crate) fn has_written_in_vain(&self) -> bool {
        self.wrote_in_vain.load(Ordering::Relaxed)
    }

    /// Whether the program has ended its own direction.
    pub(crate) fn is_write_shut(&self) -> bool {
        self.write_shut.load(Ordering::Relaxed)
    }

    /// Whether TCP_INQ is set.
    pub(crate) fn is_queue_size_wanted(&self) -> bool {
        self.queue_size_wanted.load(Ordering::Relaxed)
    }

    /// Stores TCP_INQ.
    pub(crate) fn set_queue_size_wanted(&self, on: bool) {
        self.queue_size_wanted.store(on, Ordering::Relaxed);
    }

    /// Whether a call has reported that the connection was reset.
    pub(crate) fn is_reset_reported(&self) -> bool {
        self.reset_reported.load(Ordering::Relaxed)
    }

    /// Stores SO_LINGER.
    pub(crate) fn set_linger(&self, linger: Option<Duration>) {
        let micros = linger.and_then(|linger| u64::try_from(linger.as_micros()).ok());
        self.linger.store(micros.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// SO_LINGER, if it is on.
    pub(crate) fn linger(&self) -> Option<Duration> {
        match self.linger.load(Ordering::Relaxed) {
            u64::MAX => None,
            micros => Some(Duration::from_micros(micros)),
        }
    }

    /// Whether a write to a peer that has closed would be the first one.
    pub(crate) fn would_write_in_vain(&self) -> bool {
        !self.write_shut.load(Ordering::Relaxed)
            && !self.reset_reported.load(Ordering::Relaxed)
            && !self.has_written_in_vain()
    }

    /// SO_RCVLOWAT; 0: not more than a byte.
    #[inline]
    pub(crate) fn low_water(&self) -> usize {
        self.low_water.load(Ordering::Relaxed) as usize
    }

    /// The error that SO_ERROR shows of a connection that was reset, once.
    pub(crate) fn take_reset(&self, stream: &SmcStream) -> c_int {
        let error = stream.take_error().ok().flatten().map(Errno::from);
        if !stream.readiness(false).failed || self.reset_reported.swap(true, Ordering::Relaxed) {
            return 0;
        }
        self.pending_error(stream, error.unwrap_or(Errno(libc::ECONNRESET))).0
    }

    /// Stores SO_RCVLOWAT.
    pub(crate) fn set_low_water(&self, bytes: u32) {
        self.low_water.store(if bytes > 1 { bytes } else { 0 }, Ordering::Relaxed);
    }

    /// What the program's poll shows of the connection.
    pub(crate) fn readiness(&self, stream: &SmcStream, urgent: bool) -> Readiness {
        let mut readiness = stream.readiness(urgent);
        // POLLHUP means that both directions have ended. A peer that has closed has ended only its
        // own, as far as TCP knows.
        let both = readiness.read_closed && self.write_shut.load(Ordering::Relaxed);
        readiness.hang_up &= readiness.failed || both;
        if readiness.failed && self.is_reset_reported() {
            readiness.failed = false;
        }
        if self.has_written_in_vain() {
            readiness.hang_up = true;
            readiness.failed |= !self.vain_reported.load(Ordering::Relaxed);
        }
        let low_water = self.low_water();
        if low_water > 1 && readiness.readable && !readiness.read_closed {
            readiness.readable = stream.readable().is_ok_and(|bytes| bytes >= low_water);
        }
        readiness
    }

    /// Whether the kernel carries out all calls until the program uses the connection: the client of
    /// this server has announced nothing, or an earlier call has postponed the handshake.
    pub(crate) fn is_plain_if_silent(&self) -> bool {
        self.role() == SocketRole::Server
            && (self.detect_timeout().is_zero() || self.lazy.load(Ordering::Relaxed))
    }

    /// Whether the client of this server has announced nothing, and is plain unless its first bytes
    /// are a Proposal.
    pub(crate) fn may_be_plain(&self) -> bool {
        self.role() == SocketRole::Server && self.detect_timeout().is_zero() && !self.is_announced()
    }

    /// Stores that a call has postponed the handshake.
    pub(crate) fn set_lazy(&self) {
        self.lazy.store(true, Ordering::Relaxed);
    }

    /// Stores the address at which the client has reached the listener.
    pub(crate) fn set_listener(&self, address: SocketAddr) {
        let _ = self.listener.set(address);
    }

    /// What [`StreamSocket::set_listener`] stored.
    pub(crate) fn listener(&self) -> Option<&SocketAddr> {
        self.listener.get()
    }

    /// Stores that the peer has sent TCP option 254.
    pub(crate) fn set_announced(&self) {
        self.announced.store(true, Ordering::Relaxed);
    }

    /// Whether the peer has sent TCP option 254. A client has announced a Proposal by that.
    pub(crate) fn is_announced(&self) -> bool {
        self.announced.load(Ordering::Relaxed)
    }

    /// Whether the handshake must come to its end although the program has closed the connection: a
    /// client that has announced a Proposal would see a reset instead of an end of data, and bytes
    /// that the program has written would be lost. So it must if a relay waits for it.
    pub(crate) fn must_finish(&self) -> bool {
        matches!(self.state(), SocketState::Undecided | SocketState::Deciding)
            && (self.has_offers()
                || self.has_early()
                || self.is_announced()
                    && self.role() == SocketRole::Server
                    && !self.may_be_shared())
    }

    /// Begins the part of a handshake that may end with SMC. `false`: the connection has to stay on
    /// TCP.
    pub(crate) fn begin_proposal(&self) -> bool {
        self.store(SocketEvent::Propose).is_some()
    }

    /// Makes the connection stay on TCP. `false`: it is too late for that.
    pub(crate) fn forbid_proposal(&self) -> bool {
        self.store(SocketEvent::Forbid).is_some()
    }

    /// A relay may come to serve the connection: it must live on when the program has closed its
    /// last descriptor.
    pub(crate) fn add_offer(&self) {
        self.offers.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`StreamSocket::add_offer`].
    pub(crate) fn remove_offer(&self) {
        self.offers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a relay may come to serve the connection.
    pub(crate) fn has_offers(&self) -> bool {
        self.offers.load(Ordering::SeqCst) > 0
    }

    /// The TCP socket of a relayed connection.
    pub(crate) fn tcp_fd(&self) -> Option<c_int> {
        let fd = self.tcp_fd.load(Ordering::Relaxed);
        (self.state() == SocketState::Relayed && own_numbers::contains(fd)).then_some(fd)
    }

    /// The registrations, locked.
    pub(crate) fn registrations(&self) -> ForkMutexGuard<'_, Vec<Registration>> {
        self.registrations.lock()
    }
}

impl Drop for StreamSocket {
    fn drop(&mut self) {
        own_numbers::close(*self.tcp_fd.get_mut());
        let foreign = self.is_inherited();
        if foreign && let Some(stream) = self.stream.take() {
            // The connection is the parent's. Dropping it here would close it there.
            std::mem::forget(stream);
        }
    }
}
