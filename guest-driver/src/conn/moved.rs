// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes sent and received by the connections of a stack since its start.
//!
//! Each connection counts its bytes, under its locks. A finished connection is added here, so a send or
//! receive does nothing for the sum.

use std::sync::atomic::{AtomicU64, Ordering};

use smc_info::ConnectionSnapshot;

/// Bytes sent, and bytes received.
type Bytes = [u64; 2];

/// The sum.
#[derive(Debug, Default)]
pub(crate) struct MovedBytes {
    /// Bytes of finished connections.
    ended: [AtomicU64; 2],
    /// The last sum reported.
    told: [AtomicU64; 2],
}

impl MovedBytes {
    pub(super) fn add(&self, bytes: Bytes) {
        for (sum, bytes) in self.ended.iter().zip(bytes) {
            sum.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// The open connections, as returned by `list`, and the sum including theirs. The sum never
    /// decreases: for a moment, the bytes of a connection being dropped are in neither part.
    pub(crate) fn with_open(
        &self,
        list: impl FnOnce() -> Vec<ConnectionSnapshot>,
    ) -> (Vec<ConnectionSnapshot>, Bytes) {
        // Before the list, so no connection is counted twice.
        let [sent, received] = self.ended.each_ref().map(|ended| ended.load(Ordering::Relaxed));
        let open = list();
        let sent = open.iter().fold(sent, |sum, one| sum.saturating_add(one.sent));
        let received = open.iter().fold(received, |sum, one| sum.saturating_add(one.received));
        let [told_sent, told_received] = &self.told;
        let last = |told: &AtomicU64, sum| told.fetch_max(sum, Ordering::Relaxed).max(sum);
        (open, [last(told_sent, sent), last(told_received, received)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_info::{ConnectionInfo, Cursors, Fallback};

    #[test]
    fn the_sum_has_ended_connections_and_never_becomes_less() {
        let moved = MovedBytes::default();
        let open = |sent, received| ConnectionSnapshot {
            local: None,
            peer: None,
            info: ConnectionInfo::Tcp(Fallback::Asked),
            changes: None,
            state: "Active".into(),
            sent,
            received,
            unread: 0,
            unread_by_peer: 0,
            queued: 0,
            cursors: Cursors::default(),
        };
        assert_eq!(moved.with_open(Vec::new).1, [0, 0]);
        assert_eq!(moved.with_open(|| vec![open(5, 7), open(1, 0)]).1, [6, 7]);
        // A connection is being dropped, and is not added yet.
        assert_eq!(moved.with_open(|| vec![open(1, 0)]).1, [6, 7]);
        moved.add([5, 9]);
        assert_eq!(moved.with_open(|| vec![open(1, 0)]).1, [6, 9]);
        let (list, sum) = moved.with_open(|| {
            // A connection ends between the two reads.
            moved.add([1, 0]);
            vec![open(1, 0)]
        });
        assert_eq!((list.len(), sum), (1, [6, 9]));
        assert_eq!(moved.with_open(Vec::new).1, [6, 9]);
    }
}
