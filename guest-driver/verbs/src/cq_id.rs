// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The number of a completion queue in completion events and asynchronous events.

/// The number of a completion queue, unique in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CqId(usize);

impl CqId {
    pub(super) fn from_number(number: usize) -> CqId {
        CqId(number)
    }
}
