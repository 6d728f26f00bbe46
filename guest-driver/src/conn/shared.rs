// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The part of a connection without the lock of a side: its state, its words, its options.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use arc_swap::Guard;
use rustix::net::sockopt;
use smc_core::connection::Ring;
use smc_core::stream::distance;
use smc_core::wire::cdc::{ConsumerWord, ProducerWord};
use smc_core::wire::cursor::Cursor;

use super::carrier::Carrier;
use super::carrier_switch::SMALLEST;
use super::end_word::Failure;
use super::parts::Shared;
use crate::byte_queue::send_queue::UNSENT;
use crate::reactor::readiness_fd::ReadinessFd;
use ism_sys::{lock, may_delay};

impl Shared {
    /// Whether the connection may continue without its carrier.
    pub(super) fn may_outlive(&self) -> bool {
        self.tcp.has_watch()
    }

    /// The own ring.
    pub(super) fn own_ring(&self) -> Ring {
        self.carrier().local_ring().unwrap_or(SMALLEST)
    }

    /// Whether the peer's last words show bytes in its send queue ([`UNSENT`]), taken for sent by its
    /// program.
    pub(super) fn peer_has_unsent(&self) -> bool {
        ConsumerWord::from_u64(self.words()[1]).producer_flags.contains(UNSENT)
    }

    /// Tests the path to the peer after too long a silence of the connection (SOCK-10). The link group
    /// checks the silence of the link, too (SOCK-11).
    pub(super) fn check_keepalive(&self) {
        let mut keepalive = lock(&self.options.keepalive);
        let Some(silence) = &mut *keepalive else { return };
        let words = self.words();
        if words != silence.words {
            (silence.words, silence.since) = (words, Instant::now());
            return;
        }
        if silence.since.elapsed() < silence.limit {
            return;
        }
        // The silence begins anew, because an answer counts as a sign of the peer (SOCK-12).
        silence.since = Instant::now();
        let limit = silence.limit;
        drop(keepalive);
        self.carrier().test(limit);
    }

    /// Runs `f` on the TCP connection underneath.
    ///
    /// # Errors
    /// `NotConnected`: the TCP connection has ended; or the error of `f`.
    pub(super) fn with_tcp<T>(
        &self,
        f: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        self.tcp.with(f)
    }

    /// Local and peer address of the TCP connection.
    pub(super) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        self.tcp.addresses()
    }

    /// TCP_NODELAY as set, or else the TCP connection's value, possibly inherited.
    pub(super) fn nodelay(&self) -> io::Result<bool> {
        match self.options.nodelay() {
            Some(on) => Ok(on),
            None => self.with_tcp(|tcp| Ok(sockopt::tcp_nodelay(tcp)?)),
        }
    }

    /// The carrier of both directions, for threads without a lock. The carrier stays alive as long as
    /// the result, while another one may be in use by then.
    #[inline]
    pub(super) fn carrier(&self) -> Guard<Arc<Carrier>> {
        self.carrier.load()
    }

    #[inline]
    pub(super) fn words(&self) -> [u64; 2] {
        may_delay();
        self.carrier().words()
    }

    /// Whether the connection has ended in a way not shown by its control words.
    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.end.has_failed()
    }

    /// Fails if the connection has ended abnormally.
    ///
    /// # Errors
    /// `ConnectionReset` or `ConnectionAborted` (SOCK-20); `TimedOut` after TCP_USER_TIMEOUT.
    pub(super) fn check(&self) -> io::Result<()> {
        match self.end.failure() {
            None | Some(Failure::Ended) => Ok(()),
            Some(Failure::Reset) => Err(io::ErrorKind::ConnectionReset.into()),
            Some(Failure::Aborted) => Err(io::ErrorKind::ConnectionAborted.into()),
            Some(Failure::TimedOut) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Notes the report of the connection's failure by a call, if `result` is one.
    pub(super) fn note_report<T>(&self, result: io::Result<T>) -> io::Result<T> {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset};
        if matches!(&result, Err(e) if matches!(e.kind(), ConnectionReset | ConnectionAborted)) {
            self.end.report();
            self.waiting.readiness.get().into_iter().for_each(ReadinessFd::clear_error);
        }
        result
    }

    /// The program's read position, announced with every word.
    pub(super) fn consumed(&self) -> Cursor {
        ConsumerWord::from_u64(self.cursors.consumed()).cursor
    }

    /// Begins again in the child of a fork, the new owner of the connection.
    pub(super) fn watch_again(&self) {
        if self.has_queued() {
            self.watch_events();
        }
        if self.waiting.awaiting.load(Ordering::SeqCst) {
            self.watch_events();
        }
    }

    /// Whether the own ring has bytes not taken by the program.
    pub(super) fn has_unread_ring(&self) -> bool {
        let read = ConsumerWord::from_u64(self.cursors.consumed()).cursor;
        let stored = ProducerWord::from_u64(self.words()[0]).cursor;
        distance(read, stored, &self.own_ring()) != Some(0)
    }
}
