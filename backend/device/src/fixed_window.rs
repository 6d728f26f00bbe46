// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The window of a front end that maps at its start only: areas of memory made ahead of slabs.
//!
//! Each area has a file of its own, for one pair of front ends. A new front end gets a free area of each
//! present one as its own, and fresh areas for later ones. So both ends of a pair have mapped the pair's file
//! before a slab lies there, and no third front end has the file. An area is not used again after its pair's
//! end, since one end has still mapped the file: a front end without a free area uses moves.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use super::shm::{PairMemory, ShmError};
use super::sync::lock;

/// Most areas of a window.
pub const MAX_AREAS: usize = 16;
/// Smallest length of an area, bytes: the first slab of a pair, with its control tail.
const MIN_AREA: u64 = 8 << 20;

/// Areas of one front end.
#[derive(Debug)]
pub struct FixedWindow {
    /// Unique on the fabric, also among [members](super::handle::DeviceHandle::member).
    id: u64,
    area_len: u64,
    /// The files do not change, only the front ends at the other ends.
    areas: Vec<(Arc<PairMemory>, Mutex<Option<u64>>)>,
}

impl FixedWindow {
    /// Length of the window, bytes: a power of two.
    pub fn size(&self) -> u64 {
        self.area_len * self.areas.len() as u64
    }

    /// Length of each area, bytes. The areas follow each other from the begin of the window.
    pub fn area_len(&self) -> u64 {
        self.area_len
    }

    /// The file of each area, mapped from its begin.
    pub fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.areas.iter().map(|(memory, _)| memory.fd())
    }

    /// Identification of the front end among all of the fabric.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The memory shared with `peer`, if any.
    pub(super) fn shared_with(&self, peer: u64) -> Option<Arc<PairMemory>> {
        let mut areas = self.areas.iter();
        areas.find(|(_, with)| *lock(with) == Some(peer)).map(|(memory, _)| memory.clone())
    }

    /// A free area, from now on for `peer`.
    pub(super) fn give(&self, peer: u64) -> Option<Arc<PairMemory>> {
        self.areas.iter().find_map(|(memory, with)| {
            let mut with = lock(with);
            if with.is_some() {
                return None;
            }
            *with = Some(peer);
            Some(memory.clone())
        })
    }

    /// Begin of a pair's memory in the window, bytes; `None`: not in this window.
    pub(super) fn offset_of(&self, memory: &Arc<PairMemory>) -> Option<u64> {
        let at = self.areas.iter().position(|(own, _)| Arc::ptr_eq(own, memory))?;
        Some(at as u64 * self.area_len)
    }
}

/// The windows of a fabric.
#[derive(Debug, Default)]
pub(super) struct FixedWindows(Mutex<Vec<Weak<FixedWindow>>>);

impl FixedWindows {
    /// A window of at most `most` bytes and `areas` areas, with slabs at multiples of `align` bytes and the
    /// identification `id`. `None`: too small for a slab.
    ///
    /// # Errors
    /// As [`PairMemory::new`].
    pub(super) fn open(
        &self,
        id: u64,
        most: u64,
        areas: usize,
        align: u32,
    ) -> Result<Option<Arc<FixedWindow>>, ShmError> {
        let count = previous_power_of_two(areas.min(MAX_AREAS) as u64);
        let area_len = previous_power_of_two(most.checked_div(count).unwrap_or(0));
        if area_len < MIN_AREA {
            return Ok(None);
        }
        // Held throughout: two front ends that begin at a time see each other.
        let mut windows = lock(&self.0);
        windows.retain(|window| window.strong_count() > 0);
        let mut given = Vec::new();
        for other in windows.iter().filter_map(Weak::upgrade) {
            if given.len() as u64 == count {
                break;
            }
            // A length differs after a change of the limits, or with fewer areas.
            if other.area_len == area_len
                && let Some(memory) = other.give(id)
            {
                given.push((memory, Mutex::new(Some(other.id))));
            }
        }
        while (given.len() as u64) < count {
            given.push((PairMemory::new(area_len, align)?, Mutex::new(None)));
        }
        let window = Arc::new(FixedWindow { id, area_len, areas: given });
        windows.push(Arc::downgrade(&window));
        Ok(Some(window))
    }
}

/// The largest power of two not above `number`; 0 for 0.
fn previous_power_of_two(number: u64) -> u64 {
    number.checked_ilog2().map_or(0, |bits| 1 << bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fabric, FabricConfig};
    use virtio_ism_abi::Chid;

    fn fabric() -> Arc<Fabric> {
        Fabric::new(FabricConfig::new(Chid(0xff00))).unwrap()
    }

    #[test]
    fn two_front_ends_have_one_area_in_common() {
        let fabric = fabric();
        let windows: Vec<_> =
            (0..3).map(|_| fabric.fixed_window(1 << 30, 4).unwrap().unwrap()).collect();
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            let [one, other] = [one, other].map(|at: usize| &windows[at]);
            let memory = one.shared_with(other.id()).unwrap();
            assert!(Arc::ptr_eq(&memory, &other.shared_with(one.id()).unwrap()));
            assert!(one.offset_of(&memory).is_some() && other.offset_of(&memory).is_some());
            let common = |memory| one.offset_of(memory).and(other.offset_of(memory)).is_some();
            assert_eq!(other.areas.iter().filter(|(memory, _)| common(memory)).count(), 1);
        }
    }

    #[test]
    fn an_area_has_one_peer_for_ever() {
        let fabric = fabric();
        let first = fabric.fixed_window(1 << 30, 2).unwrap().unwrap();
        let met: Vec<_> =
            (0..3).map(|_| fabric.fixed_window(1 << 30, 2).unwrap().unwrap()).collect();
        let shares = |other: &Arc<FixedWindow>| first.shared_with(other.id()).is_some();
        assert_eq!(met.iter().map(shares).collect::<Vec<_>>(), [true, true, false]);
        drop(met);
        let late = fabric.fixed_window(1 << 30, 2).unwrap().unwrap();
        assert!(first.shared_with(late.id()).is_none(), "both areas are spent");
        assert!(first.give(late.id()).is_none());
    }

    #[test]
    fn a_window_stays_within_limits_and_room() {
        let fabric = fabric();
        let window = fabric.fixed_window(u64::MAX, usize::MAX).unwrap().unwrap();
        assert_eq!(window.files().count(), MAX_AREAS);
        assert!(window.size() <= fabric.limits().slab_bytes);
        for (most, areas) in [(0, 16), (16 << 20, 4), (1 << 30, 0)] {
            assert!(fabric.fixed_window(most, areas).unwrap().is_none(), "{most} {areas}");
        }
        let loopback = Fabric::new(FabricConfig::new(Chid(0xffff))).unwrap();
        assert!(loopback.fixed_window(1 << 30, 4).unwrap().is_none());
    }
}
