// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `pthread_cancel`. libc would end a thread in the middle of the library. So the cancelled thread
//! itself asks libc for the end: outside of the library at once in libc's signal, otherwise when
//! the thread leaves the library. From then on the hooks of cancellation points end the thread.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use ism_sys::interrupt;
use libc::{pthread_t, siginfo_t};

use crate::config;
use crate::hooks::libc_symbols::call_libc;
use crate::sys::raw::{self, Errno};

/// The signal by which libc cancels threads.
const SIGCANCEL: c_int = 32;

/// libc's handler of SIGCANCEL, once libc has installed one.
static OF_LIBC: AtomicUsize = AtomicUsize::new(0);

type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void);

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_self() -> pthread_t;
}

/// libc's function.
fn native(thread: pthread_t) -> c_int {
    call_libc!(pthread_cancel, -1, (thread: pthread_t) -> c_int)
}

/// Ends the thread if a cancellation is pending and the thread allows cancellation.
pub(super) fn test() {
    // SAFETY: no arguments; the hooks hold nothing here.
    unsafe { pthread_testcancel() }
}

/// libc's numbers.
const PTHREAD_CANCEL_ENABLE: c_int = 0;
const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// Keeps libc from ending the thread, until [`release`]. `false`: the program has disabled
/// cancellation.
#[cold]
pub(super) fn hold() -> bool {
    let mut old = PTHREAD_CANCEL_DISABLE;
    // SAFETY: the number is valid until the call returns.
    let _ = unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut old) };
    old == PTHREAD_CANCEL_ENABLE
}

/// Undoes [`hold`]. A cancelled thread with asynchronous cancelability ends here.
#[cold]
pub(super) fn release() {
    // SAFETY: libc stores no old state.
    let _ = unsafe { pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, std::ptr::null_mut()) };
}

/// Cancels the calling thread, after the thread has left the library. `is_point`: the call is a
/// cancellation point.
pub(super) fn act(is_point: bool) {
    cancel_this_thread();
    if is_point {
        test();
    }
}

fn cancel_this_thread() {
    interrupt::note_cancelled();
    // SAFETY: no arguments.
    native(unsafe { pthread_self() });
    // libc may have installed its handler.
    install();
}

/// Replaces libc's handler by [`on_cancel`].
fn install() {
    let own = on_cancel as Handler as usize;
    if let Some(libcs) = raw::replace_handler(SIGCANCEL, own, libc::SA_SIGINFO | libc::SA_RESTART)
        && libcs != own
        && libcs > 1
    {
        OF_LIBC.store(libcs, Ordering::Relaxed);
    }
}

unsafe extern "C-unwind" fn on_cancel(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's argument.
    let is_ours = unsafe { raw::is_from_this_process(info) };
    if is_ours && interrupt::is_inside() {
        // SAFETY: the context of this handler.
        return unsafe { interrupt::defer(None, context.cast()) };
    }
    if is_ours {
        cancel_this_thread();
    }
    let libcs = OF_LIBC.load(Ordering::Relaxed);
    if libcs != 0 {
        // SAFETY: libc's handler. The handler ends a thread with asynchronous cancelability, or a
        // thread in one of libc's cancellation points.
        unsafe { std::mem::transmute::<usize, Handler>(libcs)(signal, info, context) }
    }
}

/// The number of a running thread.
fn number_of(thread: pthread_t) -> Option<c_int> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the number is valid until the call returns.
    let known = unsafe { libc::pthread_getcpuclockid(thread, &raw mut clock) } == 0;
    // The kernel's clock of a thread is the complement of its number and three bits.
    Some(!(clock >> 3)).filter(|number| known && *number > 0)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cancel(thread: pthread_t) -> c_int {
    // SAFETY: no arguments.
    let is_this = thread == unsafe { pthread_self() };
    if config::get().is_none() {
        return native(thread);
    }
    if is_this {
        cancel_this_thread();
        return 0;
    }
    let Some(number) = number_of(thread) else { return native(thread) };
    install();
    match raw::signal_thread(number, SIGCANCEL) {
        // The thread has ended, and waits for pthread_join.
        Err(Errno(libc::ESRCH)) => 0,
        Err(_) => native(thread),
        Ok(_) => 0,
    }
}
