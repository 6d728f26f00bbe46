// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The functions called when the library is loaded, when the process forks, and at exit.

use std::time::Duration;

use ism_sys::interrupt;

#[cfg(target_arch = "x86_64")]
use super::syscall;
use super::within::within;
use super::{escapes, exec, libc_symbols, rebinding};
#[cfg(target_arch = "x86_64")]
use crate::boundary;
use crate::config::RunConfig;
use crate::io::kernel;
use crate::selection::{establish, option, outcome, running, short_lived, waiting, worthwhile};
use crate::socket::table::{DESCRIPTORS, NUMBERS};
use crate::sys::heap::{self, Heap};
use crate::sys::{clock, raw};
use crate::{config, fork, last_thread, log, relay, status, tcp_notes};

#[global_allocator]
static MEMORY: Heap = Heap::new();

/// Limit for a fork to wait for a lock. After the limit the fork goes on without the lock.
const LOCK_LIMIT: Duration = Duration::from_millis(500);

/// The descriptor on which `smc run` waits for a sign of the loaded library.
const PROOF: &str = "SMC_RUN_PROOF";

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn begin() {
    let behind = rebinding::objects_behind();
    clock::find(behind.iter().flatten());
    libc_symbols::find_all(&behind);
    fork::init(in_untold_child);
    // SAFETY: the functions stay valid, because the library is never unloaded.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child));
        // Runs after the handlers registered by the program.
        at_quick_exit(end_quickly);
    }
    // /etc/ld.so.preload also reaches programs with more rights than their user, in an environment
    // set by the user. The library leaves such programs alone.
    // SAFETY: reads a table of the process.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return;
    }
    let _ = exec::own_path();
    if let Some(fd) = std::env::var(PROOF).ok().and_then(|fd| fd.parse().ok()) {
        let _ = raw::write(fd, b"loaded");
        let _ = raw::close(fd);
        // SAFETY: no other thread runs while the program is being loaded.
        unsafe { std::env::remove_var(PROOF) };
    }
    config::read_stack();
    if let Some(config) = RunConfig::from_environment() {
        config::set(config);
        status::init();
        // valgrind and emulators of processors have no vDSO. These ignore a handler's changes of
        // the returned context, so no signal could be deferred.
        // SAFETY: reads a table of the process.
        if unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } == 0 {
            status::is_emulated();
            return config::switch_off();
        }
        rebinding::begin();
        log::begin().iter().for_each(|mistake| status::no_log(mistake));
        status::cannot_read(config::get().map(|config| &config.mistakes[..]).unwrap_or_default());
        option::init();
        // First, because a list of the open descriptors goes through all numbers of the table.
        establish::add_inherited();
        outcome::grow_table();
        // A program executed for each client may use stdio at once.
        (0..=2).for_each(escapes::leave_standard);
        #[cfg(target_arch = "x86_64")]
        boundary::begin(&syscall::ANSWERED, syscall::answer);
    }
}

unsafe extern "C" {
    fn at_quick_exit(handler: extern "C" fn()) -> std::ffi::c_int;
}

/// Whether the locks of a fork come free. A signal handler interrupting a thread in the library must
/// not wait for the same thread.
fn comes_free() -> bool {
    NUMBERS.comes_free(LOCK_LIMIT)
        && waiting::comes_free(LOCK_LIMIT)
        && relay::fork::comes_free(LOCK_LIMIT)
        && relay::forward::comes_free(LOCK_LIMIT)
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
    relay::forward::before_fork();
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
    relay::forward::in_parent();
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
    relay::forward::in_child();
    relay::fork::in_child();
    NUMBERS.release_after_fork();
}

/// Variant of [`in_child`] for an unprepared child: one made without a call of this library, or by
/// a signal handler interrupting one. Connections in use have no relays there, so calls on them fail.
fn in_untold_child() {
    fork::in_child();
    waiting::in_untold_child();
    running::close_copies();
    relay::forward::close_in_child();
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

extern "C" fn end_quickly() {
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
