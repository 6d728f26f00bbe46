// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm --nested`: the core of the suite under KVM, on machines without it.
//!
//! QEMU emulates AMD's SVM. So an emulated guest, the *outer* guest, has KVM, and runs the tests with guests
//! of its own. Its kernel comes from `tests/vm/outer-kernel.sh`; its image holds the tests with their needs.
//! `tests/vm/outer-init` runs the tests, and tells deaths of the emulation from failures.
//!
//! Now and then the emulation kills a guest: the guest does not boot, boots again unasked, or its kernel
//! reports an instruction without a way to fail. Such a test runs once more, and the last line counts these
//! deaths; a test dying twice has failed. After a death of the outer guest, the remaining tests run in a
//! second one. The conformance suite never got to its end: guests booted again, or the outer guest panicked.
//!
//! Cloud-hypervisor is in no package registry: without `CLOUD_HYPERVISOR=/path` its test reports that no
//! run took place.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use crate::artifacts::{self, Artifacts};
use crate::image::{self, Contents};
use crate::tool::{self, ToolError, at};

/// The core of the suite: the differences between KVM and emulation.
const CORE: [&str; 14] = [
    "boots::a_guest_boots_and_sees_its_device",
    "kvm::kicks_and_interrupts_do_not_pass_through_qemu",
    "kvm::a_slab_in_the_window_costs_a_notification_and_no_memory_slot",
    "boots::guests_come_back_after_reset_panic_and_kill",
    "lifecycle::connections_outlive_a_pause",
    "lifecycle::a_reboot_ends_connections_at_once_and_the_guest_comes_back",
    "lifecycle::a_driver_that_is_killed_leaves_the_fabric_and_its_device_can_be_used_again",
    "lifecycle::a_killed_daemon_resets_connections_within_a_second_and_new_ones_work",
    "lifecycle::an_unplugged_device_ends_its_connections_and_nothing_else",
    "isolation::a_third_guest_that_reads_its_whole_window_finds_nothing",
    "conformance::over_the_window",
    "conformance::over_moves",
    "page::the_commands_for_qemu_start_two_guests_that_talk",
    "page::the_commands_for_cloud_hypervisor_start_two_guests_that_talk",
];

/// The processor of the outer guest: with SVM, without features beyond QEMU's emulation.
const CPU: &str = "EPYC-Rome-v1,+svm,+npt,-nrip-save,-fxsr-opt,-misalignsse,-osvw,-topoext,\
                   -perfctr-core,-clzero,-ibpb,-amd-stibp,-xsavec,-xsaves";
/// Memory of the outer guest: its image, and three guests.
const MEMORY: &str = "4G";

/// Fetches the outer guest's kernel.
const SCRIPT: &str = "tests/vm/outer-kernel.sh";
/// Time limit of two runs of a test, in seconds, including the outer guest's boot.
const TEST_LIMIT: u64 = 1500;
/// How long a measurement may take, in seconds.
const PERF_LIMIT: u64 = 3600;

/// The outer guest's line with its result.
const END: &str = "outer: exit code ";

/// Runs the tests of the core with a name containing one of `only`; all if `only` is empty. After a death of
/// the outer guest, the remaining tests run in a second guest.
///
/// # Errors
/// A build fails, or a program cannot be started.
pub(crate) fn tests(
    root: &Path,
    artifacts: &Artifacts,
    only: &[String],
    show_output: bool,
) -> Result<ExitCode, ToolError> {
    let wanted = |name: &&str| only.is_empty() || only.iter().any(|part| name.contains(part));
    let mut left: Vec<&str> = CORE.into_iter().filter(wanted).collect();
    if left.is_empty() {
        eprintln!("xtask: none of the tests under nested KVM is meant: {}", CORE.join(", "));
        return Ok(ExitCode::FAILURE);
    }
    let keep = if show_output { " outer.keep=yes" } else { "" };
    let mut failed = false;
    for died_before in [false, true] {
        let words = format!("outer.tests={}{keep}", left.join(","));
        let ended = outer(root, artifacts, &words, TEST_LIMIT * left.len() as u64)?;
        left.retain(|name| !ended.tests.iter().any(|(ran, _)| ran == name));
        failed |= ended.tests.iter().any(|(_, passed)| !passed);
        match ended.code {
            Some(0) if !failed => {
                let times = if died_before { "once" } else { "never" };
                eprintln!("xtask: the outer guest died {times}");
                return Ok(ExitCode::SUCCESS);
            }
            None if !died_before => {
                eprintln!("xtask: the outer guest died; tests that run once more: {}", left.len());
            }
            _ => break,
        }
    }
    Ok(ExitCode::FAILURE)
}

