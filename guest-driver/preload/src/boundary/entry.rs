// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The entry: between the program's registers and the library.
//!
//! A thunk comes with the address of its tail in rcx. A system call destroys rcx and r11, so the entry
//! may use both. All other registers, the program's stack and the bytes below it stay unchanged: a
//! goroutine has few bytes left, and a child of vfork runs on the stack of its parent. Vector registers
//! are free, except that Go has zero in xmm15.
//!
//! A thread is *busy* from the entry to the way back. A busy thread's calls are those of a signal
//! handler, and go to the kernel. `threads` has the stacks.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, Ordering};

use ism_sys::OnceBox;

use super::threads;
use crate::sys::user_memory::for_stack;

/// The library's answer to a system call: its result, or `None` for the kernel.
pub(crate) type Answer = fn(i64, [usize; 6]) -> Option<isize>;

/// Numbers of system calls with a place in the table.
pub(super) const NUMBERS: usize = 512;

/// Not zero: the library answers the number.
pub(super) static CALLS: [AtomicU8; NUMBERS] = [const { AtomicU8::new(0) }; NUMBERS];
static ANSWER: OnceBox<Answer> = OnceBox::new();

/// Sets the numbers with an answer of the library.
pub(super) fn set(calls: &[i64], answer: Answer) {
    let _ = ANSWER.set(answer);
    add(calls);
}

/// Adds numbers to those with an answer.
pub(super) fn add(calls: &[i64]) {
    for place in calls.iter().filter_map(|number| CALLS.get(*number as usize)) {
        place.store(1, Ordering::Relaxed);
    }
}

/// Registers of a call, as the entry has pushed them.
#[repr(C)]
pub(super) struct Frame {
    alignment: usize,
    /// The number of the call, then its result.
    pub(super) rax: usize,
    r9: usize,
    r8: usize,
    r10: usize,
    rdx: usize,
    rsi: usize,
    pub(super) rdi: usize,
    /// The thunk's tail, and the program's stack pointer.
    pub(super) rcx: usize,
    rsp: usize,
}

/// Answers a call. 0: the call is the kernel's.
///
/// # Safety
/// The frame is of the entry, on the stack of the calling thread.
unsafe extern "C" fn answer(frame: *mut Frame) -> u32 {
    threads::in_call();
    // SAFETY: the caller's promise.
    u32::from(ask_frame(unsafe { &mut *frame }))
}

/// Asks the library for its answer. `false`: the call is the kernel's.
pub(super) fn ask_frame(frame: &mut Frame) -> bool {
    let words = [frame.rdi, frame.rsi, frame.rdx, frame.r10, frame.r8, frame.r9];
    let result = for_stack(frame.rsp, || ask(frame.rax as i64, words));
    if let Some(result) = result {
        frame.rax = result as usize;
    }
    result.is_some()
}

/// The library's answer. `None`: the call is the kernel's.
pub(super) fn ask(number: i64, words: [usize; 6]) -> Option<isize> {
    ANSWER.get().and_then(|answer| answer(number, words))
}

// One `threads::State` per thread.
std::arch::global_asm!(
    ".pushsection .tbss.smc_boundary_state,\"awT\",@nobits",
    ".balign 8",
    ".globl smc_boundary_state",
    ".hidden smc_boundary_state",
    ".type smc_boundary_state,@object",
    ".size smc_boundary_state,16",
    "smc_boundary_state:",
    ".zero 16",
    ".popsection",
);

/// Bytes from the tail of a thunk to the way back of a thread with an answer, and to the tail for kernel
/// calls of a busy thread and for other numbers.
pub(super) const ANSWERED: usize = 2;
pub(super) const OTHERS: usize = 16;

/// The entry. rcx: the tail of the thunk, for kernel calls of a thread that is not busy.
///
/// # Safety
/// For thunks only.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn enter() {
    std::arch::naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined rip",
        "cmp rax, {numbers}",
        "jae 7f",
        "lea r11, [rip + {calls}]",
        "cmp byte ptr [r11 + rax], 0",
        "je 7f",
        "mov r11, [rip + smc_boundary_state@GOTTPOFF]",
        "cmp byte ptr fs:[r11 + 8], 0",
        "jne 7f",
        // A signal handler from here on leaves its calls to the kernel.
        "mov byte ptr fs:[r11 + 8], 1",
        "mov r11, fs:[r11]",
        "test r11, r11",
        "jz 3f",
        "2:",
        "xchg rsp, r11",
        "push r11",
        "push rcx",
        "push rdi",
        "push rsi",
        "push rdx",
        "push r10",
        "push r8",
        "push r9",
        "push rax",
        "push rax",
        // A thread keeps the stack of its first call.
        "mov r11, [rip + smc_boundary_state@GOTTPOFF]",
        "lea rax, [rsp + 80]",
        "mov fs:[r11], rax",
        "cld",
        "mov rdi, rsp",
        "call {answer}",
        "xorps xmm15, xmm15",
        "test eax, eax",
        "pop rax",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop r10",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rcx",
        "pop rsp",
        "jz 4f",
        "add rcx, {answered}",
        "jmp rcx",
        // The kernel's: not busy any more. The child of a vfork comes in by itself.
        "4:",
        "mov r11, [rip + smc_boundary_state@GOTTPOFF]",
        "mov byte ptr fs:[r11 + 8], 0",
        "jmp rcx",
        // The first call of a thread takes a ready stack.
        "3:",
        "xchg r11, [rip + {ready}]",
        "test r11, r11",
        "jnz 2b",
        "xchg r11, [rip + {ready} + 8]",
        "test r11, r11",
        "jnz 2b",
        "xchg r11, [rip + {ready} + 16]",
        "test r11, r11",
        "jnz 2b",
        "xchg r11, [rip + {ready} + 24]",
        "test r11, r11",
        "jnz 2b",
        "pause",
        "jmp 3b",
        "7:",
        "add rcx, {others}",
        "jmp rcx",
        ".cfi_endproc",
        numbers = const NUMBERS,
        answered = const ANSWERED,
        others = const OTHERS,
        calls = sym CALLS,
        ready = sym threads::READY,
        answer = sym answer,
    )
}

/// The prefix for the segment with the mark of a busy thread.
pub(super) const PREFIX: u8 = 0x64;

/// The address of the entry.
pub(super) fn address() -> usize {
    enter as unsafe extern "C" fn() as *const c_void as usize
}
