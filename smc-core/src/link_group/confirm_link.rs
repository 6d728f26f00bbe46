// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Confirm Link, on the first link and on added ones (RFC 7609 section 3.5.1.5).

use super::{
    Anomaly, AnomalyKind, Cause, EyeCatcher, Generation, LinkEvent, LinkExchange, LinkGroup,
    LinkKey, LinkState, Output, Phase, Reason, Stage,
};
use crate::time::Tick;
use crate::wire::clc::Version;
use crate::wire::ids::Mac;
use crate::wire::llc::{ConfirmLink, Message};

impl LinkGroup {
    /// The own Confirm Link of a link: this end of the link (LLC-12), with the limits of CLC
    /// (CLCV2-84).
    pub(super) fn confirm_message(&self, key: LinkKey, reply: bool) -> Option<Message> {
        let link = self.link(key)?;
        let max_conns = match self.params.generation {
            Generation::V21(limits) => limits.max_conns,
            _ => 0,
        };
        Some(Message::ConfirmLink(ConfirmLink {
            reply,
            // Whether elements begin with an eye catcher (RMB-6).
            low_flags: match self.params.eye_catcher {
                EyeCatcher::Off => ConfirmLink::NO_EYE_CATCHER,
                EyeCatcher::On => 0,
            },
            mac: link.rnic.mac,
            gid: link.rnic.gid,
            qpn: link.qpn,
            link_number: link.number,
            link_user_id: link.user_id,
            max_links: self.max_links,
            max_conns,
        }))
    }

    pub(super) fn post_confirm(&mut self, key: LinkKey, reply: bool) {
        if let Some(message) = self.confirm_message(key, reply) {
            // Over the link to be confirmed (LLC-6).
            self.post(key, message);
        }
    }

    /// Server: the reply of the client.
    pub(super) fn on_confirm_reply(
        &mut self,
        key: LinkKey,
        message: ConfirmLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let first = matches!(self.phase, Phase::FirstConfirm { .. }) && key == LinkKey::FIRST;
        if !first && !self.awaits_confirm(key) {
            return Err(Anomaly::UnexpectedReply("Confirm Link"));
        }
        self.check_confirm(key, &message, now)?;
        self.learn_user_id(key, &message);
        self.link_is_up(key, now);
        if !first {
            return Ok(());
        }
        self.agree_on_max_links(message.max_links);
        self.phase = Phase::SecondLink;
        // LLCV2-39.
        self.additions.wanted = self.max_links > 1;
        // With one link no later message could commit the group (wire erratum B-4).
        if self.max_links == 1 {
            self.decided.commit();
        }
        Ok(())
    }

    /// Client: the request of the server.
    pub(super) fn on_confirm_request(
        &mut self,
        key: LinkKey,
        message: ConfirmLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let first = matches!(self.phase, Phase::FirstConfirm { .. }) && key == LinkKey::FIRST;
        if !first && !self.awaits_confirm(key) {
            let again = self.link(key).is_some_and(|link| {
                let same = link.remote.is_some_and(|remote| remote.qpn == message.qpn);
                link.state.carries() && link.number == message.link_number && same
            });
            if !again {
                return Err(Anomaly::WrongTime("Confirm Link"));
            }
            // The server may not have got the reply.
            self.post_confirm(key, true);
            return Err(Anomaly::Repeated("Confirm Link"));
        }
        self.check_confirm(key, &message, now)?;
        self.learn_user_id(key, &message);
        // LLC-13.
        self.outputs.push_back(Output::ActivateLink { link: key });
        if !first {
            self.decided.commit();
            self.post_confirm(key, true);
            self.link_is_up(key, now);
            return Ok(());
        }
        if let Some(link) = self.link_mut(key) {
            link.number = message.link_number;
        }
        self.agree_on_max_links(message.max_links);
        self.phase = match self.max_links {
            1 => {
                let until = now.after(self.params.timers.last_message);
                let receipt = match self.confirm_message(key, true) {
                    Some(message) => self.post_with_receipt(key, message),
                    None => return Ok(()),
                };
                Phase::FirstReply { receipt, until }
            }
            _ => {
                self.post_confirm(key, true);
                Phase::FirstAddLink { until: now.after(self.params.timers.add_link) }
            }
        };
        self.link_is_up(key, now);
        Ok(())
    }

