// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Servers that decline SMC again and again because they have no device left.
//!
//! A server that forks a short-lived process for each client declines nearly all (`short_lived`). A
//! server with more processes than devices always declines some. Each Decline costs the client a
//! round trip. So after several in a row the client stops proposing to that server for a while.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::selection::circuit_breaker::CircuitBreaker;
use crate::sys::raw;

/// The answers of one server.
struct ServerEntry {
    /// A hash of its address, never 0. An entry with 0 is unused.
    address_hash: AtomicU64,
    breaker: CircuitBreaker,
}

/// A table without chains, because few servers decline at the same time. Two servers that share an
/// entry overwrite each other, without harm. There is no lock that a forked child could find held.
static ENTRIES: [ServerEntry; 64] =
    [const { ServerEntry { address_hash: AtomicU64::new(0), breaker: CircuitBreaker::new() } }; 64];

/// The entry that a server uses, and the hash of its address.
fn entry(server: &SocketAddr) -> (&'static ServerEntry, u64) {
    let mut hasher = DefaultHasher::new();
    server.hash(&mut hasher);
    let address_hash = hasher.finish() | 1;
    let place = (address_hash >> 32) as usize % ENTRIES.len();
    (&ENTRIES[place], address_hash)
}

/// Whether the server would probably decline a Proposal.
pub(crate) fn is_skipped(server: &SocketAddr) -> bool {
    let (entry, address_hash) = entry(server);
    entry.address_hash.load(Ordering::Relaxed) == address_hash
        && !entry.breaker.allows(raw::monotonic_micros())
}

/// Whether any server has ever declined.
static ANY: AtomicBool = AtomicBool::new(false);

/// Whether any server has ever declined.
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// Records that a server declined because it has no device.
pub(crate) fn declined(server: &SocketAddr) {
    ANY.store(true, Ordering::Relaxed);
    let (entry, address_hash) = entry(server);
    if entry.address_hash.swap(address_hash, Ordering::Relaxed) != address_hash {
        entry.breaker.succeeded();
    }
    entry.breaker.failed(raw::monotonic_micros());
}

/// Records that a server accepted.
pub(crate) fn accepted(server: &SocketAddr) {
    let (entry, address_hash) = entry(server);
    if entry.address_hash.load(Ordering::Relaxed) == address_hash {
        entry.breaker.succeeded();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_skipped_after_several_and_others_are_not() {
        let [one, other] = ["192.0.2.1:5", "192.0.2.1:6"].map(|text| text.parse().unwrap());
        for _ in 0..4 {
            assert!(!is_skipped(&one));
            declined(&one);
        }
        assert!(is_skipped(&one));
        assert!(!is_skipped(&other));
        accepted(&one);
        assert!(!is_skipped(&one));
    }
}
