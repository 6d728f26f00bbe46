// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Room in a send queue.
//!
//! A *slot* is one SEND not yet acknowledged by the peer's adapter, together with the RDMA WRITEs in
//! front of it. Slots bound the length of the own send queue, and the lead of this side over the peer's
//! receive queue. SMC has no credits, so a peer with 48 posted receives (such as Linux) must never see
//! more than 48 messages at a time; any remaining lack in the two directions is left to the adapters'
//! own retries.

use std::sync::atomic::{AtomicU64, Ordering};

/// Slots for CDC messages.
pub(crate) const CDC_SLOTS: u32 = 44;
/// Slots for LLC messages. These must get through independently of connections, and vice versa (CDC-3).
pub(crate) const LLC_SLOTS: u32 = 4;
/// CDC and LLC slots.
pub(crate) const SLOTS: u32 = CDC_SLOTS + LLC_SLOTS;
/// The most work requests of one slot: two WRITEs, as the ring may wrap, and the SEND.
pub(crate) const REQUESTS_PER_SLOT: u32 = 3;

/// Receives posted by a link: the most messages of a peer under way (Linux: 48), and as many again sent
/// before this side has polled.
pub(crate) const RECEIVES: u32 = 96;

const CDC_MASK: u64 = (1 << CDC_SLOTS) - 1;
const LLC_MASK: u64 = ((1 << LLC_SLOTS) - 1) << CDC_SLOTS;

/// The slots of one queue pair, taken and freed without a lock.
#[derive(Debug)]
pub(crate) struct Slots {
    /// A bit per free slot.
    free: AtomicU64,
    /// The message in each slot of connections: the peer's alert token and the sequence number.
    messages: [AtomicU64; CDC_SLOTS as usize],
}

impl Default for Slots {
    fn default() -> Self {
        let messages = [const { AtomicU64::new(0) }; CDC_SLOTS as usize];
        Slots { free: AtomicU64::new(CDC_MASK | LLC_MASK), messages }
    }
}

impl Slots {
    /// A slot for a CDC message with this number, to the connection with this alert token.
    #[inline]
    pub(crate) fn take_cdc(&self, token: u32, sequence: u16) -> Option<u32> {
        let slot = self.take(CDC_MASK)?;
        if let Some(message) = self.messages.get(slot as usize) {
            message.store(u64::from(token) << 16 | u64::from(sequence), Ordering::Relaxed);
        }
        Some(slot)
    }

    /// Numbers of the unacknowledged messages to the connection with this alert token, in any order
    /// (LG-39). No other thread may be posting for the connection.
    pub(crate) fn unacknowledged(&self, token: u32) -> impl Iterator<Item = u16> + '_ {
        let free = self.free();
        let in_use = (0..CDC_SLOTS).filter(move |slot| free & 1 << slot == 0);
        in_use
            .filter_map(|slot| self.messages.get(slot as usize))
            .map(|message| message.load(Ordering::Relaxed))
            .filter(move |message| message >> 16 == u64::from(token))
            .map(|message| message as u16)
    }

    /// A slot for an LLC message.
    pub(crate) fn take_llc(&self) -> Option<u32> {
        self.take(LLC_MASK)
    }

    #[inline]
    fn take(&self, mask: u64) -> Option<u32> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let mine = free & mask;
            if mine == 0 {
                return None;
            }
            let slot = mine.trailing_zeros();
            // Acquire: the last user of the slot no longer uses its buffer.
            match self.free.compare_exchange_weak(
                free,
                free & !(1 << slot),
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(slot),
                Err(now) => free = now,
            }
        }
    }

    /// The message of a slot was acknowledged, or is lost with its queue pair.
    #[inline]
    pub(crate) fn release(&self, slot: u32) {
        if slot < SLOTS {
            self.free.fetch_or(1 << slot, Ordering::Release);
        }
    }

    /// A bit per free slot.
    pub(crate) fn free(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    /// Number of unacknowledged messages.
    pub(crate) fn used(&self) -> u32 {
        SLOTS - self.free.load(Ordering::Relaxed).count_ones()
    }

    /// Number of unacknowledged messages of connections.
    pub(crate) fn used_by_cdc(&self) -> u32 {
        CDC_SLOTS - (self.free() & CDC_MASK).count_ones()
    }

    /// Whether to poll completions: half of the slots of connections are in use.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        (self.free.load(Ordering::Relaxed) & CDC_MASK).count_ones() < CDC_SLOTS / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_given_once_until_it_is_freed() {
        let slots = Slots::default();
        let taken: std::collections::BTreeSet<_> =
            std::iter::from_fn(|| slots.take_cdc(1, 1)).collect();
        assert_eq!(taken.len() as u32, CDC_SLOTS);
        assert_eq!(slots.used(), CDC_SLOTS);
        slots.release(7);
        assert_eq!((slots.take_cdc(1, 1), slots.take_cdc(1, 1)), (Some(7), None));
    }

    // Shows: CDC-3.
    #[test]
    fn connections_cannot_use_up_what_the_link_layer_needs() {
        let slots = Slots::default();
        while slots.take_cdc(1, 1).is_some() {}
        let llc = slots.take_llc();
        assert!(llc.is_some_and(|slot| (CDC_SLOTS..SLOTS).contains(&slot)));
    }

    /// The first step of a failover ([`smc_core::connection::Outbound::fail_over`]).
    // Shows: LG-33.
    #[test]
    fn the_messages_of_a_connection_that_are_not_acknowledged_are_known() {
        let slots = Slots::default();
        let of = |token| slots.unacknowledged(token).collect::<std::collections::BTreeSet<_>>();
        let mut taken = Vec::new();
        for number in 0xfffe_u32..=0x1_0002 {
            taken.push(slots.take_cdc(7, number as u16).unwrap());
            slots.take_cdc(0x8000_0007, number as u16).unwrap();
        }
        assert!(slots.take_llc().is_some());
        slots.release(taken[0]);
        slots.release(taken[3]);
        assert_eq!(of(7), [0xffff, 0, 2].into());
        assert_eq!(of(0x8000_0007), [0xfffe, 0xffff, 0, 1, 2].into());
        assert!(of(8).is_empty());
        // A slot in use again has forgotten its last message.
        slots.take_cdc(8, 9).unwrap();
        assert_eq!((of(7), of(8)), ([0xffff, 0, 2].into(), [9].into()));
        taken.iter().for_each(|slot| slots.release(*slot));
        assert!(of(7).is_empty());
    }

    #[test]
    fn a_slot_that_does_not_exist_is_not_freed() {
        let slots = Slots::default();
        slots.release(SLOTS);
        slots.release(u32::MAX);
        assert_eq!(slots.used(), 0);
    }

    #[test]
    fn threads_never_share_a_slot() {
        let slots = Slots::default();
        let owners: Vec<AtomicU64> = (0..SLOTS).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let Some(slot) = slots.take_cdc(1, 1) else { continue };
                        let owner = &owners[slot as usize];
                        assert_eq!(owner.fetch_add(1, Ordering::Relaxed), 0);
                        owner.fetch_sub(1, Ordering::Relaxed);
                        slots.release(slot);
                    }
                });
            }
        });
        assert_eq!(slots.used(), 0);
    }
}
