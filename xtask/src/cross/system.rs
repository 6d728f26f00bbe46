// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask cross aarch64 --system`: `smc demo` in a system guest with Debian's kernel. The
//! user-mode emulation lacks asynchronous IO, filters of system calls, and `futex_waitv`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use super::machine::Machine;
use crate::cache;
use crate::cpio::Tree;
use crate::packages::{apt_install, has_program};
use crate::tool::{self, ToolError, at};

const QEMU: &str = "qemu-system-aarch64";
/// The packages depending on the newest kernel, with usual pages and with large ones.
const KERNELS: [&str; 2] = ["linux-image-arm64", "linux-image-arm64-16k"];
/// Debian's first distribution with a kernel with large pages.
const LARGE_PAGES: &str = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
                           http://deb.debian.org/debian trixie main\n";
/// Longest run of the guest, seconds: an emulated processor is some 20 times slower.
const LIMIT: &str = "900";
/// Line of the guest after a demo that has passed.
const PASSED: &str = "smc demo: 0";

const INIT: &str = "#!/bin/busybox sh
export PATH=/bin HOME=/tmp
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
busybox mkdir /dev/shm
busybox mount -t tmpfs shm /dev/shm
busybox mount -t tmpfs tmp /tmp
busybox ip link set lo up
# With large pages a packet takes much of a buffer of TCP's usual size, and TCP crawls.
echo 4096 4194304 6291456 | busybox tee /proc/sys/net/ipv4/tcp_rmem >/proc/sys/net/ipv4/tcp_wmem
busybox uname -srm
busybox grep KernelPageSize /proc/self/smaps | busybox head -n 1
smc demo --size 16M
echo \"smc demo: $?\"
busybox poweroff -f
";

/// Runs the demo in the guest. The exit code says whether the demo passed.
///
/// # Errors
/// Packages are missing, the command does not build, or the guest does not start.
pub(super) fn run(
    machine: Machine,
    root: &Path,
    install: bool,
    large_pages: bool,
) -> Result<ExitCode, ToolError> {
    if machine != Machine::Aarch64 {
        let what = format!("--system knows no guest of {}", machine.name());
        return Err(ToolError::Answer { program: "xtask".to_owned(), what });
    }
    if !has_program(QEMU) {
        let packages = vec!["qemu-system-arm".to_owned()];
        if !install {
            return Err(ToolError::Packages(packages));
        }
        apt_install(&packages)?;
    }
    let packages = cache::directory()?.join("arm64");
    let image = if large_pages {
        let of_another = cache::directory()?.join("arm64-trixie");
        unpack(&of_another, KERNELS[1], Some(LARGE_PAGES))?
    } else {
        unpack(&packages, KERNELS[0], None)?
    };
    let image = image.join("boot");
    let kernel = names(&image)?.into_iter().find(|path| starts_with(path, "vmlinuz-"));
    let busybox = unpack(&packages, "busybox-static", None)?.join("bin/busybox");
    let mut cargo = machine.cargo(root)?;
    tool::succeed(cargo.args(["build", "-p", "smc-cli", "--bin", "smc"]))?;
    let built = root.join("target").join(machine.target()).join("debug");
    let initrd = built.join("system.cpio");
    fs::write(&initrd, tree(machine, &built, &busybox)?.archive()).map_err(at(&initrd))?;

    let mut guest = Command::new("timeout");
    guest.args(["--kill-after=5", LIMIT, QEMU, "-M", "virt", "-cpu", "max,pauth-impdef=on"]);
    guest.args(["-smp", "2", "-m", "1G", "-nographic", "-nic", "none", "-no-reboot", "-kernel"]);
    guest.arg(kernel.unwrap_or_default()).arg("-initrd").arg(&initrd);
    guest.args(["-append", "console=ttyAMA0 quiet panic=-1"]);
    let mut passed = false;
    tool::lines(guest, |line| {
        println!("{line}");
        passed |= line.trim() == PASSED;
    })?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The guest's files: the command, its libraries, and a shell.
fn tree(machine: Machine, built: &Path, busybox: &Path) -> Result<Tree, ToolError> {
    let read = |path: &Path| fs::read(path).map_err(at(path));
    let small = built.join("smc.stripped");
    let mut strip = Command::new(format!("{}-linux-gnu-strip", machine.name()));
    tool::succeed(strip.arg("-o").arg(&small).arg(built.join("smc")))?;
    let mut tree = Tree::default();
    for directory in ["proc", "sys", "dev", "tmp", "run"] {
        tree.directory(directory);
    }
    tree.file("init", INIT.as_bytes().to_vec());
    tree.file("bin/busybox", read(busybox)?);
    tree.file("bin/smc", read(&small)?);
    for library in ["ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libgcc_s.so.1"] {
        let path = Path::new(&machine.libraries()).join("lib").join(library);
        tree.file(&format!("lib/{library}"), read(&path)?);
    }
    Ok(tree)
}

/// The unpacked files of a Debian package of arm64, downloaded once into `place`, from another distribution
/// than this machine's with `source`. A package of `KERNELS` has no files of its own: its dependency is
/// unpacked.
fn unpack(place: &Path, package: &str, source: Option<&str>) -> Result<PathBuf, ToolError> {
    let unpacked = place.join(package);
    if unpacked.join("done").exists() {
        return Ok(unpacked);
    }
    for directory in ["state/lists/partial", "cache/archives/partial"] {
        let directory = place.join(directory);
        fs::create_dir_all(&directory).map_err(at(&directory))?;
    }
    let status = place.join("state/status");
    fs::write(&status, "").map_err(at(&status))?;
    let list = place.join("sources.list");
    if let Some(source) = source {
        fs::write(&list, source).map_err(at(&list))?;
    }
    // The machine's own apt stays as it is: another architecture has lists and a cache of its own.
    let apt = |program: &str| {
        let mut apt = Command::new(program);
        apt.current_dir(place).args(["-q", "-o", "APT::Architecture=arm64"]);
        apt.args(["-o", "APT::Architectures::=arm64", "-o", "APT::Sandbox::User=root"]);
        for (option, path) in
            [("State", "state"), ("State::status", "state/status"), ("Cache", "cache")]
        {
            apt.arg("-o").arg(format!("Dir::{option}={}", place.join(path).display()));
        }
        if source.is_some() {
            apt.arg("-o").arg(format!("Dir::Etc::sourcelist={}", list.display()));
            apt.args(["-o", "Dir::Etc::sourceparts=/dev/null"]);
        }
        apt
    };
    tool::succeed(apt("apt-get").arg("update"))?;
    let mut depends = apt("apt-cache");
    depends.args(["depends", "--important", package]);
    let depends = tool::output(depends)?;
    let mut named = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let named =
        named.next_back().filter(|name| name.starts_with("linux-image-")).unwrap_or(package);
    tool::succeed(apt("apt-get").args(["download", named]))?;
    let file = names(place)?.into_iter().find(|path| starts_with(path, &format!("{named}_")));
    let mut dpkg = Command::new("dpkg-deb");
    tool::succeed(dpkg.arg("-x").arg(file.unwrap_or_default()).arg(&unpacked))?;
    fs::write(unpacked.join("done"), "").map_err(at(&unpacked))?;
    Ok(unpacked)
}

fn names(directory: &Path) -> Result<Vec<PathBuf>, ToolError> {
    let entries = fs::read_dir(directory).map_err(at(directory))?;
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(at(directory))).collect()
}

fn starts_with(path: &Path, start: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
}
