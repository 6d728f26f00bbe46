// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `dlopen` and `dlmopen`: opened objects bind to the hooks, by any way of looking functions up.
//!
//! Objects in another namespace have a libc of their own. The hook of `dlmopen` makes the namespace
//! itself, with only a libc in it, and redirects the libc's symbol table to this library.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};

use crate::config;
use crate::hooks::assembly::in_assembly;
use crate::hooks::libc_symbols::{call_libc, symbols};
use crate::hooks::rebinding;
use crate::hooks::within::within;
use crate::sys::elf::{LoadedObject, NamespaceId};
use crate::sys::fork_lock::ForkMutex;
use crate::sys::user_memory;

/// Functions without use of libc's memory except `errno`: plain system calls. For others (streams, the
/// environment, handlers of fork, threads) a hook would call functions of the program's libc, so the
/// namespace keeps its own.
const SYSTEM_CALLS: &str = " \
    _Exit __close __connect __dup2 __fcntl __libc_fcntl64 __open __open64 __pipe __poll __poll_chk \
    __ppoll_chk __read __read_chk __recv __recv_chk __recvfrom_chk __select __send __sendmmsg \
    __socket __write _exit accept accept4 close close_range closefrom connect dup dup2 dup3 \
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd_read \
    eventfd_write execve execveat fcntl fcntl64 fexecve getpeername getsockname getsockopt \
    inotify_init1 ioctl listen memfd_create mlockall open open64 openat openat64 pipe pipe2 poll ppoll \
    preadv2 preadv64v2 pselect pwritev2 pwritev64v2 read readv recv recvfrom recvmmsg recvmsg \
    select send sendfile sendfile64 sendmmsg sendmsg sendto setsockopt shutdown signalfd \
    sockatmark socket socketpair splice syscall timerfd_create write writev ";

fn is_system_call(name: &CStr) -> bool {
    let name = name.to_str().unwrap_or_default();
    SYSTEM_CALLS.split_whitespace().any(|call| call == name)
}

/// A namespace made by the hook. Never removed, because the library stores errors of failed calls in
/// its libc. The program gets a prepared namespace in place of a new one.
struct Namespace {
    id: NamespaceId,
    libc: LoadedObject,
    /// Number of objects of a namespace with only a libc.
    objects: usize,
    /// The thread about to open an object there, until the object is open.
    taken_by: Option<i32>,
}

impl Namespace {
    /// Whether only libc is open there, and no other thread has taken the namespace.
    fn is_idle(&mut self) -> bool {
        if self.libc.neighbours() > self.objects {
            self.taken_by = None;
            return false;
        }
        self.taken_by.is_none_or(|thread| thread == ism_sys::thread_number())
    }
}

static NAMESPACES: ForkMutex<Vec<Namespace>> = ForkMutex::new(Vec::new());

/// A namespace with a libc redirected to this library. `None`: the linker makes no further one.
fn prepared() -> Option<NamespaceId> {
    let mut namespaces = NAMESPACES.lock();
    if let Some(idle) = namespaces.iter_mut().find_map(|n| n.is_idle().then_some(n)) {
        idle.taken_by = Some(ism_sys::thread_number());
        return Some(idle.id);
    }
    let (new, name, mode) = (libc::LM_ID_NEWLM, c"libc.so.6".as_ptr(), libc::RTLD_NOW);
    let handle = call_libc!(dlmopen, -1, (new: c_long, name: *const c_char, mode: c_int)
                            -> *mut c_void);
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is never closed.
    let (libc, id) = unsafe { (LoadedObject::of_handle(handle)?, NamespaceId::of_handle(handle)?) };
    rebinding::rebind_functions(&libc, is_system_call);
    let errno = libc.named(c"__errno_location").next().map(|function| function.address);
    // SAFETY: the function belongs to a loaded libc, never to be unloaded.
    unsafe { user_memory::add_errno(errno?) };
    let objects = libc.neighbours();
    namespaces.push(Namespace { id, libc, objects, taken_by: Some(ism_sys::thread_number()) });
    Some(id)
}

/// The function to continue with, and the namespace to pass.
#[repr(C)]
struct Next {
    function: *mut c_void,
    namespace: c_long,
}

extern "C" fn before_dlopen(file: *const c_char) -> *mut c_void {
    // SAFETY: the program's name of a file.
    within(|| unsafe { rebinding::before_open_of(file) });
    if symbols::dlopen.get().is_none() {
        symbols::dlopen.find();
    }
    // The linker would have refused a program without libc's function.
    symbols::dlopen.get().unwrap_or_else(|| std::process::abort())
}

// The linker takes the search path of the caller.
in_assembly! {
    dlopen calls before_dlopen:
    x86_64 {
        "endbr64"
        "push rdi" "push rsi" "sub rsp, 8"
        "call {function}"
        "mov r11, rax"
        "add rsp, 8" "pop rsi" "pop rdi"
        "jmp r11"
    }
    aarch64 {
        "hint #34" // bti c
        "stp x29, x30, [sp, #-32]!"
        "stp x0, x1, [sp, #16]"
        "bl {function}"
        "mov x16, x0"
        "ldp x0, x1, [sp, #16]"
        "ldp x29, x30, [sp], #32"
        "br x16"
    }
}

extern "C" fn before_dlmopen(namespace: c_long, file: *const c_char) -> Next {
    // SAFETY: the program's name of a file.
    within(|| unsafe { rebinding::before_open_of(file) });
    if symbols::dlmopen.get().is_none() {
        symbols::dlmopen.find();
    }
    // The linker would have refused a program without libc's function.
    let function = symbols::dlmopen.get().unwrap_or_else(|| std::process::abort());
    // SAFETY: the program's name of a file.
    let names_file = !file.is_null() && unsafe { file.read() } != 0;
    let is_new = namespace == libc::LM_ID_NEWLM && names_file && config::get().is_some();
    let prepared = if is_new { prepared() } else { None };
    Next { function, namespace: prepared.map_or(namespace, |id| id.0) }
}

// As above.
in_assembly! {
    dlmopen calls before_dlmopen:
    x86_64 {
        "endbr64"
        "push rdi" "push rsi" "push rdx"
        "call {function}"
        "mov r11, rax"
        "mov rcx, rdx"
        "pop rdx" "pop rsi" "pop rdi"
        "mov rdi, rcx"
        "jmp r11"
    }
    aarch64 {
        "hint #34" // bti c
        "stp x29, x30, [sp, #-32]!"
        "stp x1, x2, [sp, #16]"
        "bl {function}"
        "mov x16, x0"
        "mov x0, x1"
        "ldp x1, x2, [sp, #16]"
        "ldp x29, x30, [sp], #32"
        "br x16"
    }
}
