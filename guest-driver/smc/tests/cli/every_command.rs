// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Common behaviour of every command: unwritable streams, missing files, arguments that are no
//! text, a narrow terminal, and JSON with nothing to tell.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::support::{Dir, smc, text};

/// The immediate result of a command without a daemon, a server or a file.
enum Does {
    /// Prints something, and succeeds.
    Prints,
    /// Has nothing to print, and fails.
    Fails,
}
use Does::{Fails, Prints};

/// Every command of `smc --help`, with arguments for which nothing has to exist.
const COMMANDS: [(&str, &[&str], Does); 21] = [
    ("demo", &["--no-such-option"], Fails),
    ("listen", &["nonsense"], Fails),
    ("connect", &["127.0.0.1:1"], Fails),
    ("perf", &["no-such-measure"], Fails),
    ("run", &["--strict", "/nonexistent"], Fails),
    ("decode", &["e2d4c3c4"], Fails),
    ("stat", &["metrics"], Prints),
    ("capture", &["--write", "-", "--seconds", "1", "--process", "no-such-program"], Prints),
    ("check", &["127.0.0.1:1"], Prints),
    ("conform", &["--list"], Prints),
    ("devices", &["--json"], Prints),
    ("doctor", &[], Prints),
    ("plan", &["--seconds", "1"], Prints),
    ("config", &[], Prints),
    ("cdi", &["--pool", "/nonexistent/any.sock"], Fails),
    ("grant", &["--cgroup", "/nonexistent"], Fails),
    ("debug", &["--output", "/nonexistent/a.tar"], Fails),
    ("completions", &["bash"], Prints),
    ("man", &[], Prints),
    ("fabric", &["--print-capabilities"], Prints),
    ("help", &[], Prints),
];

/// The command in a directory without running processes.
fn alone(dir: &Dir, name: &str, args: &[&str]) -> Command {
    let mut command = smc(&[name]);
    command.args(args).env("XDG_RUNTIME_DIR", &dir.0).env("SMC_CONFIG", "");
    command.stdin(Stdio::null()).current_dir(&dir.0);
    command
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// A pipe without a reader.
fn closed() -> Stdio {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    drop::<OwnedFd>(reader);
    writer.into()
}

/// Checks that a command did not panic, nor die of a signal.
fn has_ended_by_itself(what: &str, output: &Output) {
    let code = output.status.code();
    assert!(code.is_some_and(|code| code != 101), "{what}: {output:?}");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{what}: {output:?}");
}

#[test]
fn the_table_has_every_command() {
    let help = text(&smc(&["--help"]).output().unwrap().stdout);
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let commands = commands.split("\n\n").next().unwrap();
    let names = commands.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<_> = names.filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, COMMANDS.map(|(name, ..)| name));
}

#[test]
fn no_command_panics_where_its_streams_cannot_be_written() {
    let dir = Dir::new("every-stream");
    for (name, args, does) in COMMANDS {
        let command = || alone(&dir, name, args);
        let prints = matches!(does, Prints);
        let what = format!("smc {name}, output that nobody reads");
        let output = command().stdout(closed()).output().unwrap();
        has_ended_by_itself(&what, &output);
        let what = format!("smc {name}, output on a full disk");
        let output = command().stdout(full()).output().unwrap();
        has_ended_by_itself(&what, &output);
        let says = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{what}: {says}");
        assert!(!prints || says.contains("No space left"), "{what}: {says}");
        for broken in [full as fn() -> Stdio, closed] {
            let what = format!("smc {name}, errors that cannot be written");
            let output = command().stderr(broken()).output().unwrap();
            has_ended_by_itself(&what, &output);
            let output = command().stdout(broken()).stderr(broken()).output().unwrap();
            has_ended_by_itself(&what, &output);
        }
        for help in ["--help", "-h"] {
            let what = format!("smc {name} {help}");
            if name == "help" {
                continue;
            }
            let output = smc(&[name, help]).stdout(full()).output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{what}: {output:?}");
            let output = smc(&[name, help]).stdout(closed()).output().unwrap();
            assert!(output.status.success(), "{what}: {output:?}");
        }
    }
}

