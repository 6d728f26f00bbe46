// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The readiness of a connection beside its control words.

/// The part of a connection's readiness not shown by its control words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalEnd {
    /// The connection ended abnormally.
    pub(super) failed: bool,
    /// The application reads no more.
    pub(super) read_shut: bool,
    /// A write that must not wait, or a poll, has found no room, and no poll has shown room since.
    pub(super) write_blocked: bool,
    /// Number of times when TCP got room for records, after the ring was left.
    pub(super) rooms_on_tcp: u32,
}

impl LocalEnd {
    /// Whether a reader finds no difference.
    pub(crate) fn same_for_reader(self, other: LocalEnd) -> bool {
        let view = |end| LocalEnd { write_blocked: false, rooms_on_tcp: 0, ..end };
        view(self) == view(other)
    }
}
