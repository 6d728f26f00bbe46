// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask cross MACHINE --system`: guests with kernel, libc and programs of a Debian distribution, in a
//! fully emulated machine. The programs of this project are linked with the libc of the oldest one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::cache;
use crate::cpio::Tree;
use crate::machine::Machine;
use crate::packages::{apt_install, has_program};
use crate::tool::{self, ToolError, at, wrong};

/// A distribution of Debian, from 11 to the one in preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Distribution {
    Bullseye,
    Bookworm,
    Trixie,
    Sid,
}

impl Distribution {
    fn name(self) -> &'static str {
        match self {
            Distribution::Bullseye => "bullseye",
            Distribution::Bookworm => "bookworm",
            Distribution::Trixie => "trixie",
            Distribution::Sid => "sid",
        }
    }
}

/// The guests: for arm64 trixie has a kernel with pages of 16 KiB.
const GUESTS: [(Machine, Distribution, &str); 11] = [
    (Machine::X86, Distribution::Bullseye, "linux-image-amd64"),
    (Machine::X86, Distribution::Bookworm, "linux-image-amd64"),
    (Machine::X86, Distribution::Trixie, "linux-image-amd64"),
    (Machine::X86, Distribution::Sid, "linux-image-amd64"),
    (Machine::Aarch64, Distribution::Bullseye, "linux-image-arm64"),
    (Machine::Aarch64, Distribution::Bookworm, "linux-image-arm64"),
    (Machine::Aarch64, Distribution::Trixie, "linux-image-arm64-16k"),
    (Machine::Aarch64, Distribution::Sid, "linux-image-arm64"),
    (Machine::S390x, Distribution::Bookworm, "linux-image-s390x"),
    (Machine::S390x, Distribution::Trixie, "linux-image-s390x"),
    (Machine::S390x, Distribution::Sid, "linux-image-s390x"),
];

/// Emulator, its package and arguments, and the console of a guest.
fn emulator(machine: Machine) -> (&'static str, &'static str, &'static [&'static str]) {
    match machine {
        Machine::Aarch64 => (
            "qemu-system-aarch64",
            "qemu-system-arm",
            &[
                "-M",
                "virt",
                "-cpu",
                "max,pauth-impdef=on",
                "-append",
                "console=ttyAMA0 quiet panic=-1",
            ],
        ),
        Machine::S390x => (
            "qemu-system-s390x",
            "qemu-system-misc",
            &["-M", "s390-ccw-virtio", "-cpu", "max", "-append", "console=ttysclp0 quiet panic=-1"],
        ),
        Machine::X86 => (
            "qemu-system-x86_64",
            "qemu-system-x86",
            &["-M", "q35", "-cpu", "max", "-append", "console=ttyS0 quiet panic=-1 no_timer_check"],
        ),
    }
}

/// Longest run of a guest, seconds: some minutes on an idle machine.
const LIMIT: &str = "3600";

/// Programs of a guest, beside its kernel.
const PROGRAMS: &str =
    "base-files,libc6,libgcc-s1,busybox-static,redis-server,redis-tools,nginx,curl";

/// nginx as the first process of a guest runs it.
const NGINX: &str = "user root; daemon off; pid /tmp/nginx.pid; error_log stderr; events {}
http { access_log off; server { listen 8080; root /tmp/files; } }
";

