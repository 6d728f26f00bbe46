// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The watcher of `smc run`: has the program loaded the library?

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use crate::support::{eventually, text};

/// `smc run` with a library that does not report its loading.
fn smc_run(args: &[&str]) -> Command {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains("/libc.so")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_smc"));
    command.args(["run", "--rendezvous", "off"]).args(args).stdin(Stdio::null());
    command.env("SMC_PRELOAD", &line[line.find('/').unwrap()..]).env_remove("SMC_RENDEZVOUS");
    command
}

#[test]
fn a_program_that_does_not_load_the_library_is_told_of_when_it_has_ended() {
    let output = smc_run(&["echo", "it runs"]).output().unwrap();
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), "it runs\n");
    let said = text(&output.stderr);
    assert!(said.contains("echo did not load the library: its connections are TCP\n"), "{said}");
}

#[test]
fn a_program_that_cannot_be_started_is_told_of_once() {
    let place = crate::support::Dir::new("load-script");
    let script = place.path("script");
    std::fs::write(&script, "#!/nonexistent\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    // The watcher has standard error, too, so the watcher has ended at the end of the output.
    let output = smc_run(&[&script]).output().unwrap();
    assert_eq!(output.status.code(), Some(126), "{output:?}");
    let said = text(&output.stderr);
    assert!(said.contains("cannot run") && said.lines().count() == 1, "{said}");
}

/// The directory in `/proc` of the watcher of a program with this word on the command line.
fn watcher_of(word: &str) -> Option<std::path::PathBuf> {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_smc")).canonicalize().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    processes.into_iter().find(|process| {
        let command = std::fs::read(process.join("cmdline")).unwrap_or_default();
        std::fs::read_link(process.join("exe")).is_ok_and(|exe| exe == program)
            && command.split(|byte| *byte == 0).any(|argument| argument == word.as_bytes())
    })
}

#[test]
fn the_watcher_is_no_child_of_the_program_and_has_nothing_of_it_but_standard_error() {
    let word = format!("watched-{}", std::process::id());
    // The program prints "runs", and ends with its standard input.
    let mut command = smc_run(&["sh", "-c", "echo runs; read line", &word]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut program = command.spawn().unwrap();
    let mut said = [0; 5];
    program.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let watcher = watcher_of(&word).unwrap();
    let status = std::fs::read_to_string(watcher.join("status")).unwrap();
    assert!(!status.contains(&format!("PPid:\t{}\n", program.id())), "{status}");
    // The watcher closes inherited descriptors after the start of the program.
    eventually("the watcher has standard error and its pipe", || {
        let descriptors = std::fs::read_dir(watcher.join("fd")).unwrap().flatten();
        let mut files: Vec<_> = descriptors
            .filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.display().to_string()))
            .collect();
        files.sort();
        println!("{files:?}");
        matches!(&files[..], [nulls @ .., pipe] if nulls == ["/dev/null"; 3] && pipe.starts_with("pipe:"))
    });
    drop(program.stdin.take());
    program.wait().unwrap();
    eventually("the watcher ends", || watcher_of(&word).is_none());
}

#[test]
fn a_library_that_the_dynamic_linker_would_not_find_by_its_path_is_refused() {
    let place = crate::support::Dir::new("load-names");
    let run = |name: &str, options: &[&str]| {
        std::fs::write(place.path(name), "a library").unwrap();
        let program = ["sh", "-c", "echo \"$LD_PRELOAD\""];
        let mut command = smc_run(&[options, &program].concat());
        command.current_dir(&place.0).env("SMC_PRELOAD", name).output().unwrap()
    };
    for name in ["a b.so", "a:b.so"] {
        let output = run(name, &["--strict"]);
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        let said = text(&output.stderr);
        assert!(said.contains(name) && said.contains("a blank or a colon"), "{said}");
    }
    // A name alone would be looked for where libraries are.
    let output = run("other.so", &[]);
    let whole = place.path("other.so");
    assert!(text(&output.stdout).contains(&whole), "{output:?}");
}
