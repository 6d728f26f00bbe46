// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The three commands, and their requests to the kernel.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use crate::error::CliError;

/// A command of smc-tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tool {
    /// Sockets.
    Smcss,
    /// Devices, link groups and statistics of SMC-D.
    Smcd,
    /// The same of SMC-R.
    Smcr,
}

impl Tool {
    /// The command with the name or path of a program, if any.
    pub(crate) fn named(program: &OsStr) -> Option<Tool> {
        let name = Path::new(program).file_name()?;
        [Tool::Smcss, Tool::Smcd, Tool::Smcr].into_iter().find(|tool| name == tool.name())
    }

    /// Name of the command.
    pub(super) fn name(self) -> &'static str {
        match self {
            Tool::Smcss => "smcss",
            Tool::Smcd => "smcd",
            Tool::Smcr => "smcr",
        }
    }
}

/// An answer of AF_SMC; nothing where the kernel has none.
pub(super) fn of_kernel<T: Default>(answer: io::Result<T>) -> Result<T, CliError> {
    use io::ErrorKind::{InvalidInput, NotFound, Unsupported};
    match answer {
        Ok(answer) => Ok(answer),
        Err(error) if matches!(error.kind(), NotFound | Unsupported | InvalidInput) => {
            Ok(T::default())
        }
        Err(source) => Err(CliError::io("cannot ask AF_SMC")(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_program_selects_the_command() {
        let named = |name: &str| Tool::named(OsStr::new(name));
        assert_eq!(named("/usr/bin/smcss"), Some(Tool::Smcss));
        assert_eq!(named("smcd"), Some(Tool::Smcd));
        assert_eq!(named("./smcr"), Some(Tool::Smcr));
        assert_eq!(named("/usr/bin/smc"), None);
        assert_eq!(named("smcss2"), None);
    }
}
