// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals that wait in a queue, the real-time signals of POSIX. The kernel puts a deferred one behind
//! those that have come to its thread meanwhile. A program may rely on their order, so the library
//! keeps what the kernel says of the deferred one. The next signal of this number that comes has its
//! handler called with that, and what comes with it is kept in its place, until the deferred one
//! comes itself.

use std::cell::Cell;
use std::ffi::c_int;
use std::mem::{align_of, size_of};

use libc::siginfo_t;

use crate::sys::raw;

/// Numbers of signals that a thread may have deferred at the same time and that stay in order.
const PLACES: usize = 4;
/// The first real-time signal of the kernel.
const FIRST: c_int = 32;
const WORDS: usize = size_of::<siginfo_t>() / size_of::<u64>();
const _: () = assert!(align_of::<siginfo_t>() <= align_of::<u64>());

/// What the kernel says of a signal.
type Info = [u64; WORDS];

/// A deferred signal. `process` is zero: none.
#[derive(Clone, Copy)]
struct Kept {
    process: c_int,
    signal: c_int,
    /// What the next handler is told.
    next: Info,
    /// What the kernel will say of the one that was sent again.
    again: Info,
}

const NONE: Kept = Kept { process: 0, signal: 0, next: [0; WORDS], again: [0; WORDS] };

thread_local! {
    /// How many places are taken.
    static TAKEN: Cell<usize> = const { Cell::new(0) };
    static KEPT: [Cell<Kept>; PLACES] = const { [const { Cell::new(NONE) }; PLACES] };
}

/// Whether this thread has deferred such a signal that has not come yet.
#[inline]
pub(super) fn any() -> bool {
    TAKEN.try_with(Cell::get).is_ok_and(|taken| taken > 0)
}

/// # Safety
/// `info` is what the kernel has given to a handler.
unsafe fn read(info: *const siginfo_t) -> Info {
    // SAFETY: the caller's promise.
    unsafe { info.cast::<Info>().read() }
}

/// A signal is deferred and was sent again.
///
/// # Safety
/// `info` is what the kernel has given to its handler.
pub(super) unsafe fn keep(signal: c_int, info: *const siginfo_t) {
    if signal < FIRST {
        return;
    }
    // SAFETY: the caller's promise.
    let info = unsafe { read(info) };
    let process = raw::getpid();
    let _ = KEPT.try_with(|places| {
        let own = |place: &&Cell<Kept>| place.get().process == process;
        if places.iter().filter(own).any(|place| place.get().signal == signal) {
            // It waits behind the others.
            return;
        }
        if let Some(place) = places.iter().find(|place| !own(place)) {
            if place.get().process == 0 {
                TAKEN.set(TAKEN.get() + 1);
            }
            place.set(Kept { process, signal, next: info, again: info });
        }
    });
}

/// A handler is to run. Changes what it is told to what it would be told if none had been deferred.
///
/// # Safety
/// `info` is what the kernel has given to the handler.
pub(super) unsafe fn put_in_order(signal: c_int, info: *mut siginfo_t) {
    // SAFETY: the caller's promise.
    let come = unsafe { read(info) };
    let process = raw::getpid();
    let _ = KEPT.try_with(|places| {
        let is_it = |kept: Kept| kept.process == process && kept.signal == signal;
        let Some(place) = places.iter().find(|place| is_it(place.get())) else { return };
        let mut kept = place.get();
        // SAFETY: the caller's promise.
        unsafe { info.cast::<Info>().write(kept.next) };
        if come == kept.again {
            kept.process = 0;
            TAKEN.set(TAKEN.get().saturating_sub(1));
        } else {
            kept.next = come;
            if !raw::is_pending(signal) {
                // The program has taken the one that was sent again, or ignores it.
                kept.again = come;
                raw::signal_this_thread(signal, Some((&raw const kept.again) as usize));
            }
        }
        place.set(kept);
    });
}
