// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Servers that did not answer TCP option 254 the last time. Their clients do nothing that only
//! pays for SMC: they ask again, but they do not delay TCP's acknowledgements. Clients of a server
//! that did not answer many times in a row ask only now and then, since each question takes two
//! system calls.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys::raw;

/// Clients ask a server that did not answer this often in a row only now and then.
const IN_A_ROW: u32 = 16;
/// For so long after the last question, in microseconds. A server that begins to answer is found
/// this much later.
const PAUSE: u64 = 100_000;

/// A server that did not answer the last time.
struct PlainServer {
    /// A hash of its address, never 0. An entry with 0 is unused. Two servers that share an entry
    /// overwrite each other, which costs the next client of either a few microseconds.
    hash: AtomicU64,
    /// How often it did not answer since it last did.
    in_a_row: AtomicU32,
    /// When the last client asked it, on the monotonic clock in microseconds.
    asked: AtomicU64,
}

impl PlainServer {
    const fn none() -> PlainServer {
        let (hash, asked) = (AtomicU64::new(0), AtomicU64::new(0));
        PlainServer { hash, in_a_row: AtomicU32::new(0), asked }
    }

    fn is_paused(&self, now: u64) -> bool {
        self.in_a_row.load(Ordering::Relaxed) >= IN_A_ROW
            && now.saturating_sub(self.asked.load(Ordering::Relaxed)) < PAUSE
    }

    fn note_no_answer(&self, hash: u64, now: u64) {
        self.asked.store(now, Ordering::Relaxed);
        if self.hash.swap(hash, Ordering::Relaxed) != hash {
            self.in_a_row.store(0, Ordering::Relaxed);
        }
        // Does not wrap: the next question is a pause away.
        self.in_a_row.fetch_add(1, Ordering::Relaxed);
    }
}

static PLAIN: [PlainServer; 64] = [const { PlainServer::none() }; 64];

fn entry(server: &SocketAddr) -> (&'static PlainServer, u64) {
    let mut hasher = DefaultHasher::new();
    server.hash(&mut hasher);
    let hash = hasher.finish() | 1;
    (&PLAIN[(hash >> 32) as usize % PLAIN.len()], hash)
}

/// Whether the server did not answer the last time.
pub(crate) fn contains(server: &SocketAddr) -> bool {
    let (entry, hash) = entry(server);
    entry.hash.load(Ordering::Relaxed) == hash
}

/// Whether a client had better not ask the server now, because it would not answer.
pub(crate) fn is_paused(server: &SocketAddr) -> bool {
    contains(server) && entry(server).0.is_paused(raw::monotonic_micros())
}

/// Stores whether a server that a client has asked has answered.
pub(crate) fn note(server: &SocketAddr, answers: bool) {
    let (entry, hash) = entry(server);
    if !answers {
        entry.note_no_answer(hash, raw::monotonic_micros());
    } else if entry.hash.load(Ordering::Relaxed) == hash {
        entry.hash.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_plain_until_it_answers() {
        let [one, other] = ["192.0.2.1:5", "192.0.2.1:6"].map(|text| text.parse().unwrap());
        assert!(!contains(&one));
        note(&one, true);
        assert!(!contains(&one));
        note(&one, false);
        note(&one, false);
        assert!(contains(&one) && !contains(&other));
        note(&one, true);
        assert!(!contains(&one));
    }

    #[test]
    fn a_server_that_never_answers_is_asked_now_and_then() {
        let server = PlainServer::none();
        for _ in 0..IN_A_ROW {
            assert!(!server.is_paused(5_000));
            server.note_no_answer(7, 5_000);
        }
        assert!(server.is_paused(5_000) && server.is_paused(5_000 + PAUSE - 1));
        assert!(!server.is_paused(5_000 + PAUSE));
        server.note_no_answer(7, 5_000 + PAUSE);
        assert!(server.is_paused(5_000 + PAUSE + 1));
        // Another server with the same place begins anew.
        server.note_no_answer(9, 5_000 + PAUSE);
        assert!(!server.is_paused(5_000 + PAUSE));
    }
}
