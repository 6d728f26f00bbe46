// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of functions to pass a descriptor on where the library cannot follow: stdio, other
//! processes, asynchronous I/O. Each leaves the descriptor to the kernel first.

use std::cell::OnceCell;
use std::ffi::{CStr, c_char, c_int, c_void};

use libc::{aiocb, pid_t};

use crate::hooks::assembly::in_assembly;
use crate::hooks::exec::{self, Target, Words};
use crate::hooks::libc_symbols::{Symbol, call_libc, symbols};
use crate::hooks::within::within;
use crate::io::kernel;
use crate::relay::take_back;
use crate::selection::{answering_listeners, handed_listeners, session};
use crate::socket::table::DESCRIPTORS;
use crate::sys::borrowed;
use crate::sys::fork_lock::ForkMutex;
use crate::sys::raw::{self, Errno};
use crate::sys::user_memory::{errno, is_nowhere, libc_result, set_errno};
use crate::{config, fork, last_thread, relay};
use ism_sys::Loader;

/// Leaves a known descriptor to the kernel.
#[inline]
pub(super) fn leave(fd: c_int) {
    if DESCRIPTORS.has(fd) {
        within(|| kernel::leave_to_kernel(fd));
    }
}

/// Leaves a standard descriptor to the kernel: for stdio, and for the next executed program.
#[inline]
pub(super) fn leave_standard(fd: c_int) {
    if (0..=2).contains(&fd) {
        leave(fd);
    }
}

/// Streams of stdio on connections served by the kernel.
static STREAMS: ForkMutex<Vec<usize>> = ForkMutex::new(Vec::new());

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
    leave(fd);
    let stream = call_libc!(fdopen, -1, (fd: c_int, mode: *const c_char) -> *mut c_void);
    if !stream.is_null() && DESCRIPTORS.has(fd) {
        within(|| STREAMS.lock().push(stream as usize));
    }
    stream
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn fclose(stream: *mut c_void) -> c_int {
    within(|| STREAMS.lock().retain(|known| *known != stream as usize));
    call_libc!(fclose, -1, (stream: *mut c_void) -> c_int)
}

unsafe extern "C" {
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
    fn ftrylockfile(stream: *mut libc::FILE) -> c_int;
    fn funlockfile(stream: *mut libc::FILE);
}

/// Flushes the streams of stdio on connections at the end of the program: libc would flush them
/// only after the end of the relays. A stream in use by another thread is left alone, as by libc.
pub(super) fn flush_streams() {
    let mut streams = std::mem::take(&mut *STREAMS.lock());
    // SAFETY: libc's streams for standard output and error.
    let standard = unsafe { [(1, stdout), (2, stderr)] };
    let ours = standard.iter().filter(|(fd, _)| DESCRIPTORS.has(*fd));
    streams.extend(ours.map(|(_, stream)| *stream as usize));
    for stream in streams {
        let stream = stream as *mut libc::FILE;
        // SAFETY: the program has not closed the stream.
        unsafe {
            if ftrylockfile(stream) == 0 {
                libc::fflush(stream);
                funlockfile(stream);
            }
        }
    }
}

/// Leaves the descriptors in a message on this socket to the kernel. Listeners stay as they are if
/// the receiving process has the library.
///
/// # Safety
/// `message` is null or leads to a header of the program.
pub(super) unsafe fn leave_passed(socket: c_int, message: *const libc::msghdr) {
    if ism_sys::is_driver_thread() {
        // The driver passes descriptors of its own to the daemon.
        return;
    }
    let has_library = OnceCell::new();
    let leave_with_listener = |fd| {
        leave(fd);
        if answering_listeners::any() && !*has_library.get_or_init(|| receiver_has_library(socket))
        {
            handed_listeners::leave_listener(fd);
        }
    };
    // SAFETY: the caller's promise.
    unsafe { passed_descriptors(message, leave_with_listener) };
}

/// Whether the process connected to this socket has the library. For a pair made by this process
/// the holder of the other end is unknown.
fn receiver_has_library(socket: c_int) -> bool {
    let peer = ism_sys::peer_process(borrowed(socket)).ok().and_then(|peer| peer.pid);
    peer.is_some_and(|pid| pid != raw::getpid() && exec::runs_library(pid))
}

