// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table of functions in a program written in Go (pclntab), with the layout of Go 1.18 and later.
//!
//! The runtime prints stack traces by the table, so stripped programs have the table, too.

use super::obstacle::GoObstacle;

/// The first bytes of a table: the layout, the unit of instructions, and the size of a pointer.
const MAGICS: [([u8; 8], Layout); 2] = [
    ([0xf0, 0xff, 0xff, 0xff, 0, 0, 1, 8], Layout { flag: 37 }),
    ([0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8], Layout { flag: 41 }),
];
/// Place of the address of the first function.
pub(super) const TEXT_START: usize = 24;
/// The flag of a function written in assembly.
const ASSEMBLY: u8 = 4;
/// The longest name of a function.
const NAME: usize = 1024;

/// Differences between the versions of the table.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Place of the flags in a function's entry.
    flag: usize,
}

fn layout(bytes: &[u8]) -> Option<Layout> {
    MAGICS.iter().find(|(magic, _)| bytes.starts_with(magic)).map(|(_, layout)| *layout)
}

/// The place of a table in bytes with other data around.
pub(super) fn find(bytes: &[u8]) -> Option<usize> {
    let places = (0..bytes.len()).step_by(8);
    places.into_iter().find(|at| bytes.get(*at..).is_some_and(|rest| layout(rest).is_some()))
}

/// A function of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function<'a> {
    /// Offsets from the first function.
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) name: &'a [u8],
}

