// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory of this process, from the kernel's list.

use std::io;
use std::ops::Range;

/// A mapping of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses.
    pub range: Range<usize>,
    /// The access bits allow to read, to write or to execute.
    pub is_accessible: bool,
    /// The access bits allow to write.
    pub is_writable: bool,
}

impl Mapping {
    /// Reads a line of `/proc/self/maps`. `None`: the mapping is the kernel's.
    fn parse(line: &str) -> Option<Mapping> {
        let mut words = line.split(' ');
        let (start, end) = words.next()?.split_once('-')?;
        let address = |text: &str| usize::from_str_radix(text, 16).ok();
        let range = address(start)?..address(end)?;
        let access = words.next()?;
        // The vsyscall page is the kernel's.
        let is_users = range.end <= isize::MAX as usize;
        let is_accessible = access.get(..3) != Some("---");
        let is_writable = access.as_bytes().get(1) == Some(&b'w');
        is_users.then_some(Mapping { range, is_accessible, is_writable })
    }
}

/// The mappings of this process, in the order of their addresses.
///
/// # Errors
/// `/proc` is missing.
pub fn of_this_process() -> io::Result<Vec<Mapping>> {
    let making = crate::making();
    let text = std::fs::read_to_string("/proc/self/maps")?;
    drop(making);
    Ok(text.lines().filter_map(Mapping::parse).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_this_process_is_listed() {
        let local = 0u8;
        let all = of_this_process().unwrap();
        let has = |at: usize| all.iter().find(|mapping| mapping.range.contains(&at));
        assert!(has((&raw const local) as usize).unwrap().is_writable);
        let code = has(of_this_process as *const () as usize).unwrap();
        assert!(code.is_accessible && !code.is_writable);
        assert!(all.is_sorted_by_key(|mapping| mapping.range.start));
        let line = "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0    [vsyscall]";
        assert_eq!(Mapping::parse(line), None);
        let line = "7f0000001000-7f0000003000 ---p 00000000 00:00 0";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!(mapping.range, 0x7f00_0000_1000..0x7f00_0000_3000);
        assert!(!mapping.is_accessible && !mapping.is_writable);
    }
}
