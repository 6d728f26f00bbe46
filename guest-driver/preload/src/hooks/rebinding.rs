//! Callers that the order of the objects does not lead to this library: an object opened with
//! RTLD_DEEPBIND binds to the libc that it depends on, `dlsym` looks into the object of its handle,
//! and a namespace of `dlmopen` has a libc of its own. So the symbol table of libc itself leads to
//! this library: the dynamic linker finds the hooks there, whoever asks and by whatever name.

use std::ffi::{CStr, c_void};

use super::libc_symbols;
use crate::sys::elf::{ExportedFunction, LoadedObject};

/// The objects whose functions have hooks, as others need them. Before glibc 2.34 its functions were
/// in several.
const GLIBC: [&[u8]; 4] = [b"libc.so.", b"libpthread.so.", b"librt.so.", b"libdl.so."];

/// The same of other projects, which make system calls themselves.
const OTHERS: [&[u8]; 2] = [b"libaio.so.", b"liburing.so."];

fn is_one_of(object: &LoadedObject, names: &[&[u8]]) -> bool {
    let soname = object.soname().map_or(&b""[..], CStr::to_bytes);
    names.iter().any(|name| soname.starts_with(name))
}

/// Has the objects of the program lead to the hooks. The library has looked up libc's functions
/// before. `false`: the kernel forbids to write in one of them.
pub(super) fn rebind() -> bool {
    let Some(own) = this_library() else { return false };
    let behind: Vec<_> = own.successors().collect();
    let glibc: Vec<_> = behind.iter().filter(|object| is_one_of(object, &GLIBC)).collect();
    let wrapped = wrapped_by_others(&glibc);
    let others = behind.iter().filter(|object| is_one_of(object, &OTHERS));
    let is_free = |_: &CStr, address| !wrapped.contains(&address);
    let mut done = true;
    for object in glibc.iter().copied().chain(others) {
        done &= rebind_object(&own, object, is_free);
    }
    done
}

/// Has an object lead to the hooks of those functions that `fits` is true of, by name and address.
pub(super) fn rebind_functions(object: &LoadedObject, fits: impl Fn(&CStr, usize) -> bool) {
    if let Some(own) = this_library() {
        rebind_object(&own, object, fits);
    }
}

fn rebind_object(
    own: &LoadedObject,
    object: &LoadedObject,
    fits: impl Fn(&CStr, usize) -> bool,
) -> bool {
    let changes: Vec<(ExportedFunction, usize)> = own
        .functions()
        .flat_map(|(name, hook)| object.named(name).into_iter().map(move |f| (name, f, hook)))
        .filter(|(name, function, _)| fits(name, function.address))
        .map(|(_, function, hook)| (function, hook))
        .collect();
    object.set_addresses(&changes)
}

fn this_library() -> Option<LoadedObject> {
    LoadedObject::containing(rebind as *const () as *const c_void)
}

/// Addresses of libc's functions that another library wraps to which the hooks pass calls on. It
/// looks for libc's function behind itself, maybe later than now, and must not find the hook that
/// calls it.
fn wrapped_by_others(glibc: &[&LoadedObject]) -> Vec<usize> {
    let mut wrapped = Vec::new();
    for (name, found) in libc_symbols::found() {
        let named = glibc.iter().flat_map(|object| object.named(name));
        let addresses: Vec<_> = named.map(|function| function.address).collect();
        if !addresses.contains(&(found as usize)) {
            wrapped.extend(addresses);
        }
    }
    wrapped
}
