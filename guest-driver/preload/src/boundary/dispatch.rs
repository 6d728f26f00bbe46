// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The entry for programs whose system calls are at unknown places: static programs in C and others.
//! The handler of SIGSYS ([`super::stubs`]) leads the thread here, with the registers of the call in a
//! [`Frame`] on the library's stack.
//!
//! Threads are lent ([`super::lent`]). A thread is in the library while its thread pointer is the lent
//! thread's. All registers are as behind a system call: a program calls the kernel in the middle of a
//! function.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};

use super::entry;
use super::lent::{self, Block, HANDLERS, ON_SIGNAL, current};
use super::stubs::{self, Frame};
use super::words::Words;
use crate::sys::raw;
use crate::sys::user_memory::is_nowhere;

/// Bytes for the vector registers, and the parts saved: x87, SSE, AVX and AVX-512.
const SAVED: usize = 2752;
const PARTS: u32 = 0b1110_0111;

/// Ways out of the entry.
const BACK: u32 = 0;
const END_OF_THREAD: u32 = 1;

/// Answers a call, and says how the entry goes on.
///
/// # Safety
/// The frame is of the entry, on the stack of the calling thread.
unsafe extern "C" fn answer(frame: *mut Frame) -> u32 {
    // SAFETY: the caller's promise.
    answer_frame(unsafe { &mut *frame })
}

/// The entry, with the stack pointer at a [`Frame`].
///
/// # Safety
/// For the handler of SIGSYS only.
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    std::arch::naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined rip",
        "rdgsbase rbx",
        "mov r12, rsp",
        "mov rax, [rbx + {lent}]",
        "wrfsbase rax",
        "mov byte ptr [rbx + {selector}], 0",
        "sub rsp, {saved}",
        "and rsp, -64",
        "mov r13, rsp",
        // The header of the area.
        "xor eax, eax",
        "mov [r13 + 512], rax",
        "mov [r13 + 520], rax",
        "mov [r13 + 528], rax",
        "mov [r13 + 536], rax",
        "mov [r13 + 544], rax",
        "mov [r13 + 552], rax",
        "mov [r13 + 560], rax",
        "mov [r13 + 568], rax",
        "mov eax, {parts}",
        "xor edx, edx",
        "xsave64 [r13]",
        "cld",
        "mov rdi, r12",
        "call {answer}",
        "mov r14d, eax",
        "mov eax, {parts}",
        "xor edx, edx",
        "xrstor64 [r13]",
        "test r14d, r14d",
        "jnz 5f",
        ".globl smc_dispatch_back",
        ".hidden smc_dispatch_back",
        "smc_dispatch_back:",
        "mov rsp, r12",
        "mov byte ptr [rbx + {selector}], 1",
        "pop rax",
        "wrfsbase rax",
        "pop rbx",
        "pop rbp",
        "pop r12",
        "pop r13",
        "pop r14",
        "pop r15",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop r10",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rcx",
        "mov r11, [rsp]",
        "popfq",
        "pop rsp",
        "jmp rcx",
        // The block is another thread's from here on. All signals are blocked.
        "5:",
        "mov rdi, [r12 + {status}]",
        "xor ecx, ecx",
        "wrgsbase rcx",
        "mov eax, 60",
        "mov byte ptr [rbx + {is_used}], 0",
        "jmp smc_stub_exit",
        ".cfi_endproc",
        lent = const offset_of!(Block, lent),
        selector = const SELECTOR,
        is_used = const offset_of!(Block, is_used),
        status = const offset_of!(Frame, rdi),
        saved = const SAVED,
        parts = const PARTS,
        answer = sym answer,
    )
}

/// The place of the selector in a block.
const SELECTOR: usize = offset_of!(Block, dispatch) + offset_of!(Words, selector);

