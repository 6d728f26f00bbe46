//! The structure that docs/architecture.md promises, held against the source tree.
//!
//! `names` finds out which module defines the item that a path in the code means; `rooms` reads
//! the table; the tests here compare the two.
//!
//!     cargo test -p smc-tests --test structure -- --ignored --nocapture print

#![allow(clippy::unwrap_used, reason = "a source that cannot be read fails the test")]

mod circles;
mod facts;
mod names;
#[cfg(test)]
mod names_tests;
mod rooms;
#[cfg(test)]
mod rooms_tests;
mod workspace;

use std::collections::{BTreeMap, BTreeSet};

use circles::{circles, neighbours};
use names::Arrow;
use rooms::{Difference, MayBeUnsafe, Rooms};
use workspace::Workspace;

/// The longest file that is still easy to hold in the head.
const LINES: usize = 700;

/// How many uses a message shows of one room by another.
const FINDINGS: usize = 20;

fn workspace() -> &'static Workspace {
    static WORKSPACE: std::sync::OnceLock<Workspace> = std::sync::OnceLock::new();
    WORKSPACE.get_or_init(|| Workspace::read().unwrap_or_else(|error| panic!("{error}")))
}

/// Fails with all `faults` at once, so that a change is judged in one go.
fn refuse(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn text_of(arrow: &Arrow) -> String {
    let files = &workspace().map.files;
    format!("{}:{}: `{}` of {}", files[arrow.from], arrow.line, arrow.path, files[arrow.to])
}

/// Which room uses which, with the arrows that make it so.
fn uses(rooms: &Rooms) -> BTreeMap<(usize, usize), Vec<&'static Arrow>> {
    let workspace = workspace();
    let mut uses: BTreeMap<(usize, usize), Vec<&Arrow>> = BTreeMap::new();
    for arrow in &workspace.map.arrows {
        let [from, to] = [arrow.from, arrow.to].map(|file| rooms.of(&workspace.map.files[file]));
        if let (Some(from), Some(to)) = (from, to)
            && from != to
        {
            uses.entry((from, to)).or_default().push(arrow);
        }
    }
    uses
}

#[test]
fn every_path_is_understood() {
    let map = &workspace().map;
    let faults: Vec<String> = map
        .unresolved
        .iter()
        .map(|(file, line, path)| format!("{}:{line}: cannot resolve {path}", map.files[*file]))
        .collect();
    refuse(&faults);
}

#[test]
fn every_file_belongs_to_a_room_and_every_room_has_files() {
    let workspace = workspace();
    let rooms = &workspace.rooms;
    let mut faults = Vec::new();
    for file in workspace.texts.keys() {
        if rooms.of(file).is_none() {
            faults.push(format!("{file}: no row of the table in docs/architecture.md has it"));
        }
        if !workspace.map.files.contains(file) && !workspace.map.test_files.contains(file) {
            faults.push(format!("{file}: no module of a crate"));
        }
    }
    for room in &rooms.rooms {
        for path in &room.paths {
            if !workspace.exists(path) {
                faults.push(format!("docs/architecture.md: the room {path} does not exist"));
            }
        }
    }
    refuse(&faults);
}

#[test]
fn rooms_use_what_the_table_names_and_nothing_else() {
    let rooms = &workspace().rooms;
    let uses = uses(rooms);
    let Difference { forbidden, needless: mut faults } =
        rooms.compare(&uses.keys().copied().collect()).unwrap();
    for (from, to) in forbidden {
        let (room, word) = (rooms.rooms[from].path(), rooms.word_for(from, to));
        let arrows = &uses[&(from, to)];
        for arrow in arrows.iter().take(FINDINGS) {
            faults.push(format!(
                "{}: room {room} uses room {}",
                text_of(arrow),
                rooms.rooms[to].path()
            ));
        }
        if arrows.len() > FINDINGS {
            faults.push(format!("  and {} more", arrows.len() - FINDINGS));
        }
        faults.push(format!(
            "  -> move what {room} needs to a room that it may use, or, if the use is right, add \
             `{word}` to its row in docs/architecture.md"
        ));
    }
    refuse(&faults);
}

/// Rooms that must not use each other, whatever the table says: (room, rooms that it never uses).
const NEVER: &[(&str, &[&str])] = &[
    ("guest-driver/src/smcr", &["guest-driver/src/ism", "guest-driver/src/smcd"]),
    ("guest-driver/src/smcd", &["guest-driver/src/verbs", "guest-driver/src/smcr"]),
    ("guest-driver/src/verbs", &["guest-driver/src/ism"]),
    ("guest-driver/src/conn", &["guest-driver/src/handshake"]),
    ("guest-driver/src/handshake", &["guest-driver/src/conn"]),
];

