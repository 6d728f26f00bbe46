// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completions for shells: the scripts of clap_complete, with corrections.
//!
//! Without the corrections, hidden commands would be offered. fish would never offer values of
//! arguments without a name. In bash and fish, the program of "smc run" would be completed as a
//! file.

use std::fmt::Write as _;

use clap::{Arg, Command, ValueHint};
use clap_complete::Shell;

/// The script for a program.
pub(super) fn script(shell: Shell, command: &Command) -> String {
    let mut shown = without_hidden(command);
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut shown, &name, &mut text);
    let text = String::from_utf8_lossy(&text);
    let starts = shown.get_subcommands().filter(|sub| starts_program(sub));
    match shell {
        Shell::Bash => starts.fold(text.into_owned(), |text, sub| bash_program(&text, &name, sub)),
        Shell::Fish => {
            let mut text = text.into_owned();
            for sub in shown.get_subcommands() {
                fish_values(&mut text, &name, sub);
            }
            starts.for_each(|sub| fish_program(&mut text, &name, sub));
            text
        }
        _ => text.into_owned(),
    }
}

/// The same options and commands, but for hidden commands.
fn without_hidden(command: &Command) -> Command {
    // Texts of a command are static. The process ends soon.
    let leaked = |text: &str| -> &'static str { text.to_owned().leak() };
    let mut shown = Command::new(leaked(command.get_name()))
        .args(command.get_arguments().cloned())
        .groups(command.get_groups().cloned())
        .disable_help_flag(command.is_disable_help_flag_set())
        .disable_version_flag(command.is_disable_version_flag_set())
        .disable_help_subcommand(command.is_disable_help_subcommand_set());
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(about) = command.get_long_about() {
        shown = shown.long_about(about.clone());
    }
    if let Some(version) = command.get_version() {
        shown = shown.version(leaked(version));
    }
    let commands = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    shown.subcommands(commands.map(without_hidden))
}

/// Whether the command starts a program, with the program's name and arguments as its own
/// arguments.
fn starts_program(command: &Command) -> bool {
    command.get_positionals().any(|arg| arg.get_value_hint() == ValueHint::CommandWithArguments)
}

/// The options of a command with a value in the next word.
fn with_value(command: &Command) -> Vec<String> {
    let takes = |arg: &&Arg| {
        !arg.is_positional()
            && !arg.is_require_equals_set()
            && arg.get_num_args().is_none_or(|values| values.takes_values())
            && arg.get_action().takes_values()
    };
    let names = command.get_arguments().filter(takes).flat_map(|arg| {
        let long = arg.get_long().map(|long| format!("--{long}"));
        long.into_iter().chain(arg.get_short().map(|short| format!("-{short}")))
    });
    names.collect()
}

/// Adds the completion of a program and its arguments to a script for bash, as if the words before
/// the program were absent.
fn bash_program(text: &str, name: &str, command: &Command) -> String {
    let (function, of) = (name.replace('-', "__"), command.get_name());
    let before = format!("        {function}__subcmd__{of})\n");
    let after = format!("{before}            _{function}_{of}_program && return 0\n");
    let options = with_value(command).join("|");
    format!(
        r#"_{function}_{of}_program() {{
    local at word
    for ((at = 2; at <= COMP_CWORD; at++)); do
        word=${{COMP_WORDS[at]}}
        case $word in
            {options})
                at=$((at + 1))
                [[ ${{COMP_WORDS[at]}} != = ]] || at=$((at + 1))
                continue
                ;;
            =)
                at=$((at + 1))
                continue
                ;;
            --)
                at=$((at + 1))
                [ "$at" -le "$COMP_CWORD" ] || return 1
                ;;
            -*) continue ;;
        esac
        if declare -F _comp_command_offset >/dev/null; then
            _comp_command_offset "$at"
        elif declare -F _command_offset >/dev/null; then
            _command_offset "$at"
        elif [ "$at" = "$COMP_CWORD" ]; then
            COMPREPLY=($(compgen -c -- "${{COMP_WORDS[at]}}"))
        fi
        return 0
    done
    return 1
}}

{}"#,
        text.replacen(&before, &after, 1)
    )
}

/// The condition of fish for completing the words of a command.
fn fish_using(name: &str, command: &Command) -> String {
    format!("__fish_{}_using_subcommand {}", name.replace('-', "_"), command.get_name())
}

/// Adds the completion of a program and its arguments to a script for fish, as if the words before
/// the program were absent.
fn fish_program(text: &mut String, name: &str, command: &Command) {
    let _ = writeln!(
        text,
        "complete -c {name} -n \"{}\" -x -a \"(__fish_complete_subcommand --fcs-skip=2 -- {})\"",
        fish_using(name, command),
        with_value(command).join(" ")
    );
}

/// Adds the values of a command's unnamed arguments to a script for fish.
fn fish_values(text: &mut String, name: &str, command: &Command) {
    for arg in command.get_positionals() {
        for value in arg.get_possible_values().iter().filter(|value| !value.is_hide_set()) {
            let help = value.get_help().map(|help| help.to_string()).unwrap_or_default();
            let help = help.replace('\\', "\\\\").replace('\'', "\\'");
            let _ = writeln!(
                text,
                "complete -c {name} -n \"{}\" -f -a \"{}\" -d '{help}'",
                fish_using(name, command),
                value.get_name()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::builder::{PossibleValue, PossibleValuesParser};

    use super::*;

    fn command() -> Command {
        let program = Arg::new("program")
            .num_args(1..)
            .trailing_var_arg(true)
            .value_hint(ValueHint::CommandWithArguments);
        let totals = PossibleValue::new("totals").help("what is 'over'");
        let values = PossibleValuesParser::new([PossibleValue::new("overview"), totals]);
        let what = Arg::new("what").value_parser(values.clone());
        let by = Arg::new("by").long("by").value_parser(values);
        let run = Command::new("run").arg(Arg::new("device").long("device")).arg(program);
        let ctl = Command::new("ctl")
            .subcommand(Command::new("list"))
            .subcommand(Command::new("__inner").hide(true));
        Command::new("smc")
            .subcommand(run)
            .subcommand(Command::new("stat").arg(what).arg(by))
            .subcommand(Command::new("fabric").subcommand(ctl))
            .subcommand(Command::new("__inner").hide(true))
    }

    #[test]
    fn no_shell_offers_hidden_commands() {
        for shell in [Shell::Bash, Shell::Fish, Shell::Zsh, Shell::Elvish, Shell::PowerShell] {
            let text = script(shell, &command());
            assert!(text.contains("stat") && !text.contains("__inner"), "{shell}: {text}");
        }
    }

    #[test]
    fn bash_and_fish_complete_the_program_that_is_started() {
        let bash = script(Shell::Bash, &command());
        assert!(bash.contains("__run)\n            _smc_run_program && return 0"), "{bash}");
        assert!(bash.contains("            --device)\n                at="), "{bash}");
        let fish = script(Shell::Fish, &command());
        assert!(fish.contains("(__fish_complete_subcommand --fcs-skip=2 -- --device)"), "{fish}");
    }

    #[test]
    fn fish_offers_values() {
        let fish = script(Shell::Fish, &command());
        let value = r#"stat" -f -a "totals" -d 'what is \'over\''"#;
        assert!(fish.contains(value), "{fish}");
    }
}
