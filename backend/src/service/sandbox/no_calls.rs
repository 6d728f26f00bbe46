// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Machines without a filter of system calls.

use super::{Process, SandboxError};
use crate::service::args::SandboxMode;

/// Warns of unrestricted system calls.
///
/// # Errors
/// None.
pub fn restrict_syscalls(_: Process, mode: SandboxMode) -> Result<(), SandboxError> {
    if mode != SandboxMode::Off {
        tracing::warn!("system calls are not restricted on this machine");
    }
    Ok(())
}

/// Does nothing.
///
/// # Errors
/// None.
pub fn restrict_keeper_syscalls(_: SandboxMode) -> Result<(), SandboxError> {
    Ok(())
}
