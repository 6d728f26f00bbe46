// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The claim: a client's buffer named by its Proposal, so that the server need not wait for Confirm.
//!
//! ```text
//! client's DMB:  24 word (8, host order): reserved (5) | state (1) | number (2)
//!                32 connection (40): client's address (16) | server's address (16)
//!                   | client's port (2) | server's port (2) | reserved (4)
//! ```
//!
//! The client stores the connection, then the word with [`Claim::open`]. A server with this DMB
//! attached compares both with its own end of the TCP connection, and changes the word to
//! [`Claim::taken`] before it sends Accept. From then on the DMB is the connection's. Each change of
//! the word but the first is a compare-and-exchange, so the client can end a claim not taken yet.
//! The low six bits of the number are the low bits of the DMB's token.

use std::num::NonZeroU16;

use super::ids::DmbToken;

/// Offset of the word in the control block.
pub const CLAIM_WORD: u32 = 24;
/// Offset of the connection in the DMB, a part of the ring not in use yet.
pub const CLAIM_CONNECTION: u32 = 32;
/// Bytes of the connection.
pub const CLAIM_LEN: usize = 40;

/// The bits of a number that are the DMB's.
const TOKEN_BITS: u16 = 0x3f;

const OPEN: u64 = 1 << 16;
const TAKEN: u64 = 2 << 16;

/// A claim of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    number: NonZeroU16,
    connection: [u8; CLAIM_LEN],
}

impl Claim {
    /// The claim with this number for the TCP connection between two ends: address of IPv6, where
    /// IPv4 is mapped, and port.
    pub fn new(number: NonZeroU16, client: ([u8; 16], u16), server: ([u8; 16], u16)) -> Claim {
        let mut connection = [0; CLAIM_LEN];
        let fields = [&client.0[..], &server.0, &client.1.to_be_bytes(), &server.1.to_be_bytes()];
        for (to, from) in connection.iter_mut().zip(fields.into_iter().flatten()) {
            *to = *from;
        }
        Claim { number, connection }
    }

    /// The number of the `count`th claim for a DMB with this token.
    pub fn number_for(token: DmbToken, count: u16) -> NonZeroU16 {
        let of_token = token.0 as u16 & TOKEN_BITS;
        let number = count.wrapping_mul(TOKEN_BITS + 1) | of_token;
        // Without a bit of the token or the count, the first count.
        NonZeroU16::new(number).unwrap_or(const { NonZeroU16::new(TOKEN_BITS + 1).unwrap() })
    }

    /// Whether this may be a claim of the DMB with this token.
    pub fn may_be_for(&self, token: DmbToken) -> bool {
        (token.0 as u16 ^ self.number.get()) & TOKEN_BITS == 0
    }

    /// The number in the Proposal.
    pub const fn number(&self) -> NonZeroU16 {
        self.number
    }

    /// The bytes of the connection.
    pub const fn connection(&self) -> &[u8; CLAIM_LEN] {
        &self.connection
    }

    /// The word of a claim not taken yet.
    pub const fn open(&self) -> u64 {
        OPEN | self.number.get() as u64
    }

    /// The word of a claim taken by the server.
    pub const fn taken(&self) -> u64 {
        TAKEN | self.number.get() as u64
    }

    /// Whether a DMB with this word and these bytes is claimed for this connection.
    pub fn is_open_in(&self, word: u64, connection: &[u8; CLAIM_LEN]) -> bool {
        word == self.open() && *connection == self.connection
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(number: u16, client: (u8, u16), server: (u8, u16)) -> Claim {
        let [client, server] = [client, server].map(|(last, port)| {
            let mut address = [0; 16];
            (address[0], address[15]) = (0xfd, last);
            (address, port)
        });
        Claim::new(NonZeroU16::new(number).unwrap(), client, server)
    }

    #[test]
    fn a_claim_is_stored_byte_for_byte() {
        let claim = claim(0x1234, (1, 256), (2, 80));
        let mut expected = [0; CLAIM_LEN];
        (expected[0], expected[15]) = (0xfd, 1);
        (expected[16], expected[31]) = (0xfd, 2);
        expected[32..36].copy_from_slice(&[1, 0, 0, 80]);
        assert_eq!(*claim.connection(), expected);
        assert_eq!([claim.open(), claim.taken()], [0x1_1234, 0x2_1234]);
    }

    #[test]
    fn a_number_leads_to_its_buffer_and_changes_each_time() {
        for token in [0u64, 1, 63, 64, u64::MAX] {
            let token = DmbToken(token);
            let numbers = (0..1024).map(|count| Claim::number_for(token, count));
            let numbers: std::collections::BTreeSet<_> = numbers.collect();
            assert!(numbers.len() >= 1023);
            for number in numbers {
                let claim = claim(number.get(), (1, 256), (2, 80));
                assert!(claim.may_be_for(token) && !claim.may_be_for(DmbToken(token.0 ^ 1)));
            }
        }
    }

    #[test]
    fn only_the_claim_of_this_connection_is_open_for_it() {
        let (client, server) = ((1, 256), (2, 80));
        let mine = claim(7, client, server);
        assert!(mine.is_open_in(mine.open(), mine.connection()));
        let others = [
            claim(8, client, server),
            claim(7, (1, 257), server),
            claim(7, (3, 256), server),
            claim(7, client, (2, 81)),
            claim(7, client, (3, 80)),
        ];
        for other in others {
            assert!(!mine.is_open_in(other.open(), other.connection()), "{other:?}");
        }
        for word in [0, 7, mine.taken(), mine.open() | TAKEN, mine.open() | 1 << 63] {
            assert!(!mine.is_open_in(word, mine.connection()), "{word:x}");
        }
    }
}
