// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way from TCP back to a ring, as far as an owner prepares it.
//!
//! [`crate::carrier::Renewal`] says which message comes next. Its owner needs device commands for
//! each answer, and carries them out without a lock: the value here says how far the owner is.

use std::collections::VecDeque;

use crate::carrier::Input;
use crate::wire::clc::{Peek, peek_header};

/// The owner's part of the handshake for a ring. `S`: the owner's state between two messages. `R`:
/// a ring.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum RingRenewal<S, R> {
    /// Nothing is under way.
    #[default]
    None,
    /// A thread carries out a step.
    Busy,
    /// The peer's next message has its turn.
    Stage(S),
    /// There is no ring, although the peer may begin it.
    Failed,
    /// The negotiated ring, not yet in use.
    Ready(R),
}

impl<S, R> RingRenewal<S, R> {
    /// Takes the stage out, for a step. `None`: another state, which stays.
    pub fn take_stage(&mut self) -> Option<S> {
        match std::mem::take(self) {
            RingRenewal::Stage(stage) => Some(stage),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Takes the ring out, to begin it.
    pub fn take_ring(&mut self) -> Option<R> {
        match std::mem::take(self) {
            RingRenewal::Ready(ring) => Some(ring),
            other => {
                *self = other;
                None
            }
        }
    }

    /// The thread has carried out its step.
    pub fn end_step(&mut self) {
        if matches!(self, RingRenewal::Busy) {
            *self = RingRenewal::None;
        }
    }

    /// The thread is gone with its step. The handshake has to end.
    pub fn lose_step(&mut self) {
        if matches!(self, RingRenewal::Busy) {
            *self = RingRenewal::Failed;
        }
    }

    /// Ends the handshake. Returns the state to drop, once no lock is held. A step under way ends
    /// by itself.
    pub fn forget(&mut self) -> Option<RingRenewal<S, R>> {
        match self {
            RingRenewal::Busy | RingRenewal::None => None,
            _ => Some(std::mem::take(self)),
        }
    }

    /// Whether there is a ring, not yet in use.
    pub const fn has_ring(&self) -> bool {
        matches!(self, RingRenewal::Ready(_))
    }
}

/// A CLC message out of the body of its record.
#[derive(Debug, Default)]
pub struct Message {
    bytes: Vec<u8>,
    missing: u32,
}

impl Message {
    /// A CLC record of this length begins.
    pub fn begin(&mut self, len: u32) {
        self.bytes.clear();
        self.missing = len;
    }

    /// Bytes missing in the record.
    pub const fn missing(&self) -> u32 {
        self.missing
    }

    /// Takes bytes of the record. Returns the input for the machine after the last byte.
    pub fn fill(&mut self, input: &mut VecDeque<u8>) -> Option<Input> {
        let n = input.len().min(self.missing as usize);
        self.bytes.extend(input.drain(..n));
        self.missing -= n as u32;
        if self.missing > 0 {
            return None;
        }
        Some(match peek_header(&self.bytes) {
            Peek::Message { kind, length } if length == self.bytes.len() => Input::Message(kind),
            _ => Input::Violated,
        })
    }

    /// Takes the bytes of a complete message.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Forgets a complete message.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::clc::Kind;

    type Renewal = RingRenewal<&'static str, u8>;

    fn all() -> [Renewal; 5] {
        use RingRenewal::{Busy, Failed, None, Ready, Stage};
        [None, Busy, Stage("offer"), Failed, Ready(7)]
    }

    #[test]
    fn only_a_stage_gives_a_stage_and_only_a_ring_a_ring() {
        for mut renewal in all() {
            let (stage, has_ring) = (renewal == RingRenewal::Stage("offer"), renewal.has_ring());
            assert_eq!(renewal.take_stage().is_some(), stage);
            assert_eq!(renewal.take_ring().is_some(), has_ring);
            assert!(!renewal.has_ring() && renewal.take_stage().is_none());
            assert_eq!(renewal == RingRenewal::None, stage || has_ring || renewal == Renewal::None);
        }
    }

    #[test]
    fn a_step_outlives_the_end_of_its_handshake_and_not_its_thread() {
        for mut renewal in all() {
            let was_busy = renewal == RingRenewal::Busy;
            let dropped = renewal.forget();
            assert!(!matches!(dropped, Some(RingRenewal::Busy | RingRenewal::None)));
            assert_eq!(renewal == RingRenewal::Busy, was_busy);
            renewal.end_step();
            assert_eq!(renewal, RingRenewal::None);
        }
        for mut renewal in all() {
            let was_busy = renewal == RingRenewal::Busy;
            let was_failed = renewal == RingRenewal::Failed;
            renewal.lose_step();
            assert_eq!(renewal == RingRenewal::Failed, was_busy || was_failed);
        }
    }

    #[test]
    fn a_message_comes_in_pieces_and_has_the_length_of_its_record() {
        // A Decline of SMCv2.
        let mut decline = vec![0xe2, 0xd4, 0xc3, 0xc4, 4, 0, 28, 0x20];
        decline.resize(24, 0);
        decline.extend([0xe2, 0xd4, 0xc3, 0xc4]);
        let mut message = Message::default();
        message.begin(28);
        let mut input: VecDeque<u8> = decline.iter().take(10).copied().collect();
        assert_eq!((message.fill(&mut input), message.missing()), (None, 18));
        input.extend(decline.iter().skip(10).chain(&[1, 2]));
        assert_eq!(message.fill(&mut input), Some(Input::Message(Kind::Decline)));
        assert_eq!((input.len(), message.take()), (2, decline));
        // A record longer than its message.
        message.begin(2);
        assert_eq!(message.fill(&mut input), Some(Input::Violated));
        assert!(input.is_empty());
    }
}
