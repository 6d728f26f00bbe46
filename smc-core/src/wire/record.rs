// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records on the TCP connection of the handshake, after Confirm, if both ends have agreed on
//! records ([`CarrierOptions`](super::clc::CarrierOptions)).
//!
//! A record is a header of 16 bytes and, in DATA and CLC, a body:
//!
//! ```text
//!  0 type | 1 flags | 2 reserved, zero (2) | 4 length of the body (4) | 8 position (8)
//! ```
//!
//! A position counts the bytes of one direction since the connection was established, on ring and
//! TCP alike. `docs/ends.md` states the purpose of each record and the time to send it.

use thiserror::Error;

use super::cdc::StateFlags;
use super::clc;

/// Bytes of a header.
pub const HEADER_LEN: usize = 16;
/// Most bytes of the body of a DATA record.
pub const MAX_DATA: u32 = 64 << 10;
/// Most bytes of the body of a CLC record.
pub const MAX_CLC: u32 = clc::MAX_LEN as u32;

/// Writes of the program have succeeded for more bytes than this record covers.
const MORE: u8 = 0x80;
const REASON: u8 = 0x0f;
const END_FLAGS: StateFlags = StateFlags::SENDING_DONE.union(StateFlags::CLOSED);

/// Why an end leaves a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The peer leaves.
    Answer,
    /// The own device is about to go.
    DeviceLeaves,
    /// The own device is gone.
    DeviceGone,
    /// The peer's buffer or device is gone, as the own device says.
    PeerGone,
    /// No link is left.
    LinksGone,
    /// The operator or the program asked to leave.
    Wanted,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Reason; 6] = [
        Reason::Answer,
        Reason::DeviceLeaves,
        Reason::DeviceGone,
        Reason::PeerGone,
        Reason::LinksGone,
        Reason::Wanted,
    ];

    /// The code on the wire: bits 4 to 7 of the flags.
    pub const fn code(self) -> u8 {
        match self {
            Reason::Answer => 0,
            Reason::DeviceLeaves => 1,
            Reason::DeviceGone => 2,
            Reason::PeerGone => 3,
            Reason::LinksGone => 4,
            Reason::Wanted => 5,
        }
    }

    /// The reason, in words.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Answer => "the peer leaves",
            Reason::DeviceLeaves => "the device is about to go",
            Reason::DeviceGone => "the device is gone",
            Reason::PeerGone => "the peer's buffer is gone",
            Reason::LinksGone => "no link is left",
            Reason::Wanted => "wanted",
        }
    }
}

/// The type of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// [`Record::Leave`].
    Leave,
    /// [`Record::Received`].
    Received,
    /// [`Record::Change`].
    Change,
    /// [`Record::Data`].
    Data,
    /// [`Record::End`].
    End,
    /// [`Record::Urgent`].
    Urgent,
    /// [`Record::Clc`].
    Clc,
}

impl Kind {
    /// Every type.
    pub const ALL: [Kind; 7] =
        [Kind::Leave, Kind::Received, Kind::Change, Kind::Data, Kind::End, Kind::Urgent, Kind::Clc];

    /// The code on the wire. None is the first byte of a CLC or LLC message.
    pub const fn code(self) -> u8 {
        match self {
            Kind::Leave => 0xd1,
            Kind::Received => 0xd2,
            Kind::Change => 0xd3,
            Kind::Data => 0xd4,
            Kind::End => 0xd5,
            Kind::Urgent => 0xd6,
            Kind::Clc => 0xd7,
        }
    }

    /// The type of a code.
    pub fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Leave => "LEAVE",
            Kind::Received => "RECEIVED",
            Kind::Change => "CHANGE",
            Kind::Data => "DATA",
            Kind::End => "END",
            Kind::Urgent => "URGENT",
            Kind::Clc => "CLC",
        }
    }

    /// Shortest and longest body, bytes.
    const fn lengths(self) -> (u32, u32) {
        match self {
            Kind::Data => (1, MAX_DATA),
            Kind::Clc => ((clc::HEADER_LEN + clc::TRAILER_LEN) as u32, MAX_CLC),
            _ => (0, 0),
        }
    }

    /// The flags defined for the record.
    const fn flags(self) -> u8 {
        match self {
            Kind::Leave => MORE | REASON,
            Kind::Data => MORE,
            Kind::End => END_FLAGS.bits(),
            _ => 0,
        }
    }
}

