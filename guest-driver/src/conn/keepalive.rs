//! SMC's own keepalive, and how a connection looks from outside.
//!
//! Rules kept here: SOCK-10, SOCK-11.

use std::time::{Duration, Instant};

use smc_core::wire::cdc::{ConsumerWord, ProducerWord};
use smc_core::wire::cursor::Cursor;

use super::{Conn, lock};
use crate::info::{ConnectionSnapshot, Cursors};

/// How long a connection has been silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    /// How long is too long.
    limit: Duration,
    /// What the peer said last, and since when.
    words: [u64; 2],
    since: Instant,
}

impl Conn {
    /// After how long a silence the way to the peer is tested; `None`: it is not.
    pub(crate) fn set_keepalive(&self, limit: Option<Duration>) {
        let (words, since) = (self.words(), Instant::now());
        *lock(&self.keepalive) = limit.map(|limit| Silence { limit, words, since });
    }

    /// Tests the way to the peer if the connection has been silent for too long (RFC 7609 section
    /// 4.5.3). Whether the link was silent, too, is for the link group to know.
    pub(super) fn check_keepalive(&self) {
        let mut keepalive = lock(&self.keepalive);
        let Some(silence) = &mut *keepalive else { return };
        let words = self.words();
        if words != silence.words {
            (silence.words, silence.since) = (words, Instant::now());
            return;
        }
        if silence.since.elapsed() < silence.limit {
            return;
        }
        // An answer makes the connection as good as one that was heard (SOCK-12).
        silence.since = Instant::now();
        let limit = silence.limit;
        drop(keepalive);
        self.carrier.test(limit);
    }

    /// How the connection is now.
    pub(crate) fn snapshot(&self) -> ConnectionSnapshot {
        let addresses = self.addresses().ok();
        let (received, unread, read, written_by_peer) = {
            let mut rx = self.rx();
            // An error shows in the state.
            let _ = self.refresh_rx(&mut rx);
            let written = ProducerWord::from_u64(rx.seen[0]).cursor;
            (rx.total, rx.receiver.available(), rx.receiver.cursor(), written)
        };
        let mut tx = self.tx();
        self.refresh_tx(&mut tx);
        ConnectionSnapshot {
            local: addresses.map(|(local, _)| local),
            peer: addresses.map(|(_, peer)| peer),
            info: self.carrier.info(),
            state: format!("{:?}", tx.close.state()),
            sent: tx.total,
            received,
            unread,
            unread_by_peer: tx.sender.in_flight(),
            cursors: Cursors {
                written: wrap_and_count(tx.sender.producer_word().cursor),
                read_by_peer: wrap_and_count(ConsumerWord::from_u64(tx.seen).cursor),
                written_by_peer: wrap_and_count(written_by_peer),
                read: wrap_and_count(read),
            },
        }
    }
}

fn wrap_and_count(cursor: Cursor) -> (u16, u32) {
    (cursor.wrap, cursor.count)
}
