// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules for every command other than the daemon: unwritable streams, missing files, arguments not in UTF-8,
//! and a narrow terminal.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};

use clap::CommandFactory;
use serde_json::Value;
use vhost_device_ism::args::Args;

use super::front_end::*;
use super::program::{PROGRAM, Program};

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// A pipe without a reader.
fn closed() -> Stdio {
    let (_, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    writer.into()
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(args).stdin(Stdio::null()).env_remove("RUST_LOG");
    for variable in ["SMC_MANAGEMENT", "VHOST_DEVICE_ISM_MANAGEMENT", "SMC_CONFIG"] {
        command.env_remove(variable);
    }
    command
}

/// Checks for an end without a panic or a signal.
fn has_ended_by_itself(what: &str, output: &Output) {
    let code = output.status.code();
    assert!(code.is_some_and(|code| code != 101), "{what}: {output:?}");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{what}: {output:?}");
}

/// The verbs of `ctl`, from the command line's definition.
fn verbs() -> Vec<String> {
    let all = Args::command();
    let ctl = all.find_subcommand("ctl").unwrap();
    ctl.get_subcommands().map(|verb| verb.get_name().to_owned()).collect()
}

/// Arguments for printing and ending; whether a running daemon is asked.
fn printing() -> Vec<(Vec<String>, bool)> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let mut all = vec![
        (words(&["--help"]), false),
        (words(&["-h"]), false),
        (words(&["--version"]), false),
        (words(&["--print-capabilities"]), false),
        (words(&["--check-config", "--socket-path", "/tmp/a.sock"]), false),
        (words(&["ctl", "--help"]), false),
        (words(&["ctl", "list"]), true),
        (words(&["ctl", "list", "--json"]), true),
        (words(&["ctl", "metrics"]), true),
        (words(&["ctl", "drain", "a"]), true),
    ];
    all.extend(verbs().iter().map(|verb| (words(&["ctl", verb, "--help"]), false)));
    all
}

#[test]
fn nothing_panics_where_its_streams_cannot_be_written() {
    let place = Place::new();
    let management = place.path("management");
    let options = ["--management", management.to_str().unwrap()];
    let _daemon = Program::start(&place, &["a"], &options);
    // The socket is a file before it listens.
    eventually("a management socket", || UnixStream::connect(&management).is_ok());
    let command = |args: &[String]| {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("VHOST_DEVICE_ISM_MANAGEMENT", &management);
        command
    };
    for (args, _) in printing() {
        let what = format!("{args:?}, output that nobody reads");
        let output = command(&args).stdout(closed()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{what}: {output:?}");
        let what = format!("{args:?}, output on a full disk");
        let output = command(&args).stdout(full()).output().unwrap();
        has_ended_by_itself(&what, &output);
        assert_eq!(output.status.code(), Some(1), "{what}: {output:?}");
        let says = String::from_utf8(output.stderr).unwrap();
        assert!(says.contains("standard output: No space left"), "{what}: {says}");
        let output = command(&args).stdout(full()).stderr(full()).output().unwrap();
        has_ended_by_itself(&what, &output);
    }
    for args in [&["ctl", "remove", "no-such-guest"][..], &["ctl", "reload"], &["--no-such-option"]]
    {
        let args: Vec<_> = args.iter().map(|word| (*word).to_owned()).collect();
        for broken in [full as fn() -> Stdio, closed] {
            let output = command(&args).stdout(broken()).stderr(broken()).output().unwrap();
            has_ended_by_itself(&format!("{args:?}"), &output);
            assert!(!output.status.success(), "{args:?}");
        }
    }
}

#[test]
fn what_cannot_be_used_is_named_with_the_reason() {
    let place = Place::new();
    let file = place.path("file");
    std::fs::write(&file, "").unwrap();
    let missing = place.path("none/below");
    let below = file.join("below");
    let cases: [&[&str]; 6] = [
        &["--check-config", "--config", "FILE"],
        &["--socket-path", "FILE"],
        &["--management", "FILE"],
        &["--check-config", "--socket-path", "FILE"],
        &["ctl", "--management", "FILE", "list"],
        &["ctl", "--management", "FILE", "list", "--json"],
    ];
    for case in cases {
        for path in [&missing, &below] {
            let path = path.to_str().unwrap();
            let args: Vec<_> = case.iter().map(|word| word.replace("FILE", path)).collect();
            let args: Vec<_> = args.iter().map(String::as_str).collect();
            let output = command(&args).output().unwrap();
            has_ended_by_itself(&format!("{args:?}"), &output);
            assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
            assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
            let says = String::from_utf8(output.stderr).unwrap();
            let directory = std::path::Path::new(path).parent().unwrap().to_str().unwrap();
            assert!(says.contains(directory), "{args:?}: {says}");
        }
    }
}

#[test]
fn an_argument_that_is_no_text_is_an_error() {
    let bytes = OsStr::from_bytes(b"\xff\xfe/\xc3\x28");
    let mut cases: Vec<Vec<String>> =
        verbs().into_iter().map(|verb| vec!["ctl".into(), verb]).collect();
    cases.extend([
        vec![],
        vec!["--config".into()],
        vec!["--socket-path".into()],
        vec!["--check-config".into(), "--management".into()],
    ]);
    for args in cases {
        let output = Command::new(PROGRAM).args(&args).arg(bytes).output().unwrap();
        has_ended_by_itself(&format!("{args:?} BYTES"), &output);
        assert!(!output.status.success() && !output.stderr.is_empty(), "{args:?}: {output:?}");
        // The error is valid UTF-8.
        assert!(String::from_utf8(output.stderr).is_ok(), "{args:?}");
    }
}

#[test]
fn json_is_whole_without_a_guest() {
    let place = Place::new();
    let management = place.path("management");
    let socket = management.to_str().unwrap();
    let _daemon = Program::start(&place, &[], &["--management", socket]);
    eventually("a management socket", || UnixStream::connect(&management).is_ok());
    let output = command(&["ctl", "--management", socket, "list", "--json"]).output().unwrap();
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list.as_array().map(Vec::len), Some(0), "{list}");
    let output = command(&["--print-capabilities"]).output().unwrap();
    let capabilities: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(capabilities["type"], "ism");
}

#[test]
fn help_fits_80_columns_and_is_broken_once() {
    let mut line = "stty cols 80 rows 40".to_owned();
    for (args, _) in printing().iter().filter(|(args, _)| args.last().unwrap().contains("-h")) {
        line += &format!("; '{PROGRAM}' {}", args.join(" "));
    }
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).env("SHELL", "/bin/sh");
    // Some programs use colours if CI is set.
    script.env("NO_COLOR", "1");
    let output = script.stdin(Stdio::null()).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.matches("Usage:").count() > verbs().len(), "{shown}");
    let lines: Vec<_> = shown.lines().map(str::trim_end).collect();
    for pair in lines.windows(2) {
        let [line, next] = pair else { unreachable!() };
        assert!(line.chars().count() <= 80, "{} columns: {line:?}", line.chars().count());
        let is_prose = |line: &str| line.starts_with(|c: char| c.is_ascii_alphabetic());
        if is_prose(line) && is_prose(next) {
            let word = next.split(' ').next().unwrap();
            assert!(line.len() + 1 + word.len() > 80, "{line:?}, then {next:?}");
        }
    }
}
