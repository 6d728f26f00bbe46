// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs understand the commands on the pages for users.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::support::{Fabric, text};

/// Pages of `docs` whose blocks of kind "console" are run. A line after "$ " is a command.
const PAGES: [&str; 1] = ["when-it-is-tcp.md"];

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// The commands of a page, with their line numbers.
pub(crate) fn commands(page: &str) -> Vec<(usize, String)> {
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
            // Only the options matter here, not the presence of a server.
            let said = text(&output.stderr);
            assert!(!said.contains("Usage:"), "{page}:{line}: {command}: {said}");
            assert_ne!(output.status.code(), Some(127), "{page}:{line}: {command}: {said}");
        }
    }
}
