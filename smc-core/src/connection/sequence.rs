// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sequence numbers of SMC-R control messages (RFC 7609 A.4). SMC-D has none: its single control
//! block cannot be overtaken.

/// Whether a control message is to be processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Sent after all messages seen.
    New,
    /// The last seen message again: processing the message changes nothing (wire erratum B-9).
    Repeated,
    /// Overtaken by a seen message: to be discarded, because its state is old.
    Old,
}

/// The numbers of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    last: u16,
}

impl Sequence {
    /// Before the first message.
    pub const fn new() -> Sequence {
        Sequence { last: 0 }
    }

    /// The number of the next message to send: 1 first, 0 after 65535 (CDC-5). Not for failover
    /// validation: a validation repeats [`Sequence::last`] (CDC-6).
    #[inline]
    pub const fn next(&mut self) -> u16 {
        self.last = self.last.wrapping_add(1);
        self.last
    }

    /// The number sent or seen last.
    pub const fn last(&self) -> u16 {
        self.last
    }

    /// Whether the message with this number, or a later one, was seen. A failover validation (F)
    /// for an unseen message means lost data: the connection is reset (RFC 7609 section 4.6.1).
    /// Only the number counts in such a message (CDC-35).
    #[inline]
    pub const fn has_seen(&self, received: u16) -> bool {
        self.last.wrapping_sub(received) < 0x8000
    }

    /// Judges a number received (CDC-7): newer and older differ by the sign of the 16-bit
    /// difference.
    #[inline]
    pub const fn judge(&mut self, received: u16) -> Order {
        match received.wrapping_sub(self.last) {
            0 => Order::Repeated,
            1..0x8000 => {
                self.last = received;
                Order::New
            }
            _ => Order::Old,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: CDC-5.
    #[test]
    fn numbers_start_at_one_and_wrap_to_zero() {
        let mut sent = Sequence::new();
        assert_eq!((sent.next(), sent.next()), (1, 2));
        let mut sent = Sequence { last: 65535 };
        assert_eq!((sent.next(), sent.next()), (0, 1));
    }

    // Shows: CDC-7.
    #[test]
    fn old_messages_differ_from_new_ones_across_the_wrap() {
        let mut seen = Sequence::new();
        assert_eq!(seen.judge(1), Order::New);
        assert_eq!(seen.judge(5), Order::New);
        assert_eq!(seen.judge(5), Order::Repeated);
        assert_eq!(seen.judge(4), Order::Old);
        let mut seen = Sequence { last: 65534 };
        assert_eq!(seen.judge(2), Order::New);
        assert_eq!(seen.judge(65535), Order::Old);
        assert_eq!(seen.last(), 2);
    }

    // Shows: CDC-35.
    #[test]
    fn failover_validation_asks_for_a_message_that_was_seen() {
        let seen = Sequence { last: 1 };
        assert!(seen.has_seen(1) && seen.has_seen(0) && seen.has_seen(65535));
        assert!(!seen.has_seen(2) && !seen.has_seen(300));
    }
}