    /// Whether the addition of this link has come to Confirm Link.
    fn awaits_confirm(&self, key: LinkKey) -> bool {
        self.adding().is_some_and(|add| add.new == Some(key) && add.stage == Stage::Confirm)
    }

    /// Compares the message with the known data of the link (ERR-35). A mistake ends the group on
    /// the first link, and an added link otherwise.
    fn check_confirm(
        &mut self,
        key: LinkKey,
        message: &ConfirmLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let field = match self.wrong_field(key, message) {
            None => return Ok(()),
            Some(field) => field,
        };
        let anomaly = Anomaly::WrongConfirmLink(field);
        if key == LinkKey::FIRST && !self.decided.was_usable() {
            let reason = match field {
                "eye catcher flag" => Reason::EyeCatcher,
                _ => Reason::WrongConfirmLink,
            };
            self.end(reason, now);
        } else {
            self.fail_link(key, Cause::Violation(AnomalyKind::WrongConfirmLink), now);
        }
        Err(anomaly)
    }

    fn wrong_field(&self, key: LinkKey, message: &ConfirmLink) -> Option<&'static str> {
        let link = self.link(key)?;
        let remote = link.remote?;
        let v1 = self.version() == Version::V1;
        let no_eye_catcher = message.low_flags & ConfirmLink::NO_EYE_CATCHER != 0;
        // The client learns the number of the first link here.
        let number_known = link.number != 0;
        // LLCV2-11, LLCV2-12.
        let limits_differ = match self.params.generation {
            Generation::V21(limits) => {
                message.max_links != limits.max_links || message.max_conns != limits.max_conns
            }
            _ => false,
        };
        if number_known && message.link_number != link.number {
            Some("link number")
        } else if message.qpn != remote.qpn {
            Some("queue pair")
        } else if !message.gid.same_address(remote.gid) {
            Some("GID")
        } else if message.mac == Mac::NONE {
            // LLCV2-15.
            Some("MAC")
        } else if remote.mac != Mac::NONE && message.mac != remote.mac && (v1 || link.rnic.direct) {
            // Of an indirect link the MAC is for information only (LLCV2-14).
            Some("MAC")
        } else if limits_differ {
            Some("limit")
        } else {
            match self.params.eye_catcher {
                EyeCatcher::Off if !no_eye_catcher => Some("eye catcher flag"),
                // In version 2 the bits may be a cache size instead (LLCV2-13; wire erratum D-3).
                EyeCatcher::On if no_eye_catcher && v1 => Some("eye catcher flag"),
                _ => None,
            }
        }
    }

    fn learn_user_id(&mut self, key: LinkKey, message: &ConfirmLink) {
        if let Some(link) = self.link_mut(key) {
            link.peer_user_id = message.link_user_id;
        }
    }

    /// Version 1: the smaller value counts, zero from a client is no wish (LLC-17, LLC-18).
    fn agree_on_max_links(&mut self, theirs: u8) {
        if let Generation::V1 { .. } = self.params.generation {
            let theirs = if theirs == 0 { u8::MAX } else { theirs };
            self.max_links = self.max_links.min(theirs).clamp(2, 8);
        }
    }

    /// Confirm Link has passed: the link is in use.
    pub(super) fn link_is_up(&mut self, key: LinkKey, now: Tick) {
        self.set_state(key, LinkEvent::Confirmed);
        if self.state_of(key) != LinkState::Active {
            return;
        }
        if let Some(link) = self.link_mut(key) {
            link.last_received = now;
        }
        self.counters.links_added += 1;
        self.judge_symmetry();
        if self.adding().is_some_and(|add| add.new == Some(key))
            && let Some(LinkExchange::Add(add)) = self.link_exchange.take()
        {
            for rmb in &mut self.keys.rmbs {
                let announced = add.announced.contains(&rmb.id);
                for (link, _, known) in &mut rmb.keys {
                    *known |= announced && *link == key;
                }
            }
            self.additions.retry_at = None;
            self.additions.quick_retries = 0;
            if self.full_links() > 1 {
                self.decided.note_redundant();
            }
        }
        self.outputs.push_back(Output::LinkUsable { link: key });
        self.drop_needless_asymmetric();
    }
}
