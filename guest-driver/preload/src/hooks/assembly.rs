// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Functions in assembly, because Rust cannot define them: variable numbers of arguments, functions
//! returning twice.

/// Defines an exported function by its instructions for each processor. `{function}` in them is the
/// function behind `calls`.
macro_rules! in_assembly {
    ($name:ident calls $function:ident:
     x86_64 { $($x86_64:literal)* } aarch64 { $($aarch64:literal)* }) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!($($x86_64,)* function = sym $function)
        }
        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!($($aarch64,)* function = sym $function)
        }
    };
}
pub(super) use in_assembly;
