// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queued signals, the real-time signals of POSIX. A program may rely on their order, but the kernel
//! puts a deferred signal, sent again, behind later ones of the same thread. So the library keeps the
//! `siginfo_t` of the deferred signal. The handler of the next signal of this number gets the kept
//! `siginfo_t`, and the newer `siginfo_t` is kept in its place, until the repeated signal comes.

use std::cell::Cell;
use std::ffi::c_int;
use std::mem::{align_of, size_of};

use libc::siginfo_t;

use crate::sys::raw;

/// Number of signals in order, deferred at the same time by one thread.
const PLACES: usize = 4;
/// The first real-time signal of the kernel.
const FIRST: c_int = 32;
const WORDS: usize = size_of::<siginfo_t>() / size_of::<u64>();
const _: () = assert!(align_of::<siginfo_t>() <= align_of::<u64>());

/// `siginfo_t` as words.
type Info = [u64; WORDS];

/// A deferred signal. `process` is zero for a free place.
#[derive(Clone, Copy)]
struct Kept {
    process: c_int,
    signal: c_int,
    /// Information for the next handler.
    next: Info,
    /// The kernel's information with the repeated signal.
    again: Info,
}

const NONE: Kept = Kept { process: 0, signal: 0, next: [0; WORDS], again: [0; WORDS] };

thread_local! {
    /// Number of taken places.
    static TAKEN: Cell<usize> = const { Cell::new(0) };
    static KEPT: [Cell<Kept>; PLACES] = const { [const { Cell::new(NONE) }; PLACES] };
}

/// Whether this thread still waits for a repeated signal.
#[inline]
pub(super) fn any() -> bool {
    TAKEN.try_with(Cell::get).is_ok_and(|taken| taken > 0)
}

/// # Safety
/// `info` is an argument of a handler called by the kernel.
unsafe fn read(info: *const siginfo_t) -> Info {
    // SAFETY: the caller's promise.
    unsafe { info.cast::<Info>().read() }
}

/// Notes a signal deferred and sent again.
///
/// # Safety
/// `info` is an argument of the handler called by the kernel.
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
            // The signal waits behind the others.
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

/// Called before a handler runs. Gives the handler the `siginfo_t` due in the order of arrival.
///
/// # Safety
/// `info` is an argument of the handler called by the kernel.
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
                // The program has taken the repeated signal, or ignores the signal.
                kept.again = come;
                raw::signal_this_thread(signal, Some((&raw const kept.again) as usize));
            }
        }
        place.set(kept);
    });
}
