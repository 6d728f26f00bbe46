// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Delete Link, for one link and for all (RFC 7609 sections 3.5.4, 3.5.5.1.3, 3.5.5.1.4).

use super::exchange::FinalDelete;
use super::link::{DeleteRequest, SentDelete};
use super::{
    Anomaly, Cause, LinkEvent, LinkExchange, LinkGroup, LinkKey, LinkState, Phase, Reason, Receipt,
};
use crate::time::Tick;
use crate::wire::llc::{DeleteLink, DeleteReason, Message};

impl LinkGroup {
    pub(super) fn on_delete_link(
        &mut self,
        over: LinkKey,
        message: DeleteLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        if message.all {
            self.on_delete_all(message, now);
            return Ok(());
        }
        match self.by_number(message.link_number) {
            Some(key) if message.reply => self.on_delete_reply(key, now),
            Some(key) if self.is_server() => self.on_delete_request(key, message, now),
            Some(key) => self.on_server_delete(over, key, message, now),
            None if message.reply => Err(Anomaly::UnexpectedReply("Delete Link")),
            None => {
                // ERR-39, ERR-40.
                let reason = DeleteReason::UNKNOWN_LINK;
                if self.state_of(over).carries() {
                    let reply = DeleteLink { reply: true, reason, ..message };
                    self.post(over, Message::DeleteLink(reply));
                }
                Err(Anomaly::UnknownLink(message.link_number))
            }
        }
    }

    /// Delete Link for all links: obeyed at once, during any exchange (LLC-44, LLC-45, LLC-66,
    /// CLOSE-34). A server confirms by its own Delete Link, without an answer (LLC-43).
    fn on_delete_all(&mut self, message: DeleteLink, now: Tick) {
        let reason = Reason::PeerDeletedAll(message.reason);
        match self.phase {
            // The client's request crossed with the own Delete Link.
            Phase::Ending(_) if self.is_server() => {}
            Phase::Ending(final_delete) => self.end(final_delete.reason, now),
            _ if self.is_server() => self.send_final_delete(reason, message.reason, true, now),
            _ => self.end(reason, now),
        }
    }

    /// Sends Delete Link for all links, as an order or a wish by role.
    pub(super) fn send_final_delete(
        &mut self,
        reason: Reason,
        code: DeleteReason,
        orderly: bool,
        now: Tick,
    ) {
        let Some(over) = self.carrier(None) else {
            self.end(reason, now);
            return;
        };
        let receipt = self.post_delete_all(over, code, orderly);
        let timers = &self.params.timers;
        let server = self.is_server();
        let until = now.after(if server { timers.last_message } else { timers.reply });
        self.link_exchange = None;
        self.keys.exchange = None;
        self.end.delete_code = (code, orderly);
        let answered_by_peer = !server;
        self.phase = Phase::Ending(FinalDelete { reason, over, receipt, until, answered_by_peer });
    }

    fn post_delete_all(&mut self, over: LinkKey, code: DeleteReason, orderly: bool) -> Receipt {
        let message = DeleteLink { reply: false, all: true, orderly, link_number: 0, reason: code };
        self.post_with_receipt(over, Message::DeleteLink(message))
    }

    /// The final_delete did not get through: over another link, if there is one (ERR-30, ERR-31).
    pub(super) fn resend_final_delete(&mut self, final_delete: FinalDelete, now: Tick) {
        self.set_state(final_delete.over, LinkEvent::Failed);
        if self.carrier(None).is_none() {
            self.end(final_delete.reason, now);
            return;
        }
        let (code, orderly) = self.end.delete_code;
        self.send_final_delete(final_delete.reason, code, orderly, now);
    }

    /// Server: the client wants a link deleted. The own Delete Link does so in its turn (LLC-40,
    /// LLC-65, LLC-69, LLC-73).
    fn on_delete_request(
        &mut self,
        key: LinkKey,
        message: DeleteLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let delete_request = DeleteRequest { reason: message.reason, orderly: message.orderly };
        let cause = Cause::PeerDeleted(message.reason);
        match self.state_of(key) {
            // About to go already (ERR-39).
            LinkState::Deleting | LinkState::Gone => {
                return Err(Anomaly::Repeated("Delete Link"));
            }
            LinkState::Failed => {}
            LinkState::Preparing | LinkState::Adding | LinkState::Confirming => {
                self.fail_link(key, cause, now);
            }
            LinkState::Active | LinkState::Leaving if self.carrier(Some(key)).is_none() => {
                // The last link: its end is the end of the group.
                let reason = Reason::LastLinkLost(cause);
                self.send_final_delete(reason, message.reason, message.orderly, now);
            }
            LinkState::Active | LinkState::Leaving if message.orderly => {
                self.begin_removal(key, delete_request)
            }
            LinkState::Active | LinkState::Leaving => {
                self.fail_link(key, cause, now);
                if let Some(link) = self.link_mut(key) {
                    link.delete_request = Some(delete_request);
                }
            }
        }
        Ok(())
    }

