// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file for later programs: honest, and not.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use smc_test_support::TestDir;

use super::saved::LASTING;
use super::*;

const SHORT: (u64, u64) = (2048, 1);
const LONG: (u64, u64) = (1 << 30, 1000);

fn server(n: u16) -> Endpoint {
    Endpoint::Server(SocketAddr::from(([10, 0, 0, 1], n)))
}

/// The table of another run of a program.
fn run_of(program: &str, file: &Path) -> Arc<TrafficTable> {
    let memory = create(Some(file)).unwrap();
    TrafficTable::adopt(memory, Path::new(program), Some(file)).unwrap()
}

/// A run with a single connection.
fn connect(file: &Path, n: u16, seen: (u64, u64)) -> Choice {
    let table = run_of("/bin/client", file);
    let key = table.key(&server(n));
    let choice = table.choose(key, None);
    let (bytes, round_trips) = seen;
    match choice {
        Choice::Tcp => {}
        Choice::Sample => {
            table.add_sample(key, &Observation { bytes, round_trips, lifetime: Default::default() })
        }
        Choice::Smc => table.observe(&server(n), false).ended(seen, &CostModel::HOST),
    }
    choice
}

fn file() -> (TestDir, PathBuf) {
    let place = TestDir::new();
    let file = place.join("traffic");
    (place, file)
}

/// A file with the knowledge of short connections to the first server.
fn learned() -> (TestDir, PathBuf) {
    let (place, file) = file();
    (0..8).for_each(|_| assert_eq!(connect(&file, 1, SHORT), Choice::Smc));
    assert_eq!(connect(&file, 1, SHORT), Choice::Tcp);
    (place, file)
}

#[test]
fn runs_of_a_program_with_one_connection_each_learn_together() {
    let (_place, file) = learned();
    let choices: Vec<_> = (1..128).map(|_| connect(&file, 1, SHORT)).collect();
    let samples: Vec<_> = (1..128).filter(|n| choices[n - 1] == Choice::Sample).collect();
    assert_eq!(samples, [63, 127]);
    assert!(choices.iter().all(|choice| *choice != Choice::Smc));
    // Another server, and another program.
    assert_eq!(connect(&file, 2, SHORT), Choice::Smc);
    let other = run_of("/bin/other", &file);
    assert_eq!(other.choose(other.key(&server(1)), None), Choice::Smc);
}

#[test]
fn a_run_whose_sample_is_long_puts_the_next_runs_on_smc() {
    let (_place, file) = learned();
    (1..63).for_each(|_| assert_eq!(connect(&file, 1, LONG), Choice::Tcp));
    assert_eq!(connect(&file, 1, LONG), Choice::Sample);
    (0..20).for_each(|_| assert_eq!(connect(&file, 1, LONG), Choice::Smc));
}

#[test]
fn numbers_of_connections_are_those_of_one_run() {
    let (_place, file) = learned();
    let known = run_of("/bin/client", &file).endpoints();
    let [known] = &known[..] else { panic!("{known:?}") };
    assert!(known.on_tcp && known.learned);
    assert_eq!((known.smc, known.tcp, known.samples), (0, 0, 0));
    assert_eq!((known.bytes, known.round_trips), SHORT);
}

#[test]
fn a_server_without_smc_is_known_to_the_next_run_and_a_listener_is_not() {
    let (_place, file) = file();
    let table = run_of("/bin/client", &file);
    table.note_plain(&server(1), 5_000_000);
    let listener = Endpoint::Listener(SocketAddr::from(([10, 0, 0, 1], 9)));
    table.observe(&listener, false).ended(SHORT, &CostModel::HOST);
    let next = run_of("/bin/client", &file);
    assert!(next.is_plain(next.key(&server(1)), || 6_000_000));
    assert!(!next.is_plain(next.key(&server(1)), || 8_000_000));
    assert_eq!(next.endpoints().len(), 1);
}

/// The place of the only entry in a file.
fn only_entry(file: &Path) -> usize {
    let bytes = std::fs::read(file).unwrap();
    assert_eq!(bytes.len(), SIZE);
    let used = |at: &usize| bytes[at * ENTRY_SIZE..][..8] != [0; 8];
    let used: Vec<_> = (1..=GROUPS * WAYS).filter(used).collect();
    assert_eq!(used.len(), 1);
    used[0] * ENTRY_SIZE
}

