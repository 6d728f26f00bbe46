//! Readiness: for pollers, and for the kernel's poll and epoll.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smc_core::connection::Sender;
use smc_core::wire::cdc::StateFlags;

use super::{Conn, Rx, lock, reader_view};
use crate::reactor::readiness_fd::{ReadinessFd, Ready};
use crate::reactor::wait::Waiter;

/// Ends of a connection that its control words do not tell of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalEnd {
    /// It ended abnormally.
    failed: bool,
    /// The application reads no more.
    read_shut: bool,
}

impl Conn {
    /// What the connection can do right now.
    pub(crate) fn ready(&self) -> Ready {
        self.ready_locked(&mut self.rx())
    }

    fn ready_locked(&self, rx: &mut Rx) -> Ready {
        let ended = self.refresh_rx(rx).unwrap_or(true);
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        let failed = self.has_failed();
        let shut = self.read_shut.load(Ordering::Acquire);
        let closed = tx.close.peer_flags().contains(StateFlags::CLOSED);
        Ready {
            readable: rx.receiver.readable() > 0 || ended || shut || failed,
            writable: failed || !tx.close.can_write() || has_room(&tx.sender),
            read_closed: ended || shut || failed,
            hang_up: failed || (closed && !tx.close.can_write()),
        }
    }

    /// Whether [`Conn::ready`] might say something else than before: two loads.
    pub(crate) fn may_have_changed(&self, seen: [u64; 2]) -> bool {
        self.words() != seen || self.has_failed()
    }

    /// The control words, to be compared by [`Conn::may_have_changed`].
    pub(crate) fn control_words(&self) -> [u64; 2] {
        self.words()
    }

    /// How it has ended, as far as the control words do not tell.
    pub(crate) fn local_end(&self) -> LocalEnd {
        LocalEnd { failed: self.has_failed(), read_shut: self.read_shut.load(Ordering::Acquire) }
    }

    /// A descriptor that the kernel shows as readable and writable when this connection is.
    pub(crate) fn pollable(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(readiness) = self.readiness.get() {
            return Ok(readiness.as_fd());
        }
        let readiness = ReadinessFd::new()?;
        if self.readiness.set(readiness).is_ok() {
            self.waiters.fetch_add(1, Ordering::SeqCst);
            self.reactor.add_pollable();
        }
        self.sync_readiness();
        match self.readiness.get() {
            Some(readiness) => Ok(readiness.as_fd()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Makes the pollable descriptor, if there is one, show how things are, and has the next change
    /// announced.
    pub(super) fn sync_readiness(&self) {
        if self.readiness.get().is_some() {
            self.sync_readiness_locked(&mut self.rx());
        }
    }

    fn sync_readiness_locked(&self, rx: &mut Rx) {
        let Some(readiness) = self.readiness.get() else { return };
        // A peer that signals without end only makes this connection's own thread look again.
        for _ in 0..64 {
            let ready = self.ready_locked(rx);
            if ready.writable {
                self.write_blocked.store(false, Ordering::Relaxed);
            }
            // A write that did not block leaves the descriptor writable: it says so by failing.
            let blocked = self.write_blocked.load(Ordering::Relaxed);
            let shown = Ready { writable: ready.writable || !blocked, ..ready };
            readiness.show(shown);
            let waits = !ready.hang_up && (!shown.readable || !shown.writable);
            if !waits || self.arm() {
                return;
            }
        }
        // Still at it: the next look is the dispatcher's.
        self.reactor.wake_background();
    }

    /// A read of a non-blocking socket found nothing. `true`: that is shown where it must be, and
    /// still true.
    pub(super) fn has_nothing_to_read(&self, rx: &mut Rx) -> bool {
        if self.readiness.get().is_none() {
            self.reactor.try_poll();
            return reader_view(self.words()) == reader_view(rx.seen) && !self.has_failed();
        }
        self.sync_readiness_locked(rx);
        rx.receiver.readable() == 0 && !self.has_failed() && !self.peer_done.load(Ordering::Acquire)
    }

    /// Registers or removes the poller that is woken for this connection.
    pub(crate) fn set_poller(&self, poller: Option<Arc<Waiter>>) {
        let mut slot = lock(&self.poller);
        match (slot.is_some(), poller.is_some()) {
            (false, true) => {
                self.waiters.fetch_add(1, Ordering::SeqCst);
            }
            (true, false) => {
                self.waiters.fetch_sub(1, Ordering::SeqCst);
            }
            _ => {}
        }
        *slot = poller;
    }

    /// Says "asleep" on behalf of a poller. `false`: there is news.
    pub(crate) fn arm_for_poller(&self) -> bool {
        self.arm()
    }

    /// Takes back [`Conn::arm_for_poller`].
    pub(crate) fn disarm_for_poller(&self) {
        // Sleeping threads and the pollable descriptor rely on the line being armed.
        if self.waiters.load(Ordering::SeqCst) <= 1
            && let Some(line) = self.carrier.line()
        {
            line.disarm();
        }
    }

    /// Shows a change that came from this side.
    pub(super) fn failed_or_shut(&self) {
        self.wake_all();
        self.sync_readiness();
    }
}

/// Whether a write is worth trying: a quarter of the ring, so that a writer is not woken for every
/// byte that is read; any byte if it makes the peer say how much it has read.
fn has_room(sender: &Sender) -> bool {
    let enough = if sender.is_outdated() { 1 } else { sender.ring().len() / 4 };
    sender.space() >= enough
}
