// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A position in a ring together with how often the ring was gone round.

/// Producer or consumer cursor (RFC 7609 section 4.3, A.4; SMC-D: same meaning, other byte order).
///
/// Equal cursors mean an empty ring if the wraps are equal too, a full one if the producer's wrap
/// is one ahead (CDC-15). The range of a count depends on the ring, so nothing is checked here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// Wrap sequence: goes up by one each time the count returns to the start, modulo 2^16.
    pub wrap: u16,
    /// Offset in the ring, bytes.
    pub count: u32,
}

impl Cursor {
    /// A cursor at `count` after `wrap` rounds.
    pub const fn new(wrap: u16, count: u32) -> Cursor {
        Cursor { wrap, count }
    }
}
