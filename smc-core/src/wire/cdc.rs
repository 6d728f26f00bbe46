// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connection Data Control: the SMC-R message and the SMC-D control block.
//!
//! SMC-R sends 44 bytes behind its RDMA writes (RFC 7609 A.4):
//!
//! ```text
//!  0 FE | 1 2C | 2 sequence | 4 alert token | 8 res | 10 producer wrap | 12 producer count
//! 16 res | 18 consumer wrap | 20 consumer count | 24 producer flags | 25 state flags | 26 reserved
//! ```
//!
//! SMC-D keeps the same state in the first 32 bytes of each DMB element, written by the peer. No
//! specification describes the block; the layout is Linux's. Integers are in host order, as both
//! ends are the same machine, and each word is stored and loaded in one access:
//!
//! ```text
//!  0 FE | 1 reserved |  8 producer word: wrap u16, count u32, 2 reserved
//!                    | 16 consumer word: wrap u16, count u32, producer flags, state flags | 24 res
//! ```

use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Cursor, WireError};

/// Type byte of a CDC message and of a control block.
pub const CDC_TYPE: u8 = 0xfe;
/// Bytes of an SMC-R CDC message (CDC-1).
pub const CDC_LEN: usize = 44;
/// Bytes of an SMC-D control block; the ring follows (CDC-46).
pub const CONTROL_BLOCK_LEN: usize = 32;

bitflags::bitflags! {
    /// The producer's flags about its writes (RFC 7609 A.4). State, not events: each message
    /// repeats every flag still in force. Reserved bits are dropped on parse.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ProducerFlags: u8 {
        /// B: blocked for lack of space; each consumption is to be announced (CDC-19, CDC-20).
        const BLOCKED = 0x80;
        /// P: urgent data exists (CDC-28).
        const URGENT_PENDING = 0x40;
        /// U: the byte before the producer cursor is urgent (CDC-28).
        const URGENT_PRESENT = 0x20;
        /// R: the consumer cursor is wanted now (CDC-23).
        const UPDATE_REQUESTED = 0x10;
        /// F: failover validation; SMC-R only (CDC-35).
        const FAILOVER = 0x08;
    }
}

bitflags::bitflags! {
    /// How far the sender has closed the connection (RFC 7609 A.4). Bits stay on once set.
    /// Reserved bits are dropped on parse.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct StateFlags: u8 {
        /// D: done writing, the half close.
        const SENDING_DONE = 0x80;
        /// C: connection closed.
        const CLOSED = 0x40;
        /// A: abnormal close.
        const ABORT = 0x20;
    }
}

/// First word of a control block: the peer's next write position in the ring behind the block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerWord {
    /// Producer cursor, counted from 0 at the start of the ring.
    pub cursor: Cursor,
}

impl ProducerWord {
    /// The word in its memory layout.
    pub const fn to_u64(self) -> u64 {
        pack(self.cursor, 0, 0)
    }

    /// Converts a word of memory. Any 64 bits are a word, checked later by the connection.
    pub const fn from_u64(word: u64) -> ProducerWord {
        ProducerWord { cursor: unpack(word).0 }
    }
}

/// Second word of a control block: the peer's read position in the other direction, and its flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerWord {
    /// Consumer cursor of the peer in its own ring.
    pub cursor: Cursor,
    /// Flags of the peer as producer.
    pub producer_flags: ProducerFlags,
    /// How far the peer has closed.
    pub state_flags: StateFlags,
}

impl ConsumerWord {
    /// The word in its memory layout.
    pub const fn to_u64(self) -> u64 {
        pack(self.cursor, self.producer_flags.bits(), self.state_flags.bits())
    }

    /// Converts a word of memory. Any 64 bits are a word, checked later by the connection.
    pub const fn from_u64(word: u64) -> ConsumerWord {
        let (cursor, producer, state) = unpack(word);
        ConsumerWord {
            cursor,
            producer_flags: ProducerFlags::from_bits_truncate(producer),
            state_flags: StateFlags::from_bits_truncate(state),
        }
    }
}

const fn pack(cursor: Cursor, producer: u8, state: u8) -> u64 {
    let [w0, w1] = cursor.wrap.to_ne_bytes();
    let [c0, c1, c2, c3] = cursor.count.to_ne_bytes();
    u64::from_ne_bytes([w0, w1, c0, c1, c2, c3, producer, state])
}

const fn unpack(word: u64) -> (Cursor, u8, u8) {
    let [w0, w1, c0, c1, c2, c3, producer, state] = word.to_ne_bytes();
    let wrap = u16::from_ne_bytes([w0, w1]);
    let count = u32::from_ne_bytes([c0, c1, c2, c3]);
    (Cursor { wrap, count }, producer, state)
}

/// A whole control block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlBlock {
    /// Where the peer writes.
    pub producer: ProducerWord,
    /// The peer's read position, and its flags.
    pub consumer: ConsumerWord,
}