    /// Client: the server deletes a link; refusing is impossible (LLC-37).
    fn on_server_delete(
        &mut self,
        over: LinkKey,
        key: LinkKey,
        message: DeleteLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let reply = Message::DeleteLink(DeleteLink { reply: true, ..message });
        // On the link of the request (LLC-5), unless that link is dead.
        let over = match self.state_of(over).carries() {
            true => over,
            false => self.carrier(Some(key)).unwrap_or(over),
        };
        if self.adding().is_some_and(|add| add.new == Some(key)) {
            self.link_exchange = None;
        }
        if self.state_of(key).carries() && self.carrier(Some(key)).is_none() {
            let receipt = self.post_with_receipt(over, reply);
            let reason = Reason::LastLinkLost(Cause::PeerDeleted(message.reason));
            let until = now.after(self.params.timers.last_message);
            let answered_by_peer = false;
            self.phase =
                Phase::Ending(FinalDelete { reason, over, receipt, until, answered_by_peer });
            return Ok(());
        }
        if self.state_of(key) == LinkState::Active
            || self.link(key).is_some_and(|link| link.connections > 0)
        {
            self.move_connections(key, !message.orderly);
        }
        let again = self.state_of(key) == LinkState::Deleting;
        let receipt = self.post_with_receipt(over, reply);
        self.set_state(key, LinkEvent::DeletionAgreed);
        let until = now.after(self.params.timers.last_message);
        if let Some(link) = self.link_mut(key) {
            // The link's resources stay until the reply has arrived (LLC-39).
            link.last_message = Some((receipt, until));
            (link.delete_request, link.sent_delete, link.probe) = (None, None, None);
        }
        if self.keys.exchange.as_ref().is_some_and(|exchange| exchange.over() == key) {
            self.keys.exchange = None;
        }
        match again {
            true => Err(Anomaly::Repeated("Delete Link")),
            false => Ok(()),
        }
    }

    /// The answer to the own Delete Link for one link.
    fn on_delete_reply(&mut self, key: LinkKey, now: Tick) -> Result<(), Anomaly> {
        if self.is_server() {
            match self.link_exchange {
                Some(LinkExchange::Delete { link, .. }) if link == key => {}
                _ => return Err(Anomaly::UnexpectedReply("Delete Link")),
            }
            self.link_exchange = None;
        } else if self.link(key).is_none_or(|link| link.sent_delete.is_none()) {
            return Err(Anomaly::UnexpectedReply("Delete Link"));
        }
        self.set_state(key, LinkEvent::DeletionAgreed);
        self.destroy(key, now);
        self.on_redundancy_lost();
        Ok(())
    }

    /// Server: a new attempt at redundancy follows the loss of a link. A link never confirmed was
    /// itself such an attempt, and the next attempt is already scheduled.
    pub(super) fn on_redundancy_lost(&mut self) {
        let pending = self.additions.retry_at.is_some();
        if self.is_server() && self.decided.was_usable() && !pending && self.full_links() == 1 {
            self.additions.wanted = true;
        }
    }

    /// Server: sends Delete Link for a link on request (LLC-34 to LLC-38).
    pub(super) fn start_delete(&mut self, key: LinkKey, now: Tick) {
        let Some((number, delete_request)) =
            self.link(key).and_then(|l| l.delete_request.map(|w| (l.number, w)))
        else {
            return;
        };
        let Some(over) = self.carrier(Some(key)) else {
            self.delete_last(key, delete_request, now);
            return;
        };
        if self.link(key).is_some_and(|link| link.connections > 0) {
            // These connections came while the link was leaving, as both ends delete a link
            // (LG-44).
            self.move_connections(key, !delete_request.orderly);
        }
        self.post_delete(over, number, delete_request);
        let until = now.after(self.params.timers.reply);
        let last = now.after(self.params.timers.deletion);
        self.link_exchange = Some(LinkExchange::Delete { link: key, over, until, last });
    }

    /// Client: asks the server to delete a link (LLC-40 to LLC-42).
    pub(super) fn ask_delete(&mut self, key: LinkKey, now: Tick) {
        let Some((number, delete_request)) =
            self.link(key).and_then(|l| l.delete_request.map(|w| (l.number, w)))
        else {
            return;
        };
        let Some(over) = self.carrier(Some(key)) else {
            self.delete_last(key, delete_request, now);
            return;
        };
        self.post_delete(over, number, delete_request);
        let until = now.after(self.params.timers.reply);
        let last = now.after(self.params.timers.deletion);
        if let Some(link) = self.link_mut(key) {
            link.sent_delete = Some(SentDelete { over, until, last });
        }
    }

    /// The link to be deleted is the last one now. Deleting the link ends the group, unless the
    /// link was merely superfluous.
    fn delete_last(&mut self, key: LinkKey, delete_request: DeleteRequest, now: Tick) {
        if let Some(link) = self.link_mut(key) {
            link.delete_request = None;
        }
        if delete_request.reason == DeleteReason::ASYMMETRIC && self.set_state(key, LinkEvent::Kept)
        {
            self.judge_symmetry();
            return;
        }
        self.send_final_delete(
            Reason::Local(delete_request.reason),
            delete_request.reason,
            delete_request.orderly,
            now,
        );
    }

    fn post_delete(&mut self, over: LinkKey, link_number: u8, delete_request: DeleteRequest) {
        let DeleteRequest { reason, orderly } = delete_request;
        let message = DeleteLink { reply: false, all: false, orderly, link_number, reason };
        self.post(over, Message::DeleteLink(message));
    }
}
