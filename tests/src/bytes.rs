// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Byte patterns, and reads and writes with notes of where they hang.

use std::io::{Read, Write};

use crate::watch::note;

pub use smc_core::testing::Rng;

/// `len` bytes depending on `seed` and on their position. A shifted, repeated or swapped piece does
/// not go unnoticed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(seed, 0, &mut bytes);
    bytes
}

/// Fills `bytes` with the pattern from position `at` on.
pub fn fill(seed: u64, at: usize, bytes: &mut [u8]) {
    let begun = (at.next_multiple_of(8) - at).min(bytes.len());
    let (begin, rest) = bytes.split_at_mut(begun);
    // Words, since emulated guests check megabytes of them.
    let (words, end) = rest.as_chunks_mut();
    begin.iter_mut().zip(at..).for_each(|(byte, at)| *byte = byte_at(seed, at));
    let first = at + begun;
    words.iter_mut().zip(first / 8..).for_each(|(word, n)| *word = word_at(seed, n).to_le_bytes());
    let last = first + 8 * words.len();
    end.iter_mut().zip(last..).for_each(|(byte, at)| *byte = byte_at(seed, at));
}

/// Checks `bytes` against the pattern from position `at` on.
#[track_caller]
pub fn check(seed: u64, at: usize, bytes: &[u8]) {
    let mut expected = vec![0; bytes.len()];
    fill(seed, at, &mut expected);
    let Some((i, byte, expected)) = difference(bytes, &expected) else { return };
    panic!("byte {} is {byte:#04x} instead of {expected:#04x}", at + i);
}

/// The first place of a wrong byte, the byte there, and the expected byte.
pub fn difference(bytes: &[u8], expected: &[u8]) -> Option<(usize, u8, u8)> {
    // First compare the whole, usually equal: this is faster.
    let differ = |(_, (byte, expected)): &(usize, (&u8, &u8))| byte != expected;
    let found = (bytes != expected).then(|| bytes.iter().zip(expected).enumerate().find(differ));
    found.flatten().map(|(i, (byte, expected))| (i, *byte, *expected))
}

fn byte_at(seed: u64, at: usize) -> u8 {
    (word_at(seed, at / 8) >> (at % 8 * 8)) as u8
}

/// The pattern's word of this number, the first byte lowest.
fn word_at(seed: u64, n: usize) -> u64 {
    (n as u64 + 1 + seed.wrapping_mul(977)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Writes everything.
#[track_caller]
pub fn send_all<S>(mut stream: &S, bytes: &[u8])
where
    for<'a> &'a S: Write,
{
    note(format!("writes {} bytes", bytes.len()));
    stream.write_all(bytes).unwrap();
}

/// Reads exactly `len` bytes.
#[track_caller]
pub fn read_exactly<S>(mut stream: &S, len: usize) -> Vec<u8>
where
    for<'a> &'a S: Read,
{
    note(format!("reads {len} bytes"));
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Reads until the end of data.
#[track_caller]
pub fn slurp<S>(mut stream: &S) -> Vec<u8>
where
    for<'a> &'a S: Read,
{
    note("reads to the end");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_the_same_however_it_is_cut() {
        let whole: Vec<u8> = (0..40).map(|at| byte_at(3, at)).collect();
        for from in 0..whole.len() {
            for to in from..=whole.len() {
                let mut piece = vec![0; to - from];
                fill(3, from, &mut piece);
                assert_eq!(piece, whole[from..to], "{from}..{to}");
            }
        }
    }

    #[test]
    fn the_first_wrong_byte_is_found_and_told() {
        let mut bytes = pattern(1, 30);
        assert_eq!(difference(&bytes, &pattern(1, 30)), None);
        let right = bytes[9];
        bytes[9] ^= 1;
        bytes[20] ^= 1;
        assert_eq!(difference(&bytes, &pattern(1, 30)), Some((9, right ^ 1, right)));
    }
}
