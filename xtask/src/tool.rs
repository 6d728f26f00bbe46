//! Other programs.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use thiserror::Error;

/// Why a chore is not done.
#[derive(Debug, Error)]
pub(crate) enum ToolError {
    /// A program cannot be started.
    #[error("cannot run {program}: {source}")]
    Start { program: String, source: io::Error },
    /// A program failed; it has said why.
    #[error("{program} failed: {status}")]
    Failed { program: String, status: ExitStatus },
    /// A program said something else than it should.
    #[error("{program}: {what}")]
    Answer { program: String, what: String },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    /// A package is missing.
    #[error("missing package; on Debian: apt-get install {0}")]
    Missing(&'static str),
    /// The program was started in another way than `cargo xtask`.
    #[error("no variable {0}: start this as `cargo xtask`")]
    NotCargo(&'static str),
}

/// An error that names the file.
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
/// It cannot be started.
pub(crate) fn status(mut command: Command) -> Result<ExitStatus, ToolError> {
    let program = name(&command);
    command.status().map_err(|source| ToolError::Start { program, source })
}

/// Runs a program to its end and hands over each line of its standard output as it comes.
///
/// # Errors
/// It cannot be started, or its output cannot be read.
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

/// What a program writes to its standard output; what it writes to standard error is shown.
///
/// # Errors
/// It cannot be started, or fails.
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

/// The file that a script names in its last line.
///
/// # Errors
/// The script fails, or names none.
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

/// Whether a variable says yes.
pub(crate) fn is_true(variable: impl AsRef<OsStr>) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "true" || value == "1")
}