#[test]
fn an_argument_that_is_no_text_is_an_error_or_a_path() {
    let dir = Dir::new("every-bytes");
    let bytes = OsStr::from_bytes(b"\xff\xfe/\xc3\x28");
    for (name, ..) in COMMANDS {
        let output = alone(&dir, name, &[]).arg(bytes).output().unwrap();
        has_ended_by_itself(&format!("smc {name} BYTES"), &output);
        // The command makes a directory of any name.
        if name != "man" {
            assert!(!output.status.success(), "smc {name}: {output:?}");
            assert!(!output.stderr.is_empty(), "smc {name}");
        }
        // Nothing else is in the way of a terminal.
        assert!(String::from_utf8(output.stderr).is_ok(), "smc {name}");
    }
    for name in ["SMC_DEVICE", "SMC_MANAGEMENT", "SMC_EID", "SMC_CONFIG", "SMC_LOG", "SMC_POLICY"] {
        for command in ["stat", "connect", "config", "doctor"] {
            let args: &[&str] = if command == "connect" { &["127.0.0.1:1"] } else { &[] };
            let output = alone(&dir, command, args).env(name, bytes).output().unwrap();
            has_ended_by_itself(&format!("{name}=BYTES smc {command}"), &output);
        }
    }
}

/// Options naming a file or directory. FILE stands for the path.
const FILES: [(&str, &[&str]); 12] = [
    ("decode", &["FILE"]),
    ("listen", &["--device", "FILE", "0"]),
    ("connect", &["--device", "FILE", "127.0.0.1:1"]),
    ("run", &["--policy", "FILE", "true"]),
    ("stat", &["--management", "FILE"]),
    ("conform", &["--list", "--cases", "FILE"]),
    ("cdi", &["--pool", "FILE"]),
    ("grant", &["--cgroup", "FILE"]),
    ("capture", &["--seconds", "1", "--write", "FILE"]),
    ("debug", &["--output", "FILE"]),
    ("man", &["FILE"]),
    ("perf", &["rtt", "--runs", "1", "--seconds", "0.01", "--plot", "FILE.svg"]),
];

#[test]
fn a_file_that_cannot_be_used_is_named_with_the_reason() {
    let dir = Dir::new("every-file");
    let file = dir.path("file");
    std::fs::write(&file, "").unwrap();
    let missing = dir.path("none/below");
    let below = format!("{file}/below");
    for (name, args) in FILES {
        for path in [&below, &missing] {
            // The output of `man` is a directory, made by the command.
            if name == "man" && *path == missing {
                continue;
            }
            let args: Vec<_> = args.iter().map(|arg| arg.replace("FILE", path)).collect();
            let args: Vec<_> = args.iter().map(String::as_str).collect();
            let output = alone(&dir, name, &args).output().unwrap();
            let what = format!("smc {name} {args:?}");
            has_ended_by_itself(&what, &output);
            assert!(!output.status.success(), "{what}");
            let says = text(&output.stderr);
            assert!(says.contains(path.as_str()), "{what} does not name it: {says}");
            let reasons = [
                "No such file",
                "Not a directory",
                "no daemon",
                "no directory",
                "not there",
                "no such",
            ];
            assert!(reasons.iter().any(|reason| says.contains(reason)), "{what}: {says}");
            assert!(output.stdout.is_empty(), "{what}: {}", text(&output.stdout));
        }
    }
}

/// A command run by an ordinary user other than the owner of the files.
fn as_other(dir: &Dir, name: &str, args: &[&str]) -> Command {
    if !rustix::process::geteuid().is_root() {
        return alone(dir, name, args);
    }
    let program = dir.path("smc");
    if !Path::new(&program).exists() {
        std::fs::copy(env!("CARGO_BIN_EXE_smc"), &program).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "4243", "--regid", "4243", "--clear-groups", &program, name]);
    command.args(args).stdin(Stdio::null()).current_dir("/");
    command.env("XDG_RUNTIME_DIR", "/nonexistent").env("SMC_CONFIG", "");
    for variable in ["SMC_DEVICE", "SMC_MANAGEMENT", "SMC_EID", "RUST_LOG"] {
        command.env_remove(variable);
    }
    command
}

