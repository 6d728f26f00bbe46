// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of exec and exit functions. Connections still in use by other processes go to a keeper.

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(target_arch = "x86_64")]
use crate::boundary;
use crate::hooks::assembly::in_assembly;
use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::within;
use crate::io::kernel;
use crate::next_program::TargetProgram;
use crate::relay::keeper::{self, KeeperResult};
use crate::relay::take_back;
use crate::selection::{answering_listeners, handed_listeners, session, waiting};
use crate::sys::user_memory::{errno, is_nowhere, set_errno};
use crate::{config, fork, relay};
use ism_sys::{LoadError, Loader, OnceBox};

/// Limit for peers to take the bytes of relays and send queues before another process takes over.
const SHORT: Duration = Duration::from_millis(20);
/// Limit in place of [`SHORT`] where no other process can take over.
const LONG: Duration = Duration::from_secs(60);

/// Hands the relays on to a keeper at the end of the program, if other processes use the relays or
/// if relays and send queues still hold bytes for peers.
pub(super) fn pass_relays_on() {
    relay::list::finish(SHORT);
    kernel::await_sent(true, SHORT);
    kernel::await_sent(false, LONG);
    if !keeper::has_work() {
        return;
    }
    match keep(|| KeeperResult::End(())) {
        Some(()) => fork::retire(),
        None => await_peers(),
    }
}

/// Waits until peers have taken the bytes of relays and send queues. For the case without a keeper.
fn await_peers() {
    waiting::finish(true);
    relay::list::finish(LONG);
    kernel::await_sent(true, LONG);
}

/// Makes a keeper of the session, and calls `next` while the keeper waits.
fn keep<T>(next: impl FnOnce() -> KeeperResult<T>) -> Option<T> {
    keeper::make(|| Some(session::of_relays()?.stack()), next)
}

/// The words of a program, or its environment.
pub(super) type Words = *const *const c_char;

/// Program to execute.
pub(super) struct Target {
    /// `None`: the call names no program, and fails.
    file: Option<PathBuf>,
    in_path: bool,
    environment: Words,
    /// Whether the program gets a dynamic linker.
    gets_linker: bool,
}

impl Target {
    /// A program by its path.
    pub(super) fn path(path: *const c_char, environment: Words) -> Target {
        Target { file: path_of(path), in_path: false, environment, gets_linker: false }
    }

    /// A program found by a search of PATH.
    pub(super) fn in_path(name: *const c_char, environment: Words) -> Target {
        Target { file: path_of(name), in_path: true, environment, gets_linker: false }
    }

    /// A program by a path relative to a directory, or an open file.
    fn at(dir: c_int, path: *const c_char, environment: Words) -> Target {
        let file = path_of(path).unwrap_or_default();
        let file = match dir == libc::AT_FDCWD {
            true => file,
            false if file.as_os_str().is_empty() => format!("/proc/self/fd/{dir}").into(),
            // An absolute path stays as it is.
            false => Path::new(&format!("/proc/self/fd/{dir}")).join(file),
        };
        Target { file: Some(file), in_path: false, environment, gets_linker: false }
    }

    /// The shell, with the environment of this process.
    pub(super) fn shell() -> Target {
        Target::path(c"/bin/sh".as_ptr(), own_environment())
    }

    /// Has a dynamic linker loaded into the program, if there is none and the library needs one. `start`:
    /// for this process, or for a child.
    pub(super) fn load_linker(
        &mut self,
        start: fn() -> Result<Loader, LoadError>,
    ) -> Option<Loader> {
        config::get().filter(|config| config.go)?;
        let words = self.words();
        let program = self.program(&words)?;
        let loader = program.needs_linker(own_path()?).then(start)?.ok();
        self.gets_linker = loader.is_some();
        loader
    }

    fn has_library(&self) -> bool {
        let words = self.words();
        let Some(program) = self.program(&words) else { return true };
        own_path().is_some_and(|library| program.has_library(library))
    }

    /// The entries of the target's environment.
    fn words(&self) -> Vec<*const c_char> {
        let mut words = Vec::new();
        for at in 0.. {
            if is_nowhere(self.environment.wrapping_add(at), size_of::<usize>()) {
                break;
            }
            // SAFETY: the program's list, up to the null that ends it.
            let word = unsafe { self.environment.add(at).read_unaligned() };
            if is_nowhere(word, 1) {
                break;
            }
            words.push(word);
        }
        if let Some(entry) = withheld_preload()
            && self.program(&words).is_some_and(|program| program.lacks_preload())
        {
            words.push(entry);
        }
        words
    }

