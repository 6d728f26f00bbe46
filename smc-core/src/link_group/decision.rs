// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decisions of a link group that are final.

use super::ids::Receipt;

/// Decided once and for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupDecision {
    was_usable: bool,
    was_redundant: bool,
    committed: bool,
    commit_receipt: Option<Receipt>,
}

impl GroupDecision {
    /// Whether connections could ever send.
    pub(super) fn was_usable(&self) -> bool {
        self.was_usable
    }

    /// Connections can send, so the first one can no longer go on as TCP.
    pub(super) fn note_usable(&mut self) {
        self.was_usable = true;
        self.commit();
    }

    /// Whether there were two links once.
    pub(super) fn was_redundant(&self) -> bool {
        self.was_redundant
    }

    /// There are two links.
    pub(super) fn note_redundant(&mut self) {
        self.was_redundant = true;
    }

    /// Whether the first connection can no longer go on as TCP (ERR-3).
    pub(super) fn is_committed(&self) -> bool {
        self.committed
    }

    /// The first connection can no longer go on as TCP.
    pub(super) fn commit(&mut self) {
        self.committed = true;
    }

    /// The arrival of the message with this receipt decides.
    pub(super) fn commit_by(&mut self, receipt: Receipt) {
        self.commit_receipt = Some(receipt);
    }

    /// The message with this receipt has arrived.
    pub(super) fn take_arrival(&mut self, receipt: Receipt) {
        if self.commit_receipt.take_if(|awaited| *awaited == receipt).is_some() {
            self.commit();
        }
    }
}
