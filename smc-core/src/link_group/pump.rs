// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Begins exchanges: exchanges that may not overlap take turns (RFC 7609 section 3.5.5.3).
//!
//! Nothing is queued. Wishes lie in the state itself: a link has a delete request, an RMB is not
//! confirmed, a flag asks for a link. Whenever the group is idle, the most urgent wish begins. So a
//! peer cannot make the group remember more than its own state.

use super::{LinkGroup, LinkKey, LinkState, Output, Phase, Reason, Timers};
use crate::time::Tick;
use crate::wire::llc::{DeleteReason, Message, RequestAddLink};

impl LinkGroup {
    /// Begins every due exchange. Called after every input.
    pub(super) fn pump(&mut self, now: Tick) {
        if !matches!(self.phase, Phase::SecondLink | Phase::Usable) {
            return;
        }
        if self.is_server() {
            self.pump_server(now);
        } else {
            self.pump_client(now);
        }
        self.become_usable(now);
        if self.may_start_rkeys() {
            self.start_rkeys(now);
        }
        self.watch_idle(now);
    }

    /// Whether neither links nor own keys are being changed, or about to be (LLCV2-8).
    pub(super) fn may_start_rkeys(&self) -> bool {
        matches!(self.phase, Phase::SecondLink | Phase::Usable)
            && self.link_exchange.is_none()
            && self.keys.exchange.is_none()
            && !self.links.iter().any(|link| link.delete_request.is_some())
    }

    fn next_delete_request(&self) -> Option<LinkKey> {
        let next_delete_request =
            |link: &&super::LinkRecord| link.delete_request.is_some() && link.sent_delete.is_none();
        self.links.iter().find(next_delete_request).map(|link| link.key)
    }

    fn pump_server(&mut self, now: Tick) {
        if self.link_exchange.is_some() || self.keys.exchange.is_some() {
            return;
        }
        if let Some(key) = self.next_delete_request() {
            self.start_delete(key, now);
            return;
        }
        self.answer_kept();
        if let Some(key) = self.additions.request.take() {
            // An answer in any case; a link cannot always be added (LLCV2-28).
            self.post(key, Message::RequestAddLink(RequestAddLink::Reply(None)));
        }
        if self.additions.wanted {
            self.start_add(now);
        }
    }

    fn pump_client(&mut self, now: Tick) {
        // A client's wish may flow at any time (LLC-59).
        while let Some(key) = self.next_delete_request() {
            self.ask_delete(key, now);
            if !matches!(self.phase, Phase::SecondLink | Phase::Usable) {
                return;
            }
        }
        if self.link_exchange.is_some() {
            return;
        }
        self.answer_kept();
        if self.additions.notice && self.may_start_rkeys() && self.phase == Phase::Usable {
            self.notify_rnic(now);
        }
    }

    /// First contact is over after the attempt at a second link and its clean-up (LG-17, LG-25,
    /// ERR-18, ERR-24).
    fn become_usable(&mut self, now: Tick) {
        let transient = |link: &super::LinkRecord| {
            !matches!(link.state, LinkState::Active | LinkState::Deleting)
        };
        let busy = self.link_exchange.is_some() || self.links.iter().any(transient);
        if self.phase != Phase::SecondLink || busy {
            return;
        }
        self.phase = Phase::Usable;
        self.decided.note_usable();
        self.outputs.push_back(Output::GroupUsable);
        if self.is_server() && self.additions.retry_at.is_none() && self.full_links() < 2 {
            self.schedule_retry(now);
        }
    }

    /// Schedules the next attempt at redundancy (LG-26). A client, only able to ask, leaves the
    /// attempt to the server until an attempt or a second link was lost: then only the client may
    /// know of its unused RNIC (ERR-24, ERR-25).
    pub(super) fn schedule_retry(&mut self, now: Tick) {
        if self.max_links > 1 {
            self.additions.retry_at = self.params.timers.retry_add_link.map(|wait| now.after(wait));
        }
    }

    /// An attempt has failed. If an RNIC has just come back, the attempt was perhaps too soon: the
    /// next one follows in a moment, and each later one after a longer wait (LG-26).
    pub(super) fn schedule_retry_of_failed(&mut self, now: Tick) {
        self.schedule_retry(now);
        if let Some(left) = self.additions.quick_retries.checked_sub(1) {
            self.additions.quick_retries = left;
            let doublings = Timers::QUICK_RETRIES.saturating_sub(self.additions.quick_retries + 1);
            let soon = now.after(Timers::FIRST_RETRY.saturating_mul(1 << doublings));
            self.additions.retry_at = self.additions.retry_at.map(|at| at.min(soon));
        }
    }

    /// The time for another attempt has come.
    pub(super) fn retry(&mut self, now: Tick) {
        self.additions.retry_at = None;
        if self.full_links() < 2 {
            match self.is_server() {
                true => self.additions.wanted = true,
                false => self.additions.notice = true,
            }
            self.schedule_retry(now);
        }
    }

    /// A group without connections has an idle time (CLOSE-35). Its links have none: an idle link
    /// stays (LG-43).
    fn watch_idle(&mut self, now: Tick) {
        if self.phase != Phase::Usable || self.connections() > 0 {
            self.end.idle_at = None;
        } else if self.end.idle_at.is_none() {
            self.end.idle_at = Some(now.after(self.params.timers.idle));
        }
    }

    /// No connection for long: the server ends the group, the client, some time later, too (LG-45,
    /// LG-46). The reason is the server's only (LLC-42).
    pub(super) fn on_idle(&mut self, now: Tick) {
        self.end.idle_at = None;
        let code = match self.is_server() {
            true => DeleteReason::PROGRAM,
            false => DeleteReason::OPERATOR,
        };
        self.send_final_delete(Reason::Idle, code, true, now);
    }
}
