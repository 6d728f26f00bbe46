// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Texts of the help, wrapped for the terminal.
//!
//! The texts have lines as long as source code may be. A narrower terminal would break each line
//! once more.

use clap::Command;

use crate::output;

/// Columns of the help, where the terminal is not narrower.
const WIDTH: usize = 100;
/// Columns at least.
const LEAST: usize = 40;
/// An indented line ending before this column ends there on purpose.
const FULL: usize = 90;

/// The command with its texts, and the texts of its subcommands, wrapped for the terminal.
pub(crate) fn wrapped(command: Command) -> Command {
    let width = output::columns().map_or(WIDTH, |columns| columns.clamp(LEAST, WIDTH));
    wrapped_to(command.term_width(width), width)
}

fn wrapped_to(command: Command, width: usize) -> Command {
    let about = command.get_long_about().map(|text| wrap(&text.to_string(), width));
    let after = command.get_after_long_help().map(|text| wrap(&text.to_string(), width));
    let short = command.get_after_help().map(|text| wrap(&text.to_string(), width));
    let command = match about {
        Some(text) => command.long_about(text),
        None => command,
    };
    let command = match short {
        Some(text) => command.after_help(text),
        None => command,
    };
    let command = match after {
        Some(text) => command.after_long_help(text),
        None => command,
    };
    command.mut_subcommands(|command| wrapped_to(command, width))
}

/// Wraps the paragraphs of a text. An indented line starts a paragraph, unless the preceding line
/// is full and the indentation equals the column of the preceding text.
pub(crate) fn wrap(text: &str, width: usize) -> String {
    let mut out = String::new();
    let mut paragraph: Option<Paragraph<'_>> = None;
    for line in text.lines() {
        if let Some(open) = &mut paragraph
            && open.takes(line)
        {
            open.add(line);
            continue;
        }
        if let Some(done) = paragraph.take() {
            done.write(&mut out, width);
        }
        paragraph = Some(Paragraph { first: line, hang: None, last: line, rest: Vec::new() });
    }
    if let Some(done) = paragraph {
        done.write(&mut out, width);
    }
    out.truncate(out.trim_end().len());
    out
}

struct Paragraph<'a> {
    first: &'a str,
    /// Column of the lines after the first.
    hang: Option<usize>,
    last: &'a str,
    rest: Vec<&'a str>,
}

impl<'a> Paragraph<'a> {
    fn takes(&self, line: &str) -> bool {
        if line.trim().is_empty() || self.last.trim().is_empty() {
            return false;
        }
        let column = indent(line);
        let fits = match self.hang {
            Some(hang) => column == hang,
            None => column == text_column(self.first),
        };
        let word = line.split_whitespace().next().unwrap_or_default();
        let full = self.last.len() + 1 + word.len() > FULL;
        fits && (full || (column == 0 && !self.last.ends_with(':')))
    }

    fn add(&mut self, line: &'a str) {
        self.hang = Some(indent(line));
        self.last = line;
        self.rest.push(line);
    }

    fn write(&self, out: &mut String, width: usize) {
        let hang = self.hang.unwrap_or_else(|| text_column(self.first));
        let (head, text) =
            self.first.split_at_checked(hang.min(self.first.len())).unwrap_or(("", self.first));
        let mut column = head.len();
        out.push_str(head);
        let words = text.split_whitespace();
        let rest = self.rest.iter().flat_map(|line| line.split_whitespace());
        let mut is_first = true;
        for word in words.chain(rest) {
            if !is_first && column + 1 + word.len() > width {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', hang));
                column = hang;
            } else if !is_first {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += word.len();
            is_first = false;
        }
        out.truncate(out.trim_end_matches(' ').len());
        out.push('\n');
    }
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Where the text of an item begins: after a term and at least two spaces, or after "- ". Of other lines: the
/// indentation.
fn text_column(line: &str) -> usize {
    let start = indent(line);
    let body = line.get(start..).unwrap_or_default();
    if body.starts_with("- ") {
        return start + 2;
    }
    match body.find("  ") {
        Some(gap) if start != 0 => {
            let after = body.get(gap..).unwrap_or_default();
            start + gap + indent(after)
        }
        _ => start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_prose_are_joined_and_wrapped() {
        let text = "One two three\nfour five.\n\nSix:\nseven";
        assert_eq!(wrap(text, 100), "One two three four five.\n\nSix:\nseven");
        assert_eq!(wrap(text, 14), "One two three\nfour five.\n\nSix:\nseven");
    }

    #[test]
    fn items_keep_their_column() {
        let long = "x".repeat(80);
        let text = format!("  term   {long} one\n         two three\n  other  four");
        let wrapped = wrap(&text, 95);
        assert_eq!(wrapped, format!("  term   {long} one\n         two three\n  other  four"));
        assert_eq!(wrap("  - one two\n  - three", 10), "  - one\n    two\n  - three");
        let wrapped = wrap("  term   one two three four five", 20);
        assert_eq!(wrapped, "  term   one two\n         three four\n         five");
    }

    #[test]
    fn short_indented_lines_stay_as_they_are() {
        let text = "Examples:\n  smc perf       the suite\n  smc perf rtt   one\n\n    a &\n    b";
        assert_eq!(wrap(text, 100), text);
        let item = format!("  smc perf  {}", "x".repeat(80));
        let text = format!("{item}\n{item}");
        assert_eq!(wrap(&text, 100), text, "items that fill their lines");
    }

    #[test]
    fn a_word_that_is_too_long_has_a_line_of_its_own() {
        assert_eq!(wrap("a bbbbbbbbbb c", 5), "a\nbbbbbbbbbb\nc");
        assert_eq!(wrap("", 5), "");
    }
}
