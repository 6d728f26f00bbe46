// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One variant per kind of error, with the wrong value inside.

use thiserror::Error;

/// An error in CLC, LLC or CDC bytes, found by a parser.
///
/// Offsets (`at`) and lengths are bytes from the start of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes end before a field does.
    #[error("{field} at {at} needs {need} bytes, {have} are there")]
    Truncated {
        /// Name of the field or area.
        field: &'static str,
        /// Start of the missing part.
        at: usize,
        /// Size of the part.
        need: usize,
        /// Bytes available from `at` on.
        have: usize,
    },
    /// More bytes than the message's length.
    #[error("message of {length} bytes is followed by {extra} more")]
    TrailingBytes {
        /// Length by the message's own header.
        length: usize,
        /// Bytes behind the message.
        extra: usize,
    },
    /// The first four bytes are neither "SMCR" nor "SMCD" in EBCDIC (CLC-3).
    #[error("leading eye catcher is {0:02x?}")]
    BadLeadingEyeCatcher([u8; 4]),
    /// The last four bytes are not the eye catcher the message began with (CLC-3).
    #[error("trailing eye catcher at {at} is {got:02x?}")]
    BadTrailingEyeCatcher {
        /// Expected place.
        at: usize,
        /// The bytes found there.
        got: [u8; 4],
    },
    /// The eye catcher does not go with the message (SMCD on a Proposal) or with its type bits.
    #[error(
        "eye catcher {eye:02x?} does not go with message type {message} and SMC type bits {code:02b}"
    )]
    EyeCatcherMismatch {
        /// Leading eye catcher.
        eye: [u8; 4],
        /// CLC message type.
        message: u8,
        /// Bits 6-7 of byte 7.
        code: u8,
    },
    /// CLC message type other than 1 to 4 (CLC-2).
    #[error("unknown CLC message type {0:#04x}")]
    UnknownClcType(u8),
    /// A version nibble invalid in this message.
    #[error("version {0} is not valid here")]
    BadVersion(u8),
    /// The declared length is impossible for a message of this type.
    #[error("{message} cannot be {got} bytes long ({min} to {max})")]
    LengthOutOfRange {
        /// Message name.
        message: &'static str,
        /// Declared length.
        got: usize,
        /// Shortest form.
        min: usize,
        /// Longest accepted form.
        max: usize,
    },
    /// The declared length does not match what the message contains (CLC-5).
    #[error("{message} says {got} bytes, its contents make {expected}")]
    LengthMismatch {
        /// Message name.
        message: &'static str,
        /// Declared length.
        got: usize,
        /// Length by its contents.
        expected: usize,
    },
    /// More than eight EIDs (EID-6).
    #[error("{0} EIDs, at most 8 are allowed")]
    TooManyEids(u8),
    /// More than eight GID-CHID entries (CLCV2-18).
    #[error("{0} GID-CHID entries, at most 8 are allowed")]
    TooManyGidEntries(u8),
    /// More than eight IPv6 prefixes (CLC-16).
    #[error("{0} IPv6 prefixes, at most 8 are allowed")]
    TooManyPrefixes(u8),
    /// A prefix or mask longer than the address.
    #[error("{bits} significant bits in an address of {max}")]
    PrefixTooLong {
        /// Significant bits.
        bits: u8,
        /// Bits of the address family.
        max: u8,
    },
    /// A RoCEv2 GID list with a count other than 1 to 8 (CLCV2-71).
    #[error("{0} entries in a RoCEv2 GID list, 1 to 8 are allowed")]
    GidListCount(u8),
    /// An offset into bytes already belonging to another part.
    #[error("{area} at {at} overlaps what ends at {free_from}")]
    Overlap {
        /// Name of the area.
        area: &'static str,
        /// Where the offset leads.
        at: usize,
        /// First byte available to the area.
        free_from: usize,
    },
    /// An area starting or reaching beyond the trailing eye catcher.
    #[error("{area} at {at} with {need} bytes does not end before the trailer at {end}")]
    OutOfRange {
        /// Name of the area.
        area: &'static str,
        /// Where the offset leads.
        at: usize,
        /// Size of the area.
        need: usize,
        /// Where the trailer starts.
        end: usize,
    },
    /// An offset of zero where an extension has to be.
    #[error("{0} is missing")]
    MissingExtension(&'static str),
    /// A version 1 Proposal whose type bits say "none".
    #[error("version 1 Proposal that offers nothing")]
    NothingOffered,
    /// The first-contact flag is on and there is no first contact extension (CLCV2-44).
    #[error("first contact without first contact extension")]
    FirstContactWithoutExtension,
    /// RMB element index 0; elements count from 1 (RFC 7609 section 2.1).
    #[error("RMB element index 0")]
    RmbIndexZero,
    /// Vendor options without a vendor (CLCV2-14).
    #[error("vendor options {0:02x?} without OUI")]
    VendorOptionsWithoutOui([u8; 5]),
    /// A version of records never offered, or 0.
    #[error("version {0} of records is not valid here")]
    CarrierVersion(u8),
    /// Nonzero reserved bits in the options for records.
    #[error(
        "options for records have the features {features:#06x} and reserved bytes {reserved:02x?}"
    )]
    CarrierReserved {
        /// The features.
        features: u16,
        /// The reserved bytes.
        reserved: [u8; 2],
    },
    /// Features never offered.
    #[error("features {got:#06x} for records, {offered:#06x} were offered")]
    CarrierFeatures {
        /// The features in the answer.
        got: u16,
        /// The features in the offer.
        offered: u16,
    },
    /// An invalid record on TCP.
    #[error(transparent)]
    Record(#[from] super::record::RecordError),
    /// A reserved value of an enumerated field: answered by Decline (CLC-29, RFC 7609 C.6).
    #[error("{field} has the reserved value {value}")]
    ReservedValue {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u8,
    },
    /// A CHID of the reserved range without a repetition in the next entry (EISM-13).
    #[error("entry {index} with CHID {chid:#06x} has no second half")]
    UnpairedChid {
        /// Position in the GID-CHID array, from 0.
        index: usize,
        /// The CHID.
        chid: u16,
    },
    /// An unknown LLC type code in the mandatory range (high bits 00 or 01: LLC-7, LLC-76).
    #[error("unknown LLC message type {0:#04x}")]
    UnknownLlcType(u8),
    /// An LLC type code in the range for silent dropping (LLC-8, LLCV2-42).
    #[error("LLC message type {0:#04x} is unknown and may be ignored")]
    IgnorableLlcType(u8),
    /// The first byte says CDC, not LLC (LLC-9).
    #[error("type {0:#04x} is a CDC message, not LLC")]
    CdcNotLlc(u8),
    /// An LLC count too large for its message, or an illegal zero.
    #[error("{field} is {got}, {min} to {max} are allowed")]
    CountOutOfRange {
        /// Name of the count.
        field: &'static str,
        /// Its value.
        got: u16,
        /// Smallest allowed.
        min: u16,
        /// Largest allowed.
        max: u16,
    },
    /// The first byte of a CDC message or control block is not 0xFE (CDC-1).
    #[error("CDC type byte is {0:#04x}")]
    BadCdcType(u8),
}

/// A receiver's duty after a bad CLC message (RFC 7609 C.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// A protocol error: break the TCP connection, fallback is forbidden (CLC-54, CLC-55).
    Break,
    /// The bytes are CLC but a value is not known here: send Decline and go on as TCP (CLC-29).
    Decline,
}

impl WireError {
    /// The reaction to this error in a CLC message.
    pub const fn reaction(&self) -> Reaction {
        match self {
            WireError::ReservedValue { .. } | WireError::UnpairedChid { .. } => Reaction::Decline,
            _ => Reaction::Break,
        }
    }
}
