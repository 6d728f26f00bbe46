// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two decisions of a failover: the message named by the sender, and the receiver's conclusion
//! (RFC 7609 section 4.6). [`Outbound`](super::Outbound) has the rest of the sender's part.

use super::Sequence;

/// The conclusion from a failover validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validation {
    /// Every message acknowledged to the sender has arrived: no action is needed.
    Intact,
    /// Data is lost: reset the connection.
    Lost {
        /// Number in the validation.
        sent: u16,
        /// Number seen last.
        seen: u16,
    },
}

/// Judges a control message with F by the numbers seen on the connection (LG-37). The message's
/// other fields have no meaning, and [`Sequence::judge`] is not for such messages (CDC-35).
pub const fn judge(seen: &Sequence, validation: u16) -> Validation {
    if seen.has_seen(validation) {
        Validation::Intact
    } else {
        Validation::Lost { sent: validation, seen: seen.last() }
    }
}

/// The oldest unacknowledged message of a connection with `last` as the number of its last message.
/// The message before is the last one certainly received by the peer (LG-33, LG-39): a reliable
/// queue pair delivers in order.
pub fn oldest_unacknowledged(numbers: impl IntoIterator<Item = u16>, last: u16) -> Option<u16> {
    numbers.into_iter().max_by_key(|number| last.wrapping_sub(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_number_is_found_across_the_wrap() {
        assert_eq!(oldest_unacknowledged([], 7), None);
        assert_eq!(oldest_unacknowledged([7, 5, 6], 7), Some(5));
        assert_eq!(oldest_unacknowledged([1, 65535, 0, 2], 2), Some(65535));
    }

    // Shows: LG-37, SEC-15.
    #[test]
    fn receiver_resets_if_the_number_is_newer_than_what_it_saw() {
        let mut seen = Sequence::new();
        seen.judge(5);
        assert_eq!(judge(&seen, 4), Validation::Intact);
        assert_eq!(judge(&seen, 5), Validation::Intact);
        assert_eq!(judge(&seen, 6), Validation::Lost { sent: 6, seen: 5 });
        let mut wrapped = Sequence::new();
        for number in [20000, 40000, 65535] {
            wrapped.judge(number);
        }
        assert_eq!(judge(&wrapped, 0), Validation::Lost { sent: 0, seen: 65535 });
        wrapped.judge(0);
        assert_eq!(judge(&wrapped, 65535), Validation::Intact);
    }
}
