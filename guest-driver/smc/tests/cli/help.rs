// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Help and errors.

use crate::support::{Dir, run, smc, text};

#[test]
fn help_names_the_commands_and_a_way_to_start() {
    let help = text(&run(&["--help"]).stdout);
    for command in ["demo", "listen", "connect", "perf", "stat", "check", "decode", "fabric"] {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is not in\n{help}");
    }
    assert!(help.contains("Start with \"smc demo\""), "{help}");
    assert!(!help.contains("__"), "hidden commands are hidden:\n{help}");
}

#[test]
fn help_of_each_command_explains_it() {
    for (command, words) in [
        ("demo", "compares hashes"),
        ("listen", "tar c dir | smc listen 5000"),
        ("connect", "Do not connect to an ordinary TCP server"),
        ("perf", "the server is one thread that"),
        ("stat", "refused     commands and moves that were refused"),
        ("stat", "smc stat connections --watch"),
        ("check", "Exit status: 0 it would be SMC"),
        ("devices", "\"kernel\" and \"rnics\""),
        ("fabric", "options are those of vhost-device-ism"),
        ("fabric", "--socket-path <PATH[,KEY=VALUE..]>"),
        ("decode", "capture"),
    ] {
        let help = text(&run(&[command, "--help"]).stdout);
        assert!(help.contains(words), "{words:?} is not in\n{help}");
    }
}

/// A text whose lines are wrapped at one width and then at a narrower one has lines of one word.
#[test]
fn texts_of_the_help_are_wrapped_once() {
    for command in [
        "", "demo", "listen", "connect", "perf", "run", "stat", "check", "devices", "decode",
        "cdi", "doctor", "plan", "grant", "fabric",
    ] {
        let words: Vec<_> =
            [command, "--help"].into_iter().filter(|word| !word.is_empty()).collect();
        let help = text(&run(&words).stdout);
        let lines: Vec<_> = help.lines().collect();
        for pair in lines.windows(2) {
            let [line, next] = pair else { unreachable!() };
            assert!(line.chars().count() <= 100, "smc {command} --help: {line}");
            let is_prose = |line: &str| line.starts_with(|c: char| !c.is_whitespace());
            if is_prose(line) && is_prose(next) && !line.ends_with(':') {
                let word = next.split(' ').next().unwrap();
                assert!(line.len() + 1 + word.len() > 100, "smc {command} --help: {line}");
            }
        }
    }
}

fn error(args: &[&str], dir: &Dir) -> String {
    let output = smc(args).env("XDG_RUNTIME_DIR", &dir.0).output().unwrap();
    assert!(!output.status.success(), "{args:?}");
    text(&output.stderr)
}

#[test]
fn errors_say_what_to_do_next() {
    let dir = Dir::new("errors");
    for args in [&["listen", "5000"][..], &["connect", "localhost", "5000"], &["stat"]] {
        let error = error(args, &dir);
        assert!(
            error.contains("No daemon listens there. Start one with \"smc fabric\""),
            "{error}"
        );
    }
    let output = error(&["connect", "localhost:5000"], &dir);
    let first = output.lines().next().unwrap();
    assert_eq!(first.matches("b.sock").count(), 1, "the path is named once: {first}");
    let output = error(&["listen", "--device", "0000:00:99.0", "5000"], &dir);
    assert!(output.contains("That is no PCI address"), "{output}");
    let output = error(&["listen", "nonsense"], &dir);
    assert!(output.contains("expected HOST:PORT"), "{output}");
    let output = error(&["listen", "--eid", "lower", "5000"], &dir);
    assert!(output.contains("An EID has at most 32 characters"), "{output}");
    let output = error(&["perf", "--suite", "--size", "5"], &dir);
    assert!(output.contains("cannot be used with"), "{output}");
    let output = error(&["perf", "--plot", "x.png"], &dir);
    assert!(output.contains("expected a name that ends in .svg"), "{output}");
}

#[test]
fn a_directory_that_others_may_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new("private");
    let smc = dir.0.join("smc");
    std::fs::create_dir(&smc).unwrap();
    std::fs::set_permissions(&smc, std::fs::Permissions::from_mode(0o777)).unwrap();
    for args in [
        &["fabric"][..],
        &["listen", "5000"],
        &["connect", "localhost", "5000"],
        &["stat"],
        &["run", "true"],
        &["perf", "--serve", "0"],
    ] {
        let output = error(args, &dir);
        assert!(output.contains("belongs to you alone"), "{args:?}: {output}");
    }
}
