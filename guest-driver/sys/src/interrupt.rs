// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals of a program with calls into a library of this project.
//!
//! A handler must not run while its own thread is in the library: the handler may call the library again,
//! or leave by a jump. So the library counts the depth of a thread's calls ([`enter`], [`leave`]), and a
//! handler in between is *deferred* until the thread is out again. The deferred handler ends the present
//! sleep of the thread at once, and all later sleeps with [`listening`]: the thread goes back to the
//! program without holding anything.
//!
//! The state is a few words of the thread, an instruction or two away.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

/// The words of a thread, used only by the thread itself and its signal handlers.
#[repr(C)]
#[derive(Debug, Default)]
struct SignalState {
    /// Depth of the thread's calls into the library.
    depth: AtomicU32,
    /// Not zero: the thread was told of its cancellation.
    cancelled: AtomicU32,
    /// Deferred events: [`DEFERRED_SIGNAL`], [`DEFERRED_CANCEL`]. Read by the assembly.
    deferred: AtomicU32,
    /// Zero, [`INTERRUPTIBLE`] or [`UNINTERRUPTIBLE`].
    listens: AtomicU32,
    /// The first deferred signal.
    signal: AtomicU32,
    /// Not zero: a handler of the library runs on this thread.
    in_handler: AtomicU32,
    /// The signal mask of the thread when a signal was deferred.
    mask: AtomicU64,
}

/// A blocked signal is pending in the kernel.
pub const DEFERRED_SIGNAL: u32 = 1;
/// The thread was cancelled.
pub const DEFERRED_CANCEL: u32 = 2;

/// Signals never blocked: libc's, for messages to all threads.
const OF_LIBC: u64 = 0b11 << 31;

// One `SignalState` per thread.
std::arch::global_asm!(
    ".pushsection .tbss.smc_interrupt_state,\"awT\",@nobits",
    ".balign 8",
    ".globl smc_interrupt_state",
    ".hidden smc_interrupt_state",
    ".type smc_interrupt_state,@object",
    ".size smc_interrupt_state,32",
    "smc_interrupt_state:",
    ".zero 32",
    ".popsection",
);

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.smc_sleep_call,\"ax\",@progbits",
    ".globl smc_sleep_call",
    ".hidden smc_sleep_call",
    ".type smc_sleep_call,@function",
    "smc_sleep_call:",
    ".cfi_startproc",
    "mov rax, rdi",
    "mov r11, rsi",
    "mov rdi, [r11]",
    "mov rsi, [r11 + 8]",
    "mov rdx, [r11 + 16]",
    "mov r10, [r11 + 24]",
    "mov r8, [r11 + 32]",
    "mov r9, [r11 + 40]",
    "mov r11, [rip + smc_interrupt_state@GOTTPOFF]",
    ".globl smc_sleep_begin",
    ".hidden smc_sleep_begin",
    "smc_sleep_begin:",
    "cmp dword ptr fs:[r11 + 8], 0",
    "jne smc_sleep_ended",
    "syscall",
    ".globl smc_sleep_end",
    ".hidden smc_sleep_end",
    "smc_sleep_end:",
    "ret",
    ".globl smc_sleep_ended",
    ".hidden smc_sleep_ended",
    "smc_sleep_ended:",
    "mov rax, -4",
    "ret",
    ".cfi_endproc",
    ".size smc_sleep_call, . - smc_sleep_call",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .text.smc_sleep_call,\"ax\",@progbits",
    ".globl smc_sleep_call",
    ".hidden smc_sleep_call",
    ".type smc_sleep_call,@function",
    "smc_sleep_call:",
    ".cfi_startproc",
    "hint #34", // bti c
    "mov x8, x0",
    "mov x9, x1",
    "ldp x0, x1, [x9]",
    "ldp x2, x3, [x9, #16]",
    "ldp x4, x5, [x9, #32]",
    "adrp x9, :gottprel:smc_interrupt_state",
    "ldr x9, [x9, :gottprel_lo12:smc_interrupt_state]",
    "mrs x10, tpidr_el0",
    "add x9, x9, x10",
    ".globl smc_sleep_begin",
    ".hidden smc_sleep_begin",
    "smc_sleep_begin:",
    "ldr w10, [x9, #8]",
    "cbnz w10, smc_sleep_ended",
    "svc 0",
    ".globl smc_sleep_end",
    ".hidden smc_sleep_end",
    "smc_sleep_end:",
    "ret",
    ".globl smc_sleep_ended",
    ".hidden smc_sleep_ended",
    "smc_sleep_ended:",
    "mov x0, #-4",
    "ret",
    ".cfi_endproc",
    ".size smc_sleep_call, . - smc_sleep_call",
    ".popsection",
);

