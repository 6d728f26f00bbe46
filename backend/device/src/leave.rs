// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Leaving in order: a device tells its driver that it is about to go, and its operator waits for a
//! while.
//!
//! A driver has left when it says so (LEFT), when it has neither registered nor attached a DMB, or
//! when its session has ended. A driver that has not accepted LEAVE is not told and not waited for.
//! From the first request on the device takes on nothing new: REGISTER and ATTACH get ESTATE. Who has
//! asked for a drain or a migration can take it back, and the device is as before.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use virtio_ism_abi::Status;
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::LeaveReason;

use super::command::done;
use super::device::DeviceState;
use super::sync::lock;
use super::{Device, Outcome};

/// Devices that go together, and how many of their drivers have not left yet.
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
    /// Nobody leaves yet.
    pub fn new() -> Arc<LeaveGroup> {
        Arc::default()
    }

    /// Drivers that were asked to leave so far.
    pub fn asked(&self) -> usize {
        lock(&self.state).asked
    }

    /// Drivers that were asked to leave, have not left, and still are to.
    pub fn staying(&self) -> usize {
        lock(&self.state).staying
    }

    /// Ends the wait, and each one that begins later.
    pub fn give_up(&self) {
        lock(&self.state).is_given_up = true;
        self.changed.notify_all();
    }

    /// Drivers that need not leave any more.
    pub fn taken_back(&self) -> usize {
        lock(&self.state).taken_back
    }

    /// Waits until all have left or need not leave any more, until [`give_up`](Self::give_up), or for
    /// `timeout`. Returns how many have not left.
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

/// A driver that has not left yet counts in its group as long as its account has this.
#[derive(Debug)]
pub(super) struct LeaveGuard(Arc<LeaveGroup>);

impl LeaveGuard {
    fn new(group: &Arc<LeaveGroup>) -> LeaveGuard {
        let mut state = lock(&group.state);
        state.asked += 1;
        state.staying += 1;
        drop(state);
        LeaveGuard(group.clone())
    }

    /// The driver need not leave any more.
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

/// What a driver was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaveRequest {
    /// From 1, the number of the request on this device.
    pub(super) number: u32,
    pub(super) reason: LeaveReason,
    /// On the fabric's clock.
    pub(super) deadline_ns: u64,
}

/// What a driver is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaveEvent {
    /// LEAVE.
    Leave(LeaveRequest),
    /// STAY: the request with this number is taken back.
    Stay(u32),
}

/// What has become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    None,
    Left,
    TakenBack,
}

/// The latest request.
#[derive(Debug)]
pub(super) struct Leaving {
    request: LeaveRequest,
    answer: Answer,
}

impl Leaving {
    /// The request for a new session, which is told, too.
    pub(super) fn restart(&mut self) -> Option<LeaveRequest> {
        if self.answer == Answer::TakenBack {
            return None;
        }
        self.answer = Answer::None;
        Some(self.request)
    }
}

impl DeviceState {
    /// Whether the device takes on nothing new.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| leaving.answer != Answer::TakenBack)
    }
}

impl Device {
    /// Asks the driver to let its DMBs go within `within`. `group` counts it until it has left. A
    /// later request replaces an earlier one, whose group goes on to count the driver.
    ///
    /// The device itself stays as it is, whatever the driver does, but for REGISTER and ATTACH.
    pub fn ask_to_leave(&self, reason: LeaveReason, within: Duration, group: &Arc<LeaveGroup>) {
        let within_ns = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX);
        let deadline_ns = self.fabric.clock.now_ns().saturating_add(within_ns);
        let mut state = lock(&self.state);
        let before = state.leaving.as_ref().map_or(0, |leaving| leaving.request.number);
        let request = LeaveRequest { number: before.wrapping_add(1), reason, deadline_ns };
        if let Some(account) = state.account.as_mut().filter(|_| self.knows_leave()) {
            account.session.push_leave(LeaveEvent::Leave(request));
            if account.uses_dmbs() {
                account.stay(LeaveGuard::new(group));
            }
        }
        state.leaving = Some(Leaving { request, answer: Answer::None });
    }

    /// Takes the latest request back, if it was to drain the device or to move its machine: the driver
    /// may stay, and the device takes on new DMBs again. The other requests are of a device that goes.
    /// Returns whether there was such a request.
    pub fn stay(&self) -> bool {
        let mut state = lock(&self.state);
        if !state.is_leaving() {
            return false;
        }
        let DeviceState { account, leaving, .. } = &mut *state;
        let drains = |reason| matches!(reason, LeaveReason::Drain | LeaveReason::Migration);
        let Some(leaving) = leaving.as_mut().filter(|leaving| drains(leaving.request.reason))
        else {
            return false;
        };
        leaving.answer = Answer::TakenBack;
        if let Some(account) = account.as_mut().filter(|_| self.knows_leave()) {
            account.session.push_leave(LeaveEvent::Stay(leaving.request.number));
            account.take_leave_back();
        }
        true
    }

    /// Whether the driver may be told to leave.
    pub(super) fn knows_leave(&self) -> bool {
        self.handle.features().contains(Features::LEAVE)
    }

    /// LEFT: the answer to one request, once.
    pub(super) fn left(&self, tag: u32, number: u32) -> Result<Outcome, Status> {
        let mut state = lock(&self.state);
        let DeviceState { account, leaving, .. } = &mut *state;
        let account = account.as_mut().ok_or(Status::Estate)?;
        let asked = leaving.as_mut().filter(|leaving| leaving.request.number == number);
        let unanswered = asked.filter(|leaving| leaving.answer == Answer::None);
        unanswered.ok_or(Status::Enoent)?.answer = Answer::Left;
        account.finish_leaving();
        Ok(done(tag, &[]))
    }
}
