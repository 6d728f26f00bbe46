//! Servers that decline SMC again and again because they have no device left.
//!
//! A server that forks for each client, and whose processes are over soon, declines nearly all
//! (`short_lived`); one with more processes than devices declines some for ever. A message to and fro for each
//! connection would be for nothing, so after several in a row a client does without for a while.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::selection::circuit_breaker::Tally;
use crate::sys::raw;

/// What is known of one server.
struct Entry {
    /// A number for its address that is not 0.
    who: AtomicU64,
    tally: Tally,
}

/// Few servers decline at the same time. Two that share a place forget each other, without harm; and there
/// is no lock that a forked child could find taken.
static ENTRIES: [Entry; 64] = [const { Entry { who: AtomicU64::new(0), tally: Tally::new() } }; 64];

/// Its place, and its number.
fn entry(server: &SocketAddr) -> (&'static Entry, u64) {
    let mut hasher = DefaultHasher::new();
    server.hash(&mut hasher);
    let who = hasher.finish() | 1;
    let place = (who >> 32) as usize % ENTRIES.len();
    (&ENTRIES[place], who)
}

/// Whether a Proposal to a server is probably for nothing.
pub(crate) fn are_likely(server: &SocketAddr) -> bool {
    let (entry, who) = entry(server);
    entry.who.load(Ordering::Relaxed) == who && !entry.tally.allows(raw::micros())
}

/// A server has declined for want of a device.
pub(crate) fn declined(server: &SocketAddr) {
    let (entry, who) = entry(server);
    if entry.who.swap(who, Ordering::Relaxed) != who {
        entry.tally.succeeded();
    }
    entry.tally.failed(raw::micros());
}

/// A server has accepted.
pub(crate) fn accepted(server: &SocketAddr) {
    let (entry, who) = entry(server);
    if entry.who.load(Ordering::Relaxed) == who {
        entry.tally.succeeded();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_spared_after_several_and_others_are_not() {
        let [one, other] = ["192.0.2.1:5", "192.0.2.1:6"].map(|text| text.parse().unwrap());
        for _ in 0..4 {
            assert!(!are_likely(&one));
            declined(&one);
        }
        assert!(are_likely(&one));
        assert!(!are_likely(&other));
        accepted(&one);
        assert!(!are_likely(&one));
    }
}