/// Measures SMC next to TCP between two guests under KVM.
///
/// # Errors
/// Something does not build or cannot be started.
pub(crate) fn perf(
    root: &Path,
    artifacts: &Artifacts,
    args: &[String],
) -> Result<ExitCode, ToolError> {
    let words = format!("outer.perf=,{}", args.join(","));
    let ended = outer(root, artifacts, &words, PERF_LIMIT)?;
    Ok(ended.code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// How an outer guest ended.
struct Ended {
    /// The reported exit code; `None`: the guest died.
    code: Option<u8>,
    /// The finished tests, and whether they passed.
    tests: Vec<(String, bool)>,
}

/// Boots the outer guest, for so many seconds at most, and shows its output.
fn outer(
    root: &Path,
    artifacts: &Artifacts,
    words: &str,
    seconds: u64,
) -> Result<Ended, ToolError> {
    let start = Instant::now();
    let kernel = match std::env::var_os("OUTER_KERNEL") {
        Some(path) => PathBuf::from(path),
        None => tool::last_line(&root.join(SCRIPT), &[])?,
    };
    let firmware = firmware(root, &artifacts.qemu)?;
    let image = outer_image(root, artifacts, &firmware, &kernel)?;
    let console = artifacts::images(root, artifacts).join("outer.console.log");
    let mut qemu = Command::new("timeout");
    qemu.args(["--signal=KILL", &seconds.to_string()]).arg(&artifacts.qemu);
    for directory in &firmware {
        qemu.arg("-L").arg(directory);
    }
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    qemu.args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU, "-m", MEMORY]);
    qemu.args(["-smp", "2", "-kernel"]).arg(&kernel).arg("-initrd").arg(&image);
    qemu.args(["-append", &format!("console=ttyS0 quiet panic=-1 no_timer_check {words}")]);
    qemu.arg("-serial").arg(format!("file:{}", console.display()));
    // Not "stdio": the end of the input would disconnect the port.
    qemu.args(["-device", "virtio-serial-pci,romfile="]);
    qemu.args(["-chardev", "file,id=output,path=/dev/stdout"]);
    qemu.args(["-device", "virtserialport,chardev=output,name=output"]);
    qemu.stdin(Stdio::null());
    eprintln!("xtask: boots the outer guest (its console: {})", console.display());
    let mut ended = Ended { code: None, tests: Vec::new() };
    let status = tool::lines(qemu, |line| match line.strip_prefix(END) {
        Some(number) => ended.code = number.trim().parse().ok(),
        None => {
            println!("{line}");
            ended.tests.extend(result(line));
        }
    })?;
    let seconds = start.elapsed().as_secs();
    if ended.code.is_some() {
        eprintln!("xtask: the outer guest has ended after {seconds} s");
    } else {
        let text = fs::read(&console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        eprintln!("{}", lines[lines.len().saturating_sub(30)..].join("\n"));
        eprintln!("xtask: the outer guest died after {seconds} s ({status})");
    }
    Ok(ended)
}

/// The name of a finished test, and whether the test passed, from a line of the outer guest.
fn result(line: &str) -> Option<(String, bool)> {
    let (name, end) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let passed = end.starts_with("ok ");
    (passed || end.starts_with("FAILED ")).then(|| (name.to_owned(), passed))
}

fn firmware(root: &Path, qemu: &Path) -> Result<Vec<PathBuf>, ToolError> {
    let mut script = Command::new(root.join("qemu/firmware.sh"));
    script.arg(qemu);
    Ok(tool::output(script)?.lines().map(PathBuf::from).collect())
}

/// The initramfs of the outer guest.
fn outer_image(
    root: &Path,
    artifacts: &Artifacts,
    firmware: &[PathBuf],
    kernel: &Path,
) -> Result<PathBuf, ToolError> {
    let root = fs::canonicalize(root).map_err(at(root))?;
    let images = artifacts::images(&root, artifacts);
    let perf = artifacts::example(&root, "vm-perf")?;
    let beside = |name: &str| artifacts.daemon.with_file_name(name);
    let bash = image::program_of("bash", "bash")?;
    let env = image::program_of("env", "coreutils")?;
    let ip = image::program_of("ip", "iproute2")?;
    let programs = [
        ("vm", artifacts.tests.clone()),
        ("vm-perf", perf),
        ("smc-test-peer", beside("smc-test-peer")),
        ("vhost-device-ism", artifacts.daemon.clone()),
        ("qemu-system-x86_64", artifacts.qemu.clone()),
        ("bash", bash),
        ("usr/bin/env", env),
        ("ip", ip),
    ];
    // The tests look for scripts in the directory of their build.
    let here = |path: &str| (root.join(path).display().to_string(), root.join(path));
    let directory = images.join("directory-of-tests");
    fs::write(&directory, format!("{}\n", root.join("tests").display())).map_err(at(&directory))?;
    let mut files = vec![
        here("qemu/run.sh"),
        here("qemu/firmware.sh"),
        here("tests/Cargo.toml"),
        ("guest/directory".into(), directory),
        ("guest/vmlinux".into(), artifacts.kernel.clone()),
        ("guest/initrd".into(), artifacts.initrd.clone()),
        ("guest/initrd-tests".into(), artifacts.initrd_tests.clone()),
    ];
    for name in ["bios-256k.bin", "linuxboot_dma.bin", "pvh.bin", "kvmvapic.bin"] {
        let found = firmware.iter().map(|directory| directory.join(name)).find(|p| p.is_file());
        files.extend(found.map(|path| (path.display().to_string(), path)));
    }
    let modules = kernel.parent().unwrap_or(Path::new("."));
    for path in image::files_below(modules)? {
        if path.extension().is_some_and(|extension| extension == "ko") {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            files.push((format!("guest/modules/{name}"), path.clone()));
        }
    }
    if let Some(path) = std::env::var_os("CLOUD_HYPERVISOR").map(PathBuf::from) {
        files.push(("bin/cloud-hypervisor".into(), path));
    }
    let contents = Contents {
        kind: "outer",
        busybox: image::busybox()?,
        init: root.join("tests/vm/outer-init"),
        programs: programs.map(|(name, path)| (name.to_owned(), path)).into(),
        files,
    };
    image::write(&contents, &images)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_word_on_a_test_is_its_result() {
        let of = |line| result(line);
        assert_eq!(of("test a::b ... ok (12 s)"), Some(("a::b".to_owned(), true)));
        assert_eq!(of("test a::b ... FAILED (12 s)"), Some(("a::b".to_owned(), false)));
        assert_eq!(of("test a::b ... a guest died of the emulation (9 s), runs once more"), None);
        assert_eq!(of("test result: ok. 1 passed; 0 failed"), None);
        assert_eq!(of("test a::b ... ok"), None);
    }

    #[test]
    fn the_core_of_the_suite_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tests/vm");
        for name in CORE {
            let (room, test) = name.split_once("::").unwrap();
            let text = fs::read_to_string(root.join(format!("{room}.rs"))).unwrap();
            assert!(text.contains(&format!("fn {test}(")), "{name}");
        }
    }
}
