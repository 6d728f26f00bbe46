// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes from TCP that the program has not read when its process ends.
//!
//! The kernel's TCP resets a connection when its process ends with unread bytes. A connection that has
//! left its ring takes bytes out of the kernel ahead of the program. So the socket has a linger time of
//! zero from before this until the program has read the bytes: the kernel resets the connection then as
//! well. SO_LINGER of the program is put back afterwards.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::net::{RecvFlags, recv, sockopt};
use smc_core::stream::distance;
use smc_core::wire::cdc::ConsumerWord;
use smc_core::wire::cdc::ProducerWord;

use super::{Conn, Rx, Tx};

impl Tx {
    /// Whether the queue has bytes of which no record to the peer can say anything yet.
    fn has_unannounced(&self) -> bool {
        !self.queue.is_empty() && self.awaits_record()
    }
}

impl Conn {
    /// Called before bytes are taken out of the kernel. `false`: there are none.
    pub(super) fn expect_unread(&self, tx: &mut Tx) -> bool {
        if tx.half.is_closed() || (tx.records.linger.is_some()) {
            return true;
        }
        let mut byte = [0u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = self.tcp.with(|tcp| Ok(recv(tcp, &mut byte[..], flags)?));
        match peeked {
            Ok((1.., _)) => self.set_reset_at_end(tx, true),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return false,
            // The end of TCP: nothing is unread.
            _ => {}
        }
        true
    }

    /// After bytes were read, or moved: sets whether the end of this process is a reset for the peer.
    pub(super) fn note_unread(&self, rx: &Rx, tx: &mut Tx) {
        let is_unread = rx.kept.is_some()
            || !tx.half.carrier().is_on_ring()
                && (!tx.records.input.is_empty() || self.has_unread_ring());
        let resets = (is_unread || tx.has_unannounced()) && !tx.half.is_closed();
        if resets != tx.records.linger.is_some() {
            self.set_reset_at_end(tx, resets);
        }
    }

    /// After a write was queued behind LEAVE, or sent: if this process is killed, the peer must not take the
    /// end of TCP for the end of the data.
    pub(super) fn note_unannounced(&self, tx: &mut Tx) {
        let has = tx.has_unannounced() && !tx.half.is_closed();
        let is_unread = !tx.records.input.is_empty() || self.has_unread_ring();
        if has != tx.records.linger.is_some() && (has || !is_unread) {
            self.set_reset_at_end(tx, has);
        }
    }

    /// Whether the own ring has bytes not taken by the program.
    fn has_unread_ring(&self) -> bool {
        let read = ConsumerWord::from_u64(self.cursors.consumed()).cursor;
        let stored = ProducerWord::from_u64(self.words()[0]).cursor;
        distance(read, stored, &self.own_ring()) != Some(0)
    }

    /// Before this end closes or resets TCP itself.
    pub(super) fn restore_linger(&self, tx: &mut Tx) {
        if tx.records.linger.is_some() {
            self.set_reset_at_end(tx, false);
        }
    }

    fn set_reset_at_end(&self, tx: &mut Tx, on: bool) {
        let set = |tcp: BorrowedFd<'_>, linger| sockopt::set_socket_linger(tcp, linger);
        let linger = tx.records.linger.take();
        let result = self.tcp.with(|tcp| {
            Ok(match (on, linger) {
                (true, _) => {
                    let programs = sockopt::socket_linger(tcp)?;
                    set(tcp, Some(Duration::ZERO))?;
                    Some(programs)
                }
                (false, Some(programs)) => {
                    set(tcp, programs)?;
                    None
                }
                (false, None) => None,
            })
        });
        match result {
            Ok(linger) => tx.records.linger = linger,
            Err(error) => tracing::debug!(%error, "SO_LINGER"),
        }
    }

    /// The program has set SO_LINGER of the socket.
    pub(crate) fn follow_linger(&self, linger: Option<Duration>) {
        let mut tx = self.tx();
        if tx.records.linger.is_some() {
            tx.records.linger = Some(linger);
            let zero = Some(Duration::ZERO);
            let _ = self.tcp.with(|tcp| Ok(sockopt::set_socket_linger(tcp, zero)?));
        }
    }

    /// SO_LINGER of the program, while the socket has another one.
    pub(crate) fn programs_linger(&self) -> Option<Option<Duration>> {
        self.tx().records.linger
    }
}
