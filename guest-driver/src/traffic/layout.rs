// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The layout of the table: of the memory, and of the file for later programs.

/// First word of the memory: its kind, and the version of its layout.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"SMCtrfc3");
/// Bytes of the header, and of an entry.
pub(super) const ENTRY_SIZE: usize = 144;
/// The number of entries in the group chosen by an endpoint's hash.
pub(super) const WAYS: usize = 8;
/// The number of groups.
pub(super) const GROUPS: usize = 64;
/// Bytes of the memory.
pub(super) const SIZE: usize = ENTRY_SIZE * (1 + GROUPS * WAYS);

/// Words of an entry.
pub(super) mod entry {
    /// A hash of program and endpoint, never 0. An entry with 0 is unused.
    pub(crate) const HASH: usize = 0;
    /// An `Estimate`.
    pub(crate) const ESTIMATE: usize = 1;
    /// Connections on SMC.
    pub(crate) const SMC: usize = 2;
    /// Connections left to TCP.
    pub(crate) const TCP: usize = 3;
    /// Observed connections on TCP.
    pub(crate) const SAMPLES: usize = 4;
    /// Observed connections already ended.
    pub(crate) const ENDED: usize = 5;
    /// Moving averages of these connections: bytes, round trips, microseconds.
    pub(crate) const AVERAGES: usize = 6;
    /// The header's clock at the last connection.
    pub(crate) const USED: usize = 9;
    /// A hash of the program.
    pub(crate) const PROGRAM: usize = 10;
    /// The end, and the port: see `Endpoint`.
    pub(crate) const PORT: usize = 11;
    /// The IP address, in the form of version 6, in network order.
    pub(crate) const ADDRESS: usize = 12;
    /// 1: a rule forces SMC.
    pub(crate) const FORCED: usize = 14;
    /// 1: the costs are those of virtual machines.
    pub(crate) const GUEST: usize = 15;
    /// A `PlainPause`.
    pub(crate) const PLAIN: usize = 16;
    /// In a file: the time of the last change, in seconds since the start of the machine.
    pub(crate) const SAVED: usize = 17;
}

/// The entries chosen by a hash.
pub(super) fn group(hash: u64) -> impl Iterator<Item = usize> {
    let first = (hash >> 32) as usize % GROUPS * WAYS;
    first..first + WAYS
}
