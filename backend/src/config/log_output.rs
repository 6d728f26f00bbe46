// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Text from other programs, made safe for a log or a terminal.

use std::fmt::{self, Display, Write};

/// Longest line, characters.
const MAX_LINE: usize = 500;
/// The parts kept of a longer line: the begin tells the place, the end the reason.
const BEGIN: usize = 250;
const END: usize = 200;

/// Shows a value line by line: control characters are escaped, and the middle of a long line is cut.
pub(crate) struct LogOutput<T>(pub(crate) T);

impl<T: Display> Display for LogOutput<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        for (number, line) in text.lines().enumerate() {
            if number > 0 {
                f.write_char('\n')?;
            }
            show_line(f, line)?;
        }
        Ok(())
    }
}

fn show_line(f: &mut fmt::Formatter<'_>, line: &str) -> fmt::Result {
    let length = line.chars().count();
    for (at, c) in line.chars().enumerate() {
        let is_left_out = length > MAX_LINE && at >= BEGIN && at < length - END;
        match is_left_out {
            true if at == BEGIN => write!(f, " [{} characters] ", length - BEGIN - END)?,
            true => {}
            false if c.is_control() => write!(f, "{}", c.escape_default())?,
            false => f.write_char(c)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped_and_what_is_long_is_cut() {
        let shown = |text: &str| LogOutput(text).to_string();
        assert_eq!(shown("a plain line: ü\nand another"), "a plain line: ü\nand another");
        assert_eq!(shown("a\x1b[2J\rb\u{9b}c\x07"), "a\\u{1b}[2J\\rb\\u{9b}c\\u{7}");
        let long = format!("c.toml:7: {:?}: expected a number", "x".repeat(100_000));
        let short = shown(&long);
        assert!(short.chars().count() < MAX_LINE, "{short}");
        assert!(short.starts_with("c.toml:7: \"xxx") && short.ends_with("\": expected a number"));
        assert_eq!(shown(&"y".repeat(MAX_LINE)).len(), MAX_LINE);
    }
}