impl ControlBlock {
    /// The 32 bytes of the block.
    pub fn to_bytes(self) -> [u8; CONTROL_BLOCK_LEN] {
        let mut block = [0; CONTROL_BLOCK_LEN];
        block[0] = CDC_TYPE;
        block[8..16].copy_from_slice(&self.producer.to_u64().to_ne_bytes());
        block[16..24].copy_from_slice(&self.consumer.to_u64().to_ne_bytes());
        block
    }

    /// The block in 32 bytes. The type byte is ignored: a fresh DMB is all zero and valid.
    pub fn from_bytes(block: &[u8; CONTROL_BLOCK_LEN]) -> ControlBlock {
        let [_, _, _, _, _, _, _, _, words @ ..] = block;
        let [p0, p1, p2, p3, p4, p5, p6, p7, c0, c1, c2, c3, c4, c5, c6, c7, ..] = *words;
        let producer = u64::from_ne_bytes([p0, p1, p2, p3, p4, p5, p6, p7]);
        let consumer = u64::from_ne_bytes([c0, c1, c2, c3, c4, c5, c6, c7]);
        ControlBlock {
            producer: ProducerWord::from_u64(producer),
            consumer: ConsumerWord::from_u64(consumer),
        }
    }
}

/// An SMC-R CDC message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cdc {
    /// Starts at 1, plus one per message, modulo 2^16 (CDC-5).
    pub sequence: u16,
    /// Alert token assigned by the receiver of this message (CDC-4).
    pub token: u32,
    /// The sender's next write position in the receiver's element.
    pub producer: Cursor,
    /// Where the sender reads next in its own element.
    pub consumer: Cursor,
    /// Flags of the sender as producer.
    pub producer_flags: ProducerFlags,
    /// How far the sender has closed.
    pub state_flags: StateFlags,
}

/// The message field by field; the byte order is in the types.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    kind: u8,
    length: u8,
    sequence: U16,
    token: U32,
    reserved0: [u8; 2],
    producer_wrap: U16,
    producer_count: U32,
    reserved1: [u8; 2],
    consumer_wrap: U16,
    consumer_count: U32,
    producer_flags: u8,
    state_flags: u8,
    reserved2: [u8; 18],
}

const _: () = assert!(size_of::<Raw>() == CDC_LEN);

impl Cdc {
    /// The message equivalent to the two words of a control block: producer, then consumer.
    #[inline]
    pub const fn from_words([producer, consumer]: [u64; 2], sequence: u16, token: u32) -> Cdc {
        let consumer = ConsumerWord::from_u64(consumer);
        Cdc {
            sequence,
            token,
            producer: ProducerWord::from_u64(producer).cursor,
            consumer: consumer.cursor,
            producer_flags: consumer.producer_flags,
            state_flags: consumer.state_flags,
        }
    }

    /// Reads a message of exactly 44 bytes.
    ///
    /// # Errors
    /// [`WireError::Truncated`], [`WireError::TrailingBytes`], [`WireError::BadCdcType`], or
    /// [`WireError::LengthMismatch`] for a length byte other than 44. Such a message is dropped
    /// (CDC-1).
    pub fn parse(bytes: &[u8]) -> Result<Cdc, WireError> {
        let Ok((raw, rest)) = Raw::ref_from_prefix(bytes) else {
            let have = bytes.len();
            return Err(WireError::Truncated { field: "CDC", at: 0, need: CDC_LEN, have });
        };
        if raw.kind != CDC_TYPE {
            return Err(WireError::BadCdcType(raw.kind));
        }
        if usize::from(raw.length) != CDC_LEN {
            let got = usize::from(raw.length);
            return Err(WireError::LengthMismatch { message: "CDC", got, expected: CDC_LEN });
        }
        if !rest.is_empty() {
            return Err(WireError::TrailingBytes { length: CDC_LEN, extra: rest.len() });
        }
        Ok(Cdc {
            sequence: raw.sequence.get(),
            token: raw.token.get(),
            producer: Cursor::new(raw.producer_wrap.get(), raw.producer_count.get()),
            consumer: Cursor::new(raw.consumer_wrap.get(), raw.consumer_count.get()),
            producer_flags: ProducerFlags::from_bits_truncate(raw.producer_flags),
            state_flags: StateFlags::from_bits_truncate(raw.state_flags),
        })
    }

    /// The 44 bytes of the message.
    pub fn emit(&self) -> [u8; CDC_LEN] {
        zerocopy::transmute!(Raw {
            kind: CDC_TYPE,
            length: CDC_LEN as u8,
            sequence: self.sequence.into(),
            token: self.token.into(),
            // Sent as zero, and not looked at (CDC-38).
            reserved0: [0; 2],
            producer_wrap: self.producer.wrap.into(),
            producer_count: self.producer.count.into(),
            reserved1: [0; 2],
            consumer_wrap: self.consumer.wrap.into(),
            consumer_count: self.consumer.count.into(),
            producer_flags: self.producer_flags.bits(),
            state_flags: self.state_flags.bits(),
            reserved2: [0; 18],
        })
    }
}
