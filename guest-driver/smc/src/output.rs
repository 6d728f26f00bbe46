// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Standard output, possibly closed by its reader.
//!
//! Texts contain values of other processes. Characters of such a value that would change a
//! terminal, or the order of the text around the value, are replaced on the way to a terminal or a
//! file.

use std::io::{IsTerminal, Write};

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

/// Text with values of other processes, for a terminal: harmful characters are replaced, and long
/// lines are cut.
pub(crate) fn printable(text: &str) -> String {
    let line = |line: &str| -> String {
        let cut = if line.chars().nth(MAX_LINE).is_some() { " ..." } else { "" };
        let shown = line.chars().take(MAX_LINE);
        shown.map(|c| if c.is_control() { '\u{fffd}' } else { c }).chain(cut.chars()).collect()
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Writes a line to standard error in one write, so lines of other processes on the same terminal
/// do not mix with it.
pub(crate) fn note(line: &str) {
    // One that cannot be written is for nobody.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Whether standard error gets colours: on a terminal, unless NO_COLOR forbids colours.
pub(crate) fn colours_of_errors() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty())
}

/// Columns of the terminal at standard output. `None` without a terminal, or if the number is
/// unknown: a serial console says 0.
pub(crate) fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns != 0)
}

/// Sentences as lines fitting into the terminal, broken between words. Continuations are indented
/// by two more than the line. A file or a pipe gets the lines unchanged.
pub(crate) fn wrapped(text: &str) -> String {
    match columns() {
        Some(room) => wrapped_at(text, room),
        None => text.to_owned(),
    }
}

/// Like [`wrapped`], for a given number of columns.
pub(crate) fn wrapped_at(text: &str, room: usize) -> String {
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        let indent = line.chars().take_while(|c| *c == ' ').count() + 2;
        break_line(&mut out, line, 0, (room, indent));
    }
    out
}

/// A line with a head. On a narrow terminal, the sentence continues below its beginning.
pub(crate) fn hanging(head: &str, says: &str) -> String {
    hanging_at(head, says, columns())
}

fn hanging_at(head: &str, says: &str, room: Option<usize>) -> String {
    let used = head.chars().count();
    let mut out = head.to_owned();
    for (at, line) in says.lines().enumerate() {
        if at > 0 {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', used));
        }
        match room {
            // If the terminal is hardly wider than the head, indent by four instead.
            Some(room) => {
                let indent = if room > used + NARROW { used } else { 4 };
                break_line(&mut out, line, used, (room, indent));
            }
            None => out.push_str(line),
        }
    }
    out.push('\n');
    out
}

/// Minimum columns of a sentence.
const NARROW: usize = 20;

/// Adds a line to a text whose last line has `used` columns, broken between words where longer than
/// `room`. The parts after the first are indented.
fn break_line(out: &mut String, line: &str, mut used: usize, (room, indent): (usize, usize)) {
    let end = if line.ends_with('\n') { "\n" } else { "" };
    // The spaces between words stay unchanged.
    for part in line.trim_end_matches('\n').split_inclusive(' ') {
        let length = part.trim_end_matches(' ').chars().count();
        if length > 0 && used + length > room && used > indent {
            let kept = out.trim_end_matches(' ').len();
            out.truncate(kept);
            out.push('\n');
            used = indent;
            out.extend(std::iter::repeat_n(' ', used));
        }
        out.push_str(part);
        used += part.chars().count();
    }
    out.push_str(end);
}

/// A page for a terminal that is written over the page before. What has no room below is left out; a
/// file or a pipe gets all of it.
pub(crate) fn screen(text: &str) -> String {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
    let Some(rows) = size.map(|size| usize::from(size.ws_row)).filter(|&rows| rows > 1) else {
        return text.to_owned();
    };
    format!("\x1b[H\x1b[J{}", top(text, rows - 1))
}

/// The first lines of a text, and how many more there are.
fn top(text: &str, rows: usize) -> String {
    let all = text.lines().count();
    if all <= rows {
        return text.to_owned();
    }
    let shown: String = text.lines().take(rows - 1).map(|line| format!("{line}\n")).collect();
    format!("{shown}... {} lines more\n", all - (rows - 1))
}

/// The arrangement of a table: on a terminal, cells may have several lines; without a terminal the
/// table is as wide as its content.
pub(crate) fn arrangement() -> ContentArrangement {
    if columns().is_some() { ContentArrangement::Dynamic } else { ContentArrangement::Disabled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = "one two three\n  four five six\n\nseven";
        assert_eq!(wrapped_at(text, 80), text);
        assert_eq!(wrapped_at("one two three\n", 9), "one two\n  three\n");
        assert_eq!(wrapped_at("  four five six", 9), "  four\n    five\n    six");
        assert_eq!(wrapped_at("averylongword x", 5), "averylongword\n  x");
        assert_eq!(wrapped_at("a  b\n", 3), "a\n  b\n");
    }

    #[test]
    fn a_sentence_goes_on_below_its_begin() {
        let says = "one two three four five six seven";
        let head = "ok      option  ";
        let broken = "ok      option  one two three four five\n                six seven\n";
        assert_eq!(hanging_at(head, says, Some(39)), broken);
        assert_eq!(hanging_at(head, says, None), format!("{head}{says}\n"));
        for room in 8..60 {
            let text = hanging_at(head, says, Some(room));
            let longest = text.lines().map(|line| line.trim_end().chars().count()).max();
            assert!(longest.unwrap() <= room.max(head.trim_end().len()), "{room}: {text}");
            assert_eq!(text.split_whitespace().count(), 9, "{text}");
        }
        assert_eq!(hanging_at("a ", "b\nc", Some(80)), "a b\n  c\n");
    }

    #[test]
    fn a_page_has_no_more_lines_than_the_terminal() {
        assert_eq!(top("a\nb\nc\n", 3), "a\nb\nc\n");
        assert_eq!(top("a\nb\nc\n", 2), "a\n... 2 lines more\n");
    }

    #[test]
    fn text_of_others_does_nothing_to_a_terminal() {
        assert_eq!(printable("a\x1b[2J\rb\nc"), "a\u{fffd}[2J\u{fffd}b\nc");
        assert_eq!(printable(&"x".repeat(100_000)).len(), MAX_LINE + 4);
    }
}