/// Makes a thread of the program. The thread goes on with the frame at the end of its block's stack.
///
/// # Safety
/// The arguments are the program's, the frame is complete, and all signals are blocked.
#[unsafe(naked)]
unsafe extern "C" fn clone_thread(
    _flags: usize,
    _stack: usize,
    _parent_tid: usize,
    _child_tid: usize,
    _tls: usize,
    _block: *const Block,
) -> isize {
    std::arch::naked_asm!(
        ".cfi_startproc",
        "push rbx",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_offset rbx, -16",
        "mov rbx, r9",
        "mov r10, rcx",
        "mov eax, 56",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "pop rbx",
        ".cfi_adjust_cfa_offset -8",
        "ret",
        "2:",
        ".cfi_undefined rip",
        "wrgsbase rbx",
        "mov r12, [rbx + {stack}]",
        "sub r12, {frame}",
        "and r12, -16",
        "mov rsp, r12",
        "mov rax, [rbx + {lent}]",
        "wrfsbase rax",
        "call {begin}",
        "jmp smc_dispatch_back",
        ".cfi_endproc",
        stack = const offset_of!(Block, stack),
        lent = const offset_of!(Block, lent),
        frame = const size_of::<Frame>(),
        begin = sym begin_thread,
    )
}

/// The frame of a new thread, at the end of its stack.
fn first_frame(block: &Block) -> *mut Frame {
    ((block.stack - size_of::<Frame>()) & !15) as *mut Frame
}

/// The handler of the program's signals, in place of the library's. For a thread in the library the
/// signal is for the library's handler. All others are for the program's at once.
///
/// # Safety
/// For the kernel only.
#[unsafe(naked)]
unsafe extern "C" fn on_signal() {
    std::arch::naked_asm!(
        "rdgsbase rax",
        "test rax, rax",
        "jz 2f",
        "rdfsbase r8",
        "cmp r8, [rax + {lent}]",
        "jne 2f",
        "push rbx",
        "mov rbx, rax",
        "movzx ecx, byte ptr [rax + {selector}]",
        "push rcx",
        "sub rsp, 8",
        "mov byte ptr [rax + {selector}], 0",
        "call [rip + {library}]",
        "add rsp, 8",
        "pop rcx",
        "mov byte ptr [rbx + {selector}], cl",
        "pop rbx",
        "ret",
        "2:",
        "mov r8, [rip + {handlers}]",
        "movsxd r9, edi",
        "mov r8, [r8 + 8 * r9]",
        // SIG_DFL and the like: the program has changed the action just now.
        "cmp r8, 4096",
        "jbe 3f",
        "jmp r8",
        "3:",
        "ret",
        lent = const offset_of!(Block, lent),
        selector = const SELECTOR,
        library = sym ON_SIGNAL,
        handlers = sym HANDLERS,
    )
}

/// # Safety
/// The calling thread is in the library, and the handler is the program's.
#[unsafe(naked)]
unsafe extern "C" fn with_own_pointer(_: c_int, _: *mut c_void, _: *mut c_void, _: usize) {
    std::arch::naked_asm!(
        "push rbx",
        "push r12",
        "sub rsp, 8",
        "rdfsbase rbx",
        "movzx r12d, byte ptr gs:[{selector}]",
        "mov byte ptr gs:[{selector}], 1",
        "mov rax, gs:[{own}]",
        "wrfsbase rax",
        "call rcx",
        "wrfsbase rbx",
        "mov byte ptr gs:[{selector}], r12b",
        "add rsp, 8",
        "pop r12",
        "pop rbx",
        "ret",
        selector = const SELECTOR,
        own = const offset_of!(Block, own),
    )
}

/// Whether the calls of this process are dispatched.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether the program's system calls come by SIGSYS.
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// The numbers with an answer here.
const CALLS: [i64; 4] = [
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigsuspend,
    libc::SYS_sigaltstack,
    libc::SYS_arch_prctl,
];

