//! Is the window as fast as memory?
//!
//! A window behind a PCI BAR can be mapped uncached (user-space VFIO on AMD hosts): then every
//! store goes alone to memory, 10 to 100 times slower than a copy by the device. Attributes of a
//! mapping cannot be asked for from user space, so the first DMB in the window is measured.

use std::hint::black_box;
use std::time::Instant;

use crate::sys::{OutOfBounds, SharedSlice};

/// A window slower than this (bytes per second) is worse than letting the device copy.
pub(super) const SLOWEST_WINDOW: u64 = 500 << 20;

/// Bytes that one pass stores and loads, at most.
const PASS: usize = 16 << 10;
/// Passes; the best counts, since the scheduler may disturb any of them.
const PASSES: u32 = 8;

/// Speed of storing zeros and loading them again, in bytes per second. `slice` is zero afterwards
/// where it was touched.
pub(super) fn rate(slice: &SharedSlice) -> Result<u64, OutOfBounds> {
    let len = slice.len().min(PASS);
    let source = vec![0u8; len];
    let mut target = vec![0u8; len];
    let mut best = u64::MAX;
    for _ in 0..PASSES {
        let start = Instant::now();
        slice.copy_in(0, black_box(&source))?;
        slice.copy_out(0, black_box(&mut target))?;
        let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        best = best.min(took.max(1));
    }
    Ok((2 * len as u64).saturating_mul(1_000_000_000) / best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::SharedMem;

    #[test]
    fn ordinary_memory_is_fast_enough() {
        let mem = SharedMem::anonymous(PASS).unwrap();
        let rate = rate(&mem.slice(0, PASS).unwrap()).unwrap();
        assert!(rate > SLOWEST_WINDOW, "{rate} B/s");
    }
}
