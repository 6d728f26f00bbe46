//! The table of rooms in docs/architecture.md.

use std::collections::BTreeSet;

/// One row of the table.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    /// Folders and files of the room. The first names it.
    pub(crate) paths: Vec<String>,
    pub(crate) may_use: Vec<String>,
    pub(crate) may_be_unsafe: MayBeUnsafe,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MayBeUnsafe {
    No,
    Yes,
    /// In these files of the room only.
    In(Vec<String>),
}

impl Room {
    pub(crate) fn path(&self) -> &str {
        &self.paths[0]
    }

    /// The last part of the path, without `.rs`. A room that is all of a `src` has no shorter name.
    pub(crate) fn name(&self) -> &str {
        let last = self.path().rsplit('/').next().unwrap_or_default();
        if last == "src" {
            return self.path();
        }
        last.strip_suffix(".rs").unwrap_or(last)
    }
}

/// The rooms, and the folders of the packages.
#[derive(Debug, Clone)]
pub(crate) struct Rooms {
    pub(crate) rooms: Vec<Room>,
    packages: Vec<String>,
}

/// What a word in the column "may use" names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    Room(usize),
    /// Every room of another package.
    Package(String),
}

/// Where the table and the code differ.
#[derive(Debug)]
pub(crate) struct Difference {
    /// Uses (from room, to room) that the table does not name.
    pub(crate) forbidden: Vec<(usize, usize)>,
    /// Entries that no code needs, as sentences.
    pub(crate) needless: Vec<String>,
}

fn in_backticks(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn is_within(file: &str, path: &str) -> bool {
    file.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Rooms {
    /// Reads the table below the heading "## Rooms" of `document`.
    pub(crate) fn read(document: &str, packages: &[String]) -> Result<Self, String> {
        let section = document
            .split("\n## ")
            .find(|section| section.starts_with("Rooms\n"))
            .ok_or("no section \"## Rooms\"")?;
        let mut rows = section.lines().filter(|line| line.starts_with('|'));
        let head = "| room | one sentence | may use | `unsafe` |";
        if rows.next() != Some(head) {
            return Err(format!("the table of rooms starts with: {head}"));
        }
        let mut rooms = Vec::new();
        for row in rows.skip(1) {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let [room, _, may_use, may_be_unsafe] = cells[..] else {
                return Err(format!("not four cells: {row}"));
            };
            let paths = in_backticks(room);
            if paths.is_empty() {
                return Err(format!("no path in backticks in the first cell: {row}"));
            }
            let may_use = match may_use {
                "nothing" => Vec::new(),
                list => {
                    list.split(',').map(|word| word.trim().trim_matches('`').to_owned()).collect()
                }
            };
            let may_be_unsafe = match may_be_unsafe {
                "" => MayBeUnsafe::No,
                "yes" => MayBeUnsafe::Yes,
                files => MayBeUnsafe::In(in_backticks(files)),
            };
            rooms.push(Room { paths, may_use, may_be_unsafe });
        }
        Ok(Self { rooms, packages: packages.to_vec() })
    }

    /// The room of a file: the row with the longest path that the file is in.
    pub(crate) fn of(&self, file: &str) -> Option<usize> {
        let paths = self.rooms.iter().enumerate().flat_map(|(room, row)| {
            row.paths
                .iter()
                .filter(|path| is_within(file, path))
                .map(move |path| (path.len(), room))
        });
        paths.max().map(|(_, room)| room)
    }

    fn package_of(&self, path: &str) -> &str {
        let packages = self.packages.iter().filter(|package| is_within(path, package));
        packages.max_by_key(|package| package.len()).map_or("", String::as_str)
    }

    /// A room by its package: `smc-core/wire`.
    fn full_name(&self, room: &Room) -> String {
        format!("{}/{}", self.package_of(room.path()), room.name())
    }

    /// What `word` in the row of `room` names: a path of a room, the last part of one in the same
    /// package, the last part of one elsewhere, a package and the last part, or another package.
    pub(crate) fn entry(&self, room: usize, word: &str) -> Result<Entry, String> {
        let at = self.rooms[room].path();
        let own = self.package_of(at);
        let all = |test: &dyn Fn(&Room) -> bool| -> Vec<usize> {
            (0..self.rooms.len()).filter(|index| test(&self.rooms[*index])).collect()
        };
        let by_path = all(&|one| one.path() == word);
        let near = all(&|one| one.name() == word && self.package_of(one.path()) == own);
        let far = all(&|one| one.name() == word);
        let by_package = all(&|one| self.full_name(one) == word);
        for found in [by_path, near, far, by_package] {
            match found[..] {
                [] => {}
                [one] => return Ok(Entry::Room(one)),
                _ => {
                    return Err(format!(
                        "row {at}: {word} may be several rooms; write `package/room`"
                    ));
                }
            }
        }
        if word != own && self.packages.iter().any(|package| package == word) {
            return Ok(Entry::Package(word.to_owned()));
        }
        Err(format!("row {at}: no room and no other package is called {word}"))
    }

    /// Whether `entry` of a row covers the room `to`.
    pub(crate) fn covers(&self, entry: &Entry, to: usize) -> bool {
        match entry {
            Entry::Room(room) => *room == to,
            Entry::Package(package) => self.package_of(self.rooms[to].path()) == package,
        }
    }

    /// The shortest word by which the row `from` can name the room `to`.
    pub(crate) fn word_for(&self, from: usize, to: usize) -> String {
        let room = &self.rooms[to];
        let words = [room.name().to_owned(), self.full_name(room), room.path().to_owned()];
        let is_right = |word: &&String| self.entry(from, word) == Ok(Entry::Room(to));
        words.iter().find(is_right).unwrap_or(&words[2]).clone()
    }

    /// What is wrong between the table and the `uses` (from room, to room) of the code.
    pub(crate) fn compare(&self, uses: &BTreeSet<(usize, usize)>) -> Result<Difference, String> {
        let mut needless = Vec::new();
        let mut allowed: BTreeSet<(usize, usize)> = BTreeSet::new();
        for (from, row) in self.rooms.iter().enumerate() {
            for word in &row.may_use {
                let entry = self.entry(from, word)?;
                let used: Vec<_> = uses
                    .iter()
                    .filter(|(one, to)| *one == from && self.covers(&entry, *to))
                    .collect();
                if used.is_empty() {
                    needless.push(format!(
                        "docs/architecture.md: {} may use {word}, but does not: delete that entry",
                        row.path()
                    ));
                }
                allowed.extend(used);
            }
        }
        let forbidden = uses.iter().filter(|pair| !allowed.contains(pair)).copied().collect();
        Ok(Difference { forbidden, needless })
    }
}
