// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Standard output, possibly closed by its reader.
//!
//! Texts contain values of other processes. Characters of such a value that would change a
//! terminal, or the order of the text around the value, are replaced on the way to a terminal or a
//! file.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use comfy_table::ContentArrangement;
use serde::Serialize;
use serde_json::ser::{CharEscape, CompactFormatter, Formatter, Serializer};

use crate::error::CliError;

/// Prints text; the end of a pipe (`smc stat | head`) is an error like any other, not a panic.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    print_after("", text)
}

fn print_after(head: &str, text: &str) -> Result<(), CliError> {
    let text = harmless(text, &['\n', '\t']);
    let mut out = std::io::stdout().lock();
    let written = out.write_all(head.as_bytes()).and_then(|()| out.write_all(text.as_bytes()));
    written.and_then(|()| out.flush()).map_err(CliError::Output)
}

/// Whether a character controls a terminal, or the order or look of the text around it: control
/// characters C0 and C1, bidirectional controls, and invisible characters.
fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Text with harmful characters replaced, except for the characters in `kept`.
fn harmless<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let is_bad = |c: char| is_harmful(c) && !kept.contains(&c);
    match text.contains(is_bad) {
        true => text.chars().map(|c| if is_bad(c) { '\u{fffd}' } else { c }).collect(),
        false => Cow::Borrowed(text),
    }
}

/// JSON with strings harmless to a program printing the strings.
struct HarmlessStrings;

impl Formatter for HarmlessStrings {
    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> io::Result<()> {
        out.write_all(harmless(text, &[]).as_bytes())
    }

    fn write_char_escape<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        match escape {
            CharEscape::Quote | CharEscape::ReverseSolidus | CharEscape::Solidus => {
                CompactFormatter.write_char_escape(out, escape)
            }
            _ => out.write_all("\u{fffd}".as_bytes()),
        }
    }
}

/// A value as a line of JSON.
///
/// # Errors
/// A map of the value has keys other than strings.
pub(crate) fn json(value: &impl Serialize) -> Result<String, CliError> {
    let mut line = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut line, HarmlessStrings);
    let written = value.serialize(&mut serializer).map_err(io::Error::other);
    written.map_err(CliError::Output)?;
    line.push(b'\n');
    String::from_utf8(line).map_err(|error| CliError::Output(io::Error::other(error)))
}

/// Maximum line of text from other processes, characters.
const MAX_LINE: usize = 500;

/// Text with values of other processes, for a terminal: harmful characters are replaced, and long
/// lines are cut.
pub(crate) fn printable(text: &str) -> String {
    text.lines().map(printable_line).collect::<Vec<_>>().join("\n")
}

/// Like [`printable`], for a value of one line.
pub(crate) fn printable_line(text: &str) -> String {
    let (shown, cut) = match text.char_indices().nth(MAX_LINE) {
        Some((end, _)) => (text.get(..end).unwrap_or_default(), " ..."),
        None => (text, ""),
    };
    format!("{}{cut}", harmless(shown, &[]))
}

/// Writes a line to standard error in one write, so lines of other processes on the same terminal
/// do not mix with it.
pub(crate) fn note(line: &str) {
    // An unwritable line is dropped.
    let line = harmless(line, &['\n', '\t']);
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

/// Prints a page over the preceding page, if there is a terminal. Lines beyond the last row are
/// left out; a file or a pipe gets the whole page.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print_page(text: &str) -> Result<(), CliError> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
    match size.map(|size| usize::from(size.ws_row)).filter(|&rows| rows > 1) {
        Some(rows) => print_after("\x1b[H\x1b[J", &top(text, rows - 1)),
        None => print(text),
    }
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
        assert_eq!(printable_line("a\nb"), "a\u{fffd}b");
        for c in "\0\x07\x08\r\x1b\x7f\u{85}\u{9b}\u{202e}\u{2066}\u{200f}\u{2028}\u{feff}".chars()
        {
            assert_eq!(harmless(&format!("a{c}b"), &['\n', '\t']), "a\u{fffd}b", "{c:?}");
        }
        assert_eq!(harmless("a\n\té", &['\n', '\t']), "a\n\té");
    }

    #[test]
    fn strings_of_json_do_nothing_to_a_terminal_either() {
        let line = json(&[("\"\\/\n\t\x1b\u{9b}\u{202e}é", 7)]).unwrap();
        let bad = "\u{fffd}".repeat(5);
        assert_eq!(line, format!("[[\"\\\"\\\\/{bad}é\",7]]\n"));
    }
}
