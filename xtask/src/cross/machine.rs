// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The other machines.

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
