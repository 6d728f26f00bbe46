// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! User and group ids mapped in this process's user namespace.
//!
//! The kernel shows every other id as one overflow id, by default 65534 (`/proc/sys/kernel/overflowuid`). Two
//! processes with the overflow id may have different users.

use std::ops::RangeInclusive;
use std::sync::OnceLock;

/// The default overflow id.
const OVERFLOW: u32 = 65534;

/// The ids of a user namespace, from `/proc/self/uid_map` and `gid_map`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IdMap(Vec<RangeInclusive<u32>>);

impl IdMap {
    /// Lines of three numbers: first id inside, first id outside, count.
    pub(crate) fn parse(text: &str) -> IdMap {
        let line = |line: &str| {
            let mut numbers = line.split_whitespace().map(|number| number.parse::<u32>().ok());
            let (start, _, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
            Some(start..=start.saturating_add(count.checked_sub(1)?))
        };
        IdMap(text.lines().filter_map(line).collect())
    }

    /// Whether a process can have this id, distinct from the overflow id.
    pub(crate) fn has(&self, id: u32) -> bool {
        self.0.iter().any(|range| range.contains(&id)) && (id != OVERFLOW || self.is_whole())
    }

    /// Whether the namespace maps all ids, like the host's.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.contains(&(0..=u32::MAX - 1))
    }
}

/// The user ids of this process's namespace. Read at the first call, since the sandbox forbids reading later.
pub(crate) fn users() -> &'static IdMap {
    static MAP: OnceLock<IdMap> = OnceLock::new();
    MAP.get_or_init(|| read("/proc/self/uid_map"))
}

/// The group ids of this process's namespace; see [`users`].
pub(crate) fn groups() -> &'static IdMap {
    static MAP: OnceLock<IdMap> = OnceLock::new();
    MAP.get_or_init(|| read("/proc/self/gid_map"))
}

fn read(path: &str) -> IdMap {
    match std::fs::read_to_string(path) {
        Ok(text) => IdMap::parse(&text),
        // A kernel without user namespaces, or no /proc: assume one namespace.
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
        // 65534 is mapped, but also stands for every unmapped id.
        assert!(!IdMap::parse("0 100000 65536\n").has(OVERFLOW));
        for nothing in ["", "x y z", "1 2", "5 5 0"] {
            assert_eq!(IdMap::parse(nothing), IdMap(Vec::new()), "{nothing:?}");
        }
    }
}
