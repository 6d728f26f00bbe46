// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The commands of `docs/virtual-machines.md` have the effects claimed by the page. They run
//! unchanged, except for the directory of the sockets.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use smc_tests::eventually;
use smc_tests::vm::{Bed, Program, print_always};

mod vfio_user;

const PAGE: &str = include_str!("../../../docs/virtual-machines.md");
/// How long a guest may take to boot, on a busy machine.
const BOOT: Duration = Duration::from_secs(200);
/// The page's directory of sockets.
const SOCKETS: &str = "/run/ism";

/// The block of the page behind `<!-- run: NAME -->`.
#[track_caller]
pub(crate) fn block(name: &str) -> String {
    let mark = format!("<!-- run: {name} -->\n```");
    let (_, rest) = PAGE.split_once(&mark).unwrap_or_else(|| panic!("no block {name}"));
    let (_, rest) = rest.split_once('\n').unwrap();
    rest.split_once("\n```").unwrap().0.to_owned()
}

/// A person at terminals.
struct Page {
    bed: Bed,
    sockets: PathBuf,
}

impl Page {
    fn new() -> Page {
        let bed = Bed::new();
        let sockets = bed.path("run");
        Page { bed, sockets }
    }

    /// Runs lines of the page in a separate terminal, with input from `NAME.in` and output to
    /// `NAME.log`.
    fn terminal(&self, name: &str, script: &str) -> Terminal {
        let script = script.replace(SOCKETS, self.sockets.to_str().unwrap());
        let input = self.bed.path(&format!("{name}.in"));
        let made = Command::new("mkfifo").arg(&input).status().unwrap();
        assert!(made.success());
        // Opened for both, the pipe waits for no other end, and has no end of file.
        let keyboard = File::options().read(true).write(true).open(&input).unwrap();
        let daemon = PathBuf::from(std::env::var_os("DAEMON").unwrap());
        let path = format!(
            "export PATH={}:$PATH; cd {}/..",
            daemon.parent().unwrap().display(),
            env!("CARGO_MANIFEST_DIR")
        );
        let script = format!("{path}\n{script} <{}", input.display());
        let program = self.bed.program(name, &["bash", "-c", &script]);
        Terminal { keyboard, log: self.bed.log(&format!("{name}.log")), program }
    }

    /// Runs each call of `guest` in a block in a separate terminal. Returns the terminals once a shell
    /// is shown.
    fn guests(&self, block: &str) -> [Terminal; 2] {
        let (function, calls) = block.split_once("\n}\n").unwrap();
        let mut calls = calls.lines();
        let guests = ["a", "b"].map(|name| {
            let call = calls.next().unwrap();
            assert!(call.starts_with(&format!("guest {name} ")), "{call}");
            let guest = self.terminal(name, &format!("{function}\n}}\n{call}"));
            // Keep a person's pace: the first guest listens for the second one.
            eventually("the network is there", || {
                !function.contains("/run/ism/net") || self.sockets.join("net").exists()
            });
            guest
        });
        assert_eq!(calls.next(), None);
        guests.iter().for_each(|guest| guest.shows("a shell on the console"));
        guests
    }

    fn daemon(&self, block: &str) -> Terminal {
        let daemon = self.terminal("page-daemon", block);
        eventually("the daemon listens", || {
            assert!(daemon.program.ended().is_none(), "the daemon has ended");
            ["a.sock", "b.sock"].iter().all(|name| self.sockets.join(name).exists())
        });
        daemon
    }

    /// Carries a line from one guest to the other by the commands for the guests. Returns the text of
    /// both terminals.
    fn talk(&self, [a, b]: &mut [Terminal; 2]) -> [String; 2] {
        a.types(&block("inside a"));
        a.shows("listening on ");
        b.types(&block("inside b"));
        a.shows("\nhello");
        [a.text(), b.text()]
    }
}

struct Terminal {
    keyboard: File,
    log: PathBuf,
    program: Program,
}

impl Terminal {
    fn types(&mut self, line: &str) {
        self.keyboard.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).replace('\r', "")
    }

    fn shows(&self, text: &str) {
        self.shows_after(0, text);
    }

    /// Waits for `text` behind so many bytes of output.
    fn shows_after(&self, from: usize, text: &str) {
        let start = Instant::now();
        loop {
            let shown = self.text();
            if shown[from..].contains(text) {
                return;
            }
            assert!(self.program.ended().is_none(), "{} has ended", self.log.display());
            assert!(start.elapsed() < BOOT, "{} does not show {text:?}", self.log.display());
            thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn the_commands_for_qemu_start_two_guests_that_talk() {
    // The commands use KVM if there is a /dev/kvm. Not every such machine can run guests by KVM.
    if std::env::var_os("ACCEL").is_none_or(|accel| accel != "kvm") {
        print_always("NOT TESTED here: the commands for QEMU. cargo xtask vm --nested tests them");
        return;
    }
    let page = Page::new();
    let _daemon = page.daemon(&block("daemon"));
    let mut guests = page.guests(&block("qemu"));
    let [a, _] = page.talk(&mut guests);
    assert!(a.contains("window"), "{a}");
}

#[test]
fn the_commands_for_cloud_hypervisor_start_two_guests_that_talk() {
    let program = std::env::var_os("CLOUD_HYPERVISOR").map(PathBuf::from);
    let Some(program) = program.filter(|path| path.is_file()) else {
        print_always("NOT TESTED: cloud-hypervisor, since CLOUD_HYPERVISOR names no binary");
        return;
    };
    if !Path::new("/dev/kvm").exists() {
        print_always("NOT TESTED: cloud-hypervisor, since there is no KVM; see --nested");
        return;
    }
    let page = Page::new();
    let bin = page.bed.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(program, bin.join("cloud-hypervisor")).unwrap();
    let network = page.bed.program("network", &["sh", "-ec", &block("cloud-hypervisor network")]);
    assert!(network.wait(Duration::from_secs(30)).success());
    let _daemon = page.daemon(&block("cloud-hypervisor daemon"));
    let path = format!("export PATH={}:$PATH\n", bin.display());
    let mut guests = page.guests(&(path + &block("cloud-hypervisor")));
    let [a, _] = page.talk(&mut guests);
    assert!(a.contains("move"), "{a}");
}
