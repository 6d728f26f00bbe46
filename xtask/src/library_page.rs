// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The manual page of the library for C, made from its header.

use std::fmt::Write as _;

/// Text without commands of roff.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    match text.starts_with('.') {
        true => format!("\\&{text}"),
        false => text,
    }
}

/// A comment, without its marks.
fn comment(text: &str) -> String {
    let marks = |c| c == '*' || c == '/';
    let line = |line: &str| {
        let line = line.trim().trim_start_matches(marks).trim_end_matches(marks);
        line.strip_prefix(' ').unwrap_or(line).trim_end().to_owned()
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n").trim().to_owned()
}

fn as_it_is(text: &str) -> String {
    let lines = text.lines().map(|line| escaped(line) + "\n").collect::<String>();
    format!(".nf\n{lines}.fi\n")
}

/// libsmc(3).
pub(crate) fn of(header: &str) -> String {
    let mut introduction = String::new();
    let mut prototypes = String::new();
    let mut calls = String::new();
    // Blocks between empty lines: a comment, and the declarations described there.
    for block in header.split("\n\n") {
        let Some((before, rest)) = block.rsplit_once("*/\n") else { continue };
        let Some(begin) = before.rfind("/*") else { continue };
        let about = comment(before.get(begin..).unwrap_or_default());
        if rest.contains("#ifndef SMC_H") && introduction.is_empty() {
            introduction = about;
            continue;
        }
        let functions: Vec<&str> =
            rest.lines().filter(|line| line.contains('(') && line.ends_with(");")).collect();
        let names: Vec<_> = functions.iter().filter_map(|line| name_of(line)).collect();
        if names.is_empty() || about.starts_with("----") {
            continue;
        }
        prototypes += &functions.iter().map(|line| format!("{line}\n")).collect::<String>();
        let _ = write!(calls, ".SS {}\n{}", names.join(", "), as_it_is(&about));
    }
    format!(
        ".TH libsmc 3\n.SH NAME\nlibsmc \\- sockets over shared memory for programs in C\n\
         .SH SYNOPSIS\n.B #include <smc.h>\n.PP\n{}.PP\nLink with\n.BR \\-lsmc .\n\
         .SH DESCRIPTION\n{}.SH CALLS\n{calls}.SH SEE ALSO\n.BR smc (1),\n.BR smc (7),\n.BR socket (7)\n",
        as_it_is(&prototypes),
        as_it_is(&introduction),
    )
}

/// The name of the function in a prototype.
fn name_of(line: &str) -> Option<&str> {
    let before = line.split_once('(')?.0;
    let name = before.rsplit(|c: char| c != '_' && !c.is_ascii_alphanumeric()).next()?;
    name.starts_with("smc_").then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = include_str!("../../guest-driver/c/include/smc.h");

    #[test]
    fn every_call_of_the_header_is_on_the_page() {
        let page = of(HEADER);
        let declared = HEADER.lines().filter(|line| line.ends_with(");")).filter_map(name_of);
        let declared: Vec<_> = declared.collect();
        assert!(declared.len() > 20, "{declared:?}");
        for name in declared {
            let heads = page.lines().filter(|line| line.starts_with(".SS "));
            let found = heads.flat_map(|line| line[4..].split(", ")).any(|found| found == name);
            assert!(found, "{name} is missing in {page}");
        }
        assert!(page.contains("No call may be made in a signal handler."));
        assert!(page.contains("Returns the stack, for smc_stack_close."));
        assert!(!page.contains("/*") && !page.contains("*/"));
    }
}
