// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machines.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::ToolError;

/// A machine, as the first part of its target of Rust names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Machine {
    /// 64-bit Arm, little-endian.
    Aarch64,
    /// IBM Z, big-endian.
    S390x,
    /// The machine of the developers: for --system only.
    #[value(name = "x86_64")]
    X86,
}

impl Machine {
    pub(super) fn name(self) -> &'static str {
        match self {
            Machine::Aarch64 => "aarch64",
            Machine::S390x => "s390x",
            Machine::X86 => "x86_64",
        }
    }

    /// The name of Debian.
    pub(super) fn of_debian(self) -> &'static str {
        match self {
            Machine::Aarch64 => "arm64",
            Machine::S390x => "s390x",
            Machine::X86 => "amd64",
        }
    }

    pub(super) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// A program of the compiler for the machine, as `gcc` or `strip`.
    pub(super) fn program(self, name: &str) -> String {
        format!("{}-linux-gnu-{name}", self.name())
    }

    /// A command of cargo for this machine; its name comes first among the arguments to add.
    ///
    /// # Errors
    /// The task was not started by cargo.
    pub(super) fn cargo(self, root: &Path) -> Result<Command, ToolError> {
        let program = std::env::var_os("CARGO").ok_or(ToolError::NoVariable("CARGO"))?;
        let mut cargo = Command::new(program);
        cargo.current_dir(root);
        if self != Machine::X86 {
            let target = self.target();
            let name = target.replace('-', "_").to_uppercase();
            cargo.env(format!("CARGO_TARGET_{name}_LINKER"), self.program("gcc"));
            cargo.env("CARGO_BUILD_TARGET", target);
        }
        Ok(cargo)
    }

    /// The directory of cargo's results for this machine.
    pub(super) fn built(self, root: &Path) -> PathBuf {
        let target = root.join("target");
        if self == Machine::X86 {
            target.join("debug")
        } else {
            target.join(self.target()).join("debug")
        }
    }

    pub(super) fn emulator(self) -> String {
        format!("qemu-{}-static", self.name())
    }

    /// The directory with the machine's libc.
    pub(super) fn libraries(self) -> String {
        format!("/usr/{}-linux-gnu", self.name())
    }

    /// The packages to build for the machine, and to run programs of the machine.
    pub(super) fn packages(self) -> Vec<String> {
        let libc = format!("libc6-dev-{}-cross", self.of_debian());
        let gcc = format!("gcc-{}-linux-gnu", self.name().replace('_', "-"));
        match self {
            Machine::X86 => vec![gcc],
            Machine::Aarch64 | Machine::S390x => vec![gcc, libc, "qemu-user-static".to_owned()],
        }
    }
}