    /// The target with these entries. `None`: the call names no program.
    fn program(&self, words: &[*const c_char]) -> Option<TargetProgram<'_>> {
        // SAFETY: the program's texts.
        let text = |word: &*const c_char| unsafe { CStr::from_ptr(*word) }.to_bytes();
        let environment = words.iter().map(|word| OsStr::from_bytes(text(word))).collect();
        let (file, in_path, gets_linker) = (self.file.as_ref()?, self.in_path, self.gets_linker);
        Some(TargetProgram { file, in_path, environment, gets_linker })
    }

    /// The environment in place of the call's, if there is one. Valid until the thread executes or
    /// starts another program: a child of vfork leaves the environment to the parent.
    pub(super) fn other_environment(&self) -> Option<Words> {
        thread_local! {
            static LAST: RefCell<(Vec<*const c_char>, CString)> = RefCell::default();
        }
        let library = LIBRARY.get()?.as_deref()?;
        let mut words = self.words();
        let preload = match self.program(&words)?.preload_without(library) {
            Some((at, preload)) => {
                let preload = CString::new(preload).ok()?;
                *words.get_mut(at)? = preload.as_ptr();
                preload
            }
            None if withheld_preload().is_some_and(|entry| words.last() == Some(&entry)) => {
                CString::default()
            }
            None => return None,
        };
        words.push(std::ptr::null());
        let environment = words.as_ptr();
        // A move into the cell does not move the heap memory.
        LAST.try_with(|last| last.replace((words, preload))).ok()?;
        Some(environment)
    }
}

/// The entry of LD_PRELOAD that the library has withheld from this program.
fn withheld_preload() -> Option<*const c_char> {
    #[cfg(target_arch = "x86_64")]
    return boundary::withheld_preload().map(CStr::as_ptr);
    #[cfg(not(target_arch = "x86_64"))]
    return None;
}

unsafe extern "C" {
    static environ: Words;
}

/// The environment of this process.
fn own_environment() -> Words {
    // SAFETY: libc's variable; the program changes it at its own risk.
    unsafe { environ }
}

fn path_of(text: *const c_char) -> Option<PathBuf> {
    if is_nowhere(text, 1) {
        return None;
    }
    // SAFETY: the program's text.
    Some(OsStr::from_bytes(unsafe { CStr::from_ptr(text) }.to_bytes()).into())
}

/// The file of this library.
static LIBRARY: OnceBox<Option<PathBuf>> = OnceBox::new();

/// Path of this library. Looked up when the library is loaded: the look-up takes a lock of the
/// dynamic linker.
pub(super) fn own_path() -> Option<&'static Path> {
    LIBRARY.get_or_init(find_own_path).as_deref()
}