/// Calls `f` with each descriptor passed by a message's SCM_RIGHTS.
///
/// # Safety
/// `message` leads to a header whose control data is valid, or nowhere.
pub(super) unsafe fn passed_descriptors(message: *const libc::msghdr, f: impl Fn(c_int)) {
    if is_nowhere(message, 1) {
        return;
    }
    // SAFETY: the caller's promise, also for the reads below.
    let header = unsafe { &*message };
    if header.msg_controllen == 0 || is_nowhere(header.msg_control, header.msg_controllen) {
        return;
    }
    // SAFETY: the control data is as long as the header says; CMSG_* stay within.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(header);
        while let Some(control) = at.as_ref() {
            if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_RIGHTS {
                let list = libc::CMSG_DATA(at).cast::<c_int>();
                let n = control.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize) / 4;
                for i in 0..n {
                    f(list.add(i).read_unaligned());
                }
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
}

// Functions with a variable number of arguments, and a function returning twice. Each is a few
// instructions to keep all arguments, to call a function of this library, and to jump to libc's
// function.

macro_rules! trampolines {
    ($($name:ident, $prepare:ident;)*) => {$(
        in_assembly! {
            $name calls $prepare:
            x86_64 {
                "endbr64"
                "push rdi" "push rsi" "push rdx" "push rcx" "push r8" "push r9" "push rax"
                "sub rsp, 128"
                "movups [rsp], xmm0" "movups [rsp + 16], xmm1"
                "movups [rsp + 32], xmm2" "movups [rsp + 48], xmm3"
                "movups [rsp + 64], xmm4" "movups [rsp + 80], xmm5"
                "movups [rsp + 96], xmm6" "movups [rsp + 112], xmm7"
                "call {function}"
                "mov r11, rax"
                "movups xmm0, [rsp]" "movups xmm1, [rsp + 16]"
                "movups xmm2, [rsp + 32]" "movups xmm3, [rsp + 48]"
                "movups xmm4, [rsp + 64]" "movups xmm5, [rsp + 80]"
                "movups xmm6, [rsp + 96]" "movups xmm7, [rsp + 112]"
                "add rsp, 128"
                "pop rax" "pop r9" "pop r8" "pop rcx" "pop rdx" "pop rsi" "pop rdi"
                "jmp r11"
            }
            aarch64 {
                "hint #34" // bti c
                "stp x29, x30, [sp, #-224]!"
                "stp x0, x1, [sp, #16]" "stp x2, x3, [sp, #32]"
                "stp x4, x5, [sp, #48]" "stp x6, x7, [sp, #64]"
                "str x8, [sp, #80]"
                "stp q0, q1, [sp, #96]" "stp q2, q3, [sp, #128]"
                "stp q4, q5, [sp, #160]" "stp q6, q7, [sp, #192]"
                "bl {function}"
                "mov x16, x0"
                "ldp q0, q1, [sp, #96]" "ldp q2, q3, [sp, #128]"
                "ldp q4, q5, [sp, #160]" "ldp q6, q7, [sp, #192]"
                "ldr x8, [sp, #80]"
                "ldp x6, x7, [sp, #64]" "ldp x4, x5, [sp, #48]"
                "ldp x2, x3, [sp, #32]" "ldp x0, x1, [sp, #16]"
                "ldp x29, x30, [sp], #224"
                "br x16"
            }
        }
    )*};
}

trampolines! {
    dprintf, before_dprintf;
    vdprintf, before_vdprintf;
    __dprintf_chk, before_dprintf_chk;
    __vdprintf_chk, before_vdprintf_chk;
    vfork, before_vfork;
    pthread_exit, before_pthread_exit;
    __vfork, before_vfork;
}

/// The address of libc's function.
fn found(symbol: &Symbol) -> *mut c_void {
    if symbol.get().is_none() {
        symbol.find();
    }
    // The linker would have refused a program without libc's function.
    symbol.get().unwrap_or_else(|| std::process::abort())
}

extern "C" fn before_dprintf(fd: c_int) -> *mut c_void {
    leave(fd);
    found(&symbols::dprintf)
}

extern "C" fn before_vdprintf(fd: c_int) -> *mut c_void {
    leave(fd);
    found(&symbols::vdprintf)
}

extern "C" fn before_dprintf_chk(fd: c_int) -> *mut c_void {
    leave(fd);
    found(&symbols::__dprintf_chk)
}

extern "C" fn before_vdprintf_chk(fd: c_int) -> *mut c_void {
    leave(fd);
    found(&symbols::__vdprintf_chk)
}

/// A child of `vfork` shares the memory of the parent, and must not change the library's descriptor
/// tables. While there are connections on SMC or on their way to SMC, the child is made by `fork`,
/// as POSIX allows.
extern "C" fn before_vfork() -> *mut c_void {
    found(if is_vfork_a_fork() { &symbols::fork } else { &symbols::vfork })
}

/// Called before the program makes a child by `vfork`. Whether `fork` makes the child.
pub(super) fn is_vfork_a_fork() -> bool {
    within(fork::note_child);
    let in_use = config::get().is_some() && relay::hand_over::has_any();
    fork::note_sharing_child();
    in_use
}

/// libc's function never returns, and unwinds the stack.
extern "C" fn before_pthread_exit() -> *mut c_void {
    if config::get().is_some() && raw::is_first_thread() && !fork::shares_memory() {
        last_thread::first_ends(|| session::opened().is_some());
    }
    found(&symbols::pthread_exit)
}

/// libc writes the names of functions by itself.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn backtrace_symbols_fd(
    list: *const *mut c_void,
    n: c_int,
    fd: c_int,
) {
    leave(fd);
    call_libc!(backtrace_symbols_fd, -1, (list: *const *mut c_void, n: c_int, fd: c_int) -> c_int);
}

