// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The second door of a program to the library: system calls of the program's own instructions. The
//! door is for programs written in Go; calls of libc's functions have their hooks.
//!
//! Before the program's first instruction, each known system call of the file becomes a jump: from the
//! call to unused bytes between two functions, and from there to a *thunk* (`patch`). The thunk jumps
//! to the *entry* (`entry`). The entry leaves most numbers to the kernel, and calls the library for the
//! others. docs/preload.md has the rules.

mod entry;
pub(crate) mod lent;
mod patch;
mod threads;

use std::ffi::CString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;

use entry::Answer;
use guest_driver::go_program::GoProgram;
use ism_sys::Beginning;
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

/// Takes over the system calls of a program written in Go. `answer`: for the numbers in `calls`.
/// Called before the program's first instruction.
pub(crate) fn begin(calls: &[i64], answer: Answer, handlers: Handlers) {
    let Ok(file) = File::open("/proc/self/exe") else { return };
    let Some(program) = GoProgram::of_file(&file) else { return };
    let done = program.map_err(|why| why.to_string()).and_then(|program| {
        entry::set(calls, answer);
        take_over(&program, handlers)
    });
    let Ok(data) = file.metadata() else { return };
    match done {
        Ok(()) => own_calls::note_taken_over(data.ino()),
        Err(why) => own_calls::note_go(data.ino(), why),
    }
}

/// Begins a program whose dynamic linker came by a loader, and does not return then. `withheld`: a variable
/// of the environment for the library only.
pub(crate) fn run_static_program(withheld: &str) {
    let Some(beginning) = Beginning::of_this_process() else { return };
    if let Ok(name) = CString::new(format!("{withheld}=")) {
        beginning.withhold(&name);
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
    lent::prepare(handlers.table, handlers.library)?;
    let (address, prefix, busy) = (lent::address(), lent::PREFIX, lent::PLACE_OF_BUSY);
    patch::apply(program, headers(), &Entry { address, prefix, busy })?;
    lent::begin();
    Ok(())
}
