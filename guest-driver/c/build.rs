// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the linker writes into `libsmc.so`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Programs ask for this name when they start. It changes when programs have to be built anew.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsmc.so.0");
    // The threads of a stack run code of the library, so dlclose(3) must not unmap it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
