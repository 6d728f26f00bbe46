// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The functions called when the process forks, and at exit.

use std::ffi::c_int;
use std::time::Duration;

use ism_sys::interrupt;

use super::within::within;
use super::{escapes, exec};
use crate::io::kernel;
use crate::selection::{running, session, short_lived, waiting, worthwhile};
use crate::socket::table::{DESCRIPTORS, NUMBERS};
use crate::sys::{heap, raw};
use crate::{config, fork, last_thread, relay, tcp_notes};

/// Limit for a fork to wait for a lock. After the limit the fork goes on without the lock.
const LOCK_LIMIT: Duration = Duration::from_millis(500);

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// Whether the locks of a fork come free. A signal handler interrupting a thread in the library must
/// not wait for the same thread.
fn comes_free() -> bool {
    NUMBERS.comes_free(LOCK_LIMIT)
        && waiting::comes_free(LOCK_LIMIT)
        && relay::fork::comes_free(LOCK_LIMIT)
        && relay::list::comes_free(LOCK_LIMIT)
        && heap::comes_free(LOCK_LIMIT)
}

pub(super) unsafe extern "C" fn before_fork() {
    if fork::is_retired() {
        return;
    }
    // Until the handlers after the fork have run.
    interrupt::enter();
    fork::note_child();
    if !comes_free() {
        return fork::begin_unprepared();
    }
    // In this order, because the program's close takes them in this order.
    NUMBERS.acquire_before_fork();
    last_thread::before_fork();
    waiting::before_fork();
    relay::fork::prepare();
    relay::list::before_fork();
    // Last, because the calls above may allocate.
    heap::before_fork();
}

pub(super) unsafe extern "C" fn in_parent() {
    if fork::is_retired() {
        return;
    }
    fork::note_child();
    if !fork::end_unprepared() {
        release_in_parent();
    }
    leave_after_fork();
}

/// The second half of a [`within`], begun before the fork.
fn leave_after_fork() {
    if interrupt::leave() {
        // Enters and leaves once more, to deliver deferred signals.
        within(|| ());
    }
}

fn release_in_parent() {
    heap::after_fork();
    relay::list::in_parent();
    relay::fork::in_parent();
    waiting::in_parent();
    NUMBERS.release_after_fork();
}

pub(super) unsafe extern "C" fn in_child() {
    if fork::is_retired() {
        return;
    }
    match fork::end_unprepared() {
        true => in_untold_child(),
        false => in_prepared_child(),
    }
    leave_after_fork();
}

fn in_prepared_child() {
    heap::after_fork();
    fork::in_child();
    last_thread::in_child();
    waiting::in_child();
    running::close_copies();
    relay::list::in_child();
    relay::fork::in_child();
    NUMBERS.release_after_fork();
}

/// Variant of [`in_child`] for an unprepared child: one made without a call of this library, or by
/// a signal handler interrupting one. Connections in use have no relays there, so calls on them fail.
pub(super) fn in_untold_child() {
    fork::in_child();
    waiting::in_untold_child();
    running::close_copies();
    relay::list::close_in_child();
    relay::fork::in_child();
}

/// Closes all connections when the program ends, as the kernel would.
pub(super) fn close_connections() {
    if fork::shares_memory() {
        return;
    }
    short_lived::record_exit();
    worthwhile::note_exit();
    relay::fork::settle_all();
    tcp_notes::remove();
    if DESCRIPTORS.highest() < 0 {
        // The library has never known a descriptor.
        return;
    }
    kernel::close_all();
    exec::pass_relays_on();
}

pub(super) extern "C" fn end_quickly() {
    close_at_end();
}

/// [`close_connections`], also for a thread of the library.
pub(super) fn close_at_end() {
    within(close_connections);
}

extern "C" fn end() {
    within(|| {
        escapes::flush_streams();
        close_connections();
    });
}

/// Runs before exit(2) ends a thread but not the process.
pub(super) fn before_exit(status: c_int) {
    if config::is_off() {
        // A filter may allow the thread no other system call.
        last_thread::exits(status, close_at_end);
    } else if config::get().is_some() && raw::is_first_thread() && !fork::shares_memory() {
        last_thread::exits(status, close_at_end);
        within(|| last_thread::first_ends(|| session::opened().is_some()));
    }
}
