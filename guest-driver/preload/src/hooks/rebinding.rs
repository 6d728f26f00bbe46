// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Callers bypassing this library's place in the order of objects: an object opened with RTLD_DEEPBIND
//! binds to its own libc, `dlsym` searches the object of its handle, and a namespace of `dlmopen` has a
//! libc of its own. So the symbol table of libc itself leads to this library: the dynamic linker finds
//! the hooks there, for any caller and any name.
//!
//! All such callers come with an object opened by the program. So the program's first `dlopen` or
//! `dlmopen` changes the table, and most processes of a shell or a build never do.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

use super::libc_symbols;
use crate::io::kernel;
use crate::selection::own_calls;
use crate::socket::table::DESCRIPTORS;
use crate::sys::elf::{ExportedFunction, LoadedObject};
use crate::sys::fork_lock::ForkLock;
use crate::sys::raw;
use crate::sys::user_memory::is_nowhere;
use crate::{config, fork, status};

/// The objects with hooked functions, as named by other objects. Before glibc 2.34 the functions were
/// in several objects.
const GLIBC: [&[u8]; 4] = [b"libc.so.", b"libpthread.so.", b"librt.so.", b"libdl.so."];

/// Objects of other projects with system calls of their own.
const OTHERS: [&[u8]; 2] = [b"libaio.so.", b"liburing.so."];

fn is_one_of(object: &LoadedObject, names: &[&[u8]]) -> bool {
    let soname = object.soname().map_or(&b""[..], CStr::to_bytes);
    names.iter().any(|name| soname.starts_with(name))
}

/// Whether a function is one of libc's.
pub(super) fn is_libcs(function: *const c_void) -> bool {
    LoadedObject::containing(function).is_some_and(|object| is_one_of(&object, &GLIBC))
}

/// Progress of the rebinding.
static STATE: AtomicU8 = AtomicU8::new(UNWANTED);
static LOCK: ForkLock = ForkLock::new();
/// The process has no settings yet, or none at all.
const UNWANTED: u8 = 0;
/// Like [`UNWANTED`], after an object was opened.
const ASKED: u8 = 1;
/// The next opened object needs the rebinding.
const WANTED: u8 = 2;
const DONE: u8 = 3;

/// Called when the library begins its work.
pub(super) fn begin() {
    if STATE.swap(WANTED, Ordering::AcqRel) == ASKED {
        before_open();
    }
}

/// Leaves the connections to the kernel, because calls will bypass the hooks from now on.
fn leave_connections() {
    (0..=DESCRIPTORS.highest()).for_each(kernel::leave_to_kernel);
}

/// Called before the program opens this object.
///
/// # Safety
/// `file` is null or the program's text.
pub(super) unsafe fn before_open_of(file: *const c_char) {
    before_open();
    if config::get().is_none() || fork::shares_memory() {
        return;
    }
    // SAFETY: the caller's promise.
    let text = (!is_nowhere(file, 1)).then(|| unsafe { CStr::from_ptr(file) }.to_bytes());
    let path =
        text.filter(|text| text.contains(&b'/')).map(|text| Path::new(OsStr::from_bytes(text)));
    if own_calls::opens(path) {
        raw::without_signals(leave_connections);
    }
}

/// Called before the program opens an object.
#[inline]
pub(super) fn before_open() {
    if matches!(STATE.load(Ordering::Acquire), UNWANTED | WANTED) {
        raw::without_signals(open_first);
    }
}

#[cold]
fn open_first() {
    let _one_at_a_time = LOCK.lock();
    match STATE.load(Ordering::Acquire) {
        WANTED => {
            // Before one half of the table is changed.
            STATE.store(DONE, Ordering::Release);
            if !rebind() {
                status::libc_stays();
                own_calls::note_libc();
                leave_connections();
            }
        }
        UNWANTED => STATE.store(ASKED, Ordering::Release),
        _ => {}
    }
}

/// The objects after this library in the linker's search order; `None` for an object with unknown kinds
/// of tables.
pub(super) fn objects_behind() -> Vec<Option<LoadedObject>> {
    this_library().iter().flat_map(LoadedObject::all_successors).collect()
}

/// Redirects the objects of the program to the hooks. The library has looked up libc's functions
/// before. `false`: the kernel forbids a write to one of the objects.
fn rebind() -> bool {
    let Some(own) = this_library() else { return false };
    let (glibc, others): (Vec<_>, Vec<_>) = own
        .successors()
        .filter(|object| is_one_of(object, &GLIBC) || is_one_of(object, &OTHERS))
        .partition(|object| is_one_of(object, &GLIBC));
    let mut changes: Vec<_> = glibc.iter().map(|object| changes(&own, object)).collect();
    let wrapped = wrapped_by_others(&glibc, &changes);
    let mut done = true;
    for (object, changes) in glibc.iter().zip(&mut changes) {
        changes.retain(|(function, _)| !wrapped.contains(&function.address));
        done &= object.set_addresses(changes);
    }
    for object in &others {
        done &= object.set_addresses(&self::changes(&own, object));
    }
    done
}

/// Redirects an object's functions to the hooks, if `fits` is true of the function.
pub(super) fn rebind_functions(object: &LoadedObject, fits: impl Fn(&CStr) -> bool) {
    if let Some(own) = this_library() {
        let named = own.functions().filter(|(name, _)| fits(name));
        let changes = named.flat_map(|(name, hook)| object.named(name).map(move |f| (f, hook)));
        object.set_addresses(&changes.collect::<Vec<_>>());
    }
}

/// The hooked functions of an object, and their hooks.
fn changes(own: &LoadedObject, object: &LoadedObject) -> Vec<(ExportedFunction, usize)> {
    let mut changes = Vec::with_capacity(256);
    for (name, hook) in own.functions() {
        changes.extend(object.named(name).map(|function| (function, hook)));
    }
    changes
}

/// This library.
fn this_library() -> Option<LoadedObject> {
    LoadedObject::containing(rebind as *const () as *const c_void)
}

/// Addresses of libc's functions wrapped by another library, where the hooks call the wrapper. The
/// wrapper looks for libc's function after itself, maybe later than now, and must not find the calling
/// hook. `changes`: the hooked functions of the objects.
fn wrapped_by_others(
    glibc: &[LoadedObject],
    changes: &[Vec<(ExportedFunction, usize)>],
) -> Vec<usize> {
    let mut known: Vec<_> =
        changes.iter().flatten().map(|(function, _)| function.address).collect();
    known.sort_unstable();
    let is_unknown = |address: *mut c_void| known.binary_search(&(address as usize)).is_err();
    let mut wrapped = Vec::new();
    for (name, found) in libc_symbols::found().filter(|(_, found)| is_unknown(*found)) {
        let named = glibc.iter().flat_map(|object| object.named(name));
        let addresses: Vec<_> = named.map(|function| function.address).collect();
        if !addresses.contains(&(found as usize)) {
            wrapped.extend(addresses);
        }
    }
    wrapped
}
