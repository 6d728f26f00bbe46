// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables, and numbers in them.

use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Table, presets};

use crate::output;

/// A table with these headings, the first column on the left.
pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.set_content_arrangement(output::arrangement());
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(header.iter().enumerate().map(|(at, title)| {
        let side = if at == 0 { CellAlignment::Left } else { CellAlignment::Right };
        Cell::new(title).set_alignment(side)
    }));
    table
}

/// Adds a row.
pub(super) fn row(table: &mut Table, name: &str, cells: impl IntoIterator<Item = String>) {
    let mut row = vec![Cell::new(printable(name))];
    let cell = |text: String| Cell::new(printable(&text)).set_alignment(CellAlignment::Right);
    row.extend(cells.into_iter().map(cell));
    table.add_row(row);
}

/// Untrusted text without the control characters that a terminal would interpret.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A number of bytes in three digits.
pub(super) fn size(bytes: u64) -> String {
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

/// What has passed per second.
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
    fn untrusted_text_has_no_control_characters() {
        assert_eq!(printable("a\x1b[2J\nb"), "a\u{fffd}[2J\u{fffd}b");
    }
}
