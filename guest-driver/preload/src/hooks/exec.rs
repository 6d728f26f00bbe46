//! Hooks of the functions that end the program or replace it by another one, and what becomes of
//! the connections that somebody else still uses.

use std::ffi::{c_char, c_int};
use std::time::Duration;

use crate::hooks::assembly::in_assembly;
use crate::hooks::libc_symbols::call_libc;
use crate::io::kernel;
use crate::relay::keeper::{self, KeeperResult};
use crate::selection::{session, waiting};
use crate::sys::user_memory::{errno, set_errno};
use crate::{config, fork, relay};

/// How long a process that ends waits for peers to take what its relays hold, before another
/// process does that.
const SHORT: Duration = Duration::from_millis(20);
/// The same where there can be no other process.
const LONG: Duration = Duration::from_secs(60);

/// Hands the relays on to a keeper, if other processes use them or peers have not taken what they
/// hold. The program ends.
pub(super) fn pass_relays_on() {
    relay::forward::finish(SHORT);
    if !keeper::has_relays() {
        return;
    }
    match keep(|| KeeperResult::End(())) {
        Some(()) => fork::retire(),
        None => {
            waiting::finish(true);
            relay::forward::finish(LONG);
        }
    }
}

/// Makes a keeper of the session, and calls `next` while it waits.
fn keep<T>(next: impl FnOnce() -> KeeperResult<T>) -> Option<T> {
    keeper::make(session::of_relays()?.stack(), next)
}

/// Executes a program by `execute`, which returns if that fails.
fn around(execute: impl FnOnce() -> c_int) -> c_int {
    if config::get().is_none() || fork::shares_memory() {
        return execute();
    }
    relay::fork::settle_all();
    kernel::leave_inherited(|_| false);
    kernel::leave_closed();
    if !keeper::has_relays() {
        return execute();
    }
    let mut execute = Some(execute);
    let mut once = || execute.take().map(|execute| (execute(), errno()));
    let done = keep(|| KeeperResult::GoOn(once()));
    match done.flatten().or_else(&mut once) {
        Some((result, error)) => {
            set_errno(error);
            result
        }
        None => -1,
    }
}

/// Defines hooks of functions that execute a program.
macro_rules! executes {
    ($($name:ident($($arg:ident : $type:ty),*), $number:expr;)*) => {
        $(#[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            around(|| call_libc!($name, $number, ($($arg: $type),*) -> c_int))
        })*
    };
}

type Words = *const *const c_char;

executes! {
    execve(path: *const c_char, words: Words, environment: Words), libc::SYS_execve;
    execv(path: *const c_char, words: Words), -1;
    execvp(file: *const c_char, words: Words), -1;
    execvpe(file: *const c_char, words: Words, environment: Words), -1;
    fexecve(file: c_int, words: Words, environment: Words), -1;
    execveat(dir: c_int, path: *const c_char, words: Words, environment: Words, flags: c_int),
        libc::SYS_execveat;
}

// Functions with a variable number of arguments, all of them addresses. Each is a few instructions
// that store the arguments of the registers next to those on the stack, and call a function of this
// library.

macro_rules! lists {
    ($($name:ident, $with_list:ident;)*) => {$(
        in_assembly! {
            $name calls $with_list:
            x86_64 {
                "endbr64"
                "push r9" "push r8" "push rcx" "push rdx" "push rsi" "push rdi"
                "mov rdi, rsp"
                "lea rsi, [rsp + 56]"
                "sub rsp, 8"
                "call {function}"
                "add rsp, 56"
                "ret"
            }
            aarch64 {
                "hint #34" // bti c
                "stp x29, x30, [sp, #-80]!"
                "stp x0, x1, [sp, #16]" "stp x2, x3, [sp, #32]"
                "stp x4, x5, [sp, #48]" "stp x6, x7, [sp, #64]"
                "add x0, sp, #16"
                "add x1, sp, #80"
                "bl {function}"
                "ldp x29, x30, [sp], #80"
                "ret"
            }
        }
    )*};
}

lists! {
    execl, with_list;
    execlp, with_list_in_path;
    execle, with_list_and_environment;
}

/// Number of arguments that come in registers.
const IN_REGISTERS: usize = if cfg!(target_arch = "x86_64") { 6 } else { 8 };

/// The arguments of a call: those of the registers, then those of the stack.
#[derive(Clone, Copy)]
struct Arguments {
    registers: *const *const c_char,
    stack: *const *const c_char,
}

impl Arguments {
    fn get(self, at: usize) -> *const c_char {
        // SAFETY: the callers ask for arguments up to the null that ends the list, and for the one
        // behind it of `execle`.
        unsafe {
            match at.checked_sub(IN_REGISTERS) {
                None => self.registers.add(at).read(),
                Some(at) => self.stack.add(at).read(),
            }
        }
    }

    /// The words of the program, with the null that ends them.
    fn words(self) -> Vec<*const c_char> {
        let mut words = Vec::new();
        for at in 1.. {
            let word = self.get(at);
            words.push(word);
            if word.is_null() {
                break;
            }
        }
        words
    }
}

extern "C" fn with_list(registers: Words, stack: Words) -> c_int {
    let all = Arguments { registers, stack };
    let words = all.words();
    // SAFETY: the program's arguments.
    unsafe { execv(all.get(0), words.as_ptr()) }
}

extern "C" fn with_list_in_path(registers: Words, stack: Words) -> c_int {
    let all = Arguments { registers, stack };
    let words = all.words();
    // SAFETY: the program's arguments.
    unsafe { execvp(all.get(0), words.as_ptr()) }
}

extern "C" fn with_list_and_environment(registers: Words, stack: Words) -> c_int {
    let all = Arguments { registers, stack };
    let words = all.words();
    let environment: Words = all.get(words.len() + 1).cast();
    // SAFETY: the program's arguments.
    unsafe { execve(all.get(0), words.as_ptr(), environment) }
}
