// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Output of a test's guests and daemon, kept if the test fails.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;

use super::paths;

/// Lines of a log printed after a failed test.
const SHOWN: usize = 15;

/// Prints a line past the test harness, which hides the output of `eprintln!` if a test succeeds.
pub fn print_always(text: &str) {
    let _ = writeln!(io::stderr(), "vm: {text}");
}

/// `target/vm/<test>/`.
#[derive(Debug)]
pub(super) struct Logs {
    dir: PathBuf,
}

impl Logs {
    /// An empty directory for a test.
    pub(super) fn new(test: &str) -> Logs {
        let name: String = test
            .replace("::", ".")
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
            .collect();
        let dir = paths::logs().join(name);
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Logs { dir }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Opens a log for appending: a second life of a guest writes after the first.
    pub(super) fn open(&self, name: &str) -> File {
        OpenOptions::new().create(true).append(true).open(self.path(name)).unwrap()
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("logs are in {}", self.dir.display());
            show(&self.dir);
        } else if std::env::var_os("SMC_VM_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Prints the end of every log, except the transcripts: the failure's message has their content.
fn show(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        let text = fs::read(entry.path()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        if !file.ends_with("control.log") && !text.trim().is_empty() {
            eprintln!("-- end of {file}");
            let all: Vec<&str> = text.lines().collect();
            for line in &all[all.len().saturating_sub(SHOWN)..] {
                eprintln!("   {line}");
            }
        }
    }
}
