// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Layout of a slab (docs/virtio-ism.md, "Slabs").
//!
//! `data` bytes (a power of two) hold DMBs; a control tail of [`CONTROL_LEN`] bytes follows. The tail starts
//! with [`ControlHeader`]; signal line `i` lies at [`line_offset`]`(i)` from the start of the tail, and the
//! line of the whole slab at its end. Owner and user both map the whole slab and both can write all of it:
//! nothing in the tail is trusted for anything but waking.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::command::wire;

/// Length of the control tail, bytes.
pub const CONTROL_LEN: usize = 64 << 10;
/// Distance of signal lines, bytes: one cache line each.
pub const LINE_LEN: usize = 64;
/// Offset of the slab's own line from the start of the control tail, bytes: an armed word as in other
/// lines, and the pending bits behind them.
pub const SLAB_LINE: usize = CONTROL_LEN - 3 * LINE_LEN;
/// Offset of the first word of pending bits from [`SLAB_LINE`], bytes: a cache line of their own.
pub const SLAB_PEND: usize = LINE_LEN;
/// Words of pending bits of the slab's line, 8 bytes each; word `n / 64` has the bit of line `n`.
pub const SLAB_WORDS: usize = 16;
/// Signal lines of a slab.
pub const MAX_LINES: usize = SLAB_LINE / LINE_LEN - 1;
/// Offset in a line of the armed word, a `u32`: "the owner sleeps".
pub const LINE_ARMED: usize = 0;
/// Offset in a line of the `u64` of pending bits.
pub const LINE_PEND: usize = 8;
/// Version in [`ControlHeader`].
pub const CONTROL_VERSION: u32 = 1;
/// Data bytes of the first slab of a pair.
pub const FIRST_SLAB_DATA: u64 = 4 << 20;
/// Data bytes of the largest slab.
pub const MAX_SLAB_DATA: u64 = 64 << 20;

wire!(
    /// Start of the control tail.
    ControlHeader, 16, {
    /// Random; part of the replies to REGISTER and ATTACH.
    nonce: U64,
    /// [`CONTROL_VERSION`].
    version: U32,
    /// Number of lines.
    nlines: U32,
});

/// Offset of line `line` from the start of the control tail, bytes; `None` beyond the tail.
pub const fn line_offset(line: u16) -> Option<usize> {
    let line = line as usize;
    if line >= MAX_LINES { None } else { Some(LINE_LEN * (line + 1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_slab_follows_the_last_line_and_ends_the_tail() {
        assert_eq!(line_offset(0), Some(64));
        assert_eq!(line_offset(MAX_LINES as u16 - 1).map(|o| o + LINE_LEN), Some(SLAB_LINE));
        assert_eq!(line_offset(MAX_LINES as u16), None);
        assert_eq!(SLAB_LINE + SLAB_PEND + 8 * SLAB_WORDS, CONTROL_LEN);
        const { assert!(MAX_LINES <= 64 * SLAB_WORDS) };
    }
}
