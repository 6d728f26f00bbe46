// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask mutants`.

mod places;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::tool::{self, ToolError, at};
use places::Place;

pub(crate) const LONG_ABOUT: &str = "\
Break single rules of the handshake at random, and count how many breaks the conformance suite finds.

A copy of smc-core in target/mutants gets all breaks at once, each behind a number that the variable \
SMC_FAULT turns on, so that one build will do. The suite then plays a server and a client of each, \
over TCP, and sees nothing but their messages. The tests of smc-core run with each break, too. \
A break that changes nothing that a peer or a caller could see is counted as one that is not found.";

/// Options of `cargo xtask mutants`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Decides which rules are broken.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Break so many rules.
    #[arg(long, value_name = "N", default_value_t = 100)]
    count: usize,

    /// Fail if the suite finds fewer, percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 70)]
    at_least: usize,

    /// Try only these of the rules drawn, by the numbers that a run prints.
    #[arg(long, value_name = "N,N..", value_delimiter = ',')]
    only: Vec<u32>,

    /// Targets at a time.
    #[arg(long, value_name = "N", default_value_t = 8)]
    jobs: usize,
}

/// Folders of smc-core whose rules are broken.
const BROKEN: [&str; 2] = ["smc-core/src/handshake", "smc-core/src/wire/clc"];
/// What the copy consists of.
const COPIED: [&str; 4] =
    ["smc-core", "guest-driver/conform", "docs/requirements.tsv", "Cargo.lock"];
