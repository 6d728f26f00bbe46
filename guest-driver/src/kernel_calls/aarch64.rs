// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Instructions of AArch64: the supervisor call, and the call's number in x8.

use std::ffi::c_long;

/// Bytes of an instruction.
pub(super) const LENGTH: usize = 4;
const SVC: [u8; LENGTH] = [0x01, 0, 0, 0xd4];
/// The most instructions checked before the call.
const BEFORE: usize = 16;

/// The places of the instruction. A piece of a file begins at a whole instruction or up to three bytes
/// before one, so the bytes may belong to two others: [`number_of_last`] decides.
pub(super) fn candidates(code: &[u8]) -> impl Iterator<Item = usize> {
    code.windows(LENGTH).enumerate().filter(|(_, word)| **word == SVC).map(|(at, _)| at)
}

/// The counterpart of the function for x86-64.
pub(super) fn number_of_last(code: &[u8]) -> Option<Option<c_long>> {
    let before = code.len().checked_sub(LENGTH).filter(|n| n % LENGTH == 0)?;
    let words = code.get(..before)?.rchunks_exact(LENGTH).take(BEFORE);
    for bytes in words {
        let word = bytes.iter().rev().fold(0u32, |sum, byte| sum << 8 | u32::from(*byte));
        let ends = word >> 26 == 0b00_0101 || word >> 26 == 0b10_0101 || word >> 25 == 0b110_1011;
        match word & 0x7fe0_001f {
            // movz w8 or x8
            0x5280_0008 => return Some(Some(c_long::from(word >> 5 & 0xffff))),
            _ if word & 0x7f80_001f == 0x5280_0008 => return Some(None),
            // mov x8, another register
            _ if word & 0x7f20_001f == 0x2a00_0008 || ends => return Some(None),
            _ => {}
        }
    }
    Some(None)
}