#[test]
fn smc_d_and_smc_r_do_not_know_each_other_and_what_waits_knows_neither() {
    let rooms = &workspace().rooms;
    let mut faults = Vec::new();
    // A room that got another name must not escape; before the first has its name, none has.
    let named = ["reactor", "smcd", "smcr", "conn", "handshake"].map(|name| {
        let path = format!("guest-driver/src/{name}");
        (rooms.rooms.iter().any(|room| room.path() == path), path)
    });
    if named.iter().any(|(is_room, _)| *is_room) {
        for (_, path) in named.iter().filter(|(is_room, _)| !is_room) {
            faults.push(format!("no room is called {path}: name it in this test as it is called"));
        }
    }
    for ((from, to), arrows) in uses(rooms) {
        let [from, to] = [from, to].map(|room| rooms.rooms[room].path());
        let never = NEVER.iter().any(|(room, never)| *room == from && never.contains(&to));
        if never || (from == "guest-driver/src/reactor" && to != "guest-driver/src/sys") {
            faults.extend(arrows.iter().map(|arrow| format!("{}: never", text_of(arrow))));
        }
    }
    refuse(&faults);
}

#[test]
fn rooms_have_no_circles() {
    let workspace = workspace();
    let found = circles(&room_edges(&workspace.rooms));
    refuse(&judge("rooms", &found, &workspace.circles.rooms, |file| {
        workspace.rooms.of(file).map(|room| workspace.rooms.rooms[room].path().to_owned())
    }));
}

#[test]
fn folders_have_no_circles() {
    let listed = &workspace().circles.folders;
    refuse(&judge("folders", &folder_circles(), listed, |file| Some(file.to_owned())));
}

/// Faults of the circles that were `found` against those that are `listed`. `member` is what a
/// file stands for in a circle.
fn judge(
    of: &str,
    found: &[Vec<String>],
    listed: &[workspace::Circle],
    member: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let mut faults = Vec::new();
    for circle in found {
        if listed.iter().any(|one| one.same(circle)) {
            continue;
        }
        faults.push(format!("a circle of {of}: {}", circle.join(", ")));
        faults.extend(arrows_of_circle(circle, &member));
    }
    if !faults.is_empty() {
        faults.push(
            "  -> move what both ends need below both; a circle that is right is listed with its \
             reason in tests/tests/structure/circles.toml"
                .to_owned(),
        );
    }
    for one in listed.iter().filter(|one| !found.iter().any(|circle| one.same(circle))) {
        let members = one.members.join(", ");
        faults.push(format!("circles.toml: this circle of {of} is no more: {members}"));
    }
    faults
}

/// The arrows that make a circle, one for each two files.
fn arrows_of_circle(circle: &[String], member: &impl Fn(&str) -> Option<String>) -> Vec<String> {
    let map = &workspace().map;
    let at = |file: usize| {
        let own = member(&map.files[file]);
        // A circle of neighbours names folders that hold others.
        let holds = |one: &&String| map.files[file].starts_with(&format!("{one}/"));
        own.filter(|own| circle.contains(own)).or_else(|| circle.iter().find(holds).cloned())
    };
    let mut shown = BTreeSet::new();
    map.arrows
        .iter()
        .filter(|arrow| !arrow.facade)
        .filter(|arrow| {
            let (from, to) = (at(arrow.from), at(arrow.to));
            from.is_some() && to.is_some() && from != to && shown.insert((arrow.from, arrow.to))
        })
        .map(|arrow| format!("  {}", text_of(arrow)))
        .collect()
}

/// Which room uses which, as paths. Names that a room passes on from below do not count.
fn room_edges(rooms: &Rooms) -> BTreeSet<(String, String)> {
    let path = |room: usize| rooms.rooms[room].path().to_owned();
    uses(rooms)
        .into_iter()
        .filter(|(_, arrows)| arrows.iter().any(|arrow| !arrow.facade))
        .map(|((from, to), _)| (path(from), path(to)))
        .collect()
}

