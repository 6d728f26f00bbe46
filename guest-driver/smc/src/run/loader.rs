// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A dynamic linker for a static program.

#[cfg(target_arch = "x86_64")]
pub(super) use ism_sys::Loader;

/// Has the dynamic linker loaded into the next program executed by this process.
///
/// # Errors
/// The reason for the program to stay on TCP.
#[cfg(target_arch = "x86_64")]
pub(super) fn start() -> Result<Loader, String> {
    Loader::start().map_err(|why| why.to_string())
}

/// A loader for this machine: there is none.
#[cfg(not(target_arch = "x86_64"))]
pub(super) enum Loader {}

#[cfg(not(target_arch = "x86_64"))]
impl Loader {
    pub(super) fn withdraw(self) {
        match self {}
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn start() -> Result<Loader, String> {
    Err("static programs are for x86-64 only".into())
}
