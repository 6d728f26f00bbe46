//! Byte patterns, and reads and writes that say where they hang.

use std::io::{Read, Write};

use crate::watch::note;

pub use smc_core::testing::Rng;

/// `len` bytes that depend on `seed` and on their position: a shifted, repeated or swapped piece of
/// them is found out.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(seed, 0, &mut bytes);
    bytes
}

/// Fills `bytes` with the pattern from position `at` on.
pub fn fill(seed: u64, at: usize, bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = byte_at(seed, at + i);
    }
}

/// Checks that `bytes` are the pattern from position `at` on.
#[track_caller]
pub fn check(seed: u64, at: usize, bytes: &[u8]) {
    for (i, byte) in bytes.iter().enumerate() {
        let expected = byte_at(seed, at + i);
        assert!(*byte == expected, "byte {} is {byte:#04x} instead of {expected:#04x}", at + i);
    }
}

fn byte_at(seed: u64, at: usize) -> u8 {
    let mixed = (at as u64 / 8 + 1 + seed.wrapping_mul(977)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (at % 8 * 8)) as u8
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
