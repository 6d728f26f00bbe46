// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs of the test programs with guests, and their results.

use std::process::{Command, ExitCode, ExitStatus};

use crate::tool::{self, ToolError};

/// How a run of the test program ended.
pub(crate) struct Ended {
    status: ExitStatus,
    /// Names of tests.
    failed: Vec<String>,
    /// Panic messages of the tests, for the end of a long output.
    panics: Panics,
}

/// More failures than this are not the emulation's.
const MOST: usize = 10;

/// Names the failed tests with their reasons, and runs each of them once more, alone: a guest under emulation
/// waits for a processor of a busy host, and may miss a time for no other reason. The exit code is success if
/// all tests have passed by then.
pub(crate) fn report(
    runs: &[Ended],
    alone: impl Fn(&str) -> Command,
) -> Result<ExitCode, ToolError> {
    let mut failed = Vec::new();
    let mut all_ran = true;
    for run in runs.iter().filter(|run| !run.status.success()) {
        eprintln!("xtask: FAILED ({}): {}", run.status, run.failed.join(", "));
        run.panics.lines.iter().for_each(|line| eprintln!("    {line}"));
        failed.extend(&run.failed);
        // A crashed program has left tests out.
        all_ran &= run.status.code() == Some(SOME_FAILED) && !run.failed.is_empty();
    }
    let mut passed = all_ran && failed.len() <= MOST;
    if !passed {
        failed.iter().for_each(|name| println!("test {name} ... FAILED"));
    } else {
        for name in failed {
            let mut command = alone(name);
            command.arg("--exact");
            let again = watched(command, |line| println!("{line}"))?.status.success();
            let result = if again { "passed" } else { "FAILED again" };
            eprintln!("xtask: {name}: FAILED beside others, {result} alone");
            passed &= again;
        }
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Exit code of a test program with a failed test.
const SOME_FAILED: i32 = 101;

/// Prints a line of a first run. Readers of a log take no test there for failed that passes alone.
pub(crate) fn print_first(line: &str) {
    match (failed_test(line), line.strip_prefix("test result: FAILED")) {
        (Some(name), _) => println!("test {name} ... failed beside others"),
        (None, Some(counts)) => println!("beside others: failed{counts}"),
        (None, None) if line == "failures:" => println!("failed beside others:"),
        (None, None) => println!("{line}"),
    }
}

/// Runs the test program and hands over each line of its output.
pub(crate) fn watched(command: Command, mut each: impl FnMut(&str)) -> Result<Ended, ToolError> {
    let mut failed = Vec::new();
    let mut panics = Panics::default();
    // Output of tests follows these lines, possibly from tests in guests.
    let mut over = false;
    let status = tool::lines(command, |line| {
        each(line);
        over |= matches!(line, "successes:" | "failures:");
        if !over {
            failed.extend(failed_test(line).map(str::to_owned));
        }
        panics.take(line);
    })?;
    Ok(Ended { status, failed, panics })
}

/// The messages of panics, without the following lines.
#[derive(Default)]
struct Panics {
    lines: Vec<String>,
    within: bool,
}

impl Panics {
    fn take(&mut self, line: &str) {
        self.within |= line.starts_with("thread '") && line.contains(" panicked at ");
        self.within &= !line.starts_with("note: ") && line != "stack backtrace:";
        if self.within {
            self.lines.push(line.to_owned());
        }
    }
}

/// The name of a failed test, from a line of a test program.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_failed_test_names_it() {
        assert_eq!(failed_test("test a::b ... FAILED"), Some("a::b"));
        for line in ["test a::b ... ok", "test a::b ... ignored, slow", "failures:", "FAILED", ""] {
            assert_eq!(failed_test(line), None, "{line}");
        }
    }

    #[test]
    fn messages_of_panics_are_kept_without_backtraces() {
        let mut panics = Panics::default();
        for line in [
            "a cell  ok",
            "thread 'a::b' (7) panicked at tests/a.rs:1:2:",
            "2 cells:",
            "a cell  FAILED",
            "stack backtrace:",
            "   0: main",
        ] {
            panics.take(line);
        }
        let kept = ["thread 'a::b' (7) panicked at tests/a.rs:1:2:", "2 cells:", "a cell  FAILED"];
        assert_eq!(panics.lines, kept);
    }

    fn ended(script: &str, failed: &[&str]) -> Ended {
        let mut sh = Command::new("sh");
        sh.args(["-c", script]);
        let failed = failed.iter().map(|&name| name.to_owned()).collect();
        Ended { status: tool::status(sh).unwrap(), failed, panics: Panics::default() }
    }

    /// Whether all is well if `c` fails alone, too, and no other test does.
    fn all_is_well(run: Ended) -> bool {
        let code = report(&[ended("true", &[]), run], |name| {
            let mut sh = Command::new("sh");
            sh.args(["-c", "test $0 != c", name]);
            sh
        });
        code.unwrap() == ExitCode::SUCCESS
    }

    #[test]
    fn a_test_that_fails_beside_others_may_pass_alone() {
        assert!(all_is_well(ended("exit 101", &["a", "b"])));
        assert!(!all_is_well(ended("exit 101", &["a", "c"])));
    }

    // The arguments of a first run and of the run alone are those of one test program.
    #[test]
    fn a_test_program_takes_the_arguments_of_a_run_alone() {
        let code = report(&[ended("exit 101", &["a_line_of_a_failed_test_names_it"])], |name| {
            let mut tests = Command::new(std::env::current_exe().unwrap());
            tests.args([&format!("guest_tests::tests::{name}"), "--test-threads=4"]);
            tests
        });
        assert_eq!(code.unwrap(), ExitCode::SUCCESS);
    }

    #[test]
    fn a_program_that_died_has_failed_whatever_passes_alone() {
        assert!(!all_is_well(ended("kill -ABRT $$", &["a"])));
        assert!(!all_is_well(ended("exit 101", &[])));
        assert!(!all_is_well(ended("exit 101", &["a"; MOST + 1])));
    }
}
