// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machines of packages and of emulated tests.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::packages::{apt_install, has_program};
use crate::tool::{self, ToolError};

/// A machine, as the first part of its target of Rust names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Machine {
    /// 64-bit Arm, little-endian.
    Aarch64,
    /// IBM Z, big-endian.
    S390x,
    /// 64-bit x86, little-endian.
    #[value(name = "x86_64")]
    X86,
}

impl Machine {
    /// The machine of this process; a machine without a row is taken for x86-64.
    pub(crate) fn own() -> Machine {
        match std::env::consts::ARCH {
            "aarch64" => Machine::Aarch64,
            "s390x" => Machine::S390x,
            _ => Machine::X86,
        }
    }

    pub(crate) fn is_own(self) -> bool {
        self == Machine::own()
    }

    /// Whether the preloaded library is for the machine.
    pub(crate) fn has_smc_run(self) -> bool {
        self != Machine::S390x
    }

    /// Makes sure that compiler, libc, emulator and standard library are there.
    ///
    /// # Errors
    /// Packages are missing, and may not be installed.
    pub(crate) fn ensure(self, install: bool) -> Result<(), ToolError> {
        let is_there = || {
            let libc = Path::new(&self.libraries()).join("lib/crt1.o").exists();
            let is_own = self == Machine::X86;
            has_program(&self.program("gcc")) && (is_own || libc && has_program(&self.emulator()))
        };
        if !is_there() {
            let packages = self.packages();
            if !install {
                return Err(ToolError::Packages(packages));
            }
            apt_install(&packages)?;
        }
        let mut rustup = Command::new("rustup");
        tool::succeed(rustup.args(["target", "add", &self.target()]))
    }

    /// A command that runs a program of the machine, by the emulator if need be.
    pub(crate) fn run(self, program: &Path) -> Command {
        if self.is_own() {
            return Command::new(program);
        }
        let mut command = Command::new(self.emulator());
        command.arg("-L").arg(self.libraries()).arg(program);
        command
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Machine::Aarch64 => "aarch64",
            Machine::S390x => "s390x",
            Machine::X86 => "x86_64",
        }
    }

    /// The name of Debian.
    pub(crate) fn of_debian(self) -> &'static str {
        match self {
            Machine::Aarch64 => "arm64",
            Machine::S390x => "s390x",
            Machine::X86 => "amd64",
        }
    }

    pub(crate) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// A program of the compiler for the machine, as `gcc` or `strip`.
    pub(crate) fn program(self, name: &str) -> String {
        format!("{}-linux-gnu-{name}", self.name())
    }

    /// A command of cargo for this machine; its name comes first among the arguments to add.
    ///
    /// # Errors
    /// The task was not started by cargo.
    pub(crate) fn cargo(self, root: &Path) -> Result<Command, ToolError> {
        let program = std::env::var_os("CARGO").ok_or(ToolError::NoVariable("CARGO"))?;
        let mut cargo = Command::new(program);
        cargo.current_dir(root);
        self.set_target(&mut cargo);
        Ok(cargo)
    }

    /// Has a command of cargo build for this machine.
    pub(crate) fn set_target(self, cargo: &mut Command) {
        if !self.is_own() {
            let target = self.target();
            let name = target.replace('-', "_").to_uppercase();
            cargo.env(format!("CARGO_TARGET_{name}_LINKER"), self.program("gcc"));
            cargo.env("CARGO_BUILD_TARGET", target);
        }
    }

    /// The directory of cargo's results for this machine, of a profile.
    pub(crate) fn built(self, target: &Path, profile: &str) -> PathBuf {
        match self.is_own() {
            true => target.join(profile),
            false => target.join(self.target()).join(profile),
        }
    }

    pub(crate) fn emulator(self) -> String {
        format!("qemu-{}-static", self.name())
    }

    /// The directory with the machine's libc.
    pub(crate) fn libraries(self) -> String {
        format!("/usr/{}-linux-gnu", self.name())
    }

    /// The packages to build for the machine, and to run programs of the machine.
    pub(crate) fn packages(self) -> Vec<String> {
        let libc = format!("libc6-dev-{}-cross", self.of_debian());
        let gcc = format!("gcc-{}-linux-gnu", self.name().replace('_', "-"));
        match self {
            Machine::X86 => vec![gcc],
            Machine::Aarch64 | Machine::S390x => vec![gcc, libc, "qemu-user-static".to_owned()],
        }
    }
}
