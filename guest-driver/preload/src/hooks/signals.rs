// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of the functions to install signal handlers. The kernel gets [`on_signal`] in place of the
//! program's handler, with the program's flags and mask. [`on_signal`] calls the program's handler, or
//! defers the signal while the thread is in the library.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ism_sys::interrupt;
use libc::{sigaction as Action, siginfo_t, sigset_t};

#[cfg(target_arch = "x86_64")]
use crate::boundary::{self, Handlers};
use crate::config;
use crate::hooks::libc_symbols::call_libc;
use crate::sys::raw;
use crate::sys::user_memory::libc_result;

/// Number of signals, and one more.
const SIGNALS: usize = 65;

/// The handlers of the program.
static HANDLERS: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(0) }; SIGNALS];

/// Signals with a handler for one time (SA_RESETHAND). The kernel does not know, because a deferred
/// signal comes twice.
static ONCE: AtomicU64 = AtomicU64::new(0);

/// A handler of the program. Every handler gets three arguments, as from the kernel.
type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void);

/// Signals of faults: the thread cannot go on. Never deferred.
const FAULTS: [c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];

/// Signals of libc. Never blocked by the library.
const OF_LIBC: std::ops::Range<c_int> = 32..34;

/// The signal of glibc for a new user of all threads, which another thread waits for, and of musl for a
/// cancellation. Never deferred before its handler has run. The other one is glibc's for a cancellation:
/// the handler ends the thread, which must be out of the library.
const AT_ONCE: c_int = 33;

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// The place of a signal's handler, for signals open to programs.
fn place(signal: c_int) -> Option<&'static AtomicUsize> {
    #[cfg(target_arch = "x86_64")]
    let is_libcs = !boundary::has_libc_of_its_own();
    #[cfg(not(target_arch = "x86_64"))]
    let is_libcs = true;
    let of_libc = is_libcs && OF_LIBC.contains(&signal);
    let at = usize::try_from(signal).ok().filter(|at| *at > 0 && !of_libc)?;
    HANDLERS.get(at).filter(|_| config::get().is_some())
}

fn own() -> usize {
    #[cfg(target_arch = "x86_64")]
    if let Some(own) = boundary::kernel_handler() {
        return own;
    }
    on_signal as Handler as usize
}

/// The table and the handler for a program whose threads are not libc's.
#[cfg(target_arch = "x86_64")]
pub(super) fn of_boundary() -> Handlers {
    Handlers { table: HANDLERS.as_ptr() as usize, library: on_signal as Handler as usize }
}

/// Calls a handler of the program.
///
/// # Safety
/// The arguments are the kernel's, and the handler is the program's.
unsafe fn call(handler: usize, signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    #[cfg(target_arch = "x86_64")]
    if boundary::kernel_handler().is_some() {
        // SAFETY: the caller's promises. Such a thread comes here from the library only.
        return unsafe { boundary::call_handler(handler, signal, info, context) };
    }
    // SAFETY: the caller's promises.
    unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) }
}

/// Whether a value is the address of a function: not SIG_DFL, SIG_IGN, SIG_HOLD or SIG_ERR.
fn is_function(handler: usize) -> bool {
    handler > 4096 && handler != libc::SIG_ERR
}

/// The kernel's handler of each signal handled by the program.
unsafe extern "C-unwind" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(handler) = HANDLERS.get(signal as usize).map(|place| place.load(Ordering::Relaxed))
    else {
        return;
    };
    if !is_function(handler) {
        return;
    }
    if ONCE.load(Ordering::Relaxed) == 0 && !interrupt::is_inside() {
        // SAFETY: the program's handler, called as by the kernel.
        return unsafe { call(handler, signal, info, context) };
    }
    // SAFETY: the kernel's arguments.
    unsafe { rarely(signal, info, context, handler) }
}