/// A table, with offsets checked at each use.
#[derive(Debug)]
pub(super) struct FunctionTable<'a> {
    bytes: &'a [u8],
    layout: Layout,
    /// Entries without the last one, with the end of the last function.
    functions: usize,
    names: usize,
    /// Place of the first entry.
    entries: usize,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<usize> {
    let part = bytes.get(at..at.checked_add(N)?)?;
    Some(part.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
}

impl<'a> FunctionTable<'a> {
    /// # Errors
    /// [`GoObstacle::Table`].
    pub(super) fn new(bytes: &'a [u8]) -> Result<FunctionTable<'a>, GoObstacle> {
        let layout = layout(bytes).ok_or(GoObstacle::Table("its layout is unknown"))?;
        let word = |at| number::<8>(bytes, at).ok_or(GoObstacle::Table("it ends too early"));
        let (functions, names, entries) = (word(8)?, word(32)?, word(64)?);
        let end = functions.checked_mul(8).and_then(|len| len.checked_add(4));
        let end = end.and_then(|len| len.checked_add(entries));
        if functions == 0 || end.is_none_or(|end| end > bytes.len()) {
            return Err(GoObstacle::Table("its count of functions is wrong"));
        }
        let table = FunctionTable { bytes, layout, functions, names, entries };
        let begins = (0..=functions).map_while(|at| table.begin(at));
        if !begins.is_sorted() {
            return Err(GoObstacle::Table("its functions are not in order"));
        }
        Ok(table)
    }

    /// The offset of a function from the first one.
    fn begin(&self, at: usize) -> Option<u32> {
        number::<4>(self.bytes, self.entries + at * 8).map(|begin| begin as u32)
    }

    /// The offset behind the last function.
    pub(super) fn end(&self) -> u32 {
        self.begin(self.functions).unwrap_or(0)
    }

    /// The functions written in assembly.
    ///
    /// # Errors
    /// [`GoObstacle::Table`] for each wrong entry.
    pub(super) fn in_assembly(
        &self,
    ) -> impl Iterator<Item = Result<Function<'a>, GoObstacle>> + '_ {
        let wrong = GoObstacle::Table("an entry is outside of it");
        (0..self.functions)
            .filter_map(move |at| self.entry(at).ok_or_else(|| wrong.clone()).transpose())
    }

    /// `Some(None)`: the function is not written in assembly.
    fn entry(&self, at: usize) -> Option<Option<Function<'a>>> {
        let offset = number::<4>(self.bytes, self.entries + at * 8 + 4)?;
        let entry = self.entries.checked_add(offset)?;
        if self.bytes.get(entry.checked_add(self.layout.flag)?)? & ASSEMBLY == 0 {
            return Some(None);
        }
        let name = self.names.checked_add(number::<4>(self.bytes, entry + 4)?)?;
        let name = self.bytes.get(name..)?.split(|byte| *byte == 0).next()?;
        let function = Function { begin: self.begin(at)?, end: self.begin(at + 1)?, name };
        (name.len() <= NAME).then_some(Some(function))
    }

    /// The offsets of functions near a place: at most `distance` before it or behind it.
    pub(super) fn begins_near(&self, place: u32, distance: u32) -> impl Iterator<Item = u32> + '_ {
        let range = place.saturating_sub(distance)..=place.saturating_add(distance);
        let (mut low, mut high) = (0, self.functions + 1);
        while low < high {
            let middle = (low + high) / 2;
            if self.begin(middle).is_some_and(|begin| begin < *range.start()) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let following = (low..=self.functions).map_while(|at| self.begin(at));
        following.take_while(move |begin| range.contains(begin))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Bytes of a header.
    const HEADER: usize = 72;

    /// A table of functions: begin, name, and whether the function is written in assembly.
    pub(crate) fn table(functions: &[(u32, &str, bool)], end: u32) -> Vec<u8> {
        let mut bytes = vec![0u8; HEADER];
        bytes[..8].copy_from_slice(&MAGICS[1].0);
        bytes[8..16].copy_from_slice(&(functions.len() as u64).to_le_bytes());
        bytes[32..40].copy_from_slice(&(HEADER as u64).to_le_bytes());
        let mut names = Vec::new();
        for (_, name, _) in functions {
            names.push(bytes.len() - HEADER);
            bytes.extend(name.bytes().chain([0]));
        }
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let entries = bytes.len();
        bytes[64..72].copy_from_slice(&(entries as u64).to_le_bytes());
        let first = functions.len() * 8 + 4;
        for (at, (begin, ..)) in functions.iter().enumerate() {
            bytes.extend(begin.to_le_bytes());
            bytes.extend(((first + at * 44) as u32).to_le_bytes());
        }
        bytes.extend(end.to_le_bytes());
        for ((begin, _, in_assembly), name) in functions.iter().zip(names) {
            let mut entry = [0u8; 44];
            entry[..4].copy_from_slice(&begin.to_le_bytes());
            entry[4..8].copy_from_slice(&(name as u32).to_le_bytes());
            entry[41] = if *in_assembly { ASSEMBLY } else { 0 };
            bytes.extend(entry);
        }
        bytes
    }

    fn names(bytes: &[u8]) -> Result<Vec<String>, GoObstacle> {
        let table = FunctionTable::new(bytes)?;
        let name = |f: Function<'_>| String::from_utf8_lossy(f.name).into_owned();
        table.in_assembly().map(|function| function.map(name)).collect()
    }

    const FUNCTIONS: [(u32, &str, bool); 4] = [
        (0, "runtime.a", true),
        (32, "main.main", false),
        (64, "syscall.b", true),
        (96, "c", true),
    ];

    #[test]
    fn functions_in_assembly_have_names_and_ends() {
        let bytes = table(&FUNCTIONS, 128);
        assert_eq!(names(&bytes).unwrap(), ["runtime.a", "syscall.b", "c"]);
        let read = FunctionTable::new(&bytes).unwrap();
        let first = read.in_assembly().next().unwrap().unwrap();
        assert_eq!((first.begin, first.end, read.end()), (0, 32, 128));
        assert_eq!(read.begins_near(64, 32).collect::<Vec<_>>(), [32, 64, 96]);
        assert_eq!(read.begins_near(0, 0).collect::<Vec<_>>(), [0]);
        assert_eq!(read.begins_near(u32::MAX, 5).count(), 0);
        let padded = [&[7; 24][..], &bytes].concat();
        assert_eq!((find(&padded), find(&[0; 100])), (Some(24), None));
    }

    #[test]
    fn a_table_cut_at_any_byte_is_refused() {
        let bytes = table(&FUNCTIONS, 128);
        assert!(names(&bytes).is_ok());
        // The last bytes of the last entry are never read.
        for len in 0..bytes.len() - 2 {
            assert!(matches!(names(&bytes[..len]), Err(GoObstacle::Table(_))), "{len}");
        }
    }

    #[test]
    fn a_table_of_lies_is_refused() {
        let change = |at: usize, value: &[u8]| {
            let mut bytes = table(&FUNCTIONS, 128);
            bytes[at..at + value.len()].copy_from_slice(value);
            names(&bytes)
        };
        let entries = number::<8>(&table(&FUNCTIONS, 128), 64).unwrap();
        for (why, at, value) in [
            ("its layout is unknown", 0, &[0xfb][..]),
            ("its layout is unknown", 7, &[4]),
            ("its count of functions is wrong", 8, &[0]),
            ("its count of functions is wrong", 8, &[0xff; 8]),
            ("its count of functions is wrong", 8, &[0, 0, 0, 0, 0, 0, 0, 0x20]),
            ("its count of functions is wrong", 64, &[0xff; 8]),
            ("its functions are not in order", entries, &[0xff, 0, 0, 0]),
            ("an entry is outside of it", entries + 4, &[0xff; 4]),
            ("an entry is outside of it", 32, &[0xff; 8]),
            ("an entry is outside of it", entries + 4 * 8 + 4 + 4, &[0xff; 4]),
        ] {
            assert_eq!(change(at, value), Err(GoObstacle::Table(why)), "{at} {value:?}");
        }
    }

    /// The seeded changes of a table: none makes the reader panic or go on for ever.
    #[test]
    fn a_changed_table_is_read_or_refused() {
        let bytes = table(&FUNCTIONS, 128);
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] = value;
                let _ = names(&bytes);
                if let Ok(read) = FunctionTable::new(&bytes) {
                    assert!(read.begins_near(64, 127).count() <= FUNCTIONS.len() + 1);
                }
            }
        }
    }
}