#[cfg(target_arch = "s390x")]
std::arch::global_asm!(
    ".pushsection .text.smc_sleep_call,\"ax\",@progbits",
    ".balign 4",
    ".globl smc_sleep_call",
    ".hidden smc_sleep_call",
    ".type smc_sleep_call,@function",
    "smc_sleep_call:",
    ".cfi_startproc",
    "stmg %r6, %r9, 48(%r15)",
    ".cfi_offset %r6, -112",
    ".cfi_offset %r7, -104",
    ".cfi_offset %r8, -96",
    ".cfi_offset %r9, -88",
    "ear %r8, %a0",
    "sllg %r8, %r8, 32",
    "ear %r8, %a1",
    "larl %r9, smc_interrupt_state@INDNTPOFF",
    "ag %r8, 0(%r9)",
    "lgr %r1, %r2",
    "lg %r2, 0(%r3)",
    "lmg %r4, %r7, 16(%r3)",
    "lg %r3, 8(%r3)",
    ".globl smc_sleep_begin",
    ".hidden smc_sleep_begin",
    "smc_sleep_begin:",
    "lt %r0, 8(%r8)",
    "jne smc_sleep_ended",
    "svc 0",
    ".globl smc_sleep_end",
    ".hidden smc_sleep_end",
    "smc_sleep_end:",
    "lmg %r6, %r9, 48(%r15)",
    "br %r14",
    ".globl smc_sleep_ended",
    ".hidden smc_sleep_ended",
    "smc_sleep_ended:",
    "lmg %r6, %r9, 48(%r15)",
    "lghi %r2, -4",
    "br %r14",
    ".cfi_endproc",
    ".size smc_sleep_call, . - smc_sleep_call",
    ".popsection",
);

unsafe extern "C" {
    /// Makes a system call unless something is deferred. The call returns -EINTR if a handler defers
    /// something between the check and the end of the call.
    fn smc_sleep_call(number: i64, arguments: *const usize) -> isize;
    static smc_sleep_begin: u8;
    static smc_sleep_end: u8;
    static smc_sleep_ended: u8;
}

/// The words of the calling thread.
#[inline(always)]
fn state<'a>() -> &'a SignalState {
    let at: *const SignalState;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads the address of this thread's copy of the words.
    unsafe {
        std::arch::asm!(
            "mov {at}, qword ptr fs:[0]",
            "add {at}, qword ptr [rip + smc_interrupt_state@GOTTPOFF]",
            at = out(reg) at, options(pure, readonly, nostack)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "adrp {at}, :gottprel:smc_interrupt_state",
            "ldr {at}, [{at}, :gottprel_lo12:smc_interrupt_state]",
            "mrs {base}, tpidr_el0",
            "add {at}, {at}, {base}",
            at = out(reg) at, base = out(reg) _, options(pure, readonly, nostack)
        );
    }
    #[cfg(target_arch = "s390x")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "ear {at}, %a0",
            "sllg {at}, {at}, 32",
            "ear {at}, %a1",
            "larl {offset}, smc_interrupt_state@INDNTPOFF",
            "ag {at}, 0({offset})",
            at = out(reg) at, offset = out(reg_addr) _, options(pure, readonly, nostack)
        );
    }
    // SAFETY: the words live as long as the thread, and references do not leave this module.
    unsafe { &*at }
}

fn raise(word: &AtomicU32, by: i32) {
    let value = word.load(Ordering::Relaxed).wrapping_add_signed(by);
    word.store(value, Ordering::Relaxed);
    // Orders the store before later and after earlier accesses, for handlers of this thread.
    compiler_fence(Ordering::SeqCst);
}

/// Enters the library. Each call has a [`leave`].
#[inline(always)]
pub fn enter() {
    raise(&state().depth, 1);
}

/// Leaves the library. `true`: something was deferred, and the thread is out now, so the caller delivers.
#[inline(always)]
pub fn leave() -> bool {
    // Orders the work of the library before the thread is out, for handlers of this thread.
    compiler_fence(Ordering::SeqCst);
    raise(&state().depth, -1);
    state().deferred.load(Ordering::Relaxed) != 0 && state().depth.load(Ordering::Relaxed) == 0
}

/// Whether the thread is in the library.
#[inline(always)]
pub fn is_inside() -> bool {
    state().depth.load(Ordering::Relaxed) != 0
}

/// Runs a handler in the state of a thread outside of the library: a fault's handler cannot wait.
pub fn outside<T>(handler: impl FnOnce() -> T) -> T {
    let depth = state().depth.load(Ordering::Relaxed);
    state().depth.store(0, Ordering::Relaxed);
    // Both order the handler within the two stores, for handlers of this thread.
    compiler_fence(Ordering::SeqCst);
    let result = handler();
    compiler_fence(Ordering::SeqCst);
    state().depth.store(depth, Ordering::Relaxed);
    result
}

