//! `clone`, whose child may be one as of `fork`: libc then calls no handlers.

use std::ffi::{c_int, c_void};

use super::init;
use crate::config;
use crate::fork;
use crate::hooks::libc_symbols::call_libc;
use crate::sys::raw;
use crate::sys::user_memory::{errno, set_errno};

/// The function of a child.
type Body = unsafe extern "C" fn(*mut c_void) -> c_int;

/// What a child begins with.
struct Start {
    body: Body,
    argument: *mut c_void,
}

/// Whether a child has a copy of this process's memory and descriptors.
pub(super) fn is_fork(flags: u64) -> bool {
    flags & (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_FILES) as u64 == 0
}

/// Takes note of a child that is no thread and shares this process's memory.
pub(super) fn note(flags: u64) {
    if flags & (libc::CLONE_VM | libc::CLONE_THREAD) as u64 == libc::CLONE_VM as u64 {
        fork::note_sharing_child();
    }
}

/// The child's first function.
unsafe extern "C" fn begin(start: *mut c_void) -> c_int {
    // SAFETY: the handler that libc would call; the address comes from `clone`, and the child has
    // a copy of what it leads to.
    unsafe {
        init::in_child();
        raw::note_other_stack();
        let Start { body, argument } = *Box::from_raw(start.cast::<Start>());
        body(argument)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn clone(
    body: *mut c_void,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    local: *mut c_void,
    child: *mut c_void,
) -> c_int {
    let native = |body: *mut c_void, argument: *mut c_void| {
        call_libc!(clone, -1, (body: *mut c_void, stack: *mut c_void, flags: c_int,
            argument: *mut c_void, parent: *mut c_void, local: *mut c_void, child: *mut c_void)
            -> c_int)
    };
    if body.is_null() || config::get().is_none() || !is_fork(flags as u64) {
        note(flags as u64);
        return native(body, argument);
    }
    // SAFETY: the program's function of this type.
    let theirs = unsafe { std::mem::transmute::<*mut c_void, Body>(body) };
    let start = Box::into_raw(Box::new(Start { body: theirs, argument }));
    // SAFETY: the handlers that libc would call around a fork.
    unsafe { init::before_fork() };
    let result = native(begin as Body as *mut c_void, start.cast::<c_void>());
    let error = errno();
    // SAFETY: as above; the child has its own copy of the box.
    unsafe {
        init::in_parent();
        drop(Box::from_raw(start));
    }
    set_errno(error);
    result
}
