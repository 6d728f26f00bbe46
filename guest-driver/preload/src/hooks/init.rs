//! The functions that run when the library is loaded, when the process forks, and when it exits.

use super::{escapes, libc_symbols};
use crate::config::RunConfig;
use crate::io::kernel;
use crate::selection::{establish, option, short_lived, waiting};
use crate::socket::table::NUMBERS;
use crate::sys::raw;
use crate::{config, fork, relay, status};

/// The library's own heap, so that the program's heap stays as it would be without the library. The
/// end of the heap decides how often some programs ask the kernel for memory and return it. And the
/// program's allocator may open files or map memory, which would call the hooks.
#[global_allocator]
static MEMORY: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

/// The descriptor on which `smc run` waits to hear that the library was loaded.
const PROOF: &str = "SMC_RUN_PROOF";

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn begin() {
    libc_symbols::find_all();
    fork::init();
    // The allocator registers its handlers before those below, which may allocate. So before a fork
    // it takes its lock after them, and after the fork it releases the lock before them.
    // SAFETY: no thread holds the allocator's lock yet.
    unsafe { dlmalloc::enable_alloc_after_fork() };
    // SAFETY: the functions stay valid, because the library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    if let Some(fd) = std::env::var(PROOF).ok().and_then(|fd| fd.parse().ok()) {
        let _ = raw::write(fd, b"loaded");
        let _ = raw::close(fd);
        // SAFETY: no other thread runs while the program is being loaded.
        unsafe { std::env::remove_var(PROOF) };
    }
    if let Some(config) = RunConfig::from_environment() {
        config::set(config);
        status::init();
        status::cannot_read(config::get().map(|config| &config.mistakes[..]).unwrap_or_default());
        option::init();
        establish::add_inherited();
        // A program that is executed for each client may use stdio at once.
        (0..=2).for_each(escapes::leave_standard);
    }
}

pub(super) unsafe extern "C" fn before_fork() {
    fork::note_child();
    waiting::before_fork();
    NUMBERS.acquire_before_fork();
    relay::fork::prepare();
}

pub(super) unsafe extern "C" fn in_parent() {
    relay::fork::in_parent();
    NUMBERS.release_after_fork();
    waiting::in_parent();
}

pub(super) unsafe extern "C" fn in_child() {
    fork::in_child();
    relay::forward::in_child();
    relay::fork::in_child();
    NUMBERS.release_after_fork();
    waiting::in_child();
}

/// Closes all connections when the program ends, as the kernel would.
pub(super) fn close_connections() {
    if fork::shares_memory() {
        return;
    }
    short_lived::record_exit();
    kernel::close_all();
}

extern "C" fn end() {
    escapes::flush_streams();
    close_connections();
}