/// Prepares the dispatch for the calling thread, the first one of the program. `handlers`, `library`:
/// as for [`lent::prepare`].
///
/// # Errors
/// The reason why the calls cannot be taken over.
pub(super) fn prepare(handlers: usize, library: usize) -> Result<(), String> {
    if !std::is_x86_feature_detected!("xsave") {
        return Err("the processor does not save its vector registers for programs (XSAVE)".into());
    }
    if !stubs::is_known_to_kernel() {
        return Err("the kernel dispatches no system calls to programs (Linux 5.11)".into());
    }
    let on_signal = on_signal as unsafe extern "C" fn() as *const c_void as usize;
    lent::prepare(handlers, library, on_signal)?;
    entry::add(&CALLS);
    lent::begin();
    let block = current();
    block.dispatch.prepare().ok_or("there is no memory for a stack of SIGSYS")?;
    stubs::set_handler(enter as unsafe extern "C" fn() as *const c_void as usize)
        .ok_or("the kernel sets no handler of SIGSYS")?;
    set_mask(&without_sigsys(mask()));
    arm(block);
    IS_ON.store(true, Ordering::Relaxed);
    Ok(())
}

/// Begins the program: the next system call of this thread is dispatched.
pub(super) fn begin() {
    current().dispatch.selector.store(1, Ordering::Relaxed);
    // SAFETY: the caller has no more need of libc. The thread pointer of a new program is zero.
    unsafe { std::arch::asm!("wrfsbase {}", in(reg) 0usize) };
}

/// Has the kernel dispatch the calls of this thread of the program. A filter of the program may forbid
/// this: without the dispatch the calls would bypass the library.
fn arm(block: &Block) {
    if !block.dispatch.set_stack() || stubs::arm(block).is_err() {
        std::process::abort();
    }
}

const SIGSYS: u64 = 1 << (libc::SIGSYS - 1);

/// A set of signals without the dispatch's: the kernel ends a process for a call refused meanwhile.
fn without_sigsys(set: u64) -> u64 {
    set & !SIGSYS
}

fn mask() -> u64 {
    let mut old = 0u64;
    change_mask(libc::SIG_BLOCK as usize, None, Some(&mut old));
    old
}

fn set_mask(set: &u64) {
    change_mask(libc::SIG_SETMASK as usize, Some(set), None);
}

fn change_mask(how: usize, new: Option<&u64>, old: Option<&mut u64>) -> isize {
    let new = new.map_or(0, |new| std::ptr::from_ref(new) as usize);
    let old = old.map_or(0, |old| std::ptr::from_mut(old) as usize);
    // SAFETY: both sets are valid until the call returns.
    kernel(libc::SYS_rt_sigprocmask, [how, new, old, 8, 0, 0])
}

/// A system call of the library: the result, as the kernel gives it to programs.
fn kernel(number: i64, words: [usize; 6]) -> isize {
    // SAFETY: the callers pass the program's arguments, or their own.
    match unsafe { raw::call(number, words) } {
        Ok(result) => result as isize,
        Err(raw::Errno(error)) => -(error as isize),
    }
}

const EFAULT: isize = -(libc::EFAULT as isize);
const EINVAL: isize = -(libc::EINVAL as isize);

/// A word of the program.
fn word(at: usize) -> Option<u64> {
    let at = at as *const u64;
    // SAFETY: the program's word.
    (!is_nowhere(at, 8)).then(|| unsafe { at.read_unaligned() })
}

