// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Syscall User Dispatch: the kernel refuses each system call of the program with SIGSYS. The handler
//! leads the thread to an entry of the library, or to a *stub*, which makes the call. No instruction of
//! the program is changed.
//!
//! The kernel lets the calls of the stubs through always, and those of the library while the thread's
//! *selector* is zero.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::entry;
use super::lent::Block;
use crate::sys::raw::{self, Errno};

/// Places of system calls in a program, each with a stub.
const PLACES: usize = 4096;

/// The addresses behind the program's system calls, as numbers of stubs by hash; 0: unused.
static BEHIND: [AtomicUsize; PLACES] = [const { AtomicUsize::new(0) }; PLACES];

// A stub makes a system call of the program, and jumps behind the program's own instruction.
std::arch::global_asm!(
    ".pushsection .text.smc_stubs,\"ax\",@progbits",
    ".balign 64",
    ".globl smc_stubs",
    ".hidden smc_stubs",
    "smc_stubs:",
    ".rept {places}",
    // jmp [rip + distance]: stubs and places have the same size, so the distance is the same.
    "syscall",
    ".byte 0xff, 0x25",
    ".long {behind} - smc_stubs - 8",
    ".endr",
    ".globl smc_stub_exit",
    ".hidden smc_stub_exit",
    "smc_stub_exit:",
    "syscall",
    "ud2",
    ".globl smc_stub_restore",
    ".hidden smc_stub_restore",
    "smc_stub_restore:",
    "mov eax, 15",
    "syscall",
    // The kernel asks for the address behind the call.
    "ud2",
    ".globl smc_stubs_end",
    ".hidden smc_stubs_end",
    "smc_stubs_end:",
    ".popsection",
    places = const PLACES,
    behind = sym BEHIND,
);

unsafe extern "C" {
    fn smc_stubs();
    fn smc_stub_restore();
    fn smc_stubs_end();
}

/// The call for the dispatch.
pub(super) const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;

/// Bytes of a stub, and of its system call.
const STUB: usize = 8;
const CALL: usize = 2;

/// Registers of a call.
#[repr(C)]
pub(super) struct Frame {
    /// The program's thread pointer.
    pub(super) own: usize,
    pub(super) rbx: usize,
    pub(super) rbp: usize,
    pub(super) r12: usize,
    pub(super) r13: usize,
    pub(super) r14: usize,
    pub(super) r15: usize,
    /// The number of the call, then its result.
    pub(super) rax: usize,
    pub(super) r9: usize,
    pub(super) r8: usize,
    pub(super) r10: usize,
    pub(super) rdx: usize,
    pub(super) rsi: usize,
    pub(super) rdi: usize,
    /// Where the thread goes on: at a stub, or behind its system call.
    pub(super) target: usize,
    pub(super) flags: usize,
    pub(super) rsp: usize,
}

