// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The unwinder of libgcc, needed for panics, and for threads cancelled within a hook: few processes
//! ever do either. So the library has private functions of these names, invisible to other objects: the
//! first call loads libgcc, at no cost for the start of a process. The functions go on by a jump,
//! because the unwinder begins with the frame of its caller.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of libgcc.
#[repr(C)]
struct Function {
    /// Null until found. Read by the instructions below.
    found: AtomicPtr<c_void>,
    name: &'static CStr,
}

/// The place of [`Function::found`], for the instructions below.
const FOUND: usize = std::mem::offset_of!(Function, found);

impl Function {
    const fn new(name: &'static CStr) -> Function {
        Function { found: AtomicPtr::new(std::ptr::null_mut()), name }
    }
}

/// Finds a function. The caller cannot go on without the function.
extern "C" fn find(function: &Function) -> *mut c_void {
    type Open = unsafe extern "C" fn(*const c_char, std::ffi::c_int) -> *mut c_void;
    // SAFETY: the names end with zero bytes. libc's `dlopen` has this type, and is not the hook for the
    // program's calls. libgcc stays loaded.
    let found = unsafe {
        let open = libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr());
        if open.is_null() {
            std::process::abort();
        }
        let open = std::mem::transmute::<*mut c_void, Open>(open);
        let libgcc = open(c"libgcc_s.so.1".as_ptr(), libc::RTLD_NOW);
        if libgcc.is_null() {
            std::process::abort();
        }
        libc::dlsym(libgcc, function.name.as_ptr())
    };
    if found.is_null() {
        std::process::abort();
    }
    function.found.store(found, Ordering::Relaxed);
    found
}

#[cfg(target_arch = "x86_64")]
macro_rules! go_on {
    () => {
        "endbr64
         mov r11, qword ptr [rip + {function} + {found}]
         test r11, r11
         jz 2f
         jmp r11
         2:
         push rdi
         push rsi
         push rdx
         lea rdi, [rip + {function}]
         call {find}
         mov r11, rax
         pop rdx
         pop rsi
         pop rdi
         jmp r11"
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! go_on {
    () => {
        "hint #34 // bti c
         adrp x17, {function}
         add x17, x17, :lo12:{function}
         ldr x16, [x17, {found}]
         cbz x16, 2f
         br x16
         2:
         stp x29, x30, [sp, #-48]!
         stp x0, x1, [sp, #16]
         str x2, [sp, #32]
         mov x0, x17
         bl {find}
         mov x16, x0
         ldr x2, [sp, #32]
         ldp x0, x1, [sp, #16]
         ldp x29, x30, [sp], #48
         br x16"
    };
}

/// Defines the functions of libgcc called by `std`, with at most three arguments.
macro_rules! unwinder {
    ($($name:ident)*) => {
        $(std::arch::global_asm!(
            concat!(".pushsection .text.smc_", stringify!($name), ",\"ax\",@progbits"),
            concat!(".globl ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ",@function"),
            concat!(stringify!($name), ":"),
            go_on!(),
            concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            ".popsection",
            function = sym functions::$name,
            found = const FOUND,
            find = sym find,
        );)*

        #[allow(non_upper_case_globals, reason = "they have the names of the functions")]
        mod functions {
            use super::Function;
            $(pub(super) static $name: Function = {
                const NAME: &str = concat!(stringify!($name), "\0");
                match std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()) {
                    Ok(name) => Function::new(name),
                    Err(_) => Function::new(c""),
                }
            };)*
        }
    };
}

unwinder! {
    _Unwind_Backtrace _Unwind_DeleteException _Unwind_FindEnclosingFunction _Unwind_GetCFA
    _Unwind_GetDataRelBase _Unwind_GetGR _Unwind_GetIP _Unwind_GetIPInfo
    _Unwind_GetLanguageSpecificData _Unwind_GetRegionStart _Unwind_GetTextRelBase
    _Unwind_RaiseException _Unwind_Resume _Unwind_SetGR _Unwind_SetIP
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught() {
        let caught = std::panic::catch_unwind(|| {
            let _dropped = String::from("x");
            std::panic::resume_unwind(Box::new(7))
        });
        assert_eq!(caught.err().and_then(|value| value.downcast_ref::<i32>().copied()), Some(7));
        for function in [&functions::_Unwind_RaiseException, &functions::_Unwind_GetIPInfo] {
            assert!(!function.found.load(Ordering::Relaxed).is_null(), "{:?}", function.name);
        }
    }
}
