// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The latest numbers that a link group has given out.

use super::ids::{LinkKey, Receipt};

/// The latest numbers given out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    next_key: u32,
    last_link: u8,
    next_receipt: u32,
    probes: u64,
}

impl Numbers {
    /// The key of a new link.
    pub(super) fn next_key(&mut self) -> LinkKey {
        let key = LinkKey(self.next_key);
        self.next_key = self.next_key.wrapping_add(1);
        key
    }

    /// The next unused link number; numbers repeat only after all 255 (LLC-15).
    pub(super) fn next_link(&mut self, is_used: impl Fn(u8) -> bool) -> u8 {
        for _ in 0..=u8::MAX {
            self.last_link = self.last_link.checked_add(1).unwrap_or(1);
            if !is_used(self.last_link) {
                break;
            }
        }
        self.last_link
    }

    /// The number of the first link, by the server.
    pub(super) fn set_first_link(&mut self, number: u8) -> u8 {
        self.last_link = number;
        number
    }

    /// The receipt of a message.
    pub(super) fn next_receipt(&mut self) -> Receipt {
        let receipt = Receipt(self.next_receipt);
        self.next_receipt = self.next_receipt.wrapping_add(1);
        receipt
    }

    /// The number of a probe.
    pub(super) fn next_probe(&mut self) -> u64 {
        let probe = self.probes;
        self.probes = self.probes.wrapping_add(1);
        probe
    }
}
