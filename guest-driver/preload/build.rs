// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Settings of the linker.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // A call of a hook from another hook means this library's, also where a library before this one in
    // the order of the objects wraps the same function.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
