// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options for the run-time libraries of sanitizers, asked for by functions. A program's own
//! function of the name has precedence, and so has the user's environment.

use std::ffi::c_char;

/// Options of the address sanitizer. By default the sanitizer ends a program with another library
/// before the run-time library.
#[unsafe(no_mangle)]
extern "C" fn __asan_default_options() -> *const c_char {
    c"verify_asan_link_order=0".as_ptr()
}

/// Options of the thread sanitizer. The sanitizer does not see the synchronization of this library,
/// and would report memory written by libc's functions on behalf of the library.
#[unsafe(no_mangle)]
extern "C" fn __tsan_default_options() -> *const c_char {
    c"ignore_noninstrumented_modules=1".as_ptr()
}
