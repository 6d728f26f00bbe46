// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stacks for the library's work in calls of the program's threads.
//!
//! The assembly of the entry cannot make a stack, so some are always ready. The first call of a thread
//! takes one of them, and puts another in its place. A thread gives its stack back when it ends.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys::own_stack::OwnStack;

/// Ends of the stacks without a thread; 0: none. The entry takes them.
pub(super) static READY: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// The key whose destructor gives a stack back, and one more; 0: none.
static KEY: AtomicUsize = AtomicUsize::new(0);

/// The words of a thread, as the entry uses them.
#[repr(C)]
struct State {
    /// The end of the thread's stack; 0: none yet.
    stack: Cell<usize>,
    /// Not zero: the thread is between the entry and the way back.
    busy: Cell<u8>,
    /// Whether the thread gives its stack back at its end.
    has_key: Cell<bool>,
}

/// The words of the calling thread.
fn state<'a>() -> &'a State {
    let at: *const State;
    // SAFETY: reads the address of this thread's copy of the words.
    unsafe {
        std::arch::asm!(
            "mov {at}, qword ptr fs:[0]",
            "add {at}, qword ptr [rip + smc_boundary_state@GOTTPOFF]",
            at = out(reg) at, options(pure, readonly, nostack)
        );
    }
    // SAFETY: the words live as long as the thread, and references do not leave this module.
    unsafe { &*at }
}

/// The distance of [`State::busy`] from the thread pointer: the same in all threads.
pub(super) fn place_of_busy() -> i32 {
    let at: isize;
    // SAFETY: reads a number of the dynamic linker.
    unsafe {
        std::arch::asm!(
            "mov {at}, qword ptr [rip + smc_boundary_state@GOTTPOFF]",
            at = out(reg) at, options(pure, readonly, nostack)
        );
    }
    // The words are in the block of the thread, below 2 GiB.
    (at + std::mem::offset_of!(State, busy) as isize) as i32
}

/// Makes the first stacks.
pub(super) fn prepare() -> Result<(), String> {
    let mut key = 0;
    // SAFETY: the destructor stays valid, because the library is never unloaded.
    let made = unsafe { libc::pthread_key_create(&raw mut key, Some(give_back)) } == 0;
    if !made || !fill() {
        return Err("there is no memory for stacks of the library".into());
    }
    KEY.store(key as usize + 1, Ordering::Relaxed);
    Ok(())
}

/// Puts stacks into empty places. `false`: there is no memory.
fn fill() -> bool {
    READY.iter().all(|place| {
        place.load(Ordering::Relaxed) != 0
            || OwnStack::take().is_some_and(|stack| {
                put(place, stack);
                true
            })
    })
}

/// Puts a stack into a place. A stack without a place is freed.
fn put(place: &AtomicUsize, stack: OwnStack) {
    let end = stack.into_end();
    if place.compare_exchange(0, end, Ordering::Release, Ordering::Relaxed).is_err() {
        // SAFETY: of the stack above.
        drop(unsafe { OwnStack::from_end(end) });
    }
}

/// Called in each call, on the library's stack.
pub(super) fn in_call() {
    if READY.iter().any(|place| place.load(Ordering::Relaxed) == 0) {
        // Without memory a later call tries again.
        fill();
    }
    if !state().has_key.replace(true)
        && let Some(key) = KEY.load(Ordering::Relaxed).checked_sub(1)
    {
        // SAFETY: the key is this module's. The value is not null, so the destructor runs.
        unsafe { libc::pthread_setspecific(key as libc::pthread_key_t, KEY.as_ptr().cast()) };
    }
}

/// Runs at the end of a thread, on the thread's own stack. A later call of the thread takes a stack
/// again, and libc calls the destructor again.
unsafe extern "C" fn give_back(_: *mut c_void) {
    let state = state();
    state.has_key.set(false);
    let end = state.stack.replace(0);
    if end == 0 || state.busy.get() != 0 {
        return;
    }
    // SAFETY: the entry took this stack from `READY`, and the thread uses the stack no more.
    let stack = unsafe { OwnStack::from_end(end) };
    let place = READY.iter().find(|place| place.load(Ordering::Relaxed) == 0);
    if let (Some(place), Some(stack)) = (place, stack) {
        put(place, stack);
    }
}
