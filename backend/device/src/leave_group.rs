// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of a device asked to leave, and the group of devices leaving together.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use virtio_ism_abi::event::LeaveReason;

use super::sync::lock;

/// Devices leaving together, and the number of drivers still there.
#[derive(Debug, Default)]
pub struct LeaveGroup {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    asked: usize,
    staying: usize,
    taken_back: usize,
    is_given_up: bool,
}

impl LeaveGroup {
    /// A group without leaving drivers.
    pub fn new() -> Arc<LeaveGroup> {
        Arc::default()
    }

    /// Drivers asked to leave so far.
    pub fn asked(&self) -> usize {
        lock(&self.state).asked
    }

    /// Asked drivers still to leave.
    pub fn staying(&self) -> usize {
        lock(&self.state).staying
    }

    /// Ends the present wait and every later one.
    pub fn give_up(&self) {
        lock(&self.state).is_given_up = true;
        self.changed.notify_all();
    }

    /// Drivers whose request was taken back.
    pub fn taken_back(&self) -> usize {
        lock(&self.state).taken_back
    }

    /// Waits until every driver has left or had its request taken back, until [`give_up`](Self::give_up), or
    /// for `timeout`. Returns the number of drivers still to leave.
    pub fn wait(&self, timeout: Duration) -> usize {
        let start = Instant::now();
        let mut state = lock(&self.state);
        while state.staying > 0 && !state.is_given_up {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.staying + state.taken_back
    }
}

/// Counts a driver in its group until the driver has left. Held by the driver's account.
#[derive(Debug)]
pub(super) struct LeaveGuard(Arc<LeaveGroup>);

impl LeaveGuard {
    pub(super) fn new(group: &Arc<LeaveGroup>) -> LeaveGuard {
        let mut state = lock(&group.state);
        state.asked += 1;
        state.staying += 1;
        drop(state);
        LeaveGuard(group.clone())
    }

    /// The request to the driver is taken back.
    pub(super) fn take_back(self) {
        lock(&self.0.state).taken_back += 1;
    }
}

impl Drop for LeaveGuard {
    fn drop(&mut self) {
        lock(&self.0.state).staying -= 1;
        self.0.changed.notify_all();
    }
}

/// A request to a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaveRequest {
    /// From 1, the number of the request on this device.
    pub(super) number: u32,
    pub(super) reason: LeaveReason,
    /// On the fabric's clock.
    pub(super) deadline_ns: u64,
}

/// An event about leaving, for a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaveEvent {
    /// LEAVE.
    Leave(LeaveRequest),
    /// STAY: the request with this number is taken back.
    Stay(u32),
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    None,
    Left,
    TakenBack,
}

/// The latest request.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) request: LeaveRequest,
    pub(super) answer: Answer,
}

impl Leaving {
    /// The request for a new session, told as well.
    pub(super) fn restart(&mut self) -> Option<LeaveRequest> {
        if self.answer == Answer::TakenBack {
            return None;
        }
        self.answer = Answer::None;
        Some(self.request)
    }
}
