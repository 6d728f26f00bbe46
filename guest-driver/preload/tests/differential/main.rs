// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sequences of operations on TCP sockets, each with the library at both ends, at one end, and at
//! none. A program must see the same as on TCP: the tests compare return values, errors, bytes, the
//! order of events and ends of data, but not time.
//!
//! `sequences/` has the sequences, `differences/` the known differences. An unlisted difference fails,
//! and so does a listed one that no longer occurs.
//!
//!     cargo test -p smc-preload --test differential -- --ignored
//!     SMC_DIFFERENTIAL=epoll cargo test -p smc-preload --test differential -- --ignored --nocapture
//!
//! The second form runs the sequences whose names contain a word, and prints the result of each. The
//! third form runs the sequences by a static program, whose system calls the kernel dispatches:
//!
//!     guest-driver/preload/tests/static.sh differential
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the calls are what is tested")]

mod agent;
#[path = "../common/mod.rs"]
mod common;
mod differences;
mod random;
mod run;
mod script;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::Fabric;
use differences::Difference;
use run::{HANGS, Outcome, Way, run};
use script::Sequence;

/// The name of the test, for starting its programs.
const TEST: &str = "programs_see_what_they_would_see_on_tcp";
/// Number of sequences at the same time.
const AT_ONCE: usize = 3;
/// Runs of a sequence on TCP at most, until two have the same result.
const MOST_RUNS: usize = 4;
/// No sequence takes so long with all its runs, even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(900);
/// The first seed of the sequences of a generator, and their number.
const RANDOM: &str = "SMC_DIFFERENTIAL_RANDOM";
/// Only sequences whose names contain this text run.
const ONLY: &str = "SMC_DIFFERENTIAL";

fn table() -> Vec<Sequence> {
    let texts = [
        include_str!("sequences/connect.txt"),
        include_str!("sequences/tcp.txt"),
        include_str!("sequences/socket.txt"),
        include_str!("sequences/poll.txt"),
        include_str!("sequences/epoll.txt"),
        include_str!("sequences/descriptors.txt"),
        include_str!("sequences/files.txt"),
        include_str!("sequences/readiness.txt"),
        include_str!("sequences/transfers.txt"),
        include_str!("sequences/around.txt"),
        include_str!("sequences/processes.txt"),
        include_str!("sequences/signals.txt"),
        include_str!("sequences/given_back.txt"),
        include_str!("sequences/outside.txt"),
        include_str!("sequences/handed_on.txt"),
        include_str!("sequences/room.txt"),
    ];
    texts.into_iter().flat_map(script::parse).collect()
}

/// The names of the rows of a run: the steps, and the ends of the programs.
fn rows(sequence: &Sequence) -> Vec<String> {
    let steps = sequence.steps.iter().map(ToString::to_string);
    steps.chain(["c ends", "s ends", "others end"].map(String::from)).collect()
}

/// The rows with different answers. If there are none, the carrier of the connections is a row, if
/// unexpected.
fn differing(
    sequence: &Sequence,
    way: Way,
    tcp: &Outcome,
    seen: &Outcome,
) -> Vec<(String, String)> {
    let rows = rows(sequence).into_iter().zip(tcp.answers.iter().zip(&seen.answers));
    let differ = rows.filter(|(_, (tcp, seen))| tcp != seen);
    let mut differ: Vec<_> = differ.map(|(row, (_, seen))| (row, seen.clone())).collect();
    // A hanging step is the last one.
    if let Some(at) = differ.iter().position(|(_, answer)| answer.ends_with(HANGS)) {
        differ.truncate(at + 1);
    }
    if differ.is_empty() {
        let carried = match way {
            Way::Both if sequence.expects_smc && seen.on_smc == 0 => Some("TCP"),
            Way::Server | Way::Client if seen.on_smc > 0 => Some("SMC"),
            _ => None,
        };
        differ.extend(carried.map(|by| ("connections are carried by".to_owned(), by.to_owned())));
    }
    differ
}

/// Both runs, side by side.
fn side_by_side(sequence: &Sequence, tcp: &Outcome, seen: &Outcome, way: &str) -> String {
    let mut text = format!("  {:44} {:34} {way}\n", "step", "TCP");
    for (row, (tcp, seen)) in rows(sequence).iter().zip(tcp.answers.iter().zip(&seen.answers)) {
        let mark = if tcp == seen { ' ' } else { '*' };
        let _ = writeln!(text, "{mark} {row:44} {tcp:34} {seen}");
    }
    for line in seen.notes.lines() {
        let _ = writeln!(text, "    {line}");
    }
    text
}

/// An entry of the lists of differences, to be completed by hand.
fn entry(sequence: &Sequence, way: Way, answers: &[(String, String)]) -> String {
    let mut text = format!("{} | {} | B\n  why: \n", sequence.name, way.name());
    for (row, answer) in answers {
        let _ = writeln!(text, "  {row} => {answer}");
    }
    text
}

