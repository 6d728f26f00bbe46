// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The contents of the archive.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};

/// How long a command may take.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of a file at most; of a longer one the beginning is shown.
const MAX_LEN: u64 = 8 << 20;

/// A file of the archive.
pub(super) struct ReportFile {
    pub(super) name: &'static str,
    from: From,
}

enum From {
    /// Output of this program.
    Smc(&'static [&'static str]),
    /// Output of another program.
    Program(&'static str, &'static [&'static str]),
    /// Files, one after the other.
    Files(&'static [&'static str]),
}

const fn file(name: &'static str, from: From) -> ReportFile {
    ReportFile { name, from }
}

/// The files, in the order of the archive.
pub(super) static FILES: &[ReportFile] = &[
    file("version.txt", From::Smc(&["--version"])),
    file("daemon-version.txt", From::Program("vhost-device-ism", &["--version"])),
    file("config.txt", From::Smc(&["config"])),
    file("doctor.txt", From::Smc(&["doctor"])),
    file("stat.txt", From::Smc(&["stat"])),
    file("stat.json", From::Smc(&["stat", "--json"])),
    file("connections.txt", From::Smc(&["stat", "connections", "--details", "-o", "wide"])),
    file("totals.txt", From::Smc(&["stat", "totals"])),
    file("endpoints.txt", From::Smc(&["stat", "endpoints"])),
    file("devices.txt", From::Smc(&["devices"])),
    file(
        "log.txt",
        From::Program(
            "journalctl",
            &["--no-pager", "--output=short-iso", "--lines=2000", "--unit=vhost-device-ism"],
        ),
    ),
    file("settings.txt", From::Files(&["/etc/smc/smc.toml", "/etc/vhost-device-ism.toml"])),
    file(
        "machine.txt",
        From::Files(&[
            "/proc/sys/kernel/ostype",
            "/proc/sys/kernel/osrelease",
            "/proc/sys/kernel/version",
            "/etc/os-release",
            "/proc/sys/kernel/unprivileged_bpf_disabled",
            "/proc/sys/kernel/yama/ptrace_scope",
            "/proc/sys/net/ipv4/tcp_migrate_req",
            "/proc/sys/net/smc/limit_smc_hs",
            "/proc/meminfo",
            "/proc/loadavg",
            "/proc/self/limits",
            "/proc/self/cgroup",
            "/proc/self/uid_map",
            "/proc/net/protocols",
        ]),
    ),
];

/// The source of a file of the archive. Text is not in memory yet.
pub(super) enum Output {
    /// The output of a command, errors included, and its exit status.
    Printed(io::Result<(File, String)>),
    Files(&'static [&'static str]),
}

impl ReportFile {
    /// Runs the command of the file, if any.
    pub(super) fn gather(&self) -> Output {
        let program = || std::env::current_exe().unwrap_or_else(|_| "smc".into());
        let run = |mut command: Command, args: &[&str]| {
            command.args(args);
            Output::Printed(ended(command))
        };
        match &self.from {
            From::Smc(args) => run(Command::new(program()), args),
            From::Program(name, args) => run(Command::new(name), args),
            From::Files(paths) => Output::Files(paths),
        }
    }
}

impl Output {
    /// The text, or why there is none.
    pub(super) fn text(self) -> String {
        let printed = |(file, how): (File, String)| Ok(format!("{}\n({how})\n", text_of(file)?));
        match self {
            Output::Printed(result) => {
                result.and_then(printed).unwrap_or_else(|error| format!("({error})\n"))
            }
            Output::Files(paths) => {
                let one = |path: &&str| format!("==> {path}\n{}\n", of_file(path));
                paths.iter().map(one).collect()
            }
        }
    }
}

fn of_file(path: &str) -> String {
    match File::open(path).and_then(text_of) {
        Ok(text) => text,
        Err(error) => format!("({error})\n"),
    }
}

fn text_of(file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(MAX_LEN).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The output of a command, errors included, and its exit status.
fn ended(mut command: Command) -> io::Result<(File, String)> {
    let mut printed = File::from(memfd_create("smc-debug", MemfdFlags::CLOEXEC)?);
    command.stdin(Stdio::null());
    command.stdout(printed.try_clone()?).stderr(printed.try_clone()?);
    let mut child = command.spawn()?;
    let deadline = Instant::now() + TIMEOUT;
    let how = loop {
        if let Some(status) = child.try_wait()? {
            break status.to_string();
        }
        if Instant::now() >= deadline {
            let _ = child.kill();
            let _ = child.wait();
            break format!("it took more than {} s", TIMEOUT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    printed.rewind()?;
    Ok((printed, how))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_says_why() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo error >&2; exit 3"]);
        let text = |command| Output::Printed(ended(command)).text();
        assert_eq!(text(command), "out\nerror\n\n(exit status: 3)\n");
        assert!(text(Command::new("/nonexistent")).contains("No such file"));
        assert!(of_file("/nonexistent").contains("No such file"));
    }
}
