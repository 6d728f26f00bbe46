// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The other machines.

use std::path::Path;
use std::process::Command;

use crate::tool::ToolError;

/// Another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Machine {
    /// 64-bit Arm, little-endian.
    Aarch64,
    /// IBM Z, big-endian.
    S390x,
}

impl Machine {
    pub(super) fn name(self) -> &'static str {
        match self {
            Machine::Aarch64 => "aarch64",
            Machine::S390x => "s390x",
        }
    }

    pub(super) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// The compiler of C, as linker.
    pub(super) fn linker(self) -> String {
        format!("{}-linux-gnu-gcc", self.name())
    }

    /// A command of cargo for this machine; its name comes first among the arguments to add.
    ///
    /// # Errors
    /// The task was not started by cargo.
    pub(super) fn cargo(self, root: &Path) -> Result<Command, ToolError> {
        let target = self.target();
        let linker = format!("CARGO_TARGET_{}_LINKER", target.replace('-', "_").to_uppercase());
        let program = std::env::var_os("CARGO").ok_or(ToolError::NoVariable("CARGO"))?;
        let mut cargo = Command::new(program);
        cargo.current_dir(root).env(linker, self.linker()).env("CARGO_BUILD_TARGET", target);
        Ok(cargo)
    }

    pub(super) fn emulator(self) -> String {
        format!("qemu-{}-static", self.name())
    }

    /// The directory with the machine's libc.
    pub(super) fn libraries(self) -> String {
        format!("/usr/{}-linux-gnu", self.name())
    }

    pub(super) fn packages(self) -> Vec<String> {
        let libc = match self {
            Machine::Aarch64 => "libc6-dev-arm64-cross",
            Machine::S390x => "libc6-dev-s390x-cross",
        };
        let gcc = format!("gcc-{}-linux-gnu", self.name());
        vec![gcc, libc.to_owned(), "qemu-user-static".to_owned()]
    }
}
