//! Tests of the table of rooms and of the search for circles.

use std::collections::BTreeSet;

use crate::circles::{circles, neighbours};
use crate::rooms::{Entry, MayBeUnsafe, Rooms};

/// A document with a table of these rows.
fn rooms(rows: &str) -> Rooms {
    let packages = ["low", "high", "high/tool"].map(str::to_owned);
    let head =
        "# Map\n\n## Rooms\n\n| room | one sentence | may use | `unsafe` |\n|---|---|---|---|\n";
    Rooms::read(&format!("{head}{rows}\n\n## Other\n\n| `x` | y | z | |\n"), &packages).unwrap()
}

const ROWS: &str = "| `low/src/wire` | bytes | nothing | yes |\n\
                    | `low/src/sys` | system | nothing | `a.rs`, `b.rs` |\n\
                    | `high/src/sys` | system | wire | |\n\
                    | `high/src` | the rest | sys, low/sys | |\n\
                    | `high/src/state.rs` | one file | low | |\n\
                    | `high/tool` | a program | high | |";

#[test]
fn the_longest_path_is_the_room_of_a_file() {
    let rooms = rooms(ROWS);
    let path = |file: &str| rooms.of(file).map(|room| rooms.rooms[room].path());
    assert_eq!(path("high/src/main.rs"), Some("high/src"));
    assert_eq!(path("high/src/sys/deep/a.rs"), Some("high/src/sys"));
    assert_eq!(path("high/src/state.rs"), Some("high/src/state.rs"));
    assert_eq!(path("high/src/system.rs"), Some("high/src"));
    assert_eq!(path("other/src/lib.rs"), None);
    assert_eq!(rooms.rooms[0].may_be_unsafe, MayBeUnsafe::Yes);
    let files = vec!["a.rs".to_owned(), "b.rs".to_owned()];
    assert_eq!(rooms.rooms[1].may_be_unsafe, MayBeUnsafe::In(files));
    assert_eq!(rooms.rooms[2].may_be_unsafe, MayBeUnsafe::No);
}

#[test]
fn a_name_is_first_of_the_same_package() {
    let rooms = rooms(ROWS);
    assert_eq!(rooms.entry(3, "sys"), Ok(Entry::Room(2)));
    assert_eq!(rooms.entry(3, "low/sys"), Ok(Entry::Room(1)));
    assert_eq!(rooms.entry(3, "low/src/sys"), Ok(Entry::Room(1)));
    assert_eq!(rooms.entry(3, "wire"), Ok(Entry::Room(0)));
    assert_eq!(rooms.entry(5, "state"), Ok(Entry::Room(4)));
    assert_eq!(rooms.entry(5, "low"), Ok(Entry::Package("low".to_owned())));
    // Two packages have a `sys`, and this one has none; its own package is no entry at all.
    assert!(rooms.entry(5, "sys").is_err());
    assert!(rooms.entry(3, "high").is_err());
    assert!(rooms.entry(3, "nowhere").is_err());
    for (from, to) in [(3, 1), (3, 2), (5, 4), (0, 2)] {
        let word = rooms.word_for(from, to);
        assert_eq!(rooms.entry(from, &word), Ok(Entry::Room(to)), "{word}");
    }
}

#[test]
fn uses_without_an_entry_and_entries_without_a_use_are_found() {
    let rooms = rooms(ROWS);
    let uses = BTreeSet::from([(2, 0), (3, 2), (4, 1), (5, 3), (0, 4)]);
    let difference = rooms.compare(&uses).unwrap();
    assert_eq!(difference.forbidden, [(0, 4)]);
    assert_eq!(difference.needless.len(), 1, "{:?}", difference.needless);
    assert!(difference.needless[0].contains("high/src may use low/sys"));
}

#[test]
fn a_package_does_not_stand_for_a_package_inside_of_it() {
    let rooms = rooms(ROWS);
    let high = rooms.entry(0, "high").unwrap();
    assert!(rooms.covers(&high, 3) && rooms.covers(&high, 4) && !rooms.covers(&high, 5));
}

#[test]
fn a_table_that_is_not_understood_is_refused() {
    let read = |text: &str| Rooms::read(text, &[]).unwrap_err();
    assert!(read("# Map\n").contains("no section"));
    assert!(read("\n## Rooms\n| room | may use |\n").contains("starts with"));
    let head = "\n## Rooms\n| room | one sentence | may use | `unsafe` |\n|---|---|---|---|\n";
    assert!(read(&format!("{head}| `a` | b |\n")).contains("not four cells"));
    assert!(read(&format!("{head}| a | b | c | |\n")).contains("no path"));
}

#[test]
fn circles_are_found_whatever_their_length() {
    let edges =
        [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "f"), ("f", "e"), ("d", "e")];
    assert_eq!(circles(&BTreeSet::from(edges)), [vec!["a", "b", "c"], vec!["e", "f"]]);
    assert!(circles(&BTreeSet::from([("a", "b"), ("b", "c"), ("a", "c"), ("a", "a")])).is_empty());
}

#[test]
fn neighbours_are_entries_of_the_deepest_common_folder() {
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(neighbours("x/a/b/c.rs", "x/a/d/e.rs"), pair("x/a/b", "x/a/d"));
    assert_eq!(neighbours("x/a/mod.rs", "x/a/d/e.rs"), pair("x/a/mod.rs", "x/a/d"));
    assert_eq!(neighbours("x/a.rs", "x/b.rs"), pair("x/a.rs", "x/b.rs"));
}
