// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which user and group ids this process's user namespace has.
//!
//! The kernel shows all other ids as one, 65534 as a rule (`/proc/sys/kernel/overflowuid`). Nothing
//! can be said about a process with that id, not even that two of them have the same user.

use std::ops::RangeInclusive;
use std::sync::OnceLock;

/// The id that stands for all others, unless the administrator has changed it.
const OVERFLOW: u32 = 65534;

/// The ids of a user namespace, as `/proc/self/uid_map` and `gid_map` have them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IdMap(Vec<RangeInclusive<u32>>);

impl IdMap {
    /// Lines of three numbers: the first id here, the first one outside, how many.
    pub(crate) fn parse(text: &str) -> IdMap {
        let line = |line: &str| {
            let mut numbers = line.split_whitespace().map(|number| number.parse::<u32>().ok());
            let (start, _, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
            Some(start..=start.saturating_add(count.checked_sub(1)?))
        };
        IdMap(text.lines().filter_map(line).collect())
    }

    /// Whether a process can have this id, and be known by it.
    pub(crate) fn has(&self, id: u32) -> bool {
        self.0.iter().any(|range| range.contains(&id)) && (id != OVERFLOW || self.is_whole())
    }

    /// Whether it has all ids, as that of the host has.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.contains(&(0..=u32::MAX - 1))
    }
}

/// The user ids of this process's namespace. Read at the first call, since the sandbox leaves no way
/// to them.
pub(crate) fn users() -> &'static IdMap {
    static MAP: OnceLock<IdMap> = OnceLock::new();
    MAP.get_or_init(|| read("/proc/self/uid_map"))
}

/// The same for group ids.
pub(crate) fn groups() -> &'static IdMap {
    static MAP: OnceLock<IdMap> = OnceLock::new();
    MAP.get_or_init(|| read("/proc/self/gid_map"))
}

fn read(path: &str) -> IdMap {
    match std::fs::read_to_string(path) {
        Ok(text) => IdMap::parse(&text),
        // A kernel without user namespaces, or no /proc: there is one namespace, as far as is known.
        Err(_) => IdMap(vec![0..=u32::MAX - 1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_all_ids_and_a_namespace_those_that_are_mapped() {
        let host = IdMap::parse("         0          0 4294967295\n");
        assert!(host.is_whole());
        assert!([0, 1000, OVERFLOW, u32::MAX - 1].into_iter().all(|id| host.has(id)));
        assert!(!host.has(u32::MAX));
        let service = IdMap::parse("0 0 1\n990 990 1\n");
        assert!(service.has(0) && service.has(990) && !service.is_whole());
        assert!(![1, 989, 991, 2001, OVERFLOW].into_iter().any(|id| service.has(id)));
        // It has this one, but shows all others by it, too.
        assert!(!IdMap::parse("0 100000 65536\n").has(OVERFLOW));
        for nothing in ["", "x y z", "1 2", "5 5 0"] {
            assert_eq!(IdMap::parse(nothing), IdMap(Vec::new()), "{nothing:?}");
        }
    }
}