impl Frame {
    pub(super) fn words(&self) -> [usize; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Gives the program a result in place of the kernel's.
    pub(super) fn set_result(&mut self, result: isize) {
        self.rax = result as usize;
        self.target += CALL;
    }
}

/// The stub for the system call before an address. `None`: there are too many places.
fn stub(behind: usize) -> Option<usize> {
    let first = behind.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    for step in 0..PLACES {
        let at = first.wrapping_add(step) % PLACES;
        let place = BEHIND.get(at)?;
        let is_mine = match place.load(Ordering::Relaxed) {
            0 => match place.compare_exchange(0, behind, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => true,
                Err(other) => other == behind,
            },
            other => other == behind,
        };
        if is_mine {
            return Some(smc_stubs as *const () as usize + at * STUB);
        }
    }
    None
}

/// The address of the entry.
static ENTRY: AtomicUsize = AtomicUsize::new(0);

/// The end of the free part of the library's stack, for a call at a stack pointer of the program.
fn free_stack(block: &Block, rsp: usize) -> usize {
    if let Some(free) = block.free_below(rsp) {
        // A handler on the library's stack.
        return free;
    }
    let words = &block.dispatch;
    let level = words.level.load(Ordering::Relaxed);
    if level != 0 && words.is_on_alternate_stack(rsp) {
        // A handler on the alternate stack, called by the library.
        return level;
    }
    // A handler may have left by a jump.
    words.level.store(0, Ordering::Relaxed);
    block.stack
}

/// The handler of SIGSYS. Leads a system call of the program to the entry, or to its stub. The thread
/// pointer is the program's: no variables of the thread, no call of libc.
///
/// # Safety
/// For the kernel only.
unsafe extern "C" fn on_dispatch(
    _: c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::ucontext_t,
) {
    const USER_DISPATCH: c_int = 2;
    // SAFETY: the kernel's arguments. The frame is in the free part of the library's stack.
    unsafe {
        let registers = &raw mut (*context).uc_mcontext.gregs;
        let at = |register: c_int| (registers.cast::<i64>()).add(register as usize);
        let of = |register: c_int| *at(register) as usize;
        let block: *const Block;
        std::arch::asm!("rdgsbase {}", out(reg) block, options(nomem, nostack));
        let target = stub(of(libc::REG_RIP)).filter(|_| (*info).si_code == USER_DISPATCH);
        let Some(target) = target else { end(block) };
        let number = of(libc::REG_RAX);
        let is_answered =
            entry::CALLS.get(number).is_some_and(|place| place.load(Ordering::Relaxed) != 0);
        if !is_answered || block.is_null() {
            *at(libc::REG_RIP) = target as i64;
            return;
        }
        let block = &*block;
        let frame = (free_stack(block, of(libc::REG_RSP)) - size_of::<Frame>()) & !15;
        let frame = frame as *mut Frame;
        let own: usize;
        std::arch::asm!("rdfsbase {}", out(reg) own, options(nomem, nostack));
        (&raw mut (*frame).own).write(own);
        (&raw mut (*frame).rbx).write(of(libc::REG_RBX));
        (&raw mut (*frame).rbp).write(of(libc::REG_RBP));
        (&raw mut (*frame).r12).write(of(libc::REG_R12));
        (&raw mut (*frame).r13).write(of(libc::REG_R13));
        (&raw mut (*frame).r14).write(of(libc::REG_R14));
        (&raw mut (*frame).r15).write(of(libc::REG_R15));
        (&raw mut (*frame).rax).write(number);
        (&raw mut (*frame).r9).write(of(libc::REG_R9));
        (&raw mut (*frame).r8).write(of(libc::REG_R8));
        (&raw mut (*frame).r10).write(of(libc::REG_R10));
        (&raw mut (*frame).rdx).write(of(libc::REG_RDX));
        (&raw mut (*frame).rsi).write(of(libc::REG_RSI));
        (&raw mut (*frame).rdi).write(of(libc::REG_RDI));
        (&raw mut (*frame).target).write(target);
        (&raw mut (*frame).flags).write(of(libc::REG_EFL));
        (&raw mut (*frame).rsp).write(of(libc::REG_RSP));
        *at(libc::REG_RSP) = frame as i64;
        *at(libc::REG_RIP) = ENTRY.load(Ordering::Relaxed) as i64;
    }
}

/// Ends the process by SIGSYS: the signal has another cause, or the program more places than stubs.
///
/// # Safety
/// For the handler of SIGSYS, in which the kernel ends a process for a refused call.
unsafe fn end(block: *const Block) -> ! {
    loop {
        // SAFETY: blocks live for ever. A call without arguments.
        unsafe {
            if let Some(block) = block.as_ref() {
                block.dispatch.selector.store(1, Ordering::Relaxed);
            }
            let _ = raw::call(libc::SYS_getpid, [0; 6]);
        }
    }
}

/// Sets the handler of SIGSYS, which leads answered calls to the entry at this address.
pub(super) fn set_handler(entry: usize) -> Option<()> {
    ENTRY.store(entry, Ordering::Relaxed);
    const FLAGS: c_int = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let handler = on_dispatch as *const c_void as usize;
    let mut action = raw::action(handler, FLAGS, u64::MAX);
    action[2] = smc_stub_restore as *const () as usize;
    raw::set_action(libc::SIGSYS, &action).map(drop)
}

/// Whether the kernel has the dispatch.
pub(super) fn is_known_to_kernel() -> bool {
    set_dispatch([0; 4]).is_ok()
}

/// Has the kernel dispatch the calls of the calling thread.
pub(super) fn arm(block: &Block) -> Result<(), Errno> {
    let begin = smc_stubs as *const () as usize;
    let size = smc_stubs_end as *const () as usize - begin;
    set_dispatch([1, begin, size, block.dispatch.selector.as_ptr() as usize])
}

/// `on`, the part of the memory without a dispatch with its size, and the selector.
fn set_dispatch([on, begin, size, selector]: [usize; 4]) -> Result<(), Errno> {
    let args = [PR_SET_SYSCALL_USER_DISPATCH, on, begin, size, selector, 0];
    // SAFETY: the selector lives as long as the process.
    unsafe { raw::call(libc::SYS_prctl, args) }.map(drop)
}
