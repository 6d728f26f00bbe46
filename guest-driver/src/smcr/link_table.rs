// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The links over one RNIC, by the numbers of their queue pairs.

use std::sync::{Arc, PoisonError, RwLock};

use rustc_hash::FxHashMap;
use smc_core::wire::ids::Qpn;

use super::link::Link;
use super::slots::{RECEIVES, REQUESTS_PER_SLOT, SLOTS};

/// The links over one RNIC. A completion names its link by the number of a queue pair.
#[derive(Debug)]
pub(crate) struct LinkTable<L = Link> {
    links: RwLock<FxHashMap<u32, Arc<L>>>,
    /// The number of links with room in the completion queues.
    max: u32,
}

impl<L> LinkTable<L> {
    /// A table for an RNIC whose completion queues have room for so many receives and sends.
    pub(crate) fn new(receives: u32, sends: u32) -> LinkTable<L> {
        // In a queue pair in error every request completes, those without completion included.
        let max = (receives / RECEIVES).min(sends / (SLOTS * REQUESTS_PER_SLOT));
        LinkTable { links: RwLock::default(), max }
    }

    /// Adds a link. `false`: the completion queues have no room for another one.
    #[must_use = "a link without room would let the queues overrun"]
    pub(crate) fn insert(&self, qpn: Qpn, link: &Arc<L>) -> bool {
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        let fits = (links.len() as u64) < u64::from(self.max);
        if fits {
            links.insert(qpn.get(), Arc::clone(link));
        }
        fits
    }

    /// Removes a link. Later completions are dropped.
    pub(crate) fn remove(&self, qpn: Qpn) {
        self.links.write().unwrap_or_else(PoisonError::into_inner).remove(&qpn.get());
    }

    /// The link with this queue pair.
    #[inline]
    pub(crate) fn get(&self, qpn: Qpn) -> Option<Arc<L>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).get(&qpn.get()).cloned()
    }

    /// The links of the table.
    pub(crate) fn all(&self) -> Vec<Arc<L>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOR_TWO: (u32, u32) = (2 * RECEIVES, 2 * SLOTS * REQUESTS_PER_SLOT);

    #[test]
    fn no_more_links_than_the_completion_queues_have_room_for() {
        let table = LinkTable::new(FOR_TWO.0, FOR_TWO.1 + 1);
        for qpn in 1..=2 {
            assert!(table.insert(Qpn::new(qpn), &Arc::new(qpn)));
        }
        assert!(!table.insert(Qpn::new(3), &Arc::new(3)));
        table.remove(Qpn::new(1));
        assert!(table.insert(Qpn::new(3), &Arc::new(3)));
        assert!(!LinkTable::new(FOR_TWO.0, 0).insert(Qpn::new(1), &Arc::new(1)));
    }

    /// A link may be removed while a batch with its completions is dispatched.
    #[test]
    fn completions_of_a_removed_link_are_dropped_in_the_middle_of_a_batch() {
        let table = LinkTable::new(FOR_TWO.0, FOR_TWO.1);
        for qpn in 1..=2 {
            assert!(table.insert(Qpn::new(qpn), &Arc::new(qpn)));
        }
        let mut seen = Vec::new();
        for qpn in [1, 2, 1, 2, 3, 2, 1] {
            let Some(link) = table.get(Qpn::new(qpn)) else { continue };
            seen.push(*link);
            if seen.len() == 3 {
                table.remove(Qpn::new(1));
            }
        }
        assert_eq!(seen, [1, 2, 1, 2, 2]);
        assert_eq!(table.all().len(), 1);
    }
}
