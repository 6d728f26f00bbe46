// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices leave in order: the daemon first tells their drivers, and waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use virtio_ism_abi::event::LeaveReason;

use super::guests::GuestSocket;
use ism_device::LeaveGroup;

/// Number of drivers asked to leave, and of drivers gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaveInfo {
    /// Drivers with DMBs that were told. Drivers without support for the request are not counted.
    pub asked: usize,
    /// Asked drivers gone in time.
    pub left: usize,
    /// Asked drivers allowed to stay, because the request was taken back.
    pub taken_back: usize,
}

/// Drivers asked to leave, with a deadline.
#[derive(Debug)]
pub(crate) struct Leaving {
    group: Arc<LeaveGroup>,
    reason: LeaveReason,
    begin: Instant,
    within: Duration,
}

impl Leaving {
    /// No driver is asked yet. `group` ends the wait early.
    pub(crate) fn new(group: Arc<LeaveGroup>, reason: LeaveReason, within: Duration) -> Leaving {
        Leaving { group, reason, begin: Instant::now(), within }
    }

    /// Asks the drivers of a guest, for a reason of their own.
    pub(crate) fn ask_for(&self, name: &str, socket: &GuestSocket, reason: LeaveReason) {
        // No time: the device ends as if killed.
        if self.within.is_zero() {
            return;
        }
        let before = self.group.asked();
        socket.ask_to_leave(reason, self.within, &self.group);
        let drivers = self.group.asked() - before;
        if drivers > 0 {
            tracing::info!(
                guest = name,
                reason = reason.name(),
                drivers,
                within_ms = self.within.as_millis(),
                "drivers were asked to leave"
            );
        }
    }

    /// Asks the drivers of a guest.
    pub(crate) fn ask(&self, name: &str, socket: &GuestSocket) {
        self.ask_for(name, socket, self.reason);
    }

    /// Whether no driver is left to wait for.
    pub(crate) fn is_over(&self) -> bool {
        self.group.staying() == 0
    }

    /// Waits for all drivers to leave, for the end of their time, or for the group to be given up.
    pub(crate) fn wait(self) -> LeaveInfo {
        let left = self.within.saturating_sub(self.begin.elapsed());
        let staying = self.group.wait(left);
        let (asked, taken_back) = (self.group.asked(), self.group.taken_back());
        let (reason, after_ms) = (self.reason.name(), self.begin.elapsed().as_millis());
        match staying {
            0 if asked == 0 => {}
            0 => tracing::info!(reason, drivers = asked, after_ms, "all drivers have left"),
            _ if staying == taken_back => {
                tracing::info!(
                    reason,
                    drivers = asked,
                    staying,
                    after_ms,
                    "drivers need not leave"
                );
            }
            _ => tracing::warn!(
                reason,
                drivers = asked,
                staying,
                after_ms,
                "drivers have not left in time: their connections on the device end"
            ),
        }
        LeaveInfo { asked, left: asked.saturating_sub(staying), taken_back }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_waited_for_if_nobody_was_asked_or_the_group_was_given_up() {
        let group = LeaveGroup::new();
        let hour = Duration::from_secs(3600);
        let leaving = Leaving::new(group.clone(), LeaveReason::Restart, hour);
        assert!(leaving.is_over());
        assert_eq!(leaving.wait(), LeaveInfo::default());
    }
}