/// Answers the call of a frame, and says how the entry goes on.
fn answer_frame(frame: &mut Frame) -> u32 {
    let block = current();
    // SAFETY: a cell of this thread.
    unsafe { *block.own.get() = frame.own };
    let (number, words) = (frame.rax as i64, frame.words());
    let result = match number {
        libc::SYS_exit => {
            entry::ask(number, words);
            set_mask(&u64::MAX);
            return END_OF_THREAD;
        }
        libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => {
            Some(child(block, frame))
        }
        libc::SYS_rt_sigprocmask => Some(rt_sigprocmask(words)),
        libc::SYS_sigaltstack => {
            Some(block.dispatch.alternate_stack(words[0], words[1], frame.rsp))
        }
        libc::SYS_arch_prctl => arch_prctl(words),
        libc::SYS_prctl if words[0] == stubs::PR_SET_SYSCALL_USER_DISPATCH => Some(EINVAL),
        libc::SYS_rt_sigaction => rt_sigaction(words),
        _ => with_mask(number, words),
    };
    if let Some(result) = result {
        frame.set_result(result);
    }
    BACK
}

/// A program's use of the GS register would be the end of the dispatch.
fn arch_prctl(words: [usize; 6]) -> Option<isize> {
    const ARCH_SET_GS: usize = 0x1001;
    (words[0] == ARCH_SET_GS).then_some(-(libc::EPERM as isize))
}

/// Blocks no SIGSYS.
fn rt_sigprocmask(words: [usize; 6]) -> isize {
    let [how, new, old, size, ..] = words;
    if new == 0 || size != 8 {
        return kernel(libc::SYS_rt_sigprocmask, words);
    }
    let Some(set) = word(new).map(without_sigsys) else { return EFAULT };
    let set = std::ptr::from_ref(&set) as usize;
    kernel(libc::SYS_rt_sigprocmask, [how, set, old, size, 0, 0])
}

/// Actions whose handlers block no SIGSYS. The program's own action of SIGSYS has no effect.
fn rt_sigaction(words: [usize; 6]) -> Option<isize> {
    let [signal, new, old, size, ..] = words;
    if signal == libc::SIGSYS as usize && size == 8 {
        return Some(match (old, word(old)) {
            (0, _) => 0,
            (_, None) => EFAULT,
            // SAFETY: the program's room for an action.
            _ => unsafe {
                (old as *mut [usize; 4]).write_unaligned([0; 4]);
                0
            },
        });
    }
    if new == 0 || size != 8 {
        return entry::ask(libc::SYS_rt_sigaction, words);
    }
    let (first, last) = (word(new), word(new.wrapping_add(24)));
    if first.is_none() || last.is_none() {
        return Some(EFAULT);
    }
    // SAFETY: the program's action.
    let mut action = unsafe { (new as *const [usize; 4]).read_unaligned() };
    action[3] = without_sigsys(action[3] as u64) as usize;
    let new = action.as_ptr() as usize;
    entry::ask(libc::SYS_rt_sigaction, [signal, new, old, size, 0, 0])
}

/// Calls with a set of signals blocked meanwhile.
fn with_mask(number: i64, mut words: [usize; 6]) -> Option<isize> {
    let place = match number {
        libc::SYS_rt_sigsuspend => 0,
        libc::SYS_ppoll => 3,
        libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => 4,
        libc::SYS_pselect6 => 5,
        _ => return entry::ask(number, words),
    };
    let (mut set, mut pair) = (0, [0; 2]);
    if words[place] != 0 {
        let mut at = words[place];
        if number == libc::SYS_pselect6 {
            let (Some(address), Some(size)) = (word(at), word(at.wrapping_add(8))) else {
                return Some(EFAULT);
            };
            pair = [address as usize, size as usize];
            at = pair[0];
        }
        if at != 0 {
            let Some(mask) = word(at) else { return Some(EFAULT) };
            set = without_sigsys(mask);
            let own = std::ptr::from_ref(&set) as usize;
            match number {
                libc::SYS_pselect6 => {
                    pair[0] = own;
                    words[place] = pair.as_ptr() as usize;
                }
                _ => words[place] = own,
            }
        }
    }
    let result = match number {
        libc::SYS_rt_sigsuspend => Some(kernel(number, words)),
        // The kernel's call needs the set, too.
        _ => Some(entry::ask(number, words).unwrap_or_else(|| kernel(number, words))),
    };
    std::hint::black_box((&set, &pair));
    result
}

