// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs other programs, and reports the reasons of failures.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use thiserror::Error;

/// Why a task is not done.
#[derive(Debug, Error)]
pub(crate) enum ToolError {
    /// A program cannot be started.
    #[error("cannot run {program}: {source}")]
    Start { program: String, source: io::Error },
    /// A program failed, with the reason on standard error.
    #[error("{program} failed: {status}")]
    Failed { program: String, status: ExitStatus },
    /// A program printed something unexpected.
    #[error("{program}: {what}")]
    Answer { program: String, what: String },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    /// Debian packages are missing.
    #[error(
        "missing packages; on Debian: apt-get install {}\n\
         xtask: the same task with --install-deps installs them, as root",
        .0.join(" ")
    )]
    Packages(Vec<String>),
    /// There is no such task under nested KVM.
    #[error("--nested goes with the tests and with \"perf\"")]
    NotNested,
    /// An environment variable of cargo or of the login is not set.
    #[error("no variable {0}: start this as `cargo xtask`")]
    NoVariable(&'static str),
}

/// Makes an error with the name of the file.
pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> ToolError {
    let path = path.to_owned();
    move |source| ToolError::File { path, source }
}

fn name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

/// Runs a program to its end.
///
/// # Errors
/// The program cannot be started.
pub(crate) fn status(mut command: Command) -> Result<ExitStatus, ToolError> {
    let program = name(&command);
    command.status().map_err(|source| ToolError::Start { program, source })
}

/// Runs a program to a successful end.
///
/// # Errors
/// The program cannot be started, or fails.
pub(crate) fn succeed(command: &mut Command) -> Result<(), ToolError> {
    let program = name(command);
    let status =
        command.status().map_err(|source| ToolError::Start { program: program.clone(), source })?;
    if status.success() { Ok(()) } else { Err(ToolError::Failed { program, status }) }
}

/// Runs a program to its end and calls `each` with every line of its standard output at once.
///
/// # Errors
/// The program cannot be started, or its output cannot be read.
pub(crate) fn lines(
    mut command: Command,
    mut each: impl FnMut(&str),
) -> Result<ExitStatus, ToolError> {
    let program = name(&command);
    let failed = |source| ToolError::Start { program: program.clone(), source };
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).split(b'\n') {
            each(&String::from_utf8_lossy(&line.map_err(failed)?));
        }
    }
    child.wait().map_err(failed)
}

/// Runs a program and returns its standard output. Its standard error is shown.
///
/// # Errors
/// The program cannot be started, or fails.
pub(crate) fn output(mut command: Command) -> Result<String, ToolError> {
    let program = name(&command);
    command.stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output();
    let output = output.map_err(|source| ToolError::Start { program: program.clone(), source })?;
    if !output.status.success() {
        return Err(ToolError::Failed { program, status: output.status });
    }
    String::from_utf8(output.stdout)
        .map_err(|error| ToolError::Answer { program, what: error.to_string() })
}

/// Runs a script and returns the file named by its last line.
///
/// # Errors
/// The script fails, or names no file.
pub(crate) fn last_line(script: &Path, args: &[&str]) -> Result<PathBuf, ToolError> {
    let mut command = Command::new(script);
    command.args(args);
    let text = output(command)?;
    let path = PathBuf::from(text.lines().last().unwrap_or_default());
    if path.is_file() {
        return Ok(path);
    }
    let what = format!("names no file in its last line, but {:?}", path.display().to_string());
    Err(ToolError::Answer { program: script.display().to_string(), what })
}

/// Whether an environment variable is `true` or `1`.
pub(crate) fn is_true(variable: impl AsRef<OsStr>) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "true" || value == "1")
}

/// The error about a program or file that says something wrong.
pub(crate) fn wrong(of: &str, what: impl Into<String>) -> ToolError {
    ToolError::Answer { program: of.into(), what: what.into() }
}
