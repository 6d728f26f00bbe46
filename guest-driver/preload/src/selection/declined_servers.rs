//! Servers that decline SMC again and again because they have no device left.
//!
//! A server that forks for each client, and whose processes are over soon, declines nearly all
//! (`short_lived`); one with more processes than devices declines some for ever. A message to and fro for each
//! connection would be for nothing, so after several in a row a client does without for a while.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::selection::circuit_breaker::CircuitBreaker;
use crate::sys::raw;

/// What is known of one server.
struct Entry {
    /// A number for its address that is not 0.
    address_hash: AtomicU64,
    breaker: CircuitBreaker,
}

/// Few servers decline at the same time. Two that share a place forget each other, without harm; and there
/// is no lock that a forked child could find taken.
static ENTRIES: [Entry; 64] =
    [const { Entry { address_hash: AtomicU64::new(0), breaker: CircuitBreaker::new() } }; 64];

/// Its place, and its number.
fn entry(server: &SocketAddr) -> (&'static Entry, u64) {
    let mut hasher = DefaultHasher::new();
    server.hash(&mut hasher);
    let address_hash = hasher.finish() | 1;
    let place = (address_hash >> 32) as usize % ENTRIES.len();
    (&ENTRIES[place], address_hash)
}

/// Whether a Proposal to a server is probably for nothing.
pub(crate) fn is_skipped(server: &SocketAddr) -> bool {
    let (entry, address_hash) = entry(server);
    entry.address_hash.load(Ordering::Relaxed) == address_hash
        && !entry.breaker.allows(raw::monotonic_micros())
}

/// A server has declined for want of a device.
pub(crate) fn declined(server: &SocketAddr) {
    let (entry, address_hash) = entry(server);
    if entry.address_hash.swap(address_hash, Ordering::Relaxed) != address_hash {
        entry.breaker.succeeded();
    }
    entry.breaker.failed(raw::monotonic_micros());
}

/// A server has accepted.
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
    fn a_server_is_spared_after_several_and_others_are_not() {
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