/// Two equal runs on TCP, or an error.
fn on_tcp(fabric: &Fabric, sequence: &Sequence) -> Result<Outcome, String> {
    let mut runs: Vec<Outcome> = Vec::new();
    while runs.len() < MOST_RUNS {
        let one = run(fabric, sequence, Way::Tcp, None);
        let Some(first) = runs.iter().position(|other| other.answers == one.answers) else {
            runs.push(one);
            continue;
        };
        let first = runs.swap_remove(first);
        let all = first.answers.join("\n");
        let bad = ["unknown operation", "exit 101", "no such thread", HANGS];
        return match bad.iter().find(|bad| all.contains(**bad)) {
            Some(bad) => {
                Err(format!("{bad}\n{}", side_by_side(sequence, &first, &one, "TCP again")))
            }
            None => Ok(first),
        };
    }
    let text = side_by_side(sequence, &runs[0], &runs[1], "TCP again");
    Err(format!("no two of {MOST_RUNS} runs on TCP have the same result\n{text}"))
}

/// Judges one way of a sequence. Returns a description of the fault, with an entry for the lists if
/// one is missing.
fn judge(
    fabric: &Fabric,
    sequence: &Sequence,
    tcp: &Outcome,
    way: Way,
    known: &[Difference],
) -> Result<(), String> {
    let known: Vec<_> = known.iter().filter(|one| one.is_about(&sequence.name, way)).collect();
    let hang = known.iter().find_map(|one| one.step_that_hangs());
    let mut seen = run(fabric, sequence, way, hang);
    let mut differences = differing(sequence, way, tcp, &seen);
    // A busy machine may hide a difference; a repaired one never comes back.
    let is_changing = Way::CHANGING.contains(&way);
    let expected = !is_changing && known.iter().any(|one| !one.sometimes);
    for _ in 0..3 {
        // If the carrier changes, a difference that does not come again is one of timing.
        let again =
            if is_changing { !differences.is_empty() } else { expected && differences.is_empty() };
        if !again {
            break;
        }
        seen = run(fabric, sequence, way, hang);
        differences = differing(sequence, way, tcp, &seen);
    }
    let wrong = if differences.is_empty() {
        expected.then(|| "a listed difference no longer occurs; remove it from the list".to_owned())
    } else if known.iter().any(|one| one.fits(&differences)) {
        None
    } else {
        let entry = entry(sequence, way, &differences);
        Some(format!("a difference from TCP that is not listed:\n{entry}"))
    };
    match wrong {
        None => Ok(()),
        Some(wrong) => Err(format!("{wrong}\n{}", side_by_side(sequence, tcp, &seen, way.name()))),
    }
}

/// Runs a sequence in these ways. Returns the faults.
fn try_out(
    fabric: &Fabric,
    sequence: &Sequence,
    ways: &[Way],
    known: &[Difference],
) -> Vec<String> {
    let head = |way: &str| format!("{} ({}), {way}: ", sequence.name, sequence.page);
    let tcp = match on_tcp(fabric, sequence) {
        Ok(tcp) => tcp,
        Err(wrong) => return vec![head("TCP") + &wrong],
    };
    ways.iter()
        .filter_map(|&way| {
            let wrong = judge(fabric, sequence, &tcp, way, known).err()?;
            Some(head(way.name()) + &wrong)
        })
        .collect()
}

/// Does `work` for all of `queue`, some at a time, and returns the faults. A panic, or work for too
/// long, is named.
fn for_all<T: Send>(
    queue: Vec<T>,
    name: impl Fn(&T) -> String + Sync,
    work: impl Fn(&T) -> Vec<String> + Sync,
) -> Vec<String> {
    let queue = Mutex::new(VecDeque::from(queue));
    let wrong = Mutex::new(Vec::new());
    let under_way = Mutex::new(BTreeMap::new());
    let threads = Mutex::new(AT_ONCE);
    std::thread::scope(|scope| {
        for thread in 0..AT_ONCE {
            let (queue, wrong, under_way) = (&queue, &wrong, &under_way);
            let (name, work, threads) = (&name, &work, &threads);
            scope.spawn(move || {
                loop {
                    let Some(next) = queue.lock().unwrap().pop_front() else { break };
                    let title = name(&next);
                    under_way.lock().unwrap().insert(thread, (title.clone(), Instant::now()));
                    let found = catch_unwind(AssertUnwindSafe(|| work(&next)));
                    under_way.lock().unwrap().remove(&thread);
                    let panicked = |_| vec![format!("{title}: the test itself panicked")];
                    wrong.lock().unwrap().extend(found.unwrap_or_else(panicked));
                }
                *threads.lock().unwrap() -= 1;
            });
        }
        while *threads.lock().unwrap() > 0 {
            std::thread::sleep(Duration::from_millis(50));
            for (title, begun) in under_way.lock().unwrap().values() {
                if begun.elapsed() > DEADLINE {
                    // The thread does not end, so a wait for it would not end either.
                    eprintln!("{title}: not done after {DEADLINE:?}");
                    std::process::exit(1);
                }
            }
        }
    });
    wrong.into_inner().unwrap()
}

