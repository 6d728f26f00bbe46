// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inputs of a group, except for messages, keys and time.

use core::time::Duration;

use super::link::DeleteRequest;
use super::{
    Cause, LinkGroup, LinkKey, LinkRecord, LinkState, Output, Phase, Prepared, Reason, Receipt,
    Rnic, RnicId, Role, Timers, UseError,
};
use crate::time::Tick;
use crate::wire::llc::DeleteReason;

impl LinkGroup {
    /// Returns the next order to the caller. To be called until the result is `None`, after every
    /// other call.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Reports received data other than LLC on a link: the link lives.
    pub fn handle_received(&mut self, link: LinkKey, now: Tick) {
        if let Some(link) = self.link_mut(link) {
            link.last_received = now;
        }
    }

    /// A connection on this link has been silent for longer than its application's keepalive time:
    /// the link is tested unless heard meanwhile (RFC 7609 section 4.5.3).
    pub fn handle_keepalive(&mut self, link: LinkKey, silence: Duration, now: Tick) {
        let is_due = |link: &LinkRecord| {
            link.state.carries()
                && link.probe.is_none()
                && link.last_received.after(silence).has_passed(now)
        };
        if self.link(link).is_some_and(is_due) {
            self.send_probe(link, now);
        }
    }

    /// The send completion of a message with a receipt. A failed send is reported by
    /// [`LinkGroup::handle_link_failed`] instead.
    pub fn handle_sent(&mut self, receipt: Receipt, now: Tick) {
        self.decided.take_arrival(receipt);
        match self.phase {
            Phase::FirstReply { receipt: awaited, .. } if awaited == receipt => {
                self.decided.commit();
                self.phase = Phase::SecondLink;
            }
            Phase::Ending(final_delete)
                if final_delete.receipt == receipt && !final_delete.answered_by_peer =>
            {
                self.end(final_delete.reason, now);
            }
            _ => {}
        }
        let gone =
            |link: &&LinkRecord| link.last_message.is_some_and(|(awaited, _)| awaited == receipt);
        if let Some(key) = self.links.iter().find(gone).map(|link| link.key) {
            self.destroy(key, now);
        }
        self.pump(now);
    }

    /// Answer to [`Output::PrepareLink`]; if there can be no queue pair, the answer is
    /// [`LinkGroup::handle_link_failed`] with [`Cause::Setup`]. An answer for a link destroyed
    /// meanwhile has no effect.
    pub fn handle_link_prepared(&mut self, link: LinkKey, prepared: Prepared, now: Tick) {
        self.prepared(link, &prepared, now);
        self.pump(now);
    }

    /// A link does not work any more, or an order for the link could not be carried out.
    pub fn handle_link_failed(&mut self, link: LinkKey, cause: Cause, now: Tick) {
        self.fail_link(link, cause, now);
        self.pump(now);
    }

    /// An RNIC with a path to the peer has come, or come back (LLC-77, LLCV2-30, LG-26).
    pub fn handle_rnic_up(&mut self, rnic: Rnic, now: Tick) {
        self.params.rnics.retain(|have| have.id != rnic.id);
        self.params.rnics.push(rnic);
        self.additions.quick_retries = Timers::QUICK_RETRIES;
        match self.params.role {
            Role::Server => self.additions.wanted = true,
            Role::Client => self.additions.notice = true,
        }
        self.pump(now);
    }

    /// An RNIC has gone: all its links have failed.
    pub fn handle_rnic_down(&mut self, rnic: RnicId, now: Tick) {
        self.params.rnics.retain(|have| have.id != rnic);
        let on_it = self.links.iter().filter(|link| link.rnic.id == rnic);
        // Links still being made go first, lest connections move to such a link.
        let mut keys: Vec<(bool, LinkKey)> =
            on_it.map(|link| (link.state.carries(), link.key)).collect();
        keys.sort_unstable();
        for (_, key) in keys {
            self.fail_link(key, Cause::Rnic, now);
        }
        self.pump(now);
    }

    /// The peer's SMC Decline came over TCP during first contact (ERR-46). The Decline is too late
    /// if [`LinkGroup::may_fall_back`] is false; the group then counts the Decline as a failure
    /// (ERR-5).
    pub fn handle_decline(&mut self, now: Tick) {
        if !self.decided.was_usable() {
            self.end(Reason::PeerDeclined, now);
        }
    }

    /// The link for the writes of a new connection: the active one with the fewest connections
    /// (LG-29, LG-41).
    pub fn pick_link(&self) -> Option<LinkKey> {
        match self.phase {
            Phase::Usable => self.least_loaded(None),
            _ => None,
        }
    }

    /// Whether the group takes one more connection; if not, the server makes a parallel group
    /// (LG-48, LG-53).
    pub fn has_room(&self) -> bool {
        !matches!(self.phase, Phase::Over | Phase::Ending(_))
            && self.connections() < self.max_connections()
    }

    /// A connection uses a link from now on; the first one may be reported during first contact.
    ///
    /// # Errors
    /// [`UseError::Full`], [`UseError::NoLink`], [`UseError::Over`].
    pub fn connection_added(&mut self, link: LinkKey, now: Tick) -> Result<(), UseError> {
        if matches!(self.phase, Phase::Over | Phase::Ending(_)) {
            return Err(UseError::Over);
        }
        if !self.has_room() {
            return Err(UseError::Full(self.connections()));
        }
        let there = self
            .link_mut(link)
            .filter(|link| matches!(link.state, LinkState::Confirming | LinkState::Active));
        let Some(there) = there else { return Err(UseError::NoLink(link)) };
        there.connections += 1;
        self.pump(now);
        Ok(())
    }

    /// A connection is gone. `link` is the connection's last link, by the outputs taken so far. If
    /// the count has moved meanwhile, the link with the most connections loses one instead.
    pub fn connection_removed(&mut self, link: LinkKey, now: Tick) {
        let counted = |have: &&mut LinkRecord| have.connections > 0;
        let there = self
            .links
            .iter_mut()
            .filter(counted)
            .max_by_key(|have| (have.key == link, have.connections));
        if let Some(there) = there {
            there.connections -= 1;
        }
        self.pump(now);
    }

    /// Deletes a link in an orderly way, e.g. before an RNIC is taken out of service (LG-42,
    /// CLOSE-36). Deleting the last link ends the group.
    pub fn delete_link(&mut self, link: LinkKey, reason: DeleteReason, now: Tick) {
        if self.state_of(link) == LinkState::Active {
            self.begin_removal(link, DeleteRequest { reason, orderly: true });
            self.pump(now);
        }
    }

    /// Ends the group: Delete Link for all links, then [`Output::Terminated`] (LG-57).
    pub fn terminate(&mut self, reason: DeleteReason, now: Tick) {
        if !matches!(self.phase, Phase::Over | Phase::Ending(_)) {
            let orderly = self.connections() == 0;
            self.send_final_delete(Reason::Local(reason), reason, orderly, now);
        }
    }
}
