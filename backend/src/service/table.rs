// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A table for the commands other than the daemon, as wide as the terminal.

/// Columns of the terminal at standard output. `None` without a terminal, or without a known width: a serial
/// console reports 0.
pub(crate) fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns != 0)
}

/// Lines of aligned cells, the headings first. On a narrow terminal, empty columns are left out, and overlong
/// lines continue on the next line, split between two cells. `room`: columns of the terminal, if any.
pub(crate) fn text<const N: usize>(lines: &[[String; N]], room: Option<usize>) -> String {
    let all: Vec<usize> = (0..N).collect();
    let wide = folded(lines, &all, None);
    match room {
        Some(room) if wide.lines().any(|line| line.chars().count() > room) => {
            let says_something = |at: &usize| {
                let mut cells = lines.iter().skip(1).filter_map(|line| line.get(*at));
                *at == 0 || cells.any(|cell| !["0", "-", ""].contains(&cell.as_str()))
            };
            let shown: Vec<usize> = all.into_iter().filter(says_something).collect();
            folded(lines, &shown, Some(room))
        }
        _ => wide,
    }
}

/// The cells of the columns `shown`.
fn folded<const N: usize>(lines: &[[String; N]], shown: &[usize], room: Option<usize>) -> String {
    let mut text = String::new();
    for cells in lines {
        let mut line = String::new();
        for &at in shown {
            let lengths = lines.iter().filter_map(|line| line.get(at)).map(|c| c.chars().count());
            let (width, cell) = (lengths.max().unwrap_or(0), cells.get(at).map_or("", |c| c));
            let used = line.chars().count();
            let end = used + usize::from(used > 0) * 2 + cell.chars().count();
            if used > 4 && room.is_some_and(|room| end > room) {
                text += line.trim_end();
                text.push('\n');
                line = "    ".into();
            } else if used > 0 {
                line += "  ";
            }
            line += &format!("{cell:<width$}");
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_table_cuts_no_word_and_leaves_out_what_is_empty() {
        let line = |cells: [&str; 4]| cells.map(str::to_owned);
        let name = "database-of-the-customer-in-rack-17";
        let socket = "/run/vhost-device-ism/database-of-the-customer-in-rack-17.sock";
        let lines = [
            line(["NAME", "FAULTS", "FRONT END", "SOCKET"]),
            line([name, "0", "pid 4711 uid 64055", socket]),
            line(["b", "0", "-", "/run/b.sock"]),
        ];
        let wide = text(&lines, None);
        assert_eq!((wide.lines().count(), text(&lines, Some(200))), (3, wide.clone()));
        assert!(wide.contains("FAULTS"), "{wide}");
        for room in [40, 80] {
            let narrow = text(&lines, Some(room));
            assert!(!narrow.contains("FAULTS"), "{narrow}");
            for word in [name, "pid 4711 uid 64055", socket] {
                assert!(narrow.contains(word), "{room}: {word} in {narrow}");
            }
            let longest = narrow.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= room.max(4 + socket.len()), "{room}: {narrow}");
        }
        let narrow = text(&lines, Some(80));
        let column = |of: &str| narrow.lines().find_map(|line| line.find(of)).unwrap();
        assert_eq!(column("FRONT END"), column("pid 4711"), "{narrow}");
        assert_eq!(column("SOCKET"), column("/run/b.sock"), "{narrow}");
    }
}
