// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Standard output, which its reader may close.

use std::io::Write;

use comfy_table::ContentArrangement;

use crate::error::CliError;

/// Prints text; the end of a pipe (`smc stat | head`) is an error like any other, not a panic.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CliError::Output)
}

/// Longest line of others' text, characters.
const MAX_LINE: usize = 500;

/// Text in which values of others are, for a terminal: control characters are replaced, and long lines
/// are cut.
pub(crate) fn printable(text: &str) -> String {
    let line = |line: &str| -> String {
        let cut = if line.chars().nth(MAX_LINE).is_some() { " ..." } else { "" };
        let shown = line.chars().take(MAX_LINE);
        shown.map(|c| if c.is_control() { '\u{fffd}' } else { c }).chain(cut.chars()).collect()
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Writes a line to standard error at once: those of other processes on the same terminal do not come
/// between its words.
pub(crate) fn note(line: &str) {
    // One that cannot be written is for nobody.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Columns of the terminal that standard output is. `None` where it is none, and where nobody knows: a
/// serial console says 0.
pub(crate) fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns != 0)
}

/// How wide a table is: cells have several lines where the terminal is narrow; without a terminal it is
/// as wide as its content.
pub(crate) fn arrangement() -> ContentArrangement {
    if columns().is_some() { ContentArrangement::Dynamic } else { ContentArrangement::Disabled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_does_nothing_to_a_terminal() {
        assert_eq!(printable("a\x1b[2J\rb\nc"), "a\u{fffd}[2J\u{fffd}b\nc");
        assert_eq!(printable(&"x".repeat(100_000)).len(), MAX_LINE + 4);
    }
}