// posix_spawn and its variants in libc.

/// Descriptors of connections and listeners duplicated by file actions of the program, by the
/// address of the actions.
static NAMED: ForkMutex<Vec<(usize, c_int)>> = ForkMutex::new(Vec::new());

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut c_void,
    fd: c_int,
    new: c_int,
) -> c_int {
    if DESCRIPTORS.has(fd) || answering_listeners::any() {
        within(|| NAMED.lock().push((actions as usize, fd)));
    }
    call_libc!(posix_spawn_file_actions_adddup2, -1,
        (actions: *mut c_void, fd: c_int, new: c_int) -> c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_spawn_file_actions_destroy(actions: *mut c_void) -> c_int {
    within(|| NAMED.lock().retain(|(of, _)| *of != actions as usize));
    call_libc!(posix_spawn_file_actions_destroy, -1, (actions: *mut c_void) -> c_int)
}

fn before_spawn(actions: *const c_void, target: &mut Target) -> Option<Loader> {
    take_back::begin_spawn();
    fork::note_sharing_child();
    fork::note_child();
    config::get()?;
    let loader = target.load_linker(Loader::start_for_child);
    // The descriptors that the file actions duplicate.
    exec::leave_to(target, |fd| NAMED.lock().contains(&(actions as usize, fd)));
    loader
}

/// Called with the result of a function to start a program. `none`: the result without a program.
fn after_spawn(loader: Option<Loader>, none: bool) {
    if let Some(loader) = loader.filter(|_| none) {
        let error = errno();
        within(|| loader.withdraw());
        set_errno(error);
    }
    fork::note_child();
    take_back::end_spawn();
}

/// Defines hooks of functions to start a program.
macro_rules! spawns {
    ($($name:ident($($arg:ident : $type:ty),*) -> $result:ty, $actions:expr, $target:expr,
       none: $none:expr $(, with $environment:ident)?;)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
            let mut loader = None;
            within(|| loader = before_spawn($actions, &mut $target));
            $(let other = within(|| $target.other_environment());
            let $environment = other.unwrap_or($environment);)?
            let result = call_libc!($name, -1, ($($arg: $type),*) -> $result);
            after_spawn(loader, $none(result));
            result
        })*
    };
}

/// Whether a result is an error. The status of an ended program may be taken for one.
fn is_error(result: c_int) -> bool {
    result != 0
}

