// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options for the run-time libraries of sanitizers, which ask for them by functions. A program's own
//! function of the name comes first, and so does what the user's environment says.

use std::ffi::c_char;

/// Options of the address sanitizer. It ends a program in which another library comes before it.
#[unsafe(no_mangle)]
extern "C" fn __asan_default_options() -> *const c_char {
    c"verify_asan_link_order=0".as_ptr()
}

/// Options of the thread sanitizer. It does not see what orders the accesses of this library, and
/// would report the memory that libc's functions write for it.
#[unsafe(no_mangle)]
extern "C" fn __tsan_default_options() -> *const c_char {
    c"ignore_noninstrumented_modules=1".as_ptr()
}