/// Makes a thread or a process. A child of vfork is one of fork: the parent's call returns on the same
/// stack of the library, and the child may execute a program with connections of the parent.
fn child(block: &'static Block, frame: &mut Frame) -> isize {
    const SHARED: usize = libc::CLONE_VM as usize;
    const WAITS: usize = libc::CLONE_VFORK as usize;
    const TLS: usize = libc::CLONE_SETTLS as usize;
    let (number, words) = (frame.rax as i64, frame.words());
    let (result, stack, tls) = match number {
        libc::SYS_clone if words[0] & (SHARED | WAITS) == SHARED => return thread(block, frame),
        libc::SYS_clone => {
            let [flags, stack, parent, id, tls, _] = words;
            let words = [flags & !(SHARED | WAITS), 0, parent, id, tls, 0];
            let result = entry::ask(number, words).unwrap_or_else(|| kernel(number, words));
            (result, stack, (flags & TLS != 0).then_some(tls))
        }
        libc::SYS_clone3 => {
            // Programs go on with `clone`.
            (entry::ask(number, words).unwrap_or(-(libc::ENOSYS as isize)), 0, None)
        }
        _ => {
            let words = [libc::SIGCHLD as usize, 0, 0, 0, 0, 0];
            let number = libc::SYS_clone;
            (entry::ask(number, words).unwrap_or_else(|| kernel(number, words)), 0, None)
        }
    };
    if result == 0 {
        if stack != 0 {
            frame.rsp = stack;
        }
        frame.own = tls.unwrap_or(frame.own);
        // SAFETY: a cell of this thread.
        unsafe { *block.own.get() = frame.own };
        arm(block);
    }
    result
}

/// Makes a thread with the program's memory.
fn thread(block: &'static Block, frame: &Frame) -> isize {
    let [flags, stack, parent, id, tls, _] = frame.words();
    let made = || {
        let new = lent::lend()?;
        new.dispatch.prepare().map(|()| new).or_else(|| {
            new.is_used.store(0, Ordering::Release);
            None
        })
    };
    let Some(new) = made() else { return -(libc::EAGAIN as isize) };
    entry::ask(libc::SYS_clone, frame.words());
    let has_tls = flags & libc::CLONE_SETTLS as usize != 0;
    let mut copy = Frame { ..*frame };
    copy.own = if has_tls { tls } else { frame.own };
    copy.rsp = if stack != 0 { stack } else { frame.rsp };
    copy.set_result(0);
    let before = mask();
    new.dispatch.mask.store(before, Ordering::Relaxed);
    set_mask(&u64::MAX);
    // SAFETY: the stack of a block without a thread, and the program's arguments.
    let made = unsafe {
        first_frame(new).write(copy);
        *new.own.get() = if has_tls { tls } else { *block.own.get() };
        clone_thread(flags, stack, parent, id, tls, new)
    };
    if made < 0 {
        new.is_used.store(0, Ordering::Release);
    }
    set_mask(&before);
    made
}

/// The beginning of a new thread, with the lent thread's pointer.
extern "C" fn begin_thread() {
    let block = current();
    arm(block);
    set_mask(&block.dispatch.mask.load(Ordering::Relaxed));
}

/// Calls a handler of the program from the library's.
///
/// # Safety
/// The arguments are the kernel's, and the handler is the program's.
pub(super) unsafe fn call_handler(
    handler: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    let block = current();
    let level = &block.dispatch.level;
    let before = level.load(Ordering::Relaxed);
    // SAFETY: the caller's promise.
    unsafe {
        let registers = &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let interrupted = registers[libc::REG_RSP as usize] as usize;
        if let Some(free) = block.free_below(interrupted) {
            level.store(free, Ordering::Relaxed);
        }
        with_own_pointer(signal, info.cast(), context, handler);
    }
    level.store(before, Ordering::Relaxed);
}
