//! The library's beginning and end.

use super::libc_symbols;
use crate::config::Config;
use crate::selection::{establish, option, session, short_lived};
use crate::socket::descriptors;
use crate::sys::raw;
use crate::{config, fork, relay, status};

/// Memory of the library's own. The program's heap stays as it would be without the library: where it
/// ends decides how often some programs ask the kernel for memory and give it back, and an allocator
/// of the program's that opens files or maps memory may call what is hooked here.
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
    // SAFETY: its lock, the only thing that this is about, is held by nobody yet. Registered before the
    // functions below, which may allocate: it takes the lock after them, and gives it back before.
    unsafe { dlmalloc::enable_alloc_after_fork() };
    // SAFETY: the function lives as long as the program: the library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    if let Some(fd) = std::env::var(PROOF).ok().and_then(|fd| fd.parse().ok()) {
        let _ = raw::write(fd, b"loaded");
        let _ = raw::close(fd);
        // SAFETY: no other thread runs yet.
        unsafe { std::env::remove_var(PROOF) };
    }
    if let Some(config) = Config::from_environment() {
        config::set(config);
        status::init();
        option::init();
        establish::inherit();
    }
}

unsafe extern "C" fn before_fork() {
    relay::prepare();
}

unsafe extern "C" fn in_parent() {
    relay::in_parent();
}

unsafe extern "C" fn in_child() {
    fork::in_child();
    relay::in_child();
}

/// The program ends: connections close as the kernel would close them.
pub(super) fn close_connections() {
    if fork::shares_memory() {
        return;
    }
    short_lived::record_exit();
    descriptors::close_all();
}

extern "C" fn end() {
    close_connections();
    session::shutdown();
}