/// Circles between a folder and what lies beside it, at every depth: other folders and files,
/// `mod.rs` included. A folder is all that is below it. Circles of files alone are not in here.
fn folder_circles() -> Vec<Vec<String>> {
    let map = &workspace().map;
    let arrows = map.arrows.iter().filter(|arrow| !arrow.facade);
    let edges = arrows.map(|arrow| neighbours(&map.files[arrow.from], &map.files[arrow.to]));
    let mut found = circles(&edges.collect());
    found.retain(|circle| circle.iter().any(|entry| !entry.ends_with(".rs")));
    found
}

/// Whether the module of the file `to` lies below that of the file `from`.
fn is_own_child(from: &str, to: &str) -> bool {
    let dir = from.strip_suffix("/mod.rs").or_else(|| from.strip_suffix(".rs"));
    dir.is_some_and(|dir| to.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/')))
}

/// Arrows between files. What a parent module takes from its own children is
/// left out if the parent is in `without`.
fn file_edges(without: &[String]) -> BTreeSet<(String, String)> {
    let map = &workspace().map;
    map.arrows
        .iter()
        .filter(|arrow| !arrow.facade)
        .map(|arrow| (map.files[arrow.from].clone(), map.files[arrow.to].clone()))
        .filter(|(from, to)| !(without.contains(from) && is_own_child(from, to)))
        .collect()
}

#[test]
fn files_have_no_circles_but_those_with_a_reason() {
    let workspace = workspace();
    let parents: Vec<String> =
        workspace.circles.parents.iter().map(|one| one.members[0].clone()).collect();
    let found = circles(&file_edges(&parents));
    let mut faults = judge("files", &found, &workspace.circles.files, |file| Some(file.to_owned()));
    for parent in &parents {
        let others: Vec<String> = parents.iter().filter(|one| *one != parent).cloned().collect();
        if circles(&file_edges(&others)) == found {
            faults.push(format!("circles.toml: {parent} is in no circle with its children"));
        }
    }
    refuse(&faults);
}

#[test]
fn unsafe_stays_in_its_rooms() {
    let workspace = workspace();
    let (map, rooms) = (&workspace.map, &workspace.rooms);
    let mut faults = Vec::new();
    let mut needed: BTreeSet<(usize, Option<&str>)> = BTreeSet::new();
    for (file, line) in &map.unsafe_lines {
        let file = map.files[*file].as_str();
        let Some(room) = rooms.of(file) else { continue };
        let row = &rooms.rooms[room];
        let mark = match &row.may_be_unsafe {
            MayBeUnsafe::No => None,
            MayBeUnsafe::Yes => Some(None),
            MayBeUnsafe::In(files) => {
                let name = files.iter().find(|name| file == format!("{}/{name}", row.path()));
                name.map(|name| Some(name.as_str()))
            }
        };
        needed.extend(mark.map(|mark| (room, mark)));
        if mark.is_none() {
            faults.push(format!(
                "{file}:{line}: `unsafe` outside of the rooms that docs/architecture.md marks for it"
            ));
        }
    }
    for (index, room) in rooms.rooms.iter().enumerate() {
        let marks: Vec<Option<&str>> = match &room.may_be_unsafe {
            MayBeUnsafe::No => Vec::new(),
            MayBeUnsafe::Yes => vec![None],
            MayBeUnsafe::In(files) => files.iter().map(|file| Some(file.as_str())).collect(),
        };
        for mark in marks.into_iter().filter(|mark| !needed.contains(&(index, *mark))) {
            let place = mark.unwrap_or("the room");
            faults.push(format!(
                "docs/architecture.md: {} is marked for `unsafe`, but {place} has none",
                room.path()
            ));
        }
    }
    refuse(&faults);
}

/// Paths that do not belong to the workspace, and where no code may use them.
struct Foreign {
    dir: &'static str,
    except: Option<&'static str>,
    paths: &'static [&'static str],
}

const FOREIGN: &[Foreign] = &[
    Foreign {
        dir: "smc-core/src/",
        except: None,
        paths: &[
            "std::net",
            "std::fs",
            "std::io",
            "std::thread",
            "std::os",
            "std::process",
            "std::time::Instant",
            "std::time::SystemTime",
            "libc",
            "rustix",
        ],
    },
    // What is for tests may say what it does.
    Foreign {
        dir: "smc-core/src/",
        except: Some("smc-core/src/testing/"),
        paths: &["std::env", "println", "eprintln", "print", "eprint"],
    },
    Foreign {
        dir: "backend/src/device/",
        except: None,
        paths: &["virtio_queue", "vhost", "vhost_user_backend"],
    },
];

