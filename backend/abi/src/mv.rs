// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! MOVE chains (docs/virtio-ism.md, "Move queues").
//!
//! Device-readable: [`MoveHeader`], `nseg` [`Segment`]s, then the payload of all segments in order.
//! Device-writable: at least 4 bytes; the first 4 become the status.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::command::wire;

wire!(
    /// Start of a MOVE chain.
    MoveHeader, 24, {
    /// The DMB to write.
    token: U64,
    /// Number of segments; 0 is a pure signal.
    nseg: U16,
    /// See [`move_flags`].
    flags: U16,
    /// Bits for the owner of a guest-memory DMB, delivered with the signal.
    mask: U16,
    /// Zero.
    reserved0: U16,
    /// Payload bytes: the sum of the segments' lengths.
    total: U32,
    /// Zero.
    reserved1: U32,
});

wire!(
    /// One piece of a move.
    Segment, 8, {
    /// Offset in the DMB, bytes.
    offset: U32,
    /// Length, bytes.
    len: U32,
});

/// Bits of [`MoveHeader::flags`].
pub mod move_flags {
    /// Signal the owner after the last segment.
    pub const SIGNAL: u16 = 1;
}

/// Longest atomic segment: with offset and length multiples of 8, a segment up to this length is written by
/// ascending 8-byte Release stores, so a reader never sees half a word.
pub const ATOMIC_SEGMENT_MAX: u32 = 64;
