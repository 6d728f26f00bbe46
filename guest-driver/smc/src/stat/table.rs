// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables, and numbers in them.

use std::time::Duration;

use comfy_table::{Cell, CellAlignment, presets};

use crate::output;
pub(super) use crate::output::printable_line as printable;

/// A table. On a narrow terminal, empty columns are left out, and lines still too long continue in
/// the next line, between two cells.
#[derive(Debug)]
pub(crate) struct Table {
    /// The headings, and then the rows.
    lines: Vec<Vec<String>>,
}

/// A table with these headings, the first column on the left.
pub(crate) fn table(header: &[&str]) -> Table {
    Table { lines: vec![header.iter().map(|title| (*title).to_owned()).collect()] }
}

/// Adds a row.
pub(crate) fn row(table: &mut Table, name: &str, cells: impl IntoIterator<Item = String>) {
    let cells = cells.into_iter().map(|cell| printable(&cell));
    table.lines.push(std::iter::once(printable(name)).chain(cells).collect());
}

impl Table {
    /// Whether there is no row.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.len() < 2
    }

    /// The text of the table. `room`: columns of the terminal, if any.
    fn text(&self, room: Option<usize>) -> String {
        let wide = self.boxed();
        match room {
            Some(room) if wide.lines().any(|line| line.chars().count() > room) => {
                let lines = self.without_empty_columns();
                let columns = lines.first().map_or(0, Vec::len);
                let is_number: Vec<_> = (0..columns).map(|at| at > 0).collect();
                folded(&lines, &is_number, Some(room))
            }
            _ => wide,
        }
    }

    fn boxed(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        for (number, line) in self.lines.iter().enumerate() {
            let cells = line.iter().enumerate().map(|(at, cell)| {
                let side = if at == 0 { CellAlignment::Left } else { CellAlignment::Right };
                Cell::new(cell).set_alignment(side)
            });
            match number {
                0 => table.set_header(cells),
                _ => table.add_row(cells.collect::<Vec<_>>()),
            };
        }
        table.to_string()
    }

    fn without_empty_columns(&self) -> Vec<Vec<String>> {
        let says_something = |at: usize| {
            let mut cells = self.lines.iter().skip(1).filter_map(|line| line.get(at));
            at == 0 || cells.any(|cell| !["0", "0 B", "-", ""].contains(&cell.as_str()))
        };
        let shorter = |line: &Vec<String>| {
            let shown = line.iter().enumerate().filter(|(at, _)| says_something(*at));
            shown.map(|(_, cell)| cell.clone()).collect()
        };
        self.lines.iter().map(shorter).collect()
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text(output::columns()).trim_end_matches('\n'))
    }
}

/// Lines of cells below each other. A line longer than `room` continues in the next line, between
/// two cells. `is_number`: for each column, whether cells are flush right.
pub(super) fn folded(lines: &[Vec<String>], is_number: &[bool], room: Option<usize>) -> String {
    let width = |at: usize| {
        let cells = lines.iter().filter_map(|line| line.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..is_number.len()).map(width).collect();
    let mut text = String::new();
    for cells in lines {
        let mut line = String::new();
        for ((cell, width), is_number) in cells.iter().zip(&widths).zip(is_number) {
            let padded = match is_number {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            };
            let used = line.chars().count();
            let end = used + usize::from(used > 0) * 2 + padded.trim_end().chars().count();
            if used > 4 && room.is_some_and(|room| end > room) {
                text += line.trim_end();
                text.push('\n');
                line = format!("    {padded}");
                continue;
            }
            line += if used > 0 { "  " } else { "" };
            line += &padded;
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// A number of bytes in three digits.
pub(crate) fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", units.get(unit).unwrap_or(&"B"))
}

/// The difference per second.
pub(super) fn per_second(now: u64, before: u64, time: Duration) -> u64 {
    (now.saturating_sub(before) as f64 / time.as_secs_f64().max(0.001)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        assert_eq!(
            [0, 999, 65536, 1 << 20, 3 << 30].map(size),
            ["0 B", "999 B", "64.0 KiB", "1.0 MiB", "3.0 GiB"]
        );
        assert_eq!(per_second(3 << 20, 1 << 20, Duration::from_secs(2)), 1 << 20);
    }

    #[test]
    fn a_narrow_table_cuts_no_word_and_leaves_out_what_is_empty() {
        let mut one = table(&["process", "groups", "received", "links", "peer's end"]);
        let end = "0123:4567:89ab:cdef#17";
        row(&mut one, "python3 19265", ["0", "64.0 KiB", "2", end].map(str::to_owned));
        row(&mut one, "python3 19266", ["0", "0 B", "-", end].map(str::to_owned));
        for room in [20, 40, 52] {
            let text = one.text(Some(room));
            assert!(!text.contains("groups") && !text.contains('│'), "{text}");
            for word in ["process", "received", "links", "python3 19265", "64.0 KiB", end] {
                assert!(text.contains(word), "{room}: {word} in {text}");
            }
            let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= room.max(4 + end.len()), "{room}: {text}");
        }
        assert_eq!(one.text(Some(54)).lines().count(), 3);
        for wide in [one.text(Some(80)), one.text(None)] {
            assert!(wide.contains("groups") && wide.contains('│'), "{wide}");
        }
        assert!(!one.is_empty() && table(&["x"]).is_empty());
    }
}
