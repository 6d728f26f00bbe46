// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The manual page of a command, in the language of man(7).
//!
//! The texts are the texts of `--help`, with the same lines.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;

use clap::Command;
use clap_mangen::Man;

use crate::help;

/// Columns of the texts.
const WIDTH: usize = 72;
/// The exit statuses on a page if the help has none.
const EXIT_STATUS: &str = "\
  0    Success.
  1    The command failed, and says why.
  2    The command line is wrong.";

/// The page of a command. `end` replaces exit status, environment and files.
pub(super) fn page(command: Command, section: &str, end: Option<&str>) -> io::Result<String> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let man = Man::new(command.clone()).section(section).title(&name);
    let mut begin = Vec::new();
    man.render_title(&mut begin)?;
    man.render_name_section(&mut begin)?;
    man.render_synopsis_section(&mut begin)?;
    let mut out = String::from_utf8_lossy(&begin).into_owned();
    let about = command.get_long_about().or(command.get_about());
    part(&mut out, "DESCRIPTION", &about.map(ToString::to_string).unwrap_or_default());
    let mut options = Vec::new();
    man.render_options_section(&mut options)?;
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        man.render_subcommands_section(&mut options)?;
    }
    out += &String::from_utf8_lossy(&options);
    let after = command.get_after_long_help().or(command.get_after_help());
    let sections = sections(&after.map(ToString::to_string).unwrap_or_default());
    for title in ["EXAMPLES", "NOTES"] {
        if let Some(text) = sections.get(title) {
            part(&mut out, title, text);
        }
    }
    if let Some(end) = end {
        out += end;
        return Ok(out);
    }
    part(&mut out, "EXIT STATUS", sections.get("EXIT STATUS").map_or(EXIT_STATUS, String::as_str));
    part(&mut out, "ENVIRONMENT", &environment(&command));
    part(&mut out, "FILES", "  /etc/smc/smc.toml    Settings of the machine; see smc.toml(5).");
    let _ = writeln!(out, ".SH SEE ALSO\n{}", see_also(&name));
    Ok(out)
}

/// Adds a section with a text of the help.
fn part(out: &mut String, title: &str, text: &str) {
    let text = help::wrap(text, WIDTH);
    let lines: String = text.lines().map(|line| escaped(line) + "\n").collect();
    let _ = write!(out, ".SH {title}\n.nf\n{lines}.fi\n");
}

/// The text behind the options, by section.
fn sections(after: &str) -> BTreeMap<&'static str, String> {
    let mut sections = BTreeMap::<_, String>::new();
    for paragraph in after.split("\n\n") {
        let (title, text) = match paragraph.split_once(':') {
            Some(("Examples" | "Example", rest)) => ("EXAMPLES", rest),
            Some(("Exit status", rest)) => ("EXIT STATUS", rest),
            _ if paragraph.starts_with("An example") => ("EXAMPLES", paragraph),
            _ => ("NOTES", paragraph),
        };
        let text = text.trim_start_matches([' ', '\n'].as_slice());
        // The first line of a list has lost its indentation.
        let whole = if paragraph.contains(":\n  ") && !text.starts_with("An ") {
            format!("  {text}")
        } else {
            text.to_owned()
        };
        let section = sections.entry(title).or_default();
        if !section.is_empty() {
            *section += "\n\n";
        }
        *section += &whole;
    }
    sections.retain(|_, text| !text.trim().is_empty());
    sections
}

fn environment(command: &Command) -> String {
    let mut text = String::new();
    for arg in command.get_arguments() {
        if let (Some(name), Some(long)) = (arg.get_env(), arg.get_long()) {
            let _ = writeln!(text, "  {}    The default of --{long}.", name.to_string_lossy());
        }
    }
    text + "  SMC_LOG    What to log on standard error, in detail; for programs of smc run, too.\n  \
            SMC_LOG_FILE    Where the log of programs of smc run goes instead.\n  \
            RUST_LOG    As SMC_LOG, for the command alone.\n  \
            NO_COLOR    The log has no colours on a terminal either.\n  \
            XDG_RUNTIME_DIR    Where the user's own fabric and the sockets of reports are."
}

fn see_also(name: &str) -> String {
    let all = [
        "smc.1",
        "smc-run.1",
        "smc-stat.1",
        "smc-doctor.1",
        "smc.toml.5",
        "smc.7",
        "vhost-device-ism.8",
    ];
    let others = all.iter().filter_map(|page| page.rsplit_once('.'));
    let others = others.filter(|(page, _)| *page != name || page.contains(".toml"));
    let list = others.map(|(page, section)| format!(".BR {} ({section})", escaped(page)));
    list.collect::<Vec<_>>().join(",\n")
}

/// Text without commands of roff.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    match text.starts_with('.') {
        true => format!("\\&{text}"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_options_has_a_section_of_its_own() {
        let after = "Examples:\n  smc stat\n  smc stat -w\n\nExit status: 0 good, 1 bad.\n\nMore.";
        let found = sections(after);
        assert_eq!(found["EXAMPLES"], "  smc stat\n  smc stat -w");
        assert_eq!(found["EXIT STATUS"], "0 good, 1 bad.");
        assert_eq!(found["NOTES"], "More.");
        assert!(sections("").is_empty());
    }

    #[test]
    fn a_page_has_the_lines_of_the_help_and_all_sections() {
        let command = Command::new("x")
            .arg(clap::Arg::new("file").short('f').long("file").value_name("FILE"))
            .about("Words.\n\n  two-b    .x\n.y");
        let text = page(command, "1", None).unwrap();
        for part in [
            "[\\fB\\-f\\fR|\\fB\\-\\-file\\fR]",
            ".SH DESCRIPTION\n.nf\nWords.\n\n  two\\-b    .x\n\\&.y\n.fi\n",
            ".SH EXIT STATUS",
            ".SH ENVIRONMENT",
            ".SH FILES",
            ".SH SEE ALSO",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!text.contains("EXTRA"));
    }
}
