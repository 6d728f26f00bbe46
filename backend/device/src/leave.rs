// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Leaving in order: a device tells its driver of the device's end, and the operator waits for a while.
//!
//! A driver has left after its LEFT, without registered and attached DMBs, or after the end of its session. A
//! driver without LEAVE is not told and not waited for. From the first request on the device takes on nothing
//! new: REGISTER and ATTACH get ESTATE. The requester of a drain or a migration can take the request back,
//! and the device is as before.

use std::sync::Arc;
use std::time::Duration;

use virtio_ism_abi::Status;
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::LeaveReason;

use super::command::done;
use super::device::DeviceState;
use super::leave_group::{Answer, LeaveEvent, LeaveGroup, LeaveGuard, LeaveRequest, Leaving};
use super::sync::lock;
use super::{Device, Outcome};

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
