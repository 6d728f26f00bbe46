// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Leaving in order: a device tells its driver of the device's end, and the operator waits for a while.
//!
//! A driver has left after its LEFT, without registered and attached DMBs, or after the end of its session. A
//! driver without LEAVE is not told and not waited for. From the first request on the device takes on nothing
//! new: REGISTER and ATTACH get ESTATE. The requester of a drain or a migration can take the request back,
//! and the device is as before.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use virtio_ism_abi::Status;
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::LeaveReason;

use super::command::done;
use super::device::DeviceState;
use super::sync::lock;
use super::{Device, Outcome};

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
    fn new(group: &Arc<LeaveGroup>) -> LeaveGuard {
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
    /// The request for a new session, told as well.
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
    /// Asks the driver to release its DMBs within `within`. `group` counts the driver until it has left. A
    /// later request replaces an earlier one; the earlier group still counts the driver.
    ///
    /// The device itself stays the same, whatever the driver does, except for REGISTER and ATTACH.
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

    /// Takes the latest request back, if for a drain or a migration: the driver may stay, and the device
    /// takes on new DMBs again. Other requests are for an ending device. Returns whether there was such a
    /// request.
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