/// Whether something is deferred on this thread.
#[inline]
pub fn is_deferred() -> bool {
    state().deferred.load(Ordering::Relaxed) != 0
}

/// Whether the thread was told of its cancellation ([`note_cancelled`]).
#[inline(always)]
pub fn is_cancelled() -> bool {
    state().cancelled.load(Ordering::Relaxed) != 0
}

/// Notes the thread's cancellation.
pub fn note_cancelled() {
    state().cancelled.store(1, Ordering::Relaxed);
}

/// Deferred events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deferred {
    /// The first signal, and the signal mask of the thread at the time (bit `n - 1` is signal `n`).
    pub signal: Option<(c_int, u64)>,
    /// The thread was cancelled.
    pub cancelled: bool,
}

/// Takes the deferred events. The signals are still blocked.
pub fn take_deferred() -> Deferred {
    let state = state();
    let what = state.deferred.swap(0, Ordering::Relaxed);
    let signal = state.signal.load(Ordering::Relaxed) as c_int;
    let mask = state.mask.load(Ordering::Relaxed);
    Deferred {
        signal: (what & DEFERRED_SIGNAL != 0).then_some((signal, mask)),
        cancelled: what & DEFERRED_CANCEL != 0,
    }
}

/// Defers, in a handler, the handler's signal, or with `None` the end of the thread. The handler has sent
/// the signal to its thread again, and returns. The thread then has the signal and all but libc's blocked,
/// and a sleep with [`listening`] has ended.
///
/// # Safety
/// `context` is the handler's.
pub unsafe fn defer(signal: Option<c_int>, context: *mut libc::ucontext_t) {
    let state = state();
    let nested = state.in_handler.swap(1, Ordering::Relaxed) != 0;
    // SAFETY: the caller's promise.
    let context = unsafe { &mut *context };
    match signal {
        None => {
            state.deferred.fetch_or(DEFERRED_CANCEL, Ordering::Relaxed);
        }
        Some(signal) => {
            let mask = std::ptr::from_mut(&mut context.uc_sigmask).cast::<u64>();
            // SAFETY: the kernel's mask is the first word of libc's.
            let before = unsafe { mask.read() };
            // The mask under an interrupted handler of the library is not the thread's.
            if !nested {
                state.mask.store(before, Ordering::Relaxed);
            }
            if state.deferred.fetch_or(DEFERRED_SIGNAL, Ordering::Relaxed) & DEFERRED_SIGNAL == 0 {
                state.signal.store(signal as u32, Ordering::Relaxed);
            }
            // SAFETY: as above.
            unsafe { mask.write(!OF_LIBC | 1 << (signal - 1)) };
        }
    }
    end_sleep(context);
    if !nested {
        state.in_handler.store(0, Ordering::Relaxed);
    }
}

/// Makes a sleep return, if not begun yet or about to be restarted by the kernel.
fn end_sleep(context: &mut libc::ucontext_t) {
    let [begin, end, ended] =
        [&raw const smc_sleep_begin, &raw const smc_sleep_end, &raw const smc_sleep_ended]
            .map(|label| label as usize);
    #[cfg(target_arch = "x86_64")]
    let at = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
    #[cfg(target_arch = "aarch64")]
    let at = &mut context.uc_mcontext.pc;
    #[cfg(target_arch = "s390x")]
    let at = &mut context.uc_mcontext.psw.addr;
    if (begin..end).contains(&(*at as usize)) {
        *at = ended as _;
    }
}

/// The sleeps of a thread end when something is deferred.
const INTERRUPTIBLE: u32 = 1;
/// The sleeps do not end, including nested ones.
const UNINTERRUPTIBLE: u32 = 2;

/// Lets the sleeps of `f` on this thread listen for signals: they return as interrupted as soon as
/// something is deferred.
#[inline]
pub fn listening<T>(f: impl FnOnce() -> T) -> T {
    if state().listens.load(Ordering::Relaxed) == UNINTERRUPTIBLE {
        f()
    } else {
        with_sleeps(INTERRUPTIBLE, f)
    }
}

/// Keeps the sleeps of `f` from listening for signals, because `f` must go on to its end.
pub fn deaf<T>(f: impl FnOnce() -> T) -> T {
    with_sleeps(UNINTERRUPTIBLE, f)
}

#[inline]
fn with_sleeps<T>(how: u32, f: impl FnOnce() -> T) -> T {
    let before = state().listens.load(Ordering::Relaxed);
    state().listens.store(how, Ordering::Relaxed);
    let result = f();
    state().listens.store(before, Ordering::Relaxed);
    result
}

