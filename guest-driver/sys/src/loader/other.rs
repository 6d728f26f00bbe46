// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A dynamic linker for a static program, on other machines than x86-64: there is none.

use thiserror::Error;

/// Why no dynamic linker can be loaded into the next program.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The loader knows no instructions of this machine.
    #[error("static programs are for x86-64 only")]
    Machine,
}

/// A loader for this machine: there is none.
#[derive(Debug)]
pub enum Loader {}

impl Loader {
    /// Fails.
    ///
    /// # Errors
    /// [`LoadError`]: always.
    pub fn start() -> Result<Loader, LoadError> {
        Err(LoadError::Machine)
    }

    /// Fails.
    ///
    /// # Errors
    /// [`LoadError`]: always.
    pub fn start_for_child() -> Result<Loader, LoadError> {
        Err(LoadError::Machine)
    }

    /// Ends the loader.
    pub fn withdraw(self) {
        match self {}
    }
}
