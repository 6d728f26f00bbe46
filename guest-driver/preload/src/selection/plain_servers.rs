//! Servers that did not answer TCP option 254 the last time. Their clients do nothing that only
//! pays for SMC: they ask again, but they do not delay TCP's acknowledgements.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Hashes of addresses; 0: none. Two servers that share a place overwrite each other, which costs
/// the next client of either a few microseconds.
static PLAIN: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn place(server: &SocketAddr) -> (&'static AtomicU64, u64) {
    let mut hasher = DefaultHasher::new();
    server.hash(&mut hasher);
    let hash = hasher.finish() | 1;
    (&PLAIN[(hash >> 32) as usize % PLAIN.len()], hash)
}

/// Whether the server did not answer the last time.
pub(crate) fn contains(server: &SocketAddr) -> bool {
    let (place, hash) = place(server);
    place.load(Ordering::Relaxed) == hash
}

/// Stores whether a server has answered.
pub(crate) fn note(server: &SocketAddr, answers: bool) {
    let (place, hash) = place(server);
    let known = place.load(Ordering::Relaxed) == hash;
    if known == answers {
        place.store(if answers { 0 } else { hash }, Ordering::Relaxed);
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
}