/// # Safety
/// As the kernel calls a handler.
#[cold]
unsafe fn rarely(signal: c_int, info: *mut siginfo_t, context: *mut c_void, handler: usize) {
    let is_fault = FAULTS.contains(&signal) || signal == AT_ONCE;
    if interrupt::is_inside() && !is_fault {
        let [handler, flags] = raw::action_of(signal).unwrap_or_default();
        let flags = flags as c_int;
        if handler == 0 && flags & libc::SA_RESETHAND != 0 {
            // Set by a system call of the program. The repeated signal is for the handler, too.
            raw::set_handler_again(signal, own());
        }
        if flags & libc::SA_NODEFER != 0 {
            // The repeated signal would come at once, here.
            raw::block_signal(signal);
        }
        let has_info = flags & libc::SA_SIGINFO != 0;
        raw::signal_this_thread(signal, has_info.then_some(info as usize));
        // SAFETY: the context of this handler.
        return unsafe { interrupt::defer(Some(signal), context.cast()) };
    }
    if ONCE.fetch_and(!bit(signal), Ordering::Relaxed) & bit(signal) != 0 {
        // SAFETY: all zeros is the default action.
        unsafe {
            let none: Action = std::mem::zeroed();
            native(signal, &none, std::ptr::null_mut());
        }
    }
    // SAFETY: the program's handler.
    let call = || unsafe { call(handler, signal, info, context) };
    if !is_fault {
        return call();
    }
    // SAFETY: the context of this handler. The kernel's mask is the first word of libc's.
    let mask = unsafe { &raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask }.cast::<u64>();
    // SAFETY: as above.
    let is_blocked = || unsafe { *mask } & bit(signal) != 0;
    let was_blocked = is_blocked();
    let is_inside = interrupt::is_inside();
    interrupt::outside(call);
    if is_inside && is_blocked() && !was_blocked && signal == AT_ONCE {
        // musl's handler of a cancellation has sent the signal again, and waits for EINTR.
        // SAFETY: as above.
        unsafe { interrupt::defer(Some(signal), context.cast()) };
    }
}

/// Whether calls interrupted by a signal are restarted.
pub(super) fn restarts(signal: c_int) -> bool {
    signal != AT_ONCE
        && raw::action_of(signal)
            .is_some_and(|[handler, flags]| handler <= 1 || flags & libc::SA_RESTART as usize != 0)
}

unsafe extern "C-unwind" {
    fn pthread_sigmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int;
}

