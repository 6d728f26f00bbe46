// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The speed of the window.
//!
//! A window behind a PCI BAR can be mapped uncached (user-space VFIO on AMD hosts). Every store
//! then goes to memory by itself, 10 to 100 times slower than a copy by the device. User space
//! cannot query the attributes of a mapping, so the driver measures the first DMB in the window.

use std::hint::black_box;
use std::time::Instant;

use ism_sys::{OutOfBounds, SharedSlice};

/// A window slower than this (bytes per second, stores and loads together) is worse than letting
/// the device copy.
pub const SLOWEST_WINDOW: u64 = 500 << 20;

/// Most bytes stored and loaded by one pass.
const PASS: usize = 16 << 10;
/// Bytes of a pass of [`long_speed`]: more than first-level caches hold, and little enough not to
/// disturb other users of the window.
const LONG_PASS: usize = 1 << 20;
/// Passes; the best counts, since the scheduler may disturb any of them.
const PASSES: u32 = 8;

/// How fast a window is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSpeed {
    /// Stores, bytes per second.
    pub store: u64,
    /// Loads, bytes per second.
    pub load: u64,
}

impl WindowSpeed {
    /// Bytes per second of storing and loading together: each byte counts twice.
    pub fn rate(self) -> u64 {
        let (store, load) = (u128::from(self.store), u128::from(self.load));
        u64::try_from(2 * store * load / (store + load).max(1)).unwrap_or(u64::MAX)
    }

    /// Whether stores into the window beat copies by the device.
    pub fn is_fast(self) -> bool {
        self.rate() >= SLOWEST_WINDOW
    }
}

/// Speed of storing zeros and of loading the zeros again. The measured part of `slice` is zero afterwards.
pub(super) fn speed(slice: &SharedSlice) -> Result<WindowSpeed, OutOfBounds> {
    measure(slice, PASS)
}

/// Like [`speed`], over more memory.
pub(super) fn long_speed(slice: &SharedSlice) -> Result<WindowSpeed, OutOfBounds> {
    measure(slice, LONG_PASS)
}

fn measure(slice: &SharedSlice, pass: usize) -> Result<WindowSpeed, OutOfBounds> {
    let len = slice.len().min(pass);
    let source = vec![0u8; len];
    let mut target = vec![0u8; len];
    let (mut store, mut load) = (u64::MAX, u64::MAX);
    for _ in 0..PASSES {
        let start = Instant::now();
        slice.copy_in(0, black_box(&source))?;
        store = store.min(nanoseconds(start));
        let start = Instant::now();
        slice.copy_out(0, black_box(&mut target))?;
        load = load.min(nanoseconds(start));
    }
    let per_second = |took| (len as u64).saturating_mul(1_000_000_000) / took;
    Ok(WindowSpeed { store: per_second(store), load: per_second(load) })
}

fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ism_sys::SharedMem;

    #[test]
    fn ordinary_memory_is_fast_enough() {
        let mem = SharedMem::anonymous(PASS).unwrap();
        let speed = speed(&mem.slice(0, PASS).unwrap()).unwrap();
        assert!(speed.is_fast(), "{speed:?}");
    }

    #[test]
    fn slow_loads_make_a_slow_window_however_fast_stores_are() {
        // Uncached, write-combined: stores are fast, loads are not.
        assert!(!WindowSpeed { store: 10 << 30, load: 100 << 20 }.is_fast());
        assert!(!WindowSpeed { store: 200 << 20, load: 200 << 20 }.is_fast());
        assert!(WindowSpeed { store: 3 << 30, load: 2 << 30 }.is_fast());
        assert_eq!(WindowSpeed { store: 0, load: 0 }.rate(), 0);
    }
}
