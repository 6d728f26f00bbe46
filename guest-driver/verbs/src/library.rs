// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `libibverbs.so.1`, opened on first use.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;

use super::VerbsUnavailable;
use super::ffi;
use ism_sys::OnceBox;

macro_rules! functions {
    (required { $($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)* }
     optional { $($new:ident: fn($($narg:ty),*) $(-> $nret:ty)?;)* }) => {
        /// The functions of the library. All have symbol version IBVERBS_1.1 or older, except the
        /// optional ones.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $(pub(super) $new: Option<unsafe extern "C" fn($($narg),*) $(-> $nret)?>,)*
        }

        impl Functions {
            fn find(library: &Library) -> Result<Functions, VerbsUnavailable> {
                $(
                    let name = concat!(stringify!($name), "\0");
                    let $name = library.symbol(name).ok_or_else(|| {
                        VerbsUnavailable::Library(format!("it has no {}", stringify!($name)))
                    })?;
                    // SAFETY: the library's function of this name has this signature, because the
                    // library exports the function with the header's symbol version.
                    let $name = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>($name)
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $new = library.symbol(concat!(stringify!($new), "\0")).map(|found| unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($narg),*) $(-> $nret)?>(found)
                    });
                )*
                Ok(Functions { $($name,)* $($new,)* })
            }
        }
    };
}

functions! {
    required {
        ibv_get_device_list: fn(*mut c_int) -> *mut *mut ffi::Device;
        ibv_free_device_list: fn(*mut *mut ffi::Device);
        ibv_open_device: fn(*mut ffi::Device) -> *mut ffi::Context;
        ibv_close_device: fn(*mut ffi::Context) -> c_int;
        ibv_query_device: fn(*mut ffi::Context, *mut ffi::DeviceAttr) -> c_int;
        ibv_query_port: fn(*mut ffi::Context, u8, *mut ffi::PortAttr) -> c_int;
        ibv_get_async_event: fn(*mut ffi::Context, *mut ffi::AsyncEvent) -> c_int;
        ibv_ack_async_event: fn(*mut ffi::AsyncEvent);
        ibv_alloc_pd: fn(*mut ffi::Context) -> *mut ffi::Pd;
        ibv_dealloc_pd: fn(*mut ffi::Pd) -> c_int;
        ibv_reg_mr: fn(*mut ffi::Pd, *mut c_void, usize, c_int) -> *mut ffi::Mr;
        ibv_dereg_mr: fn(*mut ffi::Mr) -> c_int;
        ibv_create_comp_channel: fn(*mut ffi::Context) -> *mut ffi::CompChannel;
        ibv_destroy_comp_channel: fn(*mut ffi::CompChannel) -> c_int;
        ibv_create_cq: fn(*mut ffi::Context, c_int, *mut c_void, *mut ffi::CompChannel, c_int) -> *mut ffi::Cq;
        ibv_destroy_cq: fn(*mut ffi::Cq) -> c_int;
        ibv_get_cq_event: fn(*mut ffi::CompChannel, *mut *mut ffi::Cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut ffi::Cq, u32);
        ibv_create_qp: fn(*mut ffi::Pd, *mut ffi::QpInitAttr) -> *mut ffi::Qp;
        ibv_modify_qp: fn(*mut ffi::Qp, *mut ffi::QpAttr, c_int) -> c_int;
        ibv_query_qp: fn(*mut ffi::Qp, *mut ffi::QpAttr, c_int, *mut ffi::QpInitAttr) -> c_int;
        ibv_destroy_qp: fn(*mut ffi::Qp) -> c_int;
        ibv_fork_init: fn() -> c_int;
    }
    optional {
        ibv_is_fork_initialized: fn() -> u32;
        ibv_reg_mr_iova: fn(*mut ffi::Pd, *mut c_void, usize, u64, c_int) -> *mut ffi::Mr;
        ibv_cmd_req_notify_cq: fn(*mut ffi::Cq, c_int) -> c_int;
        _ibv_query_gid_table: fn(*mut ffi::Context, *mut ffi::GidEntry, usize, u32, usize) -> isize;
    }
}

/// A shared library, never closed: the device libraries loaded by `libibverbs` do not expect an
/// unload.
struct Library(*mut c_void);

impl Library {
    fn open(name: &CStr) -> Result<Library, VerbsUnavailable> {
        // SAFETY: the name is a C string. Loading runs the library's constructors, as linking with
        // the library would.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(Library(handle));
        }
        // SAFETY: no argument; the result is a C string of this thread until the next such call,
        // or null.
        let text = unsafe { libc::dlerror() };
        Err(VerbsUnavailable::Library(string(text)))
    }

    fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
        // SAFETY: the handle belongs to a library never unloaded, the name a C string.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

/// The text of a C string, or nothing for null.
fn string(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown reason".to_owned();
    }
    // SAFETY: not null, and every caller passes a pointer to a C string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Whether the kernel keeps pinned pages with the parent when a process forks (Linux 5.12 does).
/// Otherwise the library has to keep pinned pages out of the child, with a system call per
/// registration, and the kernel kills a child accessing such pages.
fn forks_are_safe(functions: &Functions) -> bool {
    const UNNEEDED: u32 = 2;
    // SAFETY: the function takes no argument and asks the kernel.
    functions.ibv_is_fork_initialized.is_some_and(|state| unsafe { state() } == UNNEEDED)
}

/// Opens a library by name and finds all functions.
fn load(name: &CStr) -> Result<Functions, VerbsUnavailable> {
    if cfg!(not(target_pointer_width = "64")) {
        return Err(VerbsUnavailable::Library(
            "its structures are known for 64-bit machines".to_owned(),
        ));
    }
    let functions = Functions::find(&Library::open(name)?)?;
    if !forks_are_safe(&functions) {
        // SAFETY: no argument, and no other function of the library has been called before. A
        // failure does not matter for a program without forks.
        let _ = unsafe { (functions.ibv_fork_init)() };
    }
    Ok(functions)
}

/// The functions of the library, loaded by the first call.
pub(super) fn functions() -> Result<&'static Functions, VerbsUnavailable> {
    #[cfg(feature = "double")]
    if let Some(double) = super::double::calls::functions() {
        return Ok(double);
    }
    static LOADED: OnceBox<Result<Functions, VerbsUnavailable>> = OnceBox::new();
    LOADED.get_or_init(|| load(c"libibverbs.so.1")).as_ref().map_err(Clone::clone)
}

/// The error of a function returning an error number (or -1 with `errno` set).
pub(super) fn error_of(code: c_int) -> io::Error {
    match code {
        -1 => io::Error::last_os_error(),
        code => io::Error::from_raw_os_error(code.saturating_abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_an_ordinary_answer() {
        let error = load(c"libibverbs-of-nobody.so.1").unwrap_err();
        assert!(matches!(error, VerbsUnavailable::Library(_)));
        assert!(error.to_string().contains("libibverbs-of-nobody"), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_an_ordinary_answer() {
        let error = load(c"libc.so.6").unwrap_err();
        assert_eq!(error, VerbsUnavailable::Library("it has no ibv_get_device_list".to_owned()));
    }

    #[test]
    fn error_numbers_come_in_three_ways() {
        assert_eq!(error_of(libc::EINVAL).raw_os_error(), Some(libc::EINVAL));
        assert_eq!(error_of(-libc::ENOSPC).raw_os_error(), Some(libc::ENOSPC));
        assert!(error_of(-1).raw_os_error().is_some());
    }
}