#[test]
fn a_file_that_this_user_may_not_use_is_named_with_the_reason() {
    let dir = Dir::new("every-closed");
    std::fs::set_permissions(&dir.0, Permissions::from_mode(0o755)).unwrap();
    let closed = dir.0.join("closed");
    std::fs::create_dir(&closed).unwrap();
    let path = dir.path("closed/file");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&closed, Permissions::from_mode(0o000)).unwrap();
    // There is no library beside the copy of the command. Without the library, `run` reads no
    // policy and `cdi` makes no specification.
    for (name, args) in FILES.into_iter().filter(|(name, _)| !["run", "cdi"].contains(name)) {
        let args: Vec<_> = args.iter().map(|arg| arg.replace("FILE", &path)).collect();
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let output = as_other(&dir, name, &args).output().unwrap();
        let what = format!("smc {name} {args:?}");
        has_ended_by_itself(&what, &output);
        let says = text(&output.stderr);
        assert!(!output.status.success() && says.contains(&path), "{what}: {says}");
        assert!(says.to_lowercase().contains("permission denied"), "{what}: {says}");
        assert!(output.stdout.is_empty(), "{what}: {}", text(&output.stdout));
    }
    std::fs::set_permissions(&closed, Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn files_on_a_full_disk_are_errors() {
    let dir = Dir::new("every-full");
    std::os::unix::fs::symlink("/dev/full", dir.path("full.svg")).unwrap();
    let cases: [(&str, &[&str]); 3] = [
        ("capture", &["--seconds", "1", "--write", "/dev/full", "--process", "no-such"]),
        ("capture", &["--seconds", "1", "--write", "full.svg"]),
        ("perf", &["rtt", "--runs", "1", "--seconds", "0.01", "--plot", "full.svg"]),
    ];
    for (name, args) in cases {
        let output = alone(&dir, name, args).output().unwrap();
        let what = format!("smc {name} {args:?}");
        has_ended_by_itself(&what, &output);
        let says = text(&output.stderr);
        assert!(!output.status.success() && says.contains("No space left"), "{what}: {says}");
        assert!(args.iter().any(|file| file.contains("full") && says.contains(file)), "{says}");
    }
    let output = alone(&dir, "debug", &["--output", "-"]).stdout(full()).output().unwrap();
    assert!(!output.status.success(), "{output:?}");
}

#[test]
fn json_is_whole_where_there_is_nothing_to_tell() {
    let dir = Dir::new("every-json");
    let commands: [&[&str]; 9] = [
        &["stat", "--json"],
        &["stat", "connections", "--json"],
        &["stat", "totals", "--json"],
        &["devices", "--json"],
        &["devices", "--json", "--rdma"],
        &["doctor", "--json"],
        &["plan", "--json", "--seconds", "1"],
        &["config", "--json"],
        &["check", "--json", "127.0.0.1:1"],
    ];
    for args in commands {
        let output = alone(&dir, args[0], &args[1..]).output().unwrap();
        has_ended_by_itself(&format!("smc {args:?}"), &output);
        let json: Result<Value, _> = serde_json::from_slice(&output.stdout);
        let says = text(&output.stderr);
        assert!(json.is_ok(), "smc {args:?}: {:?} {says}", text(&output.stdout));
    }
}

#[test]
fn help_fits_80_columns() {
    let smc = env!("CARGO_BIN_EXE_smc");
    let names: Vec<_> = COMMANDS.iter().map(|(name, ..)| *name).filter(|n| *n != "help").collect();
    let line = format!(
        "stty cols 80 rows 40; for one in '' {}; do '{smc}' $one --help; '{smc}' $one -h; done",
        names.join(" ")
    );
    let mut script = Command::new("script");
    script
        .args(["-qec", &line, "/dev/null"])
        .env("SHELL", "/bin/sh")
        // Some take colours for wanted where CI is set.
        .env("NO_COLOR", "1")
        .stdin(Stdio::null());
    let shown = text(&script.output().unwrap().stdout);
    assert!(shown.matches("Usage:").count() >= 2 * names.len(), "{shown}");
    for line in shown.lines().map(str::trim_end) {
        assert!(line.chars().count() <= 80, "{} columns: {line:?}", line.chars().count());
    }
}
