// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linker arguments for `libsmc.so`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Programs ask for this name at their start. The name changes when programs have to be rebuilt.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsmc.so.0");
    // The threads of a stack run code of the library, so dlclose(3) must not unmap it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