fn find_own_path() -> Option<PathBuf> {
    // SAFETY: an all-zero value is valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = find_own_path as fn() -> Option<PathBuf> as *const c_void;
    // SAFETY: the address is one of this library, and `info` is valid until the call returns.
    if unsafe { libc::dladdr(here, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the dynamic linker's text lives as long as the library: for ever.
    Some(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes()).into())
}

/// Whether another process has this library now and would treat connections as this process does.
/// If the process executes a program later, the library there handles the inheritance.
pub(super) fn runs_library(process: i32) -> bool {
    let of = |what: &str| std::fs::read(format!("/proc/{process}/{what}")).unwrap_or_default();
    let Some(library) = own_path().and_then(|path| path.canonicalize().ok()) else { return false };
    let name = library.as_os_str().as_bytes();
    if !of("maps").split(|byte| *byte == b'\n').any(|line| line.ends_with(name)) {
        return false;
    }
    let environment = of("environ");
    let value = |name: &str| {
        let mut entries = environment.split(|byte| *byte == 0);
        let value =
            entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        value.map(OsStr::from_bytes)
    };
    let program = std::fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
    config::is_same_for(value) && config::get().is_some_and(|config| config.has_rules_of(&program))
}

/// Leaves the connections and listeners inherited by the next program to the kernel. `named`:
/// whether the program gets a descriptor in spite of close-on-exec.
pub(super) fn leave_to(target: &Target, named: impl Fn(c_int) -> bool) {
    let has_any = relay::hand_over::has_any();
    if !has_any && !answering_listeners::any() {
        return;
    }
    let has_library = target.has_library();
    if has_any {
        kernel::leave_inherited(&named, has_library);
    }
    if !has_library {
        handed_listeners::leave_inherited(named);
    }
}

/// Executes a program by `execute`. `execute` gets the environment if another one replaces the
/// call's, and returns only on failure. `execute` runs outside of the library ([`within`]): a child
/// of vfork shares the library's state, and no signals may stay blocked.
fn around(target: impl FnOnce() -> Target, execute: impl FnOnce(Option<Words>) -> c_int) -> c_int {
    if config::get().is_none() {
        return execute(within(|| target().other_environment()));
    }
    // The parent of a child with shared memory would count the child for ever.
    let counts = !fork::shares_memory();
    if counts {
        within(take_back::begin_spawn);
    }
    let result = execute_with_keeper(target, execute);
    if counts {
        take_back::end_spawn();
    }
    result
}

fn execute_with_keeper(
    target: impl FnOnce() -> Target,
    execute: impl FnOnce(Option<Words>) -> c_int,
) -> c_int {
    let mut loader = None;
    let (has_work, other) = within(|| {
        let mut target = target();
        loader = target.load_linker(Loader::start);
        (prepare(&target), target.other_environment())
    });
    let execute = |other| {
        let result = execute(other);
        let error = errno();
        if let Some(loader) = loader.take() {
            within(|| loader.withdraw());
        }
        set_errno(error);
        result
    };
    if !has_work {
        return execute(other);
    }
    let mut execute = Some(execute);
    let mut once = || execute.take().map(|execute| (execute(other), errno()));
    let done = keep(|| KeeperResult::GoOn(once())).unwrap_or_else(|| {
        within(await_peers);
        once()
    });
    match done {
        Some((result, error)) => {
            set_errno(error);
            result
        }
        None => -1,
    }
}

/// Leaves the inherited descriptors to the kernel, and waits for peers. `true`: a keeper has work.
fn prepare(target: &Target) -> bool {
    if fork::shares_memory() {
        // The connections and the library's tables are the parent's.
        if answering_listeners::any() && !target.has_library() {
            handed_listeners::leave_inherited(|_| false);
        }
        return false;
    }
    relay::fork::settle_all();
    leave_to(target, |_| false);
    kernel::leave_closed();
    kernel::await_sent(true, SHORT);
    kernel::await_sent(false, LONG);
    keeper::has_work()
}

/// Defines hooks of exec functions, each with the libc function for another environment.
macro_rules! executes {
    ($($name:ident($($arg:ident : $type:ty),*), $number:expr, $target:expr,
       $with:ident($($given:ident : $kind:ty),*), $environment:ident;)*) => {
        $(#[unsafe(no_mangle)]
        pub(super) unsafe extern "C-unwind" fn $name($($arg: $type),*) -> c_int {
            around(|| $target, |other| match other {
                None => call_libc!($name, $number, ($($arg: $type),*) -> c_int),
                Some($environment) => call_libc!($with, -1, ($($given: $kind),*) -> c_int),
            })
        })*
    };
}

executes! {
    execve(path: *const c_char, words: Words, environment: Words), libc::SYS_execve,
        Target::path(path, environment),
        execve(path: *const c_char, words: Words, environment: Words), environment;
    execv(path: *const c_char, words: Words), -1, Target::path(path, own_environment()),
        execve(path: *const c_char, words: Words, environment: Words), environment;
    execvp(file: *const c_char, words: Words), -1, Target::in_path(file, own_environment()),
        execvpe(file: *const c_char, words: Words, environment: Words), environment;
    execvpe(file: *const c_char, words: Words, environment: Words), -1,
        Target::in_path(file, environment),
        execvpe(file: *const c_char, words: Words, environment: Words), environment;
    fexecve(file: c_int, words: Words, environment: Words), -1,
        Target::at(file, c"".as_ptr(), environment),
        fexecve(file: c_int, words: Words, environment: Words), environment;
    execveat(dir: c_int, path: *const c_char, words: Words, environment: Words, flags: c_int),
        libc::SYS_execveat, Target::at(dir, path, environment),
        execveat(dir: c_int, path: *const c_char, words: Words, environment: Words, flags: c_int),
        environment;
}

// Functions with a variable number of arguments, all of them addresses. Each stores the arguments
// in registers next to the arguments on the stack, and calls a function of this library.

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

/// Number of arguments passed in registers.
const IN_REGISTERS: usize = if cfg!(target_arch = "x86_64") { 6 } else { 8 };

/// The arguments of a call: first from the registers, then from the stack.
#[derive(Clone, Copy)]
struct Arguments {
    registers: *const *const c_char,
    stack: *const *const c_char,
}

impl Arguments {
    fn get(self, at: usize) -> *const c_char {
        // SAFETY: the callers ask for arguments up to the null at the end of the list, and for the
        // environment of `execle` behind the null.
        unsafe {
            match at.checked_sub(IN_REGISTERS) {
                None => self.registers.add(at).read(),
                Some(at) => self.stack.add(at).read(),
            }
        }
    }

    /// The words of the program, with the null at the end.
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