/// Every entry is about a sequence that exists and has a reason; no two sequences share a name.
fn check_lists(sequences: &[Sequence], known: &[Difference]) {
    let mut names = BTreeSet::new();
    for sequence in sequences {
        assert!(names.insert(&sequence.name), "two sequences have the name {}", sequence.name);
    }
    let ways: Vec<_> = Way::WITH_LIBRARY.into_iter().chain(Way::CHANGING).map(Way::name).collect();
    for one in known {
        assert!(names.contains(&one.sequence), "no sequence has the name {}", one.sequence);
        assert!(!one.why.is_empty(), "{}: the entry has no reason", one.sequence);
        for way in &one.ways {
            assert!(ways.contains(&way.as_str()), "{}: no way is {way}", one.sequence);
        }
    }
}

#[test]
fn programs_see_what_they_would_see_on_tcp() {
    agent::run_if_agent();
    compare(&Way::WITH_LIBRARY, None);
}

#[test]
fn ends_of_one_direction_are_those_of_tcp_when_the_carrier_changes() {
    agent::run_if_agent();
    compare(&Way::CHANGING, Some("half close"));
}

#[test]
#[ignore = "it finds differences that are not repaired: --test differential -- --ignored"]
fn programs_see_what_they_would_see_on_tcp_when_their_carrier_changes() {
    compare(&Way::CHANGING, None);
}

/// Compares the sequences with this word in their names in these ways; `None`: all sequences.
fn compare(ways: &[Way], word: Option<&str>) {
    let (sequences, known) = (table(), differences::known());
    check_lists(&sequences, &known);
    let only = std::env::var(ONLY).ok();
    let verbose = only.is_some();
    let only = only.or(word.map(str::to_owned));
    let (number, defects) = (sequences.len(), known.iter().filter(|one| one.defect).count());
    let has_uring = agent::has_uring();
    let wanted = |sequence: &Sequence| {
        only.as_ref().is_none_or(|word| sequence.name.contains(word))
            && (has_uring || !sequence.needs_uring)
    };
    let queue: Vec<_> = sequences.into_iter().filter(wanted).collect();
    // Cargo builds the library now, if necessary.
    common::library();
    let fabric = Fabric::new(8 * AT_ONCE);
    let begun = Instant::now();
    let name = |sequence: &Sequence| sequence.name.clone();
    let wrong = for_all(queue, name, |sequence| {
        let begun = Instant::now();
        let found = try_out(&fabric, sequence, ways, &known);
        if verbose {
            println!("{}: {} wrong, {:?}", sequence.name, found.len(), begun.elapsed());
        }
        found
    });
    println!(
        "{number} sequences, {} differences are known ({defects} of them defects), {:?}",
        known.len(),
        begun.elapsed()
    );
    assert!(wrong.is_empty(), "{} are wrong:\n\n{}", wrong.len(), wrong.join("\n"));
}

/// The fault of a sequence of the generator, made as short as possible.
fn try_seed(fabric: &Fabric, seed: u64) -> Option<String> {
    let differs = |sequence: &Sequence| {
        let tcp = on_tcp(fabric, sequence).ok()?;
        let mut seen = run(fabric, sequence, Way::Both, None);
        if differing(sequence, Way::Both, &tcp, &seen).is_empty() {
            return None;
        }
        // A difference that does not come again is one of timing.
        seen = run(fabric, sequence, Way::Both, None);
        let same = differing(sequence, Way::Both, &tcp, &seen).is_empty();
        (!same).then_some((tcp, seen))
    };
    let sequence = random::sequence(seed);
    differs(&sequence)?;
    let shortest = random::shorten(sequence, |shorter| differs(shorter).is_some());
    let (tcp, seen) = differs(&shortest)?;
    let table = side_by_side(&shortest, &tcp, &seen, "both");
    Some(format!("seed {seed}:\n{}{table}", random::text(&shortest)))
}

#[test]
#[ignore = "SMC_DIFFERENTIAL_RANDOM says how much: --test differential -- --ignored"]
fn random_sequences_do_what_they_do_on_tcp() {
    agent::run_if_agent();
    let given = std::env::var(RANDOM).unwrap_or_default();
    let mut given = given.split(',').map(|number| number.parse::<u64>().unwrap_or(20));
    let (first, n) = (given.next().unwrap_or(1), given.next().unwrap_or(20));
    common::library();
    let fabric = Fabric::new(8 * AT_ONCE);
    let name = |seed: &u64| format!("seed {seed}");
    let wrong = for_all((first..first + n).collect(), name, |seed| {
        let found = try_seed(&fabric, *seed);
        println!("seed {seed}: {}", found.as_deref().unwrap_or("as on TCP"));
        found.into_iter().collect()
    });
    assert!(wrong.is_empty(), "{} are wrong:\n\n{}", wrong.len(), wrong.join("\n"));
}
