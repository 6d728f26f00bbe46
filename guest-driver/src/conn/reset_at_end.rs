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

use super::parts::{Rx, Shared, Tx};

impl Tx {
    /// Whether the queue has bytes of which no record to the peer can say anything yet.
    fn has_unannounced(&self) -> bool {
        !self.queue.is_empty() && self.awaits_record()
    }

    /// Called before bytes are taken out of the kernel. `false`: there are none.
    pub(super) fn expect_unread(&mut self, shared: &Shared) -> bool {
        if self.half.is_closed() || (self.records.linger.is_some()) {
            return true;
        }
        let mut byte = [0u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = shared.tcp.with(|tcp| Ok(recv(tcp, &mut byte[..], flags)?));
        match peeked {
            Ok((1.., _)) => self.set_reset_at_end(shared, true),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return false,
            // The end of TCP: nothing is unread.
            _ => {}
        }
        true
    }

    /// After bytes were read, or moved: sets whether the end of this process is a reset for the peer.
    pub(super) fn note_unread(&mut self, shared: &Shared, rx: &Rx) {
        let is_unread = rx.unread.is_some()
            || !self.half.carrier().is_on_ring()
                && (!self.records.input.is_empty() || shared.has_unread_ring());
        let resets = (is_unread || self.has_unannounced()) && !self.half.is_closed();
        if resets != self.records.linger.is_some() {
            self.set_reset_at_end(shared, resets);
        }
    }

    /// After a write was queued behind LEAVE, or sent: if this process is killed, the peer must not take the
    /// end of TCP for the end of the data.
    pub(super) fn note_unannounced(&mut self, shared: &Shared) {
        let has = self.has_unannounced() && !self.half.is_closed();
        let is_unread = !self.records.input.is_empty() || shared.has_unread_ring();
        if has != self.records.linger.is_some() && (has || !is_unread) {
            self.set_reset_at_end(shared, has);
        }
    }

    /// Before this end closes or resets TCP itself.
    pub(super) fn restore_linger(&mut self, shared: &Shared) {
        if self.records.linger.is_some() {
            self.set_reset_at_end(shared, false);
        }
    }

    fn set_reset_at_end(&mut self, shared: &Shared, on: bool) {
        let set = |tcp: BorrowedFd<'_>, linger| sockopt::set_socket_linger(tcp, linger);
        let linger = self.records.linger.take();
        let result = shared.tcp.with(|tcp| {
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
            Ok(linger) => self.records.linger = linger,
            Err(error) => tracing::debug!(%error, "SO_LINGER"),
        }
    }
}
