// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The number of handshakes of each source with a DMB or an RMB for a client without a Confirm.
//!
//! A client makes its server register memory by a Proposal, at the cost of device commands. Clients
//! that never confirm are to pay for it themselves: a source with many of them gets Declines.

use std::net::{IpAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustc_hash::FxHashMap;

use ism_sys::{ForkLocks, is_free, lock};

/// The most accepted clients of a source without a Confirm.
const MAX_OFFERS: usize = 512;

/// The location of a client: a host, or with IPv6 a network, where a host has any address it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source(u64);

impl Source {
    pub(super) fn of(ip: IpAddr) -> Source {
        match ip.to_canonical() {
            IpAddr::V4(ip) => Source(u64::from(ip.to_bits())),
            IpAddr::V6(ip) => Source((ip.to_bits() >> 64) as u64),
        }
    }

    /// The source of a connection with its peer still there.
    pub(super) fn of_stream(tcp: &TcpStream) -> Option<Source> {
        tcp.peer_addr().ok().map(|addr| Source::of(addr.ip()))
    }
}

/// The accepted clients of a stack without a Confirm.
#[derive(Debug, Default)]
pub(super) struct Offers {
    all: AtomicUsize,
    by_source: Mutex<FxHashMap<Source, usize>>,
}

/// One accepted client without a Confirm.
#[derive(Debug)]
pub(super) struct Offer {
    offers: Arc<Offers>,
    source: Source,
}

impl ForkLocks for Offers {
    fn is_unlocked(&self) -> bool {
        is_free(&self.by_source)
    }
}

impl Offers {
    /// Whether there is room for one more client of a source.
    pub(super) fn has_room(&self, source: impl FnOnce() -> Option<Source>) -> bool {
        // Mostly there are so few clients that their sources do not matter.
        self.all.load(Ordering::Relaxed) < MAX_OFFERS
            || source().is_some_and(|source| self.of(source) < MAX_OFFERS)
    }

    fn of(&self, source: Source) -> usize {
        lock(&self.by_source).get(&source).copied().unwrap_or(0)
    }

    /// Counts one client of a source until the result is dropped.
    pub(super) fn add(self: &Arc<Offers>, source: Source) -> Offer {
        self.all.fetch_add(1, Ordering::Relaxed);
        *lock(&self.by_source).entry(source).or_default() += 1;
        Offer { offers: self.clone(), source }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.offers.all.fetch_sub(1, Ordering::Relaxed);
        let mut by_source = lock(&self.offers.by_source);
        if let Some(count) = by_source.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                by_source.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_with_many_clients_that_do_not_confirm_gets_no_more_and_others_do() {
        let offers = Arc::new(Offers::default());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = Source::of("10.0.0.1".parse().unwrap());
        let others: Vec<_> = (0..MAX_OFFERS).map(|_| offers.add(other)).collect();
        let source = || Source::of_stream(&tcp);
        assert!(offers.has_room(source), "those are of another source");
        let mut mine: Vec<_> = (0..MAX_OFFERS).map(|_| offers.add(source().unwrap())).collect();
        assert!(!offers.has_room(source));
        mine.pop();
        assert!(offers.has_room(source));
        drop((mine, others));
        assert_eq!(offers.all.load(Ordering::Relaxed), 0);
        assert!(lock(&offers.by_source).is_empty());
    }

    #[test]
    fn clients_of_one_network_of_ipv6_are_one_source() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