#[test]
fn the_core_has_no_io_clock_or_thread_and_the_room_device_does_not_know_virtio() {
    let map = &workspace().map;
    let mut faults = Vec::new();
    for used in &map.foreign {
        let file = &map.files[used.file];
        let within = |rule: &&Foreign| {
            file.starts_with(rule.dir)
                && !rule.except.is_some_and(|except| file.starts_with(except))
        };
        for rule in FOREIGN.iter().filter(within) {
            let is_below = |path: &&&str| {
                used.path
                    .strip_prefix(**path)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            if let Some(path) = rule.paths.iter().find(is_below) {
                faults
                    .push(format!("{file}:{}: {path} does not belong in {}", used.line, rule.dir));
            }
        }
    }
    for arrow in &map.arrows {
        let (from, to) = (&map.files[arrow.from], &map.files[arrow.to]);
        if from.starts_with("backend/")
            && (to.starts_with("smc-core/") || to.starts_with("guest-driver/"))
        {
            faults.push(format!("{}: the device knows neither SMC nor its driver", text_of(arrow)));
        }
    }
    refuse(&faults);
}

#[test]
fn files_stay_small_enough_to_hold_in_the_head() {
    let faults: Vec<String> = workspace()
        .all_sources()
        .into_iter()
        .map(|(name, text)| (name, text.lines().count()))
        .filter(|(_, lines)| *lines > LINES)
        .map(|(name, lines)| format!("{name} has {lines} lines, more than {LINES}"))
        .collect();
    refuse(&faults);
}

/// Prints every use between rooms and every circle, whether it is allowed or not. `ROOMS` may
/// name a document with another table of rooms.
#[test]
#[ignore = "prints, and holds nothing"]
fn print() {
    let workspace = workspace();
    let rooms = match std::env::var("ROOMS") {
        Ok(path) => {
            Rooms::read(&std::fs::read_to_string(path).unwrap(), &workspace.packages).unwrap()
        }
        Err(_) => workspace.rooms.clone(),
    };
    let uses = uses(&rooms);
    let Difference { forbidden, needless } =
        rooms.compare(&uses.keys().copied().collect()).unwrap();
    println!("# Uses between rooms (`!`: not in the table)\n");
    for ((from, to), arrows) in &uses {
        let mark = if forbidden.contains(&(*from, *to)) { "! " } else { "" };
        println!("{mark}{} -> {}", rooms.rooms[*from].path(), rooms.rooms[*to].path());
        if mark.is_empty() && std::env::var_os("ALL").is_none() {
            continue;
        }
        for arrow in arrows {
            println!("    {}", text_of(arrow));
        }
    }
    println!("\n# Entries that no code needs\n");
    for entry in needless {
        println!("{entry}");
    }
    println!("\n# What each room uses\n");
    for (from, room) in rooms.rooms.iter().enumerate() {
        let words: Vec<String> = uses
            .keys()
            .filter(|(one, _)| *one == from)
            .map(|(_, to)| rooms.word_for(from, *to))
            .collect();
        println!("{}: {}", room.path(), words.join(", "));
    }
    let print_circles =
        |title: &str, found: Vec<Vec<String>>, member: &dyn Fn(&str) -> Option<String>| {
            println!("\n# {title}\n");
            for circle in found {
                println!("circle: {}", circle.join(", "));
                for arrow in arrows_of_circle(&circle, &|file: &str| member(file)) {
                    println!("  {arrow}");
                }
            }
        };
    print_circles("Circles of rooms", circles(&room_edges(&rooms)), &|file| {
        rooms.of(file).map(|room| rooms.rooms[room].path().to_owned())
    });
    print_circles("Circles of folders", folder_circles(), &|file| Some(file.to_owned()));
    let parents = parents_in_circles();
    println!("\n# Parents in circles with their own children\n");
    for parent in &parents {
        println!("parent: {parent}");
    }
    print_circles("Other circles of files", circles(&file_edges(&parents)), &|file| {
        Some(file.to_owned())
    });
}

/// Files without whose use of their own children some circle is no more. All are needed.
fn parents_in_circles() -> Vec<String> {
    let mut parents = workspace().map.files.clone();
    let fewest = circles(&file_edges(&parents));
    let edges = file_edges(&[]);
    parents
        .retain(|parent| edges.iter().any(|(from, to)| from == parent && is_own_child(from, to)));
    for parent in parents.clone() {
        let others: Vec<String> = parents.iter().filter(|one| **one != parent).cloned().collect();
        if circles(&file_edges(&others)) == fewest {
            parents = others;
        }
    }
    parents
}
