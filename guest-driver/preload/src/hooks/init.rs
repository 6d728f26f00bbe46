// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The function called when the library is loaded.

use super::fork_and_exit::{before_fork, end_quickly, in_child, in_parent, in_untold_child};
use super::{escapes, exec, libc_symbols, rebinding};
#[cfg(target_arch = "x86_64")]
use super::{signals, syscall};
#[cfg(target_arch = "x86_64")]
use crate::boundary;
use crate::config::RunConfig;
use crate::selection::{establish, option, outcome};
use crate::sys::heap::Heap;
use crate::sys::{clock, raw};
use crate::{config, fork, log, status};

#[global_allocator]
static MEMORY: Heap = Heap::new();

/// The descriptor on which `smc run` waits for a sign of the loaded library.
const PROOF: &str = "SMC_RUN_PROOF";

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    load();
    #[cfg(target_arch = "x86_64")]
    boundary::run_static_program(PROOF);
}

fn load() {
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
        if config::get().is_some_and(|config| config.go) {
            boundary::begin(&syscall::ANSWERED, syscall::answer, signals::of_boundary());
        }
    }
}

unsafe extern "C" {
    fn at_quick_exit(handler: extern "C" fn()) -> std::ffi::c_int;
}
