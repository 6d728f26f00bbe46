// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC's own keepalive, and snapshots of a connection.

use std::time::{Duration, Instant};

use smc_core::wire::cdc::{ConsumerWord, ProducerWord};
use smc_core::wire::cursor::Cursor;

use super::Conn;
use crate::info::{ConnectionSnapshot, Cursors};
use ism_sys::lock;

/// The silence of a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    /// The longest silence without a test.
    limit: Duration,
    /// The last words of the peer, and the time of their change.
    words: [u64; 2],
    since: Instant,
}

impl Conn {
    /// Sets the time of silence before a test of the path to the peer; `None`: never.
    pub(crate) fn set_keepalive(&self, limit: Option<Duration>) {
        let (words, since) = (self.words(), Instant::now());
        *lock(&self.options.keepalive) = limit.map(|limit| Silence { limit, words, since });
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

    /// The present state of the connection.
    pub(crate) fn snapshot(&self) -> ConnectionSnapshot {
        let addresses = self.addresses().ok();
        let (received, unread, read, written_by_peer) = {
            let mut rx = self.rx();
            // A failure shows in the state.
            let _ = self.refresh_rx(&mut rx);
            let written = ProducerWord::from_u64(rx.half.seen()[0]).cursor;
            (rx.half.total(), rx.half.receiver.available(), rx.half.receiver.cursor(), written)
        };
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        ConnectionSnapshot {
            local: addresses.map(|(local, _)| local),
            peer: addresses.map(|(_, peer)| peer),
            info: self.carrier().info(),
            changes: self.may_outlive().then(|| tx.report()),
            state: format!("{:?}", tx.half.close.state()),
            sent: tx.half.total(),
            received,
            unread,
            unread_by_peer: tx.half.sender.in_flight(),
            queued: tx.queue.len(),
            cursors: Cursors {
                written: wrap_and_count(tx.half.sender.producer_word().cursor),
                read_by_peer: wrap_and_count(ConsumerWord::from_u64(tx.half.seen()).cursor),
                written_by_peer: wrap_and_count(written_by_peer),
                read: wrap_and_count(read),
            },
        }
    }

    /// Bytes so far, both directions together, and an upper bound of the turns in writing between the
    /// ends.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        let (received, arrivals) = {
            let rx = self.rx();
            (rx.half.total(), rx.half.arrivals())
        };
        let tx = self.tx();
        (tx.half.total().saturating_add(received), tx.half.deliveries().min(arrivals))
    }
}

fn wrap_and_count(cursor: Cursor) -> (u16, u32) {
    (cursor.wrap, cursor.count)
}
