// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Failing links, deleted links, and the end of a group (RFC 7609 appendix C.7.1).

use super::link::DeleteRequest;
use super::{
    Cause, Ending, LinkEvent, LinkExchange, LinkGroup, LinkKey, LinkState, Output, Phase, Reason,
    Stage,
};
use crate::time::Tick;

impl LinkGroup {
    /// Fails a dead link: silent, or with a failed send (ERR-13). Exchanges on the link are aborted
    /// and repeated on another link (LLC-75).
    pub(super) fn fail_link(&mut self, key: LinkKey, cause: Cause, now: Tick) {
        if matches!(self.phase, Phase::Over) {
            return;
        }
        if let Phase::Ending(final_delete) = self.phase {
            self.set_state(key, LinkEvent::Failed);
            if final_delete.over == key {
                self.resend_final_delete(final_delete, now);
            }
            return;
        }
        if self.adding().is_some_and(|add| add.new == Some(key)) {
            self.abort_add(cause, now);
            return;
        }
        match self.state_of(key) {
            LinkState::Gone | LinkState::Failed => return,
            LinkState::Deleting => {
                // The link's last message does not get through; the peer notices by itself.
                if self.link(key).is_some_and(|link| link.last_message.is_some()) {
                    self.destroy(key, now);
                }
                return;
            }
            _ => {}
        }
        self.counters.links_failed += 1;
        self.set_state(key, LinkEvent::Failed);
        if self.carrier(Some(key)).is_none() {
            // CLOSE-37.
            self.end(Reason::LastLinkLost(cause), now);
            return;
        }
        // Neither end waits for the other's Delete Link (LG-16).
        self.move_connections(key, true);
        if let Some(link) = self.link_mut(key) {
            // The end of the link is announced over another link (LLC-36), behind the moves
            // (LG-31).
            link.probe = None;
            link.delete_request =
                Some(DeleteRequest { reason: cause.delete_reason(), orderly: false });
        }
        self.abort_exchanges_on(key, cause, now);
    }

    /// Aborts every exchange on a link.
    fn abort_exchanges_on(&mut self, key: LinkKey, cause: Cause, now: Tick) {
        match &self.link_exchange {
            Some(LinkExchange::Add(add)) if add.over == key => {
                self.abort_add(cause, now);
                self.additions.wanted = true;
            }
            Some(LinkExchange::Delete { over, .. }) if *over == key => self.link_exchange = None,
            Some(LinkExchange::Request { over, .. }) if *over == key => {
                self.link_exchange = None;
                self.additions.notice = true;
            }
            _ => {}
        }
        if self.keys.exchange.as_ref().is_some_and(|exchange| exchange.over() == key) {
            self.keys.exchange = None;
        }
        if self.keys.peer_confirm.as_ref().is_some_and(|confirm| confirm.link == key) {
            self.keys.peer_confirm = None;
        }
        if self.additions.request == Some(key) {
            self.additions.request = None;
        }
        self.keys.kept.retain(|(link, _)| *link != key);
        for link in &mut self.links {
            if link.sent_delete.is_some_and(|sent_delete| sent_delete.over == key) {
                link.sent_delete = None;
            }
        }
    }

    /// Ends the attempt at a new link, to be repeated (ERR-19). A peer knowing of the link gets a
    /// Delete Link.
    pub(super) fn abort_add(&mut self, cause: Cause, now: Tick) {
        let Some(LinkExchange::Add(add)) = self.link_exchange.take() else { return };
        self.schedule_retry_of_failed(now);
        let Some(new) = add.new else { return };
        let refused_here = add.stage == Stage::Prepare;
        if refused_here && !self.is_server() {
            self.refuse_add(add.over, new);
        }
        if refused_here || add.stage == Stage::Reply {
            let rnic = self.link(new).map(|link| link.rnic);
            self.destroy(new, now);
            if let (true, false, Some(rnic)) = (self.is_server(), self.decided.was_usable(), rnic)
                && refused_here
                && self.state_of(add.over) == LinkState::Active
            {
                // The client waits for an Add Link, and would for seconds (LG-17).
                self.add_in_vain(add.over, &rnic, add.number, now);
            }
            return;
        }
        self.counters.links_failed += 1;
        self.set_state(new, LinkEvent::Failed);
        if let Some(link) = self.link_mut(new) {
            link.delete_request =
                Some(DeleteRequest { reason: cause.delete_reason(), orderly: false });
        }
    }

