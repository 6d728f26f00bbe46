// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table of crates and rooms in docs/architecture.md.

use std::collections::BTreeSet;

use crate::sources::root;

/// One row: a crate, or a room of a crate.
#[derive(Debug)]
pub(crate) struct Row {
    /// Folder or file, from the root of the repository.
    pub(crate) path: String,
    /// For a crate's row packages; for a room's row rooms of the same crate.
    pub(crate) may_use: BTreeSet<String>,
    pub(crate) may_be_unsafe: MayBeUnsafe,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MayBeUnsafe {
    No,
    Yes,
    /// In these files and folders of the crate only.
    In(Vec<String>),
}

#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) rows: Vec<Row>,
}

const HEAD: &str = "| crate or room | one sentence | may use | `unsafe` |";

impl Table {
    /// Reads the table below the heading "## Rooms".
    pub(crate) fn read() -> Table {
        let document = std::fs::read_to_string(root().join("docs/architecture.md")).unwrap();
        let section = document.split("\n## ").find(|section| section.starts_with("Rooms\n"));
        let section = section.expect("docs/architecture.md has a section \"## Rooms\"");
        let mut rows = section.lines().filter(|line| line.starts_with('|'));
        assert_eq!(rows.next(), Some(HEAD), "the head of the table");
        Table { rows: rows.skip(1).map(Row::read).collect() }
    }
}

impl Row {
    fn read(row: &str) -> Row {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [room, _, may_use, may_be_unsafe] = cells[..] else {
            panic!("not four cells: {row}");
        };
        let may_use = match may_use {
            "nothing" => BTreeSet::new(),
            list => list.split(',').map(|word| word.trim().to_owned()).collect(),
        };
        let may_be_unsafe = match may_be_unsafe {
            "" => MayBeUnsafe::No,
            "yes" => MayBeUnsafe::Yes,
            files => MayBeUnsafe::In(in_backticks(files)),
        };
        let path = in_backticks(room).into_iter().next().expect("a path in backticks");
        Row { path, may_use, may_be_unsafe }
    }

    /// The last part of the path, without `.rs`. The root room of a crate is called `src`.
    pub(crate) fn name(&self) -> &str {
        let last = self.path.rsplit('/').next().unwrap_or_default();
        last.strip_suffix(".rs").unwrap_or(last)
    }

    pub(crate) fn is_room_of(&self, package: &str) -> bool {
        self.path == format!("{package}/src") || self.path.starts_with(&format!("{package}/src/"))
    }

    pub(crate) fn has(&self, file: &str) -> bool {
        file.strip_prefix(&self.path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

fn in_backticks(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}