fn change(file: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(file).unwrap();
    change(&mut bytes);
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn an_entry_is_forgotten_after_ten_minutes_and_with_a_start_of_the_machine() {
    for (later, known) in [(0, 1), (LASTING.as_secs() + 60, 0), (u64::MAX / 2, 0)] {
        let (_place, file) = learned();
        let at = only_entry(&file) + entry::SAVED * 8;
        change(&file, |bytes| {
            let saved = u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
            // Below 0 the time is far in the future, as one of an earlier start may be.
            bytes[at..at + 8].copy_from_slice(&saved.wrapping_sub(later).to_ne_bytes());
        });
        assert_eq!(run_of("/bin/client", &file).endpoints().len(), known, "{later}");
    }
}

#[test]
fn files_of_others_and_files_that_are_none_are_not_used() {
    type Spoil = fn(&Path, &Path);
    let cases: [(&str, Spoil); 5] = [
        ("writable for a group", |file, _| {
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o660)).unwrap();
        }),
        ("readable for all", |file, _| {
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o604)).unwrap();
        }),
        ("a link", |file, other| {
            std::fs::rename(file, other).unwrap();
            symlink(other, file).unwrap();
        }),
        ("a second name", |file, other| std::fs::hard_link(file, other).unwrap()),
        ("a directory", |file, _| {
            std::fs::remove_file(file).unwrap();
            std::fs::create_dir(file).unwrap();
        }),
    ];
    for (what, spoil) in cases {
        let (place, file) = learned();
        let open = run_of("/bin/client", &file);
        spoil(&file, &place.join("other"));
        let before = std::fs::read(&file).ok();
        assert_eq!(run_of("/bin/client", &file).endpoints(), [], "{what}");
        open.note_plain(&server(7), 1);
        assert_eq!(std::fs::read(&file).ok(), before, "{what}: not written either");
    }
}

#[test]
fn a_file_of_another_version_or_length_begins_anew() {
    let cases: [fn(&mut Vec<u8>); 4] = [
        |bytes| bytes[0] ^= 1,
        |bytes| bytes.truncate(SIZE - 1),
        |bytes| bytes.push(0),
        |bytes| bytes.clear(),
    ];
    for (n, spoil) in cases.into_iter().enumerate() {
        let (_place, file) = learned();
        change(&file, spoil);
        assert_eq!(run_of("/bin/client", &file).endpoints(), [], "{n}");
        assert_eq!(connect(&file, 1, SHORT), Choice::Smc, "{n}");
        assert_eq!(run_of("/bin/client", &file).endpoints().len(), 1, "{n}");
    }
}

#[test]
fn an_entry_in_a_group_of_others_is_not_taken() {
    let (_place, file) = learned();
    let from = only_entry(&file);
    let to = (from / ENTRY_SIZE - 1 + WAYS) % (GROUPS * WAYS) + 1;
    change(&file, |bytes| {
        let entry = bytes[from..from + ENTRY_SIZE].to_vec();
        bytes[from..from + ENTRY_SIZE].fill(0);
        bytes[to * ENTRY_SIZE..][..ENTRY_SIZE].copy_from_slice(&entry);
    });
    assert_eq!(run_of("/bin/client", &file).endpoints(), []);
}

/// A file shrunk, replaced or removed under a running program.
#[test]
fn a_file_that_changes_under_a_program_harms_nothing() {
    let cases: [fn(&Path); 3] = [
        |file| std::fs::write(file, "").unwrap(),
        |file| std::fs::write(file, vec![0x55; SIZE]).unwrap(),
        |file| std::fs::remove_file(file).unwrap(),
    ];
    for spoil in cases {
        let (_place, file) = learned();
        let table = run_of("/bin/client", &file);
        spoil(&file);
        let before = std::fs::read(&file).ok();
        for n in 0..20 {
            table.observe(&server(n), false).ended(SHORT, &CostModel::HOST);
        }
        assert_eq!(table.endpoints().len(), 20);
        assert_eq!(std::fs::read(&file).ok(), before, "a file that is not ours stays as it is");
    }
}

#[test]
fn any_words_in_a_file_are_borne() {
    for value in [u64::MAX, 1 << 63, 0x5555_5555_5555_5555, 1] {
        let (_place, file) = learned();
        let at = only_entry(&file);
        change(&file, |bytes| {
            for word in entry::ESTIMATE..entry::SAVED {
                bytes[at + word * 8..][..8].copy_from_slice(&value.to_ne_bytes());
            }
        });
        let table = run_of("/bin/client", &file);
        table.endpoints();
        let key = table.key(&server(1));
        table.is_plain(key, || 1);
        assert!(
            (0..64).any(|_| table.choose(key, None) != Choice::Tcp),
            "a connection is observed"
        );
        table.observe(&server(1), false).ended((u64::MAX, u64::MAX), &CostModel::HOST);
    }
}
