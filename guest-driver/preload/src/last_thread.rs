// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a process whose first thread ends before the others.
//!
//! libc ends a process when its last thread ends, and the library's threads count as well. So where the
//! first thread may end without the process, a thread of the library watches the program's threads, and
//! ends the process as libc would when there are none left.
//!
//! The cases: after `pthread_exit` in the first thread; in the child of a fork by another thread, whose
//! only thread ends when its function returns; and under a filter of system calls with exit(2) as the
//! only way to end a thread.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use crate::fork;
use crate::sys::raw;
use ism_sys::OnceBox;

/// Whether the process may go on without its first thread. SeqCst: set before the first thread looks for
/// a session; read behind the beginning of one.
static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
/// Whether the forking thread is not the first one of its process.
static FORKS: AtomicBool = AtomicBool::new(false);
/// The generation of the process (see `fork`) with the watching thread; 0: none.
static WATCHED: AtomicU32 = AtomicU32::new(0);
/// The first thread's status from exit(2), or [`UNKNOWN`]. Release, behind `CLOSES`.
static STATUS: AtomicI32 = AtomicI32::new(UNKNOWN);
const UNKNOWN: c_int = -1;
static CLOSES: OnceBox<fn()> = OnceBox::new();
/// Pause between two counts of the threads.
const PAUSE: Duration = Duration::from_millis(50);
/// Stack of the thread, bytes.
const SMALL_STACK: usize = 256 << 10;

/// The first thread of the process ends by `pthread_exit`. `has_session`: the library has threads. The
/// question comes behind the store: a session that begins now sees one or the other.
pub(crate) fn first_ends(has_session: impl FnOnce() -> bool) {
    MAY_GO_ON.store(true, Ordering::SeqCst);
    if has_session() {
        session_begins();
    }
}

/// The library begins to have threads.
pub(crate) fn session_begins() {
    let this = fork::generation();
    if !MAY_GO_ON.load(Ordering::SeqCst) || WATCHED.swap(this, Ordering::Relaxed) == this {
        return;
    }
    // Without a new thread the process does not end by itself.
    let _ = raw::without_signals(|| ism_sys::start_thread("smc-end", SMALL_STACK, await_last));
}

fn await_last() {
    while raw::threads_of_program() > 0 {
        std::thread::sleep(PAUSE);
    }
    match (STATUS.load(Ordering::Acquire), CLOSES.get()) {
        // Like the kernel.
        (status, Some(closes)) if status != UNKNOWN => {
            closes();
            let _ = raw::exit_group(status);
        }
        // Like libc for the last thread.
        _ => std::process::exit(0),
    }
}

/// The first thread ends by exit(2), with this status. `closes`: the library's work at the end of the
/// process.
pub(crate) fn exits(status: c_int, closes: fn()) {
    let _ = CLOSES.set(closes);
    STATUS.store(status & 0xff, Ordering::Release);
}

/// Notes the forking thread. The caller holds a lock for the time of the fork.
pub(crate) fn before_fork() {
    FORKS.store(!raw::is_first_thread(), Ordering::Relaxed);
}

/// The calling thread is the only one, and the first one, of a new process.
pub(crate) fn in_child() {
    MAY_GO_ON.store(FORKS.load(Ordering::Relaxed), Ordering::Relaxed);
    STATUS.store(UNKNOWN, Ordering::Relaxed);
}
