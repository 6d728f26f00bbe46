// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The words of a thread whose system calls are dispatched, and the thread's alternate stack of signals.
//! The stack of a call may be small, or already unmapped, so the handler of SIGSYS needs another one.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use ism_sys::map_zeros;

use crate::sys::raw;
use crate::sys::user_memory::is_nowhere;

/// Bytes of the library's alternate stack. A program's stack of this size or more is used itself.
const SIZE: usize = 64 << 10;

/// The words of a thread.
#[repr(C)]
#[derive(Default)]
pub(super) struct Words {
    /// The kernel's selector: not zero for a dispatch.
    pub(super) selector: AtomicU8,
    /// The end of the free part of the library's stack during a handler called by the library; or 0.
    pub(super) level: AtomicUsize,
    /// The mask of a new thread.
    pub(super) mask: AtomicU64,
    /// The library's alternate stack; 0: none.
    base: AtomicUsize,
    /// The alternate stack as the program has set it: address, flags and size.
    set: [AtomicUsize; 3],
}

const DISABLED: usize = libc::SS_DISABLE as usize;

impl Words {
    /// Prepares the words for a new thread. `None`: there is no memory.
    pub(super) fn prepare(&self) -> Option<()> {
        if self.base.load(Ordering::Relaxed) == 0 {
            self.base.store(map_zeros(SIZE).ok()? as usize, Ordering::Relaxed);
        }
        self.level.store(0, Ordering::Relaxed);
        self.selector.store(0, Ordering::Relaxed);
        self.note([0, DISABLED, 0]);
        Some(())
    }

    fn note(&self, set: [usize; 3]) {
        for (place, word) in self.set.iter().zip(set) {
            place.store(word, Ordering::Relaxed);
        }
    }

    fn noted(&self) -> [usize; 3] {
        [0, 1, 2].map(|at: usize| self.set.get(at).map_or(0, |w| w.load(Ordering::Relaxed)))
    }

    /// The alternate stack of the thread: address and size.
    fn stack(&self) -> (usize, usize) {
        match self.noted() {
            [at, flags, size] if flags & DISABLED == 0 && size >= SIZE => (at, size),
            _ => (self.base.load(Ordering::Relaxed), SIZE),
        }
    }

    /// Whether a stack pointer is on the alternate stack.
    pub(super) fn is_on_alternate_stack(&self, rsp: usize) -> bool {
        let (at, size) = self.stack();
        rsp.wrapping_sub(at) <= size
    }

    /// Tells the kernel the alternate stack.
    pub(super) fn set_stack(&self) -> bool {
        let (at, size) = self.stack();
        let stack = [at, 0, size];
        // SAFETY: the kernel reads the words. The stack is this thread's, or the program's own.
        unsafe { raw::call(libc::SYS_sigaltstack, [stack.as_ptr() as usize, 0, 0, 0, 0, 0]) }
            .is_ok()
    }

    /// The program's `sigaltstack`. `rsp`: the program's stack pointer.
    pub(super) fn alternate_stack(&self, new: usize, old: usize, rsp: usize) -> isize {
        const LEAST: usize = 2048;
        const ON_STACK: usize = libc::SS_ONSTACK as usize;
        let is_on = self.is_on_alternate_stack(rsp);
        let (new, old) = (new as *const [usize; 3], old as *mut [usize; 3]);
        if !new.is_null() && is_nowhere(new, 24) || !old.is_null() && is_nowhere(old, 24) {
            return -(libc::EFAULT as isize);
        }
        let before = self.noted();
        if !new.is_null() {
            // SAFETY: the program's words.
            let [at, flags, size] = unsafe { new.read_unaligned() };
            let flags = flags as u32 as usize;
            if is_on && before[1] & DISABLED == 0 {
                return -(libc::EPERM as isize);
            }
            let kind = flags & !(1 << 31);
            if kind != 0 && kind != DISABLED && kind != ON_STACK {
                return -(libc::EINVAL as isize);
            }
            match kind == DISABLED {
                true => self.note([0, DISABLED, 0]),
                false if size < LEAST => return -(libc::ENOMEM as isize),
                false => self.note([at, flags & (1 << 31), size]),
            }
            if !self.set_stack() {
                self.note(before);
                return -(libc::EINVAL as isize);
            }
        }
        if !old.is_null() {
            let [at, flags, size] = before;
            let on = if is_on && flags & DISABLED == 0 { ON_STACK } else { 0 };
            // SAFETY: the program's room.
            unsafe { old.write_unaligned([at, flags | on, size]) };
        }
        0
    }
}
