// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The policies read since the start of the program.

use std::sync::atomic::{AtomicPtr, Ordering};

use smc_rendezvous::Policy;

use crate::sys::leaked;

/// Policies at most. After these the file is not read again: each takes memory for good, because other
/// threads may use any of them.
const MAX_CHANGES: usize = 10_000;

/// A policy read after the start of the program, and the ones before.
struct Change {
    policy: Policy,
    before: Option<&'static Change>,
    number: usize,
}

/// The latest change.
static LATEST: AtomicPtr<Change> = AtomicPtr::new(std::ptr::null_mut());

/// The policy in force. `None`: the first one.
pub(crate) fn changed() -> Option<&'static Policy> {
    latest().map(|change| &change.policy)
}

/// The policies read since the start, the latest first.
pub(crate) fn changes<'a>() -> impl Iterator<Item = &'a Policy> {
    std::iter::successors(latest(), |change| change.before).map(|change| &change.policy)
}

fn latest() -> Option<&'static Change> {
    leaked(LATEST.load(Ordering::Acquire))
}

/// Whether the file is not read again.
pub(crate) fn are_full() -> bool {
    latest().is_some_and(|change| change.number >= MAX_CHANGES)
}

/// Puts a policy in force. The caller is the only one at a time.
pub(crate) fn add(policy: Policy) {
    let before = latest();
    let number = before.map_or(1, |change| change.number + 1);
    let change = Box::leak(Box::new(Change { policy, before, number }));
    LATEST.store(change, Ordering::Release);
}
