// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Leaving in order: a device tells its driver that it is about to go, and its operator waits for a
//! while.
//!
//! A driver has left when it says so (LEFT), when it has neither registered nor attached a DMB, or
//! when its session has ended. A driver that has not accepted LEAVE is not told and not waited for.
//! From the first request on the device takes on nothing new: REGISTER and ATTACH get ESTATE.

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

    /// Drivers that were asked to leave and have not left.
    pub fn staying(&self) -> usize {
        lock(&self.state).staying
    }

    /// Ends the wait, and each one that begins later.
    pub fn give_up(&self) {
        lock(&self.state).is_given_up = true;
        self.changed.notify_all();
    }

    /// Waits until all have left, until [`give_up`](Self::give_up), or for `timeout`. Returns how many
    /// have not left.
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
        state.staying
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

/// The latest request.
#[derive(Debug)]
pub(super) struct Leaving {
    request: LeaveRequest,
    is_answered: bool,
}

impl Leaving {
    /// The request for a new session, which is told, too.
    pub(super) fn restart(&mut self) -> LeaveRequest {
        self.is_answered = false;
        self.request
    }
}

impl DeviceState {
    /// Whether the device takes on nothing new.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.is_some()
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
            account.session.push_leave(request);
            if account.uses_dmbs() {
                account.stay(LeaveGuard::new(group));
            }
        }
        state.leaving = Some(Leaving { request, is_answered: false });
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
        let leaving = asked.filter(|leaving| !leaving.is_answered).ok_or(Status::Enoent)?;
        leaving.is_answered = true;
        account.finish_leaving();
        Ok(done(tag, &[]))
    }
}
