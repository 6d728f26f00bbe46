// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The second door of a program to the library: system calls of the program's own instructions. The
//! door is for programs written in Go and for static programs; calls of libc's functions have their
//! hooks.
//!
//! In a program written in Go, each known system call of the file becomes a jump before the program's
//! first instruction: from the call to unused bytes between two functions, and from there to a *thunk*
//! (`patch`). The thunk jumps to the *entry* (`entry`, `lent`). In other static programs the kernel
//! refuses each system call by a signal, whose handler leads to another entry (`stubs`, `dispatch`).
//! The entries leave most numbers to the kernel, and call the library for the others. docs/preload.md
//! has the rules.

mod dispatch;
mod entry;
mod lent;
mod patch;
mod stubs;
mod threads;
mod words;

use std::ffi::{CStr, CString, c_int, c_void};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use entry::Answer;
use guest_driver::go_program::GoProgram;
use ism_sys::{Beginning, OnceBox};
use patch::Entry;

use crate::selection::own_calls;

/// The library's signal handlers, for programs whose threads are not libc's.
#[derive(Clone, Copy)]
pub(crate) struct Handlers {
    /// The address of the table of the program's handlers, by signal.
    pub(crate) table: usize,
    /// The address of the library's handler of all signals.
    pub(crate) library: usize,
}

/// Takes over the system calls of a program written in Go, or of another one without glibc. `answer`: for
/// the numbers in `calls`. Called before the program's first instruction.
pub(crate) fn begin(calls: &[i64], answer: Answer, handlers: Handlers) {
    let Ok(file) = File::open("/proc/self/exe") else { return };
    let program = GoProgram::of_file(&file);
    let is_in_go = program.is_some();
    let done = match program {
        Some(program) => {
            let done = program.map_err(|why| why.to_string()).and_then(|program| {
                entry::set(calls, answer);
                take_over(&program, handlers)
            });
            done.map_err(|why| format!("written in Go: {why}"))
        }
        None if Beginning::of_this_process().is_some() => {
            entry::set(calls, answer);
            dispatch::prepare(handlers.table, handlers.library)
                .map_err(|why| format!("without glibc: {why}"))
        }
        None => return,
    };
    let Ok(data) = file.metadata() else { return };
    match done {
        Ok(()) if is_in_go => own_calls::note_go_taken_over(data.ino()),
        Ok(()) => own_calls::note_all_taken_over(),
        Err(why) => own_calls::note_not_taken_over(data.ino(), why),
    }
}

/// The kernel's handler of the program's signals. `None`: the library's.
pub(crate) fn kernel_handler() -> Option<usize> {
    lent::kernel_handler()
}

/// Whether a libc of the program's own has signals for itself, with handlers.
pub(crate) fn has_libc_of_its_own() -> bool {
    dispatch::is_on()
}

/// Calls a handler of the program from the library's, with the program's thread pointer.
///
/// # Safety
/// The arguments are the kernel's, and the handler is the program's. There is a [`kernel_handler`].
pub(crate) unsafe fn call_handler(
    handler: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match dispatch::is_on() {
            true => dispatch::call_handler(handler, signal, info, context),
            false => lent::call_handler(handler, signal, info, context),
        }
    }
}

unsafe extern "C" {
    /// The end of the heap, as glibc knows the end.
    static __curbrk: AtomicUsize;
}

/// The entry of LD_PRELOAD withheld from a program.
static PRELOAD: OnceBox<CString> = OnceBox::new();

/// The entry of LD_PRELOAD withheld from this program, for programs that this one executes.
pub(crate) fn withheld_preload() -> Option<&'static CStr> {
    PRELOAD.get().map(CString::as_c_str)
}

/// Begins a program whose dynamic linker came by a loader, and does not return then. `withheld`: a variable
/// of the environment for the library only.
pub(crate) fn run_static_program(withheld: &str) {
    let Some(beginning) = Beginning::of_this_process() else { return };
    if let Ok(name) = CString::new(format!("{withheld}=")) {
        beginning.withhold(&name);
    }
    if beginning.has_linker {
        // The program's dynamic linker would load the library a second time.
        let preload = std::env::var_os("LD_PRELOAD").unwrap_or_default().into_encoded_bytes();
        let entry = CString::new([b"LD_PRELOAD=", &preload[..]].concat());
        let _ = entry.map(|entry| PRELOAD.set(entry));
        beginning.withhold(c"LD_PRELOAD=");
    }
    // The end of the heap is the program's from here on: two libcs would move the end without each other.
    // No increment fits behind this address, so glibc takes its memory from elsewhere.
    // SAFETY: libc's variable, read and written by a thread at a time.
    unsafe { __curbrk.store(usize::MAX << 12, Ordering::Relaxed) };
    if dispatch::is_on() {
        dispatch::begin();
    }
    // SAFETY: the dynamic linker calls the library on the program's first thread, and needs no return:
    // the constructors of all libraries before this one have run.
    unsafe { beginning.run() }
}

/// The address of the program headers of the program.
fn headers() -> usize {
    match Beginning::of_this_process() {
        Some(beginning) => beginning.headers,
        // SAFETY: reads a table of the process.
        None => unsafe { libc::getauxval(libc::AT_PHDR) as usize },
    }
}

fn take_over(program: &GoProgram, handlers: Handlers) -> Result<(), String> {
    if program.has_libc {
        threads::prepare()?;
        let (address, busy) = (entry::address(), threads::place_of_busy());
        return patch::apply(program, headers(), &Entry { address, prefix: entry::PREFIX, busy });
    }
    lent::prepare(handlers.table, handlers.library, lent::own_handler())?;
    let (address, prefix, busy) = (lent::address(), lent::PREFIX, lent::PLACE_OF_BUSY);
    patch::apply(program, headers(), &Entry { address, prefix, busy })?;
    lent::begin();
    Ok(())
}
