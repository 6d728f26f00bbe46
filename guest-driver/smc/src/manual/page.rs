// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The manual page of a command, in the language of man(7).
//!
//! The texts are the texts of `--help`: a line of two spaces, a word and at least two spaces is an
//! entry of a list; other indented lines are shown verbatim; the rest is filled.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;

use clap::{Arg, ArgAction, Command};
use clap_mangen::Man;

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
    let rendered = |render: &dyn Fn(&mut Vec<u8>) -> io::Result<()>| -> io::Result<String> {
        let mut text = Vec::new();
        render(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let mut out = rendered(&|text| man.render_title(text))?;
    out += &rendered(&|text| man.render_name_section(text))?;
    out += &synopsis(&command);
    out += ".SH DESCRIPTION\n";
    let about = command.get_long_about().or(command.get_about());
    out += &body(&about.map(ToString::to_string).unwrap_or_default());
    out += &rendered(&|text| man.render_options_section(text))?;
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        out += &rendered(&|text| man.render_subcommands_section(text))?;
    }
    let after = command.get_after_long_help().or(command.get_after_help());
    let sections = sections(&after.map(ToString::to_string).unwrap_or_default());
    let own = |title: &str| sections.get(title).cloned();
    let part = |out: &mut String, title: &str, text: Option<String>| {
        if let Some(text) = text {
            let _ = write!(out, ".SH {title}\n{}", body(&text));
        }
    };
    part(&mut out, "EXAMPLES", own("EXAMPLES"));
    part(&mut out, "NOTES", own("NOTES"));
    if let Some(end) = end {
        out += end;
        return Ok(out);
    }
    part(
        &mut out,
        "EXIT STATUS",
        Some(own("EXIT STATUS").unwrap_or_else(|| EXIT_STATUS.to_owned())),
    );
    part(&mut out, "ENVIRONMENT", Some(environment(&command)));
    part(
        &mut out,
        "FILES",
        Some("  /etc/smc/smc.toml    Settings of the machine; see smc.toml(5).".into()),
    );
    let _ = writeln!(out, ".SH SEE ALSO\n{}", see_also(&name));
    Ok(out)
}

/// The options with their values.
fn synopsis(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let mut text = format!(".SH SYNOPSIS\n\\fB{}\\fR", escaped(name));
    let shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help";
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(shown).partition(|arg| arg.is_positional());
    for arg in options {
        let mut words: Vec<String> = Vec::new();
        words.extend(arg.get_short().map(|short| format!("\\fB\\-{short}\\fR")));
        words.extend(
            arg.get_long().map(|long| format!("\\fB{}\\fR", escaped(&format!("--{long}")))),
        );
        let word = format!("{}{}", words.join("|"), values(arg));
        let _ = match arg.is_required_set() {
            true => write!(text, " {word}"),
            false => write!(text, " [{word}]"),
        };
    }
    if command.has_subcommands() {
        text += " \\fICOMMAND\\fR";
    }
    for arg in positional {
        let value = escaped(&value_names(arg).join(" "));
        let more = if arg.get_num_args().is_some_and(|n| n.max_values() > 1) { " ..." } else { "" };
        let _ = match arg.is_required_set() {
            true => write!(text, " \\fI{value}\\fR{more}"),
            false => write!(text, " [\\fI{value}\\fR{more}]"),
        };
    }
    text + "\n"
}

fn value_names(arg: &Arg) -> Vec<String> {
    match arg.get_value_names() {
        Some(names) => names.iter().map(ToString::to_string).collect(),
        None => vec![arg.get_id().as_str().to_uppercase()],
    }
}

fn values(arg: &Arg) -> String {
    if !matches!(arg.get_action(), ArgAction::Set | ArgAction::Append) {
        return String::new();
    }
    let names = escaped(&value_names(arg).join(" "));
    match arg.get_num_args().map(|n| n.min_values()) {
        Some(0) => format!(" [\\fI{names}\\fR]"),
        _ => format!(" \\fI{names}\\fR"),
    }
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

/// A line of a list: its word or words, and the text behind.
fn entry(line: &str) -> Option<(&str, &str)> {
    let inner = line.strip_prefix("  ").filter(|inner| !inner.starts_with(' '))?;
    let (term, text) = inner.split_once("  ")?;
    Some((term, text.trim_start()))
}

/// Text of the help in roff.
fn body(text: &str) -> String {
    let mut out = String::new();
    let mut in_list = false;
    let mut as_it_is = false;
    for line in text.lines() {
        let is_deep = line.starts_with("    ");
        let now_as_it_is = line.starts_with("  ") && entry(line).is_none() && !(in_list && is_deep);
        if as_it_is && !now_as_it_is {
            out += ".fi\n.RE\n";
        }
        if now_as_it_is && !as_it_is {
            out += if in_list { ".PP\n.RS 4\n.nf\n" } else { ".RS 4\n.nf\n" };
            in_list = false;
        }
        as_it_is = now_as_it_is;
        if let Some((term, text)) = entry(line) {
            let _ = write!(out, ".TP\n\\fB{}\\fR\n{}\n", escaped(term), escaped(text));
            in_list = true;
        } else if line.is_empty() {
            out += ".PP\n";
            in_list = false;
        } else {
            if in_list && !is_deep {
                out += ".PP\n";
                in_list = false;
            }
            let text = if as_it_is { line.trim_start_matches("  ") } else { line.trim_start() };
            out += &escaped(text);
            out.push('\n');
        }
    }
    if as_it_is {
        out += ".fi\n.RE\n";
    }
    out
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
    fn lists_of_the_help_are_lists_and_commands_stay_lines() {
        let text = "Words\nthat go on.\n\n  one      the first\n           of them\n  two-b    .x\n\
                    Behind.\n\n  smc run x\n  smc stat";
        let expected = "Words\nthat go on.\n.PP\n.TP\n\\fBone\\fR\nthe first\nof them\n.TP\n\
                        \\fBtwo\\-b\\fR\n\\&.x\n.PP\nBehind.\n.PP\n.RS 4\n.nf\nsmc run x\nsmc stat\n\
                        .fi\n.RE\n";
        assert_eq!(body(text), expected);
    }

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
    fn a_synopsis_has_the_values_of_options() {
        let command = Command::new("x")
            .arg(Arg::new("file").short('f').long("file").value_name("FILE"))
            .arg(Arg::new("all").long("all").action(ArgAction::SetTrue))
            .arg(Arg::new("every").long("every").num_args(0..=1).value_name("N"))
            .arg(Arg::new("host").required(true));
        let text = page(command, "1", None).unwrap();
        for part in [
            "[\\fB\\-f\\fR|\\fB\\-\\-file\\fR \\fIFILE\\fR]",
            "[\\fB\\-\\-all\\fR]",
            "[\\fB\\-\\-every\\fR [\\fIN\\fR]]",
            " \\fIHOST\\fR",
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
