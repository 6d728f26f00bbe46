//! The commands on the pages for users are ones that the programs understand.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::support::{Dir, Fabric, Running, eventually, text};

/// Pages of `docs` whose blocks of kind "console" are run. A line after "$ " is a command.
const PAGES: [&str; 1] = ["troubleshooting.md"];

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// The commands of a page, with the lines they stand in.
fn commands(page: &str) -> Vec<(usize, String)> {
    let page = std::fs::read_to_string(docs().join(page)).unwrap();
    let mut in_console = false;
    let mut found = Vec::new();
    for (number, line) in page.lines().enumerate() {
        match line {
            "```console" => in_console = true,
            "```" => in_console = false,
            _ => {}
        }
        if let Some(command) = line.strip_prefix("$ ").filter(|_| in_console) {
            found.push((number + 1, command.to_owned()));
        }
    }
    found
}

#[test]
fn commands_of_the_pages_are_understood() {
    let fabric = Fabric::start("pages");
    let mut path =
        PathBuf::from(env!("CARGO_BIN_EXE_smc")).parent().unwrap().as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    for page in PAGES {
        let all = commands(page);
        assert!(!all.is_empty(), "{page} has no commands");
        for (line, command) in all {
            let mut shell = Command::new("bash");
            shell.args(["-c", &command]).env("PATH", &path).stdin(Stdio::null());
            shell.env("XDG_RUNTIME_DIR", fabric.directory()).current_dir(fabric.directory());
            let output = shell.output().unwrap();
            // Whether a server is there does not matter; that the command knows its options does.
            let said = text(&output.stderr);
            assert!(!said.contains("Usage:"), "{page}:{line}: {command}: {said}");
            assert_ne!(output.status.code(), Some(127), "{page}:{line}: {command}: {said}");
        }
    }
}

/// The commands of a chapter of the README, without comments.
fn commands_of_readme(chapter: &str) -> Vec<String> {
    let readme = std::fs::read_to_string(docs().join("../README.md")).unwrap();
    let rest = readme.split(&format!("## {chapter}\n")).nth(1).unwrap();
    let lines = rest.lines().take_while(|line| !line.starts_with("## "));
    let code = lines.take_while(|line| !line.starts_with("```"));
    let commands = code.filter_map(|line| line.strip_prefix("    "));
    commands.map(|line| line.split("  #").next().unwrap().trim().to_owned()).collect()
}

#[test]
fn the_first_commands_of_the_readme_carry_a_file() {
    let dir = Dir::new("readme");
    let programs = PathBuf::from(env!("CARGO_BIN_EXE_smc")).parent().unwrap().to_owned();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    // Another test may listen there.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut running = Vec::new();
    let commands = commands_of_readme("Your own programs");
    let begin = commands.iter().position(|command| command.starts_with("smc fabric")).unwrap();
    let end = commands.iter().position(|command| command.starts_with("cmp")).unwrap();
    assert_eq!(end - begin, 3, "{commands:?}");
    for command in &commands[begin..=end] {
        let words = command.replace("5000", &port);
        let run = |words: &str| {
            let mut shell = Command::new("bash");
            shell.args(["-c", &format!("exec {words}")]).env("PATH", &path);
            shell.env("XDG_RUNTIME_DIR", &dir.0).current_dir(&dir.0).stderr(Stdio::null());
            shell.env_remove("SMC_DEVICE").spawn().unwrap()
        };
        if let Some(words) = words.strip_suffix('&') {
            running.push(Running(run(words)));
            let listens = |tables: String| {
                tables.contains(&format!(":{:04X} ", port.parse::<u16>().unwrap()))
            };
            eventually(command, || match running.len() {
                1 => dir.0.join("smc/management.sock").exists(),
                _ => ["tcp", "tcp6"].iter().any(|name| {
                    std::fs::read_to_string(format!("/proc/net/{name}")).is_ok_and(listens)
                }),
            });
            continue;
        }
        // The server may write the file a little later than the client ends.
        let mut status = run(&words).wait().unwrap();
        eventually(command, || {
            if !status.success() && command.starts_with("cmp") {
                status = run(&words).wait().unwrap();
            }
            status.success()
        });
    }
}