spawns! {
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void,
        argv: *const c_void, envp: Words) -> c_int, actions, Target::path(path, envp), none: is_error,
        with envp;
    posix_spawnp(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void,
        argv: *const c_void, envp: Words) -> c_int, actions, Target::in_path(path, envp),
        none: is_error, with envp;
    pidfd_spawn(pidfd: *mut c_int, path: *const c_char, actions: *const c_void,
        attr: *const c_void, argv: *const c_void, envp: Words) -> c_int, actions,
        Target::path(path, envp), none: is_error, with envp;
    pidfd_spawnp(pidfd: *mut c_int, path: *const c_char, actions: *const c_void,
        attr: *const c_void, argv: *const c_void, envp: Words) -> c_int, actions,
        Target::in_path(path, envp), none: is_error, with envp;
    system(command: *const c_char) -> c_int, std::ptr::null(), Target::shell(), none: is_error;
    __libc_system(command: *const c_char) -> c_int, std::ptr::null(), Target::shell(), none: is_error;
    popen(command: *const c_char, mode: *const c_char) -> *mut c_void, std::ptr::null(),
        Target::shell(), none: <*mut c_void>::is_null;
    _IO_popen(command: *const c_char, mode: *const c_char) -> *mut c_void, std::ptr::null(),
        Target::shell(), none: <*mut c_void>::is_null;
}

// POSIX asynchronous I/O: libc's threads make the calls.

macro_rules! asynchronous {
    ($($name:ident;)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(block: *mut aiocb) -> c_int {
            // SAFETY: the program's control block.
            if let Some(block) = unsafe { block.as_ref() } {
                leave(block.aio_fildes);
            }
            call_libc!($name, -1, (block: *mut aiocb) -> c_int)
        })*
    };
}

asynchronous! {
    aio_read;
    aio_read64;
    aio_write;
    aio_write64;
}

macro_rules! lists {
    ($($name:ident;)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            mode: c_int,
            list: *const *mut aiocb,
            n: c_int,
            event: *mut c_void,
        ) -> c_int {
            for i in 0..usize::try_from(n).unwrap_or(0) {
                // SAFETY: the program's list of `n` addresses, each null or of a control block.
                if let Some(block) = unsafe { list.add(i).read().as_ref() } {
                    leave(block.aio_fildes);
                }
            }
            call_libc!($name, -1, (mode: c_int, list: *const *mut aiocb, n: c_int,
                event: *mut c_void) -> c_int)
        })*
    };
}

lists! {
    lio_listio;
    lio_listio64;
}

// io_uring: liburing makes system calls by itself, so its functions fail. The library could not see
// the kernel's work on the descriptors. Without io_uring, programs use epoll.

/// Defines functions of liburing to fail with ENOSYS, as on a kernel without io_uring. In a process
/// without SMC these functions call liburing's.
macro_rules! rings {
    ($($name:ident($($arg:ident : $type:ty),*);)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $type),*) -> c_int {
            if config::get().is_some() {
                return -libc::ENOSYS;
            }
            call_next(stringify_c!($name), [$($arg as usize),*])
        })*
    };
}

macro_rules! stringify_c {
    ($name:ident) => {
        match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => c"",
        }
    };
}

/// Calls the next function of a name, with up to six arguments.
fn call_next<const N: usize>(name: &CStr, given: [usize; N]) -> c_int {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null() {
        return libc_result(Err(Errno(libc::ENOSYS))) as c_int;
    }
    let mut all = [0usize; 6];
    all.iter_mut().zip(given).for_each(|(slot, value)| *slot = value);
    type Function = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_int;
    // SAFETY: a function with fewer arguments ignores the other registers.
    let function = unsafe { std::mem::transmute::<*mut c_void, Function>(found) };
    // SAFETY: the program's arguments, unchanged.
    unsafe { function(all[0], all[1], all[2], all[3], all[4], all[5]) }
}

rings! {
    io_uring_setup(entries: u32, params: *mut c_void);
    io_uring_queue_init(entries: u32, ring: *mut c_void, flags: u32);
    io_uring_queue_init_params(entries: u32, ring: *mut c_void, params: *mut c_void);
    io_uring_queue_init_mem(entries: u32, ring: *mut c_void, params: *mut c_void, buf: *mut c_void,
        size: usize);
}