/// The guest's init. A line with `NAME: STATUS` has the exit status of a part.
const INIT: &str = "#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/bin HOME=/tmp
for mount in proc:/proc sysfs:/sys devtmpfs:/dev tmpfs:/dev/shm tmpfs:/tmp tmpfs:/run cgroup2:/sys/fs/cgroup; do
    busybox mkdir -p ${mount#*:}
    busybox mount -t ${mount%:*} none ${mount#*:}
done
busybox ip link set lo up
# With large pages a packet takes much of a buffer of TCP's usual size, and TCP crawls.
echo 4096 4194304 6291456 | busybox tee /proc/sys/net/ipv4/tcp_rmem >/proc/sys/net/ipv4/tcp_wmem
echo # Behind the output of the firmware.
echo \"kernel: $(busybox uname -r)\"
echo \"libc: $(/lib/*-linux-gnu/libc.so.6 | busybox sed -n '1s/.*version \\([0-9.]*[0-9]\\).*/\\1/p')\"
busybox sed -n 's/^KernelPageSize: *//p' /proc/self/smaps | busybox sed '1s/^/pages: /;1q'
smc demo --size 16M
echo \"smc demo: $?\"
[ -e /usr/lib/smc/libsmc_preload.so ] || busybox poweroff -f
smc fabric &
# client NAME COMMAND...: runs a client, whose connections have to be of SMC-D.
client() {
    name=$1
    shift
    busybox mkdir /tmp/$name
    smc run --always '*' --status /tmp/$name \"$@\" >/dev/null
    result=$?
    busybox cat /tmp/$name/*
    busybox grep -q SMC-D /tmp/$name/* || result=SMC-D-was-not-used
    [ $name != nginx ] || busybox cmp /tmp/files/file /tmp/file || result=other-bytes
    echo \"smc run $name: $result\"
}
smc run redis-server --save '' >/dev/null &
until redis-cli ping >/dev/null 2>&1; do busybox sleep 1; done
client redis redis-benchmark -q -n 100 -c 4 -d 10000 -t set,get
echo root:x:0:0::/:/bin/sh >/etc/passwd
echo root:x:0: >/etc/group
busybox mkdir -p /tmp/files /var/lib/nginx /var/log/nginx
busybox dd if=/dev/urandom of=/tmp/files/file bs=1M count=10 2>/dev/null
smc run nginx -c /nginx.conf &
until busybox nc 127.0.0.1 8080 </dev/null >/dev/null 2>&1; do busybox sleep 1; done
client nginx curl --silent --fail --output /tmp/file http://127.0.0.1:8080/file
smc doctor
busybox poweroff -f
";

/// Runs the guests of the machine. The exit code says whether all have passed.
///
/// # Errors
/// Packages are missing, the command does not build, or a guest does not start.
pub(super) fn run(
    machine: Machine,
    checkout: &Path,
    install: bool,
    only: Option<Distribution>,
) -> Result<ExitCode, ToolError> {
    let (qemu, package, _) = emulator(machine);
    let missing: Vec<_> = [(qemu, package), ("mmdebstrap", "mmdebstrap")]
        .into_iter()
        .filter(|(program, _)| !has_program(program))
        .map(|(_, package)| package.to_owned())
        .collect();
    if !missing.is_empty() && !install {
        return Err(ToolError::Packages(missing));
    }
    if !missing.is_empty() {
        apt_install(&missing)?;
    }
    let built = build(machine, checkout)?;
    let mut rows = vec!["| machine | kernel | pages | glibc | passed |".to_owned()];
    rows.push("|---|---|---|---|---|".to_owned());
    let mut is_ok = true;
    for (_, distribution, kernel) in GUESTS.into_iter().filter(|(of, distribution, _)| {
        *of == machine && only.is_none_or(|only| only == *distribution)
    }) {
        let report = guest(machine, distribution, kernel, &built)?;
        is_ok &= report.has_passed(machine);
        rows.push(report.row(machine));
    }
    println!("\n{}", rows.join("\n"));
    Ok(if is_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Lines of a guest.
#[derive(Default)]
struct Report {
    kernel: String,
    pages: String,
    libc: String,
    parts: Vec<(String, String)>,
}

impl Report {
    fn take(&mut self, line: &str) {
        let Some((name, value)) = line.trim().split_once(": ") else { return };
        match name {
            "kernel" => value.clone_into(&mut self.kernel),
            "pages" => value.clone_into(&mut self.pages),
            "libc" => value.clone_into(&mut self.libc),
            "smc demo" | "smc run redis" | "smc run nginx" => {
                self.parts.push((name.to_owned(), value.to_owned()))
            }
            _ => {}
        }
    }

    fn has_passed(&self, machine: Machine) -> bool {
        let expected = if machine.has_smc_run() { 3 } else { 1 };
        self.parts.len() == expected && self.parts.iter().all(|(_, status)| status == "0")
    }

    fn row(&self, machine: Machine) -> String {
        let passed: Vec<_> = self.parts.iter().filter(|(_, status)| status == "0").collect();
        let passed: Vec<_> = passed.into_iter().map(|(name, _)| format!("`{name}`")).collect();
        let passed = if passed.is_empty() { "nothing".to_owned() } else { passed.join(", ") };
        let Report { kernel, pages, libc, .. } = self;
        format!("| {} | {kernel} | {pages} | {libc} | {passed} |", machine.name())
    }
}

/// Builds the command and the preloaded library with the libc of the oldest distribution. Returns the
/// directory of both, stripped.
fn build(machine: Machine, checkout: &Path) -> Result<PathBuf, ToolError> {
    // Without smc run, the machine's guests are no older than the libc of this machine's compiler.
    let flags = if machine.has_smc_run() { oldest_libc(machine)? } else { Vec::new() };
    let built = machine.built(&checkout.join("target"), "debug");
    for name in files(machine) {
        let mut cargo = machine.cargo(checkout)?;
        cargo.arg("rustc").args(match *name {
            "smc" => ["-p", "smc-cli", "--bin=smc"],
            _ => ["-p", "smc-preload", "--lib"],
        });
        tool::succeed(cargo.arg("--").args(&flags))?;
    }
    let stripped = built.join("system");
    fs::create_dir_all(&stripped).map_err(at(&stripped))?;
    for name in files(machine) {
        let mut strip = Command::new(machine.program("strip"));
        tool::succeed(strip.arg("-o").arg(stripped.join(name)).arg(built.join(name)))?;
    }
    Ok(stripped)
}

/// Flags to link with the libc of the oldest distribution.
fn oldest_libc(machine: Machine) -> Result<Vec<String>, ToolError> {
    let root = root(machine, Distribution::Bullseye, "libc", "base-files,libc6-dev,libgcc-s1")?;
    let libraries = root.join(format!("usr/lib/{}-linux-gnu", machine.name()));
    // Absolute links would lead to the libraries of this machine.
    for directory in [&libraries, &root.join("usr/lib64")] {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let link = entry.path();
            let Ok(target) = fs::read_link(&link) else { continue };
            if target.is_absolute() && !target.starts_with(&root) {
                let inside = root.join(target.strip_prefix("/").unwrap_or(&target));
                fs::remove_file(&link).map_err(at(&link))?;
                std::os::unix::fs::symlink(inside, &link).map_err(at(&link))?;
            }
        }
    }
    // The compiler looks into its own directories before those of its --sysroot.
    let options = [("--sysroot=", &root), ("-B", &libraries), ("-L", &libraries)];
    Ok(options.map(|(option, path)| format!("-Clink-arg={option}{}", path.display())).into())
}

fn files(machine: Machine) -> &'static [&'static str] {
    if machine.has_smc_run() { &["smc", "libsmc_preload.so"] } else { &["smc"] }
}

/// Runs a guest to its end.
fn guest(
    machine: Machine,
    distribution: Distribution,
    kernel: &str,
    built: &Path,
) -> Result<Report, ToolError> {
    println!("\n{}: {kernel} of {}", machine.name(), distribution.name());
    let root = root(machine, distribution, kernel, &format!("{PROGRAMS},{kernel}"))?;
    // Newer packages have the kernel beside its modules.
    let mut places = vec![root.join("boot")];
    let modules = fs::read_dir(root.join("usr/lib/modules")).into_iter().flatten().flatten();
    places.extend(modules.map(|entry| entry.path()));
    let entries = places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten().flatten();
    let image = entries.map(|entry| entry.path()).find(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
    });
    let image = image.ok_or_else(|| wrong(kernel, "has no kernel"))?;
    let mut tree = Tree::default();
    for entry in fs::read_dir(&root).map_err(at(&root))?.flatten() {
        if entry.file_name() != "boot" {
            tree.copy(&entry.path(), &entry.file_name().to_string_lossy())?;
        }
    }
    tree.file("init", INIT.as_bytes().to_vec());
    tree.file("nginx.conf", NGINX.as_bytes().to_vec());
    for name in files(machine) {
        let place = if *name == "smc" { "usr/bin" } else { "usr/lib/smc" };
        tree.copy(&built.join(name), &format!("{place}/{name}"))?;
    }
    let initrd = built.join(format!("{}.cpio", distribution.name()));
    fs::write(&initrd, tree.archive()).map_err(at(&initrd))?;
    let (qemu, _, arguments) = emulator(machine);
    let mut guest = Command::new("timeout");
    guest.args(["--kill-after=5", LIMIT, qemu]).args(arguments);
    guest.args(["-smp", "2", "-m", "1G", "-nographic", "-nic", "none", "-no-reboot", "-kernel"]);
    guest.arg(image).arg("-initrd").arg(&initrd);
    let mut report = Report::default();
    tool::lines(guest, |line| {
        println!("{line}");
        report.take(line);
    })?;
    fs::remove_file(&initrd).map_err(at(&initrd))?;
    Ok(report)
}

/// The unpacked files of packages of a distribution and of all their dependencies, downloaded once.
fn root(
    machine: Machine,
    distribution: Distribution,
    name: &str,
    packages: &str,
) -> Result<PathBuf, ToolError> {
    let place = cache::directory()?.join("debian");
    fs::create_dir_all(&place).map_err(at(&place))?;
    let name = format!("{}-{}-{name}", distribution.name(), machine.of_debian());
    let (root, new) = (place.join(&name), place.join(format!("{name}.new")));
    let list = place.join(format!("{name}.packages"));
    if root.exists() && fs::read_to_string(&list).is_ok_and(|list| list == packages) {
        return Ok(root);
    }
    crate::package::remove(&root)?;
    crate::package::remove(&new)?;
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap.args(["--quiet", "--variant=extract", "--mode=root"]);
    mmdebstrap.args(["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", "--architectures"]);
    mmdebstrap.arg(machine.of_debian());
    // A mirror may be older than its index says.
    mmdebstrap.arg("--aptopt=Acquire::Check-Valid-Until \"false\"");
    for left_out in ["share/doc", "share/man", "share/locale", "lib/modules/*/kernel", "lib/debug"]
    {
        mmdebstrap.arg(format!("--dpkgopt=path-exclude=/usr/{left_out}/*"));
        mmdebstrap.arg(format!("--dpkgopt=path-exclude=/{left_out}/*"));
    }
    mmdebstrap.arg(format!("--include={packages}")).arg(distribution.name()).arg(&new);
    mmdebstrap.arg(format!(
        "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {} main",
        distribution.name()
    ));
    tool::succeed(&mut mmdebstrap)?;
    fs::rename(&new, &root).map_err(at(&new))?;
    fs::write(&list, packages).map_err(at(&list))?;
    Ok(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_passes_by_all_of_its_parts() {
        let mut report = Report::default();
        let lines = ["kernel: 6.1.0", "libc: 2.36", "pages: 4 kB", "smc demo: 0\r", "2. Two: 1"];
        lines.iter().for_each(|line| report.take(line));
        assert!(report.has_passed(Machine::S390x) && !report.has_passed(Machine::Aarch64));
        assert_eq!(report.row(Machine::S390x), "| s390x | 6.1.0 | 4 kB | 2.36 | `smc demo` |");
        report.take("smc run redis: SMC-D-was-not-used");
        assert!(!report.has_passed(Machine::Aarch64));
        assert_eq!(report.row(Machine::Aarch64), "| aarch64 | 6.1.0 | 4 kB | 2.36 | `smc demo` |");
    }
}
