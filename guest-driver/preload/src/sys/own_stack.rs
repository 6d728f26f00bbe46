// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stacks of the library, for work with a large need of stack: a handshake. A thread of the program may
//! have only PTHREAD_STACK_MIN, and a coroutine less. The rest of a stack other than the thread's is
//! unknown: so the work never begins on the caller's stack.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use ism_sys::map_zeros;

use super::fork_lock::ForkMutex;

/// Bytes of a stack: a handshake may open the device. Unused bytes cost no memory.
const SIZE: usize = super::STACK;
/// Inaccessible bytes below the stack.
const GUARD: usize = 64 << 10;

/// Stacks without threads.
static FREE: ForkMutex<Vec<Stack>> = ForkMutex::new(Vec::new());
/// Maximum number of unused stacks.
const KEPT: usize = 1;

/// Memory for a stack, with the guard below it.
struct Stack(NonNull<libc::c_void>);

// SAFETY: the memory belongs to the owner of the value.
unsafe impl Send for Stack {}

impl Stack {
    fn new() -> Option<Stack> {
        let base = map_zeros(GUARD + SIZE).ok()?;
        let stack = Stack(NonNull::new(base)?);
        // SAFETY: an unused part of this value's mapping.
        (unsafe { libc::mprotect(base, GUARD, libc::PROT_NONE) } == 0).then_some(stack)
    }

    /// The end of the memory, where a stack begins. A multiple of the page size.
    fn top(&self) -> *mut libc::c_void {
        self.0.as_ptr().wrapping_byte_add(GUARD + SIZE)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no thread runs on the stack.
        unsafe { libc::munmap(self.0.as_ptr(), GUARD + SIZE) };
    }
}

/// Work and its result.
union Slot<F, T> {
    work: ManuallyDrop<F>,
    result: ManuallyDrop<T>,
}

/// A stack for one thread, for as long as the value lives.
pub(crate) struct OwnStack(ManuallyDrop<Stack>);

/// Does the work of a slot. A panic ends the process, as in an exported function.
extern "C" fn run<F: FnOnce() -> T, T>(slot: *mut Slot<F, T>) {
    // SAFETY: `OwnStack::run` has put the work there, and takes the result.
    unsafe {
        let work = ManuallyDrop::take(&mut (*slot).work);
        (*slot).result = ManuallyDrop::new(work());
    }
}

impl OwnStack {
    /// A stack without other users. `None`: there is no memory for a stack.
    pub(crate) fn take() -> Option<OwnStack> {
        let free = FREE.lock().pop();
        free.or_else(Stack::new).map(|stack| OwnStack(ManuallyDrop::new(stack)))
    }

    /// Does work on this stack, from any stack of the caller: a thread's, a coroutine's or a handler's.
    /// The work must return.
    pub(crate) fn run<F: FnOnce() -> T, T>(&mut self, work: F) -> T {
        let mut slot = Slot { work: ManuallyDrop::new(work) };
        let (function, argument) = (run::<F, T> as *const libc::c_void, (&raw mut slot).cast());
        // SAFETY: the stack is this value's, no work runs on the stack, and the slot lives longer.
        unsafe { call_on(self.0.top(), function, argument) };
        // SAFETY: `run` has put the result there.
        unsafe { ManuallyDrop::into_inner(slot.result) }
    }

    /// The end of the stack, where its use begins. The stack lives until [`OwnStack::from_end`].
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn into_end(self) -> usize {
        ManuallyDrop::new(self).0.top() as usize
    }

    /// The stack of an end.
    ///
    /// # Safety
    /// The end is from [`OwnStack::into_end`], and nothing uses the stack.
    #[cfg(target_arch = "x86_64")]
    pub(crate) unsafe fn from_end(end: usize) -> Option<OwnStack> {
        let base = (end - GUARD - SIZE) as *mut libc::c_void;
        NonNull::new(base).map(|base| OwnStack(ManuallyDrop::new(Stack(base))))
    }
}

impl Drop for OwnStack {
    fn drop(&mut self) {
        // SAFETY: the value is not used afterwards.
        let stack = unsafe { ManuallyDrop::take(&mut self.0) };
        // The first work opens a device, and touches more of a stack than later work.
        static WAS_USED: AtomicBool = AtomicBool::new(false);
        let was_used = WAS_USED.swap(true, Ordering::Relaxed);
        let mut free = FREE.lock();
        let surplus = match was_used && free.len() < KEPT {
            true => {
                free.push(stack);
                None
            }
            false => Some(stack),
        };
        drop(free);
        drop(surplus);
    }
}

/// Calls a function of one argument with another stack.
///
/// # Safety
/// The function has this type, and the argument is valid for the function. `top` is aligned to 16
/// bytes, and the memory below is the caller's alone.
#[cfg(target_arch = "x86_64")]
unsafe fn call_on(
    top: *mut libc::c_void,
    function: *const libc::c_void,
    argument: *mut libc::c_void,
) {
    // SAFETY: the caller's promises. The function preserves r12, with the stack pointer.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {function}",
            "mov rsp, r12",
            top = in(reg) top,
            function = in(reg) function,
            in("rdi") argument,
            out("r12") _,
            clobber_abi("C"),
        );
    }
}

/// Calls a function of one argument with another stack.
///
/// # Safety
/// The function has this type, and the argument is valid for the function. `top` is aligned to 16
/// bytes, and the memory below is the caller's alone.
#[cfg(target_arch = "aarch64")]
unsafe fn call_on(
    top: *mut libc::c_void,
    function: *const libc::c_void,
    argument: *mut libc::c_void,
) {
    // SAFETY: the caller's promises. The function preserves x20, with the stack pointer.
    unsafe {
        std::arch::asm!(
            "mov x20, sp",
            "mov sp, {top}",
            "blr {function}",
            "mov sp, x20",
            top = in(reg) top,
            function = in(reg) function,
            in("x0") argument,
            out("x20") _,
            clobber_abi("C"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address on the caller's stack.
    #[inline(never)]
    fn here() -> usize {
        let local = 0u8;
        std::hint::black_box(&raw const local) as usize
    }

    #[test]
    fn work_runs_elsewhere_and_its_result_comes_back() {
        let text = String::from("moved in");
        let before = here();
        let on_own_stack = |room: &dyn Fn() -> usize| OwnStack::take().unwrap().run(room);
        let (at, text) = OwnStack::take().unwrap().run(|| (here(), text + " and out"));
        assert_eq!(text, "moved in and out");
        assert!(at.abs_diff(before) > GUARD, "{at:x}, {before:x}");
        // A build without optimisation has copies of the array.
        const ROOM: usize = SIZE / 8;
        let deep = on_own_stack(&|| {
            let room = std::hint::black_box([7u8; ROOM]);
            on_own_stack(&|| room.iter().map(|byte| usize::from(*byte)).sum::<usize>())
        });
        assert_eq!(deep, 7 * ROOM);
    }

    #[test]
    fn threads_have_stacks_of_their_own() {
        std::thread::scope(|scope| {
            for number in 0..8u64 {
                scope.spawn(move || {
                    for round in 0..200 {
                        let sum = OwnStack::take().unwrap().run(|| {
                            let room = std::hint::black_box([number; 512]);
                            std::thread::yield_now();
                            room.iter().sum::<u64>()
                        });
                        assert_eq!(sum, 512 * number, "round {round}");
                    }
                });
            }
        });
        assert!(FREE.lock().len() <= KEPT);
    }
}