/// Sets the signal mask of the thread. Handlers run in this call, and need not return.
pub(super) fn set_mask(mask: u64) {
    // SAFETY: an all-zero set is valid, and as long as libc's or longer than the kernel's.
    unsafe {
        let mut set: sigset_t = std::mem::zeroed();
        (&raw mut set).cast::<u64>().write(mask);
        pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// libc's function.
///
/// # Safety
/// As `sigaction`.
unsafe fn native(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    call_libc!(sigaction, -1, (signal: c_int, new: *const Action, old: *mut Action) -> c_int)
}

/// Replaces the program's handler. Returns the address for the kernel, and the old handler.
fn replace(place: &AtomicUsize, handler: usize) -> (usize, usize) {
    match is_function(handler) {
        true => (own(), place.swap(handler, Ordering::Relaxed)),
        // The kernel calls no handler then. A child with this memory may do this.
        false => (handler, place.load(Ordering::Relaxed)),
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn sigaction(
    signal: c_int,
    new: *const Action,
    old: *mut Action,
) -> c_int {
    let Some(place) = place(signal) else {
        // SAFETY: the program's arguments.
        return unsafe { native(signal, new, old) };
    };
    let before = place.load(Ordering::Relaxed);
    let was_once = ONCE.load(Ordering::Relaxed) & bit(signal) != 0;
    // SAFETY: the program's action, or none.
    let mut action = unsafe { new.as_ref() }.copied();
    if let Some(action) = &mut action {
        let handler = action.sa_sigaction;
        (action.sa_sigaction, _) = replace(place, handler);
        if is_function(handler) {
            let once = action.sa_flags & libc::SA_RESETHAND != 0;
            action.sa_flags &= !libc::SA_RESETHAND;
            match once {
                true => ONCE.fetch_or(bit(signal), Ordering::Relaxed),
                false => ONCE.fetch_and(!bit(signal), Ordering::Relaxed),
            };
        }
    }
    let new = action.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the action is valid until the call returns, and the program's room is its own.
    let result = unsafe { native(signal, new, old) };
    if result != 0 {
        place.store(before, Ordering::Relaxed);
    // SAFETY: the program's structure, filled by libc.
    } else if let Some(old) = unsafe { old.as_mut() }
        && old.sa_sigaction == own()
    {
        old.sa_sigaction = before;
        if was_once {
            old.sa_flags |= libc::SA_RESETHAND;
        }
    }
    result
}

/// An alias of libc's.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __sigaction(
    signal: c_int,
    new: *const Action,
    old: *mut Action,
) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    unsafe { sigaction(signal, new, old) }
}

/// Calls one of libc's functions with a handler as argument and result.
fn by_handler(signal: c_int, handler: usize, native: impl Fn(usize) -> usize) -> usize {
    let Some(place) = place(signal) else { return native(handler) };
    let (given, before) = replace(place, handler);
    if given == own() {
        ONCE.fetch_and(!bit(signal), Ordering::Relaxed);
    }
    let old = native(given);
    if old == libc::SIG_ERR {
        place.store(before, Ordering::Relaxed);
    }
    if old == own() { before } else { old }
}

/// Defines hooks of functions with a handler as argument and result.
macro_rules! handlers {
    ($($name:ident as $libcs:ident;)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(signal: c_int, handler: usize) -> usize {
            by_handler(signal, handler, |handler| {
                call_libc!($libcs, -1, (signal: c_int, handler: usize) -> usize)
            })
        })*
    };
}

handlers! {
    signal as signal;
    bsd_signal as signal;
    ssignal as signal;
    sigset as sigset;
}

/// The handler is for one time.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __sysv_signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: actions of this function.
    unsafe {
        let (mut new, mut old): (Action, Action) = (std::mem::zeroed(), std::mem::zeroed());
        new.sa_sigaction = handler;
        new.sa_flags = libc::SA_RESETHAND | libc::SA_NODEFER;
        if handler == libc::SIG_ERR {
            return libc_result(Err(raw::Errno(libc::EINVAL))) as usize;
        }
        if sigaction(signal, &new, &mut old) != 0 {
            return libc::SIG_ERR;
        }
        old.sa_sigaction
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sysv_signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: the same function.
    unsafe { __sysv_signal(signal, handler) }
}

/// The system call, with another layout of the action than libc's. Other values than functions, and
/// queries, are left to the kernel.
///
/// # Safety
/// As the system call.
pub(super) unsafe fn rt_sigaction(
    signal: c_int,
    new: *const usize,
    old: *mut usize,
    size: usize,
) -> Option<i64> {
    let place = place(signal).filter(|_| size == 8)?;
    // SAFETY: the program's action: handler, flags, restorer, mask.
    let mut action = (!new.is_null()).then(|| unsafe { new.cast::<[usize; 4]>().read_unaligned() });
    let mut before = place.load(Ordering::Relaxed);
    if let Some([handler, ..]) = &mut action {
        (*handler, before) = replace(place, *handler);
    }
    let at = action.as_ref().map_or(0, |action| action.as_ptr() as usize);
    let args = [signal as usize, at, old as usize, size, 0, 0];
    // SAFETY: the action is valid until the call returns, and the program's room is its own.
    let result = unsafe { raw::call(libc::SYS_rt_sigaction, args) };
    match result {
        Err(_) => place.store(before, Ordering::Relaxed),
        Ok(_) if old.is_null() => {}
        // SAFETY: the program's structure, filled by the kernel.
        Ok(_) => unsafe {
            if old.read_unaligned() == own() {
                old.write_unaligned(before);
            }
        },
    }
    Some(libc_result(result) as i64)
}