/// Makes a system call with a sleep, with the kernel's result. If the thread listens, and something is
/// deferred before or during the call, the result is `-EINTR`.
///
/// # Safety
/// Arguments with addresses must be valid for the system call.
pub unsafe fn sleep_call(number: i64, arguments: &[usize; 6]) -> isize {
    if state().listens.load(Ordering::Relaxed) == INTERRUPTIBLE {
        // SAFETY: the caller's promise.
        return unsafe { smc_sleep_call(number, arguments.as_ptr()) };
    }
    // SAFETY: the caller's promise.
    unsafe { call(number, arguments) }
}

/// Makes a system call without libc: libc's function may be replaced by this project's. The result is the
/// kernel's: an error is a negative number.
///
/// # Safety
/// Arguments with addresses must be valid for the system call.
pub(crate) unsafe fn call(number: i64, arguments: &[usize; 6]) -> isize {
    let [a, b, c, d, e, f] = *arguments;
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; the kernel clobbers rcx and r11 only.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller's promise; the kernel keeps all registers but x0.
    unsafe {
        std::arch::asm!("svc 0", in("x8") number, inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    #[cfg(target_arch = "s390x")]
    // SAFETY: the caller's promise; the kernel keeps all registers but r2.
    unsafe {
        std::arch::asm!("svc 0", in("r1") number, inlateout("r2") a => result,
            in("r3") b, in("r4") c, in("r5") d, in("r6") e, in("r7") f, options(nostack));
    }
    result
}

/// Variant of [`sleep_call`] with the error of the kernel.
///
/// # Errors
/// The errors of the system call, including `Interrupted`.
///
/// # Safety
/// The promise for [`sleep_call`].
pub unsafe fn sleep_in_kernel(number: i64, arguments: &[usize; 6]) -> std::io::Result<usize> {
    // SAFETY: the caller's promise.
    let result = unsafe { sleep_call(number, arguments) };
    usize::try_from(result).map_err(|_| std::io::Error::from_raw_os_error(-result as c_int))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static HANDLED: Cell<u32> = const { Cell::new(0) };
    }

    extern "C" fn on_signal(
        signal: c_int,
        _: *mut libc::siginfo_t,
        context: *mut libc::ucontext_t,
    ) {
        if !is_inside() {
            HANDLED.set(HANDLED.get() + 1);
            return;
        }
        // SAFETY: numbers only; the context is that of this handler.
        unsafe {
            libc::pthread_kill(libc::pthread_self(), signal);
            defer(Some(signal), context);
        }
    }

    fn install(flags: c_int) {
        // SAFETY: the handler has the type of the flag.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | flags;
            assert_eq!(libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()), 0);
        }
    }

    fn raise_signal() {
        // SAFETY: numbers only.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) };
    }

    fn deliver() -> Deferred {
        let deferred = take_deferred();
        if let Some((_, mask)) = deferred.signal {
            let at = (&raw const mask) as usize;
            let args = [libc::SIG_SETMASK as usize, at, 0, 8, 0, 0];
            // SAFETY: the mask is valid until the call returns.
            unsafe { sleep_call(libc::SYS_rt_sigprocmask, &args) };
        }
        deferred
    }

    #[test]
    fn a_signal_waits_until_the_thread_has_left_and_ends_its_sleeps() {
        install(libc::SA_RESTART);
        raise_signal();
        assert_eq!(HANDLED.get(), 1, "outside it is handled at once");
        enter();
        enter();
        raise_signal();
        assert!(is_deferred());
        // No descriptors and no end: only the signal ends the call.
        let forever = [0usize; 6];
        // SAFETY: the call has no addresses.
        let slept = listening(|| unsafe { sleep_call(libc::SYS_ppoll, &forever) });
        assert_eq!(slept, -(libc::EINTR as isize));
        assert!(!leave(), "still in the library");
        assert_eq!(HANDLED.get(), 1);
        assert!(leave());
        assert_eq!(deliver().signal.map(|(signal, _)| signal), Some(libc::SIGUSR2));
        assert_eq!(HANDLED.get(), 2);
        assert!(!is_deferred());
    }

    #[test]
    fn a_signal_ends_a_sleep_that_the_kernel_would_begin_again() {
        install(libc::SA_RESTART);
        // SAFETY: number of this thread.
        let (sleeper, word) = (unsafe { libc::pthread_self() }, AtomicU32::new(0));
        let waker = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            // SAFETY: the thread waits for this one.
            unsafe { libc::pthread_kill(sleeper, libc::SIGUSR2) };
        });
        enter();
        let args = [word.as_ptr() as usize, libc::FUTEX_WAIT as usize, 0, 0, 0, 0];
        // SAFETY: the word is valid until the call returns.
        let slept = listening(|| unsafe { sleep_call(libc::SYS_futex, &args) });
        assert_eq!(slept, -(libc::EINTR as isize));
        assert!(leave());
        deliver();
        assert_eq!(HANDLED.get(), 1);
        waker.join().unwrap();
    }
}
