//! Standard output, which its reader may close.

use std::io::Write;

use crate::error::CliError;

/// Prints text; the end of a pipe (`smc stat | head`) is an error like any other, not a panic.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CliError::Output)
}

/// Writes a line to standard error at once: those of other processes on the same terminal do not come
/// between its words.
pub(crate) fn note(line: &str) {
    // One that cannot be written is for nobody.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
