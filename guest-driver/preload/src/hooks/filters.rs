// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `prctl` and the filter of system calls (seccomp) of a thread. The same for `seccomp` by way of
//! `syscall`.

use std::ffi::{c_int, c_ulong};
use std::time::{Duration, Instant};

use guest_driver::Fallback;
use ism_sys::FilterCall;

use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::within;
use crate::io::kernel;
use crate::selection::session;
use crate::socket::table::DESCRIPTORS;
use crate::sys::raw::{self, SysResult};
use crate::{config, fork, last_thread, status, tcp_notes};

/// `prctl`, with as many arguments as the kernel takes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn prctl(
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        let [a, b, c, d] = [a, b, c, d].map(|argument| argument as usize);
        before((libc::SYS_prctl, [option as usize, a, b, c, d, 0]));
    }
    call_libc!(prctl, libc::SYS_prctl, (option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong)
               -> c_int)
}

/// seccomp(2), as the program calls it by `syscall`.
pub(super) fn seccomp(mut arguments: [usize; 6]) -> SysResult {
    let [operation, flags, ..] = arguments;
    let sets = [libc::SECCOMP_SET_MODE_STRICT, libc::SECCOMP_SET_MODE_FILTER];
    let (for_all, asks) =
        (libc::SECCOMP_FILTER_FLAG_TSYNC as usize, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER as usize);
    // A filter with a listener needs a supervisor to answer.
    if sets.contains(&(operation as _))
        && flags & asks == 0
        && before((libc::SYS_seccomp, arguments))
        && is_programs_only_thread()
    {
        // The other threads are the library's.
        arguments[1] &= !for_all;
    }
    // SAFETY: the program's arguments, with other flags at most.
    unsafe { raw::call(libc::SYS_seccomp, arguments) }
}

/// Whether all other threads are the library's. New threads have no name yet.
fn is_programs_only_thread() -> bool {
    let begun = Instant::now();
    loop {
        match raw::threads_of_program() {
            1 => return true,
            _ if begun.elapsed() > NAMED => return false,
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Limit for a new thread to set its name.
const NAMED: Duration = Duration::from_millis(200);

/// Runs before the calling thread gets a filter. Connections unusable under the filter get relays,
/// whose threads have no filter, and the library switches off. `true`: the filter forbids needed
/// calls.
fn before(filter: FilterCall) -> bool {
    if config::get().is_none() || fork::shares_memory() {
        return false;
    }
    within(|| {
        // SAFETY: the program's arguments, about to be passed to the kernel.
        let forbidden = raw::without_signals(|| unsafe { ism_sys::forbidden_call_in(filter) });
        let Some(call) = forbidden else { return false };
        status::leaves_for_filter(call);
        // The filter is not installed yet.
        tcp_notes::note_all(Fallback::Filtered(call.into()), false);
        // Under the filter the thread may still end without its process.
        last_thread::first_ends(|| session::opened().is_some());
        (0..=DESCRIPTORS.highest()).for_each(kernel::leave_to_kernel);
        config::switch_off();
        true
    })
}