/// The switch, which only the copy has.
const SWITCH: &str = "
/// Whether a fault is on.
#[doc(hidden)]
pub mod fault {
    /// Whether the fault of this number is on.
    pub fn on(number: u32) -> bool {
        static ON: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
        let of_variable = || std::env::var(\"SMC_FAULT\").ok()?.parse().ok();
        *ON.get_or_init(|| of_variable().unwrap_or(0)) == number
    }
}
";
/// Among so many targets one more has no break.
const CONTROL: usize = 10;
/// A target that plays for longer has lost its way, which is found, too.
const LONGEST: Duration = Duration::from_secs(240);

/// Runs the task. The exit code says whether enough breaks were found.
///
/// # Errors
/// A source cannot be read, or the copy does not build.
pub(crate) fn run(args: &Args, root: &Path) -> Result<ExitCode, ToolError> {
    let tree = root.join("target/mutants/tree");
    copy(root, &tree)?;
    let mut mutants = break_rules(&tree, args)?;
    mutants.retain(|one| args.only.is_empty() || args.only.contains(&one.number));
    let programs = build(root, &tree)?;
    println!("{} rules of {:?} are broken, seed {}", mutants.len(), BROKEN, args.seed);
    let next = AtomicUsize::new(0);
    let unbroken: Mutex<Vec<String>> = Mutex::default();
    let results: Mutex<BTreeMap<usize, Found>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(mutant) = mutants.get(at) else { return };
                    // Whether the machine is too busy shows at targets without a break.
                    if at.is_multiple_of(CONTROL) {
                        let said = first_failure(0, &programs.suite);
                        unbroken.lock().unwrap_or_else(|lost| lost.into_inner()).extend(said);
                    }
                    let found = Found {
                        suite: first_failure(mutant.number, &programs.suite),
                        tests: first_failure(mutant.number, &programs.tests),
                    };
                    println!("{}", mutant.line(&found));
                    let mut results = results.lock().unwrap_or_else(|lost| lost.into_inner());
                    results.insert(at, found);
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(|lost| lost.into_inner());
    let unbroken = unbroken.into_inner().unwrap_or_else(|lost| lost.into_inner());
    if let Some(said) = unbroken.first() {
        let what = format!("{} targets without a break fail, too: {said}", unbroken.len());
        return Err(ToolError::Answer { program: "the suite".into(), what });
    }
    let by = |found: fn(&Found) -> bool| results.values().filter(|one| found(one)).count();
    let (suite, tests) = (by(|one| one.suite.is_some()), by(|one| one.tests.is_some()));
    let neither = by(|one| one.suite.is_none() && one.tests.is_none());
    let all = results.len();
    println!(
        "of {all} breaks the suite finds {suite}, smc-core's tests {tests}, neither {neither}"
    );
    Ok(if suite * 100 >= args.at_least * all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What noticed a break.
struct Found {
    suite: Option<String>,
    tests: Option<String>,
}

struct Mutant {
    number: u32,
    file: String,
    line: usize,
    what: String,
}

impl Mutant {
    fn line(&self, found: &Found) -> String {
        let words: Vec<&str> = self.what.split_whitespace().collect();
        let what: String = words.join(" ").chars().take(70).collect();
        let by = match (&found.suite, &found.tests) {
            (Some(suite), _) => format!("found: {suite}"),
            (None, Some(tests)) => format!("found by tests only: {tests}"),
            (None, None) => "not found".into(),
        };
        format!("{:3} {}:{} {what}: {by}", self.number, self.file, self.line)
    }
}

fn copy(root: &Path, tree: &Path) -> Result<(), ToolError> {
    match std::fs::remove_dir_all(tree) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(at(tree)(error));
        }
        _ => {}
    }
    for name in COPIED {
        let to = tree.join(name);
        let parent = to.parent().unwrap_or(tree);
        std::fs::create_dir_all(parent).map_err(at(parent))?;
        let mut command = Command::new("cp");
        command.arg("-r").arg(root.join(name)).arg(&to);
        tool::succeed(&mut command)?;
    }
    let path = root.join("Cargo.toml");
    let manifest = std::fs::read_to_string(&path).map_err(at(&path))?;
    let (start, rest) = manifest.split_once("members = [").unwrap_or((&manifest, ""));
    let (_, end) = rest.split_once(']').unwrap_or(("", rest));
    let members = "members = [\"smc-core\", \"guest-driver/conform\"]";
    let path = tree.join("Cargo.toml");
    std::fs::write(&path, format!("{start}{members}{end}")).map_err(at(&path))?;
    let path = tree.join("smc-core/src/lib.rs");
    let library = std::fs::read_to_string(&path).map_err(at(&path))?;
    std::fs::write(&path, library + SWITCH).map_err(at(&path))
}

/// Puts the breaks into the copy.
fn break_rules(tree: &Path, args: &Args) -> Result<Vec<Mutant>, ToolError> {
    let mut files = Vec::new();
    for folder in BROKEN {
        sources(&tree.join(folder), &mut files)?;
    }
    files.sort();
    let mut all: Vec<(usize, Place)> = Vec::new();
    let mut texts = Vec::new();
    for (i, path) in files.iter().enumerate() {
        let text = std::fs::read_to_string(path).map_err(at(path))?;
        let found = places::of_source(&text).map_err(|error| ToolError::Answer {
            program: path.display().to_string(),
            what: error.to_string(),
        })?;
        all.extend(found.into_iter().map(|place| (i, place)));
        texts.push(text);
    }
    println!("there are {} rules to break", all.len());
    let mut chosen: Vec<(usize, Place)> = Vec::new();
    let mut random = args.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while chosen.len() < args.count && !all.is_empty() {
        // Xorshift: any numbers will do that a seed repeats.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let len = u64::try_from(all.len()).unwrap_or(1);
        let (file, place) = all.swap_remove(usize::try_from(random % len).unwrap_or(0));
        // One lies in no other.
        let is_apart = |(other, taken): &(usize, Place)| {
            *other != file
                || taken.range.end <= place.range.start
                || place.range.end <= taken.range.start
        };
        if chosen.iter().all(is_apart) {
            chosen.push((file, place));
        }
    }
    chosen.sort_by_key(|(file, place)| (*file, place.range.start));
    let mut mutants = Vec::new();
    for (i, (file, place)) in chosen.iter().enumerate() {
        let path = files.get(*file).and_then(|path| path.strip_prefix(tree).ok());
        let file = path.map_or(String::new(), |path| path.display().to_string());
        let number = u32::try_from(i + 1).unwrap_or(u32::MAX);
        mutants.push(Mutant { number, file, line: place.line, what: place.what.clone() });
    }
    // From the end, so that places before stay where they are.
    for ((file, place), mutant) in chosen.iter().zip(&mutants).rev() {
        let on = format!("crate::fault::on({})", mutant.number);
        if let Some(text) = texts.get_mut(*file) {
            text.replace_range(place.range.clone(), &place.with.replace("{on}", &on));
        }
    }
    for (path, text) in files.iter().zip(texts) {
        std::fs::write(path, text).map_err(at(path))?;
    }
    Ok(mutants)
}

fn sources(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), ToolError> {
    for entry in std::fs::read_dir(folder).map_err(at(folder))? {
        let path = entry.map_err(at(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            sources(&path, files)?;
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// A test program, and which of its tests run.
struct Program {
    path: PathBuf,
    only: &'static [&'static str],
    /// Where it runs: tests of properties leave files there.
    folder: PathBuf,
}

struct Programs {
    suite: Vec<Program>,
    tests: Vec<Program>,
}

fn build(root: &Path, tree: &Path) -> Result<Programs, ToolError> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    // What comes from a registry is there already, as a rule.
    command.current_dir(tree).env("CARGO_TARGET_DIR", root.join("target"));
    command.args(["test", "--no-run", "--offline", "--message-format=json"]);
    command.args(["-p", "smc-core", "--lib", "--test", "handshake", "--test", "golden"]);
    command.args(["-p", "smc-conform", "--test", "server", "--test", "client"]);
    command.args(["--test", "hosts"]);
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    let output =
        command.output().map_err(|source| ToolError::Start { program: "cargo".into(), source })?;
    if !output.status.success() {
        return Err(ToolError::Failed { program: "cargo test".into(), status: output.status });
    }
    let mut programs = Programs { suite: Vec::new(), tests: Vec::new() };
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let Some(path) = message["executable"].as_str().map(PathBuf::from) else { continue };
        let folder = tree.to_owned();
        match message["target"]["name"].as_str() {
            Some("server") => {
                let only = &["--exact", "a_server_without_faults_passes"];
                programs.suite.push(Program { path, only, folder });
            }
            Some("client") => {
                let only = &["--exact", "a_client_without_faults_passes"];
                programs.suite.push(Program { path, only, folder });
            }
            // They notice most, and are quick.
            Some("hosts") => programs.suite.insert(0, Program { path, only: &[], folder }),
            Some("smc_core") => {
                let only = &["handshake", "wire"];
                programs.tests.push(Program { path, only, folder });
            }
            Some("handshake" | "golden") => {
                programs.tests.push(Program { path, only: &[], folder })
            }
            _ => {}
        }
    }
    Ok(programs)
}

/// The first program that notices a break, with what it says.
fn first_failure(number: u32, programs: &[Program]) -> Option<String> {
    programs.iter().find_map(|program| {
        let name = program.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let name = name.split('-').next().unwrap_or_default().to_owned();
        let mut command = Command::new(&program.path);
        command.current_dir(&program.folder);
        command.args(program.only).args(["--nocapture"]).env("SMC_FAULT", number.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut child) = command.spawn() else { return Some(format!("{name} cannot run")) };
        let mut stdout = child.stdout.take();
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(stdout) = &mut stdout {
                let _ = std::io::Read::read_to_end(stdout, &mut text);
            }
            String::from_utf8_lossy(&text).into_owned()
        });
        let began = Instant::now();
        let ended = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Some(status),
                _ if began.elapsed() > LONGEST => {
                    let _ = child.kill();
                    let _ = child.wait();
                    break None;
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        let text = reader.join().unwrap_or_default();
        let says = text.lines().find_map(|line| line.strip_prefix("FAIL ")).unwrap_or_default();
        let says: String = says.chars().take(110).collect();
        match ended {
            Some(status) if status.success() => None,
            Some(_) => Some(format!("{name} {says}").trim().to_owned()),
            None => Some(format!("{name} does not end")),
        }
    })
}