    /// Hands the connections of a link to another (LG-30, LG-44).
    pub(super) fn move_connections(&mut self, from: LinkKey, dead: bool) {
        let Some(to) = self.least_loaded(Some(from)).or_else(|| self.carrier(Some(from))) else {
            return;
        };
        let count = self.link_mut(from).map_or(0, |link| core::mem::take(&mut link.connections));
        if let Some(link) = self.link_mut(to) {
            link.connections = link.connections.saturating_add(count);
        }
        self.counters.moves += 1;
        self.outputs.push_back(Output::MoveConnections { from, to, dead });
    }

    /// Begins to delete a working link: no new connection gets the link, and its connections move.
    pub(super) fn begin_removal(&mut self, key: LinkKey, delete_request: DeleteRequest) {
        if self.state_of(key) == LinkState::Active {
            self.set_state(key, LinkEvent::DeleteWanted);
            // In an orderly deletion the link works until then (LG-42).
            self.move_connections(key, !delete_request.orderly);
        }
        if let Some(link) = self.link_mut(key)
            && link.delete_request.is_none()
        {
            link.delete_request = Some(delete_request);
        }
    }

    /// Frees a link and forgets its keys.
    pub(super) fn destroy(&mut self, key: LinkKey, now: Tick) {
        if self.link(key).is_some_and(|link| link.connections > 0) {
            // These connections came while the link was leaving, as there was no better link.
            self.move_connections(key, true);
        }
        if !self.set_state(key, LinkEvent::Destroyed) {
            return;
        }
        self.links.retain(|link| link.key != key);
        self.counters.links_deleted += 1;
        // The server tries at once (`on_redundancy_lost`).
        let may_ask = !self.is_server() && self.additions.retry_at.is_none();
        if may_ask && self.decided.was_redundant() && self.full_links() < 2 {
            self.schedule_retry(now);
        }
        for rmb in &mut self.keys.rmbs {
            rmb.keys.retain(|(link, ..)| *link != key);
        }
        self.keys.peer_rmbs.remove_link(key);
        self.outputs.push_back(Output::DestroyLink { link: key });
        if matches!(&self.link_exchange, Some(LinkExchange::Delete { link, .. }) if *link == key) {
            self.link_exchange = None;
        }
        self.abort_exchanges_on(key, Cause::QueuePair, now);
        self.judge_symmetry();
    }

    /// Moves a link to its next state; whether there is one.
    pub(super) fn set_state(&mut self, key: LinkKey, event: LinkEvent) -> bool {
        let Some(link) = self.link_mut(key) else { return false };
        let Some(next) = link.state.next(event) else { return false };
        let before = std::mem::replace(&mut link.state, next);
        if before == LinkState::Active {
            // Both ends judge before the next link comes; otherwise the results would differ.
            self.judge_symmetry();
        }
        true
    }

    /// Ends the group.
    pub(super) fn end(&mut self, reason: Reason, now: Tick) {
        if matches!(self.phase, Phase::Over) {
            return;
        }
        let ending = self.ending(reason);
        self.link_exchange = None;
        self.links.iter_mut().for_each(|link| link.connections = 0);
        let keys: Vec<LinkKey> = self.links.iter().map(|link| link.key).collect();
        for key in keys {
            self.destroy(key, now);
        }
        self.phase = Phase::Over;
        self.keys.exchange = None;
        self.keys.peer_confirm = None;
        self.keys.kept.clear();
        self.outputs.push_back(Output::Terminated { reason, ending });
    }

    fn ending(&self, reason: Reason) -> Ending {
        if self.decided.was_usable() {
            return match self.connections() {
                0 => Ending::Quiet,
                _ => Ending::Reset,
            };
        }
        match reason {
            // A merely silent peer may not have seen any Decline either.
            Reason::NoConfirmLink | Reason::NoAddLink | Reason::NoAddLinkReply => Ending::Reset,
            _ if self.decided.is_committed() => Ending::Reset,
            // This end is not committed yet, e.g. if its Confirm Link cannot be sent (ERR-15,
            // ERR-16).
            _ => Ending::Fallback,
        }
    }
}
