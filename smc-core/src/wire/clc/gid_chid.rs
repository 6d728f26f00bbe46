// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The GID-CHID array of the SMC-Dv2 extension, raw and as devices (EISM-11 to EISM-14).

use crate::wire::WireError;
use crate::wire::ids::{Chid, Gid, GidV1};

/// One entry of the array, 10 bytes (CLCV2-31): a platform ISM device, or one half of an emulated
/// one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GidChid {
    /// GID, or half of an extended GID.
    pub gid: GidV1,
    /// Fabric.
    pub chid: Chid,
}

/// An ISM device a client offers for SMC-Dv2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IsmOffer {
    /// The device's GID; part 2 is zero for a platform ISM device.
    pub gid: Gid,
    /// Fabric.
    pub chid: Chid,
}

impl IsmOffer {
    /// The one or two entries for this device; only the first counts for a platform device.
    pub fn entries(&self) -> (GidChid, Option<GidChid>) {
        let first = GidChid { gid: self.gid.part1(), chid: self.chid };
        let second = GidChid { gid: self.gid.part2(), chid: self.chid };
        (first, self.chid.is_emulated().then_some(second))
    }
}

/// Walks an array device by device, in the client's order.
///
/// An emulated CHID takes two consecutive entries. An entry without a repetition in the next one is
/// returned as [`WireError::UnpairedChid`], and the walk goes on with the next entry. The caller
/// chooses to end the offer or to skip the entry like Linux (wire errata D-6).
#[derive(Clone, Debug)]
pub struct IsmOffers<'a> {
    entries: &'a [GidChid],
    at: usize,
}

impl<'a> IsmOffers<'a> {
    /// Starts at the first entry.
    pub fn new(entries: &'a [GidChid]) -> Self {
        IsmOffers { entries, at: 0 }
    }
}

impl Iterator for IsmOffers<'_> {
    type Item = Result<IsmOffer, WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.at;
        let first = *self.entries.get(index)?;
        self.at += 1;
        let chid = first.chid;
        if !chid.is_emulated() {
            return Some(Ok(IsmOffer { gid: Gid::from_parts(first.gid, GidV1::NONE), chid }));
        }
        match self.entries.get(self.at) {
            Some(second) if second.chid == chid => {
                self.at += 1;
                Some(Ok(IsmOffer { gid: Gid::from_parts(first.gid, second.gid), chid }))
            }
            _ => Some(Err(WireError::UnpairedChid { index, chid: chid.0 })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(n: u8, chid: u16) -> GidChid {
        GidChid { gid: GidV1([n; 8]), chid: Chid(chid) }
    }

    fn emulated(a: u8, b: u8, chid: u16) -> IsmOffer {
        IsmOffer { gid: Gid::from_parts(GidV1([a; 8]), GidV1([b; 8])), chid: Chid(chid) }
    }

    fn walk(entries: &[GidChid]) -> Vec<Result<IsmOffer, WireError>> {
        IsmOffers::new(entries).collect()
    }

    // Shows: CLCV2-31.
    #[test]
    fn emulated_devices_take_two_entries_and_platform_ones_one() {
        let found = walk(&[entry(1, 0x0007), entry(2, 0xff01), entry(3, 0xff01), entry(4, 8)]);
        assert_eq!(
            found,
            [Ok(emulated(1, 0, 7)), Ok(emulated(2, 3, 0xff01)), Ok(emulated(4, 0, 8))]
        );
    }

    // Shows: EISM-13.
    #[test]
    fn an_emulated_entry_at_the_end_is_unpaired() {
        let found = walk(&[entry(1, 7), entry(2, 0xffff)]);
        assert_eq!(found[1], Err(WireError::UnpairedChid { index: 1, chid: 0xffff }));
        assert_eq!(found.len(), 2);
    }

    // Shows: EISM-13.
    #[test]
    fn an_emulated_entry_before_another_chid_is_unpaired_and_the_walk_goes_on() {
        let found = walk(&[entry(1, 0xff01), entry(2, 0xff02), entry(3, 0xff02), entry(4, 7)]);
        let unpaired = Err(WireError::UnpairedChid { index: 0, chid: 0xff01 });
        assert_eq!(found, [unpaired, Ok(emulated(2, 3, 0xff02)), Ok(emulated(4, 0, 7))]);
    }

    #[test]
    fn three_entries_of_one_emulated_chid_are_a_device_and_a_half() {
        let found = walk(&[entry(1, 0xff01), entry(2, 0xff01), entry(3, 0xff01)]);
        let unpaired = Err(WireError::UnpairedChid { index: 2, chid: 0xff01 });
        assert_eq!(found, [Ok(emulated(1, 2, 0xff01)), unpaired]);
    }

    #[test]
    fn a_device_gives_back_the_entries_it_came_from() {
        assert_eq!(emulated(1, 2, 0xff01).entries(), (entry(1, 0xff01), Some(entry(2, 0xff01))));
        assert_eq!(emulated(1, 0, 7).entries(), (entry(1, 7), None));
    }
}
