// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Paths of every part of a bed. `cargo xtask vm` sets the variables.

use std::path::{Path, PathBuf};

/// Results of `cargo xtask vm`, by the names of their variables.
#[derive(Clone, Copy, Debug)]
pub(super) enum Built {
    /// `KERNEL`: a vmlinux bootable by PVH, or a bzImage.
    Kernel,
    /// `KERNEL_V1`: a kernel with version 1 of SMC-R over soft-RoCE in AF_SMC.
    KernelV1,
    /// `INITRD`: the guests' initramfs.
    Initrd,
    /// `INITRD_TESTS`: the same with whole test programs for guests.
    InitrdTests,
    /// `INITRD_PROGRAMS`: the usual one with programs of the distribution.
    InitrdPrograms,
    /// `QEMU`: with this project's patches.
    Qemu,
    /// `QEMU_STOCK`: the same release without.
    QemuStock,
    /// `DAEMON`: `vhost-device-ism`.
    Daemon,
    /// `UML`: user-mode Linux, a program, set by `cargo xtask uml`.
    Uml,
    /// `UML_INITRD`: the initramfs of its guests.
    UmlInitrd,
}

impl Built {
    fn variable(self) -> &'static str {
        match self {
            Built::Kernel => "KERNEL",
            Built::KernelV1 => "KERNEL_V1",
            Built::Initrd => "INITRD",
            Built::InitrdTests => "INITRD_TESTS",
            Built::InitrdPrograms => "INITRD_PROGRAMS",
            Built::Qemu => "QEMU",
            Built::QemuStock => "QEMU_STOCK",
            Built::Daemon => "DAEMON",
            Built::Uml => "UML",
            Built::UmlInitrd => "UML_INITRD",
        }
    }

    /// The path in the variable.
    #[track_caller]
    pub(super) fn path(self) -> PathBuf {
        let variable = self.variable();
        let Some(path) = std::env::var_os(variable).map(PathBuf::from) else {
            panic!(
                "{variable} is not set. `cargo xtask vm` runs these tests; to run them by hand: \
                 export $(cargo xtask vm build)"
            );
        };
        assert!(path.exists(), "{variable}={} does not exist", path.display());
        path
    }
}

/// The launch script of one guest.
pub(super) fn run_script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../qemu/run.sh")
}

/// The file name of this program.
pub(super) fn program() -> String {
    let this = std::env::current_exe().unwrap();
    this.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// `smc-test-peer` beside the test executable.
#[track_caller]
pub(super) fn test_peer() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    // target/release/deps/vm-0123 or target/release/examples/vm-demo
    let found = this.ancestors().map(|dir| dir.join("smc-test-peer")).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no smc-test-peer near {}", this.display()))
}

/// The directory `vm` in Cargo's target directory.
#[track_caller]
pub(super) fn logs() -> PathBuf {
    let peer = test_peer();
    let target = peer.ancestors().nth(2).unwrap();
    target.join("vm")
}
