// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! LLC messages on their way out of one link.

use std::collections::VecDeque;

use smc_core::link_group::Receipt;
use smc_core::wire::llc::LLC_LEN;

use super::slots::{CDC_SLOTS, LLC_SLOTS};

/// The most messages waiting for room. A link group exceeds this only if its peer keeps asking for
/// answers without end, and the link fails.
const MAX_WAITING: usize = 64;

#[derive(Debug, Default)]
struct Sent {
    bytes: Vec<u8>,
    receipt: Option<Receipt>,
}

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct LlcQueue {
    waiting: VecDeque<Sent>,
    /// The message in each slot.
    slots: [Option<Sent>; LLC_SLOTS as usize],
    /// The queue waits for completions.
    awaits: bool,
}

impl LlcQueue {
    /// One more message. `false`: there is no room.
    #[must_use = "a message that is not sent must not be forgotten"]
    pub(crate) fn push(&mut self, bytes: Vec<u8>, receipt: Option<Receipt>) -> bool {
        let has_room = self.waiting.len() < MAX_WAITING;
        if has_room {
            self.waiting.push_back(Sent { bytes, receipt });
        }
        has_room
    }

    fn place(slot: u32) -> Option<usize> {
        slot.checked_sub(CDC_SLOTS).map(|slot| slot as usize)
    }

    /// Puts the next message into a slot. Long messages go one at a time: a Linux peer has one buffer
    /// for the tails of them all (LLCV2-7).
    pub(crate) fn next(&mut self, take: impl FnOnce() -> Option<u32>) -> Option<u32> {
        let long = |sent: &Sent| sent.bytes.len() > LLC_LEN;
        if long(self.waiting.front()?) && self.slots.iter().flatten().any(long) {
            return None;
        }
        let slot = take()?;
        let place = self.slots.get_mut(Self::place(slot)?)?;
        *place = self.waiting.pop_front();
        Some(slot)
    }

    /// The message in a slot.
    pub(crate) fn bytes(&self, slot: u32) -> Option<&[u8]> {
        self.slots.get(Self::place(slot)?)?.as_ref().map(|sent| sent.bytes.as_slice())
    }

    /// The message in a slot was acknowledged. Returns its receipt, and whether the queue has stopped
    /// waiting for completions.
    pub(crate) fn sent(&mut self, slot: u32) -> (Option<Receipt>, bool) {
        let place = Self::place(slot).and_then(|place| self.slots.get_mut(place));
        let receipt = place.and_then(Option::take).and_then(|sent| sent.receipt);
        let over = self.awaits && !self.wants_completions();
        if over {
            self.awaits = false;
        }
        (receipt, over)
    }

    fn wants_completions(&self) -> bool {
        !self.waiting.is_empty() || self.slots.iter().flatten().any(|sent| sent.receipt.is_some())
    }

    /// Whether the queue begins to wait for completions now.
    pub(crate) fn starts_awaiting(&mut self) -> bool {
        let begins = !self.awaits && self.wants_completions();
        self.awaits |= begins;
        begins
    }

    /// Whether messages wait for room.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The link ends. `true`: the queue was waiting for completions.
    pub(crate) fn close(&mut self) -> bool {
        self.waiting.clear();
        std::mem::take(&mut self.awaits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(n: u8, len: usize) -> Vec<u8> {
        vec![n; len]
    }

    // Shows: LLC-2.
    #[test]
    fn messages_leave_in_order_and_wait_for_room() {
        let mut queue = LlcQueue::default();
        for n in 0..6 {
            assert!(queue.push(message(n, LLC_LEN), None));
        }
        let mut slots = (CDC_SLOTS..).take(4).collect::<Vec<_>>().into_iter();
        let first: Vec<_> = std::iter::from_fn(|| queue.next(|| slots.next())).collect();
        assert_eq!(first.len(), 4);
        assert_eq!(queue.bytes(first[2]).unwrap()[0], 2);
        assert!(queue.starts_awaiting() && !queue.starts_awaiting());
        assert_eq!(queue.sent(first[0]), (None, false));
        assert_eq!(queue.next(|| Some(first[0])), Some(first[0]));
        assert_eq!(queue.bytes(first[0]).unwrap()[0], 4);
    }

    // Shows: LLCV2-7.
    #[test]
    fn two_long_messages_are_never_on_their_way_together() {
        let mut queue = LlcQueue::default();
        for (n, len) in [(1, 88), (2, 88), (3, LLC_LEN)] {
            assert!(queue.push(message(n, len), None));
        }
        assert_eq!(queue.next(|| Some(CDC_SLOTS)), Some(CDC_SLOTS));
        // Order counts, so the short message behind waits, too.
        assert_eq!(queue.next(|| Some(CDC_SLOTS + 1)), None);
        queue.sent(CDC_SLOTS);
        assert_eq!(queue.next(|| Some(CDC_SLOTS)), Some(CDC_SLOTS));
        assert_eq!(queue.next(|| Some(CDC_SLOTS + 1)), Some(CDC_SLOTS + 1));
    }

    #[test]
    fn a_flood_is_bounded_and_noticed() {
        let mut queue = LlcQueue::default();
        for n in 0..1000 {
            assert_eq!(queue.push(message(0, LLC_LEN), None), n < MAX_WAITING);
        }
        assert_eq!(queue.waiting.len(), MAX_WAITING);
    }

    #[test]
    fn a_slot_of_a_connection_has_no_message_here() {
        let mut queue = LlcQueue::default();
        assert_eq!(queue.bytes(0), None);
        assert_eq!(queue.sent(0), (None, false));
    }
}
