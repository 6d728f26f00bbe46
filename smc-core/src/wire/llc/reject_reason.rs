// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reason in a refusal to add a link.

/// Reason for the refusal of an Add Link or Request Add Link (LLC-21, wire errata A-9): four bits,
/// always 0 from a version 2 Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RejectReason(pub u8);

impl RejectReason {
    /// No alternate path.
    pub const NO_PATH: RejectReason = RejectReason(1);
    /// Invalid MTU.
    pub const BAD_MTU: RejectReason = RejectReason(2);
}
