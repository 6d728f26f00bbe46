// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random delays for tests, to provoke check-then-act races. A build has them with `RUSTFLAGS="--cfg
//! delays"`.

/// Marks a point of possible interference by other threads and processes. With `--cfg delays` one call of
/// 40 sleeps for up to 3 ms; without, the function is empty.
#[inline]
pub fn may_delay() {
    #[cfg(delays)]
    random::delay();
}

#[cfg(delays)]
mod random {
    use std::sync::atomic::{AtomicU64, Ordering};

    const ONE_OF: u64 = 40;
    const LONGEST_US: u64 = 3000;

    pub(super) fn delay() {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        // splitmix64, other numbers in each process.
        let mut x =
            (call | u64::from(std::process::id()) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        if x % ONE_OF == 0 {
            let tv_nsec = ((x >> 32) % LONGEST_US * 1000) as i64;
            // rustix leaves errno and libc's functions alone.
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 0, tv_nsec });
        }
    }
}
