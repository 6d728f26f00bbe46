// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The numbers of links, RNICs and buffers, shared by a link group and its caller.

/// The group's own name of a link; unlike the link's number, a name is never reused in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkKey(pub(super) u32);

impl LinkKey {
    /// The first link of every group.
    pub const FIRST: LinkKey = LinkKey(0);

    /// The number, for display.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// The caller's number of an own RMB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RmbId(pub u32);

/// The group's number of an RMB of the peer; never given twice in a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerRmbId(pub(super) u32);

/// The caller's number of a local RNIC port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RnicId(pub u32);

/// Names one message with a wanted report of arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Receipt(pub(super) u32);