/// A record, without the bytes of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Record {
    /// "I leave my outgoing ring at position `at`, and write neither bytes nor words to the ring
    /// any more. Leave, too. Later bytes come as DATA, after your RECEIVED."
    Leave {
        /// Bytes before.
        at: u64,
        /// The reason, for people.
        reason: Reason,
        /// Writes of the program have succeeded for more bytes.
        more: bool,
    },
    /// "I have your bytes from before LEAVE up to `at`, and take nothing more from that ring."
    Received {
        /// Bytes received.
        at: u64,
    },
    /// "The bytes from position `at` on are in the ring negotiated last."
    Change {
        /// Bytes before.
        at: u64,
    },
    /// Bytes of the sender's direction, as the body.
    Data {
        /// Position of the first byte.
        at: u64,
        /// Number of bytes, 1 to [`MAX_DATA`].
        len: u32,
        /// Writes of the program have succeeded for more bytes.
        more: bool,
    },
    /// "My direction ends at position `at`": equals the state flags of control words on a ring. An
    /// abort has no record: TCP's reset is the abort.
    End {
        /// Bytes of the direction.
        at: u64,
        /// [`StateFlags::SENDING_DONE`], [`StateFlags::CLOSED`] or both.
        flags: StateFlags,
    },
    /// "The byte before position `at` is urgent."
    Urgent {
        /// One beyond the urgent byte.
        at: u64,
    },
    /// A CLC message of the handshake for a new ring, as the body.
    Clc {
        /// Length of the message, bytes.
        len: u32,
    },
}

/// An error in the header of a record. Each error resets the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The first byte is no type.
    #[error("unknown record type {0:#04x}")]
    UnknownType(u8),
    /// Bits without a meaning in this record are set.
    #[error("{} has the flags {got:#04x}, of which {known:#04x} are known", kind.name())]
    UnknownFlags {
        /// The record.
        kind: Kind,
        /// The record's flags.
        got: u8,
        /// The allowed flags.
        known: u8,
    },
    /// The reserved bytes are not zero.
    #[error("the reserved bytes of {} are {got:02x?}", kind.name())]
    Reserved {
        /// The record.
        kind: Kind,
        /// The bytes.
        got: [u8; 2],
    },
    /// A body length out of the record's range.
    #[error("the body of {} has {got} bytes, {min} to {max} are allowed", kind.name())]
    Length {
        /// The record.
        kind: Kind,
        /// Length of the body.
        got: u32,
        /// Shortest.
        min: u32,
        /// Longest.
        max: u32,
    },
    /// DATA ending beyond the last position.
    #[error("DATA of {len} bytes at position {at} ends beyond the last position")]
    Overflow {
        /// Position of the first byte.
        at: u64,
        /// Length of the body.
        len: u32,
    },
    /// An undefined reason of LEAVE.
    #[error("unknown reason {0} of LEAVE")]
    UnknownReason(u8),
    /// END without a flag.
    #[error("END at position {0} says neither done nor closed")]
    EndsNothing(u64),
    /// A position in CLC, which has none.
    #[error("CLC has the position {0}")]
    PositionOfClc(u64),
}

impl Record {
    /// The type.
    pub const fn kind(&self) -> Kind {
        match self {
            Record::Leave { .. } => Kind::Leave,
            Record::Received { .. } => Kind::Received,
            Record::Change { .. } => Kind::Change,
            Record::Data { .. } => Kind::Data,
            Record::End { .. } => Kind::End,
            Record::Urgent { .. } => Kind::Urgent,
            Record::Clc { .. } => Kind::Clc,
        }
    }

    /// Bytes of the body.
    pub const fn body_len(&self) -> u32 {
        match *self {
            Record::Data { len, .. } | Record::Clc { len } => len,
            _ => 0,
        }
    }

    /// The position; 0 for CLC.
    pub const fn at(&self) -> u64 {
        match *self {
            Record::Leave { at, .. }
            | Record::Received { at }
            | Record::Change { at }
            | Record::Data { at, .. }
            | Record::End { at, .. }
            | Record::Urgent { at } => at,
            Record::Clc { .. } => 0,
        }
    }

    fn flags(&self) -> u8 {
        let more = |more: bool| if more { MORE } else { 0 };
        match *self {
            Record::Leave { reason, more: held, .. } => more(held) | reason.code(),
            Record::Data { more: held, .. } => more(held),
            Record::End { flags, .. } => flags.bits(),
            _ => 0,
        }
    }

    /// The header; the body follows.
    pub fn header(&self) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        header[0] = self.kind().code();
        header[1] = self.flags();
        header[4..8].copy_from_slice(&self.body_len().to_be_bytes());
        header[8..].copy_from_slice(&self.at().to_be_bytes());
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`RecordError`], for the first error in this order: type, flags, reserved bytes, length,
    /// position.
    pub fn parse(header: &[u8; HEADER_LEN]) -> Result<Record, RecordError> {
        let [code, got, r0, r1, l0, l1, l2, l3, p0, p1, p2, p3, p4, p5, p6, p7] = *header;
        let kind = Kind::from_code(code).ok_or(RecordError::UnknownType(code))?;
        let known = kind.flags();
        if got & !known != 0 {
            return Err(RecordError::UnknownFlags { kind, got, known });
        }
        if [r0, r1] != [0; 2] {
            return Err(RecordError::Reserved { kind, got: [r0, r1] });
        }
        let len = u32::from_be_bytes([l0, l1, l2, l3]);
        let (min, max) = kind.lengths();
        if !(min..=max).contains(&len) {
            return Err(RecordError::Length { kind, got: len, min, max });
        }
        let at = u64::from_be_bytes([p0, p1, p2, p3, p4, p5, p6, p7]);
        let more = got & MORE != 0;
        match kind {
            Kind::Leave => {
                let code = got & REASON;
                let reason = Reason::ALL.into_iter().find(|reason| reason.code() == code);
                let reason = reason.ok_or(RecordError::UnknownReason(code))?;
                Ok(Record::Leave { at, reason, more })
            }
            Kind::Received => Ok(Record::Received { at }),
            Kind::Change => Ok(Record::Change { at }),
            Kind::Data if at.checked_add(u64::from(len)).is_none() => {
                Err(RecordError::Overflow { at, len })
            }
            Kind::Data => Ok(Record::Data { at, len, more }),
            Kind::End if got == 0 => Err(RecordError::EndsNothing(at)),
            Kind::End => Ok(Record::End { at, flags: StateFlags::from_bits_truncate(got) }),
            Kind::Urgent => Ok(Record::Urgent { at }),
            Kind::Clc if at != 0 => Err(RecordError::PositionOfClc(at)),
            Kind::Clc => Ok(Record::Clc { len }),
        }
    }
}

/// The next part of a stream of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A record has begun, or is complete if it has no body. The bytes of DATA follow.
    Record(Record),
    /// Bytes of the last reported DATA record.
    Bytes(&'a [u8]),
    /// The whole body of the last reported CLC record.
    Clc(Vec<u8>),
}

/// The next part of the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Next {
    #[default]
    Header,
    Data,
    Clc(Vec<u8>),
}

/// Splits a stream into records, in pieces of any size. The parser keeps at most one header and the
/// received part of one CLC message; bytes of DATA are passed through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parser {
    next: Next,
    header: [u8; HEADER_LEN],
    /// Received bytes of the header.
    have: usize,
    /// Missing bytes of the body.
    left: u32,
}

impl Parser {
    /// A parser at the start of a record.
    pub fn new() -> Parser {
        Parser::default()
    }

    /// Takes the next part out of `bytes`. Returns the number of bytes taken, and the part if
    /// complete. Call again with the rest until nothing is left.
    ///
    /// # Errors
    /// [`RecordError`]: from here on the stream has no valid records.
    pub fn feed<'a>(&mut self, bytes: &'a [u8]) -> Result<(usize, Option<Piece<'a>>), RecordError> {
        if let Next::Header = self.next {
            return self.feed_header(bytes);
        }
        let taken = bytes.len().min(self.left as usize);
        let body = bytes.get(..taken).unwrap_or_default();
        self.left -= taken as u32;
        let ends = self.left == 0;
        let part = match &mut self.next {
            Next::Clc(message) => {
                message.extend_from_slice(body);
                ends.then(|| Piece::Clc(core::mem::take(message)))
            }
            _ => (!body.is_empty()).then_some(Piece::Bytes(body)),
        };
        if ends {
            self.next = Next::Header;
        }
        Ok((taken, part))
    }

    fn feed_header<'a>(&mut self, bytes: &[u8]) -> Result<(usize, Option<Piece<'a>>), RecordError> {
        let room = self.header.get_mut(self.have..).unwrap_or_default();
        let taken = bytes.len().min(room.len());
        for (place, byte) in room.iter_mut().zip(bytes) {
            *place = *byte;
        }
        self.have += taken;
        if self.have < HEADER_LEN {
            return Ok((taken, None));
        }
        let record = Record::parse(&self.header)?;
        self.have = 0;
        self.left = record.body_len();
        self.next = match record {
            Record::Data { .. } => Next::Data,
            Record::Clc { .. } => Next::Clc(Vec::new()),
            _ => Next::Header,
        };
        Ok((taken, Some(Piece::Record(record))))
    }

    /// Missing bytes of a DATA record. A read may put the bytes directly into the program's buffer
    /// and report them by [`Parser::passed`].
    pub fn data_left(&self) -> u32 {
        if self.next == Next::Data { self.left } else { 0 }
    }

    /// Reports `n` bytes of DATA read past the parser, [`data_left`](Parser::data_left) at most.
    pub fn passed(&mut self, n: u32) {
        if self.next == Next::Data {
            self.left = self.left.saturating_sub(n);
            if self.left == 0 {
                self.next = Next::Header;
            }
        }
    }

    /// Bytes to read before this parser can return another part; the body of DATA counts as one
    /// part.
    pub fn wanted(&self) -> usize {
        match self.next {
            Next::Header => HEADER_LEN - self.have,
            _ => self.left as usize,
        }
    }

    /// Whether the last record is complete: a stream ending elsewhere was cut.
    pub fn is_between_records(&self) -> bool {
        self.next == Next::Header && self.have == 0
    }
}

#[cfg(test)]
mod tests;
