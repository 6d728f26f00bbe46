// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Received messages: the permitted messages of each role, and their time.

use super::{Anomaly, Cause, LinkGroup, LinkKey, LinkState, MOST_ANOMALIES, Phase};
use crate::time::Tick;
use crate::wire::WireError;
use crate::wire::llc::{Llc, Message, RequestAddLink, TestLink};

impl LinkGroup {
    /// Takes the message of one receive completion.
    ///
    /// # Errors
    /// [`Anomaly`] for an odd message, already handled and counted; only [`Anomaly::NotLlc`] leaves
    /// the message to the caller.
    pub fn handle_message(
        &mut self,
        link: LinkKey,
        bytes: &[u8],
        now: Tick,
    ) -> Result<(), Anomaly> {
        let result = self.receive(link, bytes, now);
        match &result {
            Ok(()) => self.counters.received += 1,
            Err(anomaly) => self.on_anomaly(link, anomaly, now),
        }
        self.pump(now);
        result
    }

    fn on_anomaly(&mut self, key: LinkKey, anomaly: &Anomaly, now: Tick) {
        self.counters.count(anomaly);
        if matches!(anomaly, Anomaly::NotLlc(_) | Anomaly::Optional(_)) {
            return;
        }
        let Some(link) = self.link_mut(key) else { return };
        link.anomalies_in_a_row = link.anomalies_in_a_row.saturating_add(1);
        if link.anomalies_in_a_row > MOST_ANOMALIES {
            self.counters.count(&Anomaly::TooMany);
            self.fail_link(key, Cause::Violation(Anomaly::TooMany.kind()), now);
        } else if anomaly.is_violation() {
            self.fail_link(key, Cause::Violation(anomaly.kind()), now);
        }
    }

    fn receive(&mut self, key: LinkKey, bytes: &[u8], now: Tick) -> Result<(), Anomaly> {
        if matches!(self.phase, Phase::Over) {
            return Err(Anomaly::GroupOver);
        }
        let Some(link) = self.link_mut(key) else { return Err(Anomaly::DeadLink(key)) };
        if matches!(link.state, LinkState::Gone | LinkState::Preparing | LinkState::Adding) {
            return Err(Anomaly::DeadLink(key));
        }
        link.last_received = now;
        let dead = matches!(link.state, LinkState::Failed | LinkState::Deleting);
        let llc = Llc::parse(bytes, &self.params.profile.dialect).map_err(|error| match error {
            WireError::CdcNotLlc(byte) => Anomaly::NotLlc(byte),
            WireError::IgnorableLlcType(byte) => Anomaly::Optional(byte),
            error => Anomaly::Malformed(error),
        })?;
        if llc.version != self.version() {
            return Err(Anomaly::WrongVersion(llc.version));
        }
        // The messages still valid on a link given up (ERR-37).
        if dead && !matches!(llc.message, Message::DeleteLink(_) | Message::DeleteRkeyReply(_)) {
            return Err(Anomaly::DeadLink(key));
        }
        if matches!(self.phase, Phase::Ending(_)) {
            return match llc.message {
                Message::DeleteLink(message) if message.all => {
                    self.on_delete_link(key, message, now)
                }
                Message::TestLink(message) => self.on_test_link(key, message),
                _ => Err(Anomaly::WrongTime("message")),
            };
        }
        self.dispatch(key, llc.message, now)?;
        if let Some(link) = self.link_mut(key) {
            link.anomalies_in_a_row = 0;
        }
        Ok(())
    }

    /// Passes each message to its handler (LLC-4).
    fn dispatch(&mut self, key: LinkKey, message: Message, now: Tick) -> Result<(), Anomaly> {
        let server = self.is_server();
        match message {
            Message::TestLink(message) => self.on_test_link(key, message),
            Message::ConfirmLink(message) if message.reply != server => {
                Err(Anomaly::WrongRole("Confirm Link"))
            }
            Message::ConfirmLink(message) if server => self.on_confirm_reply(key, message, now),
            Message::ConfirmLink(message) => self.on_confirm_request(key, message, now),
            Message::DeleteLink(message) if message.all => self.on_delete_link(key, message, now),
            // Before its Confirm Link has passed a link carries nothing else (LLC-10).
            _ if self.state_of(key) == LinkState::Confirming => {
                Err(Anomaly::WrongTime("message on a link that is not confirmed"))
            }
            Message::AddLink(message) => match (server, message.reply) {
                (true, true) => self.on_add_reply(key, message, now),
                (false, false) => self.on_add_request(key, message, now),
                (true, false) if self.is_v1() => self.on_client_add(),
                (true, false) => Err(Anomaly::WrongRole("Add Link")),
                (false, true) => Err(Anomaly::UnexpectedReply("Add Link")),
            },
            Message::AddLinkCont(message) if message.reply != server => {
                Err(Anomaly::WrongRole("Add Link Continuation"))
            }
            Message::AddLinkCont(message) => self.on_add_cont(key, message, now),
            Message::DeleteLink(message) => self.on_delete_link(key, message, now),
            Message::RequestAddLink(RequestAddLink::Request(gids)) if server => {
                self.on_request_add_link(key, &gids)
            }
            Message::RequestAddLink(RequestAddLink::Reply(_)) if !server => {
                self.on_request_reply(key)
            }
            Message::RequestAddLink(_) => Err(Anomaly::WrongRole("Request Add Link")),
            Message::ConfirmRkey(message) if message.reply => {
                self.on_confirm_rkey_reply(key, &message, now)
            }
            Message::ConfirmRkey(message) => self.on_confirm_rkey(key, &message, now),
            Message::ConfirmRkeyCont(message) if message.reply => {
                self.on_confirm_rkey_cont_reply(key, &message, now)
            }
            Message::ConfirmRkeyCont(message) => self.on_confirm_rkey_cont(key, &message, now),
            Message::DeleteRkey(message) if message.reply => self.on_delete_rkey_reply(key),
            Message::DeleteRkeyReply(_) => self.on_delete_rkey_reply(key),
            Message::DeleteRkey(message) => self.on_delete_rkey(key, message),
        }
    }

    /// A question is answered at once, whatever else is under way (LLC-58, LLC-63).
    fn on_test_link(&mut self, key: LinkKey, message: TestLink) -> Result<(), Anomaly> {
        if !message.reply {
            // With the same 16 bytes (LLCV2-38), over the same link (LLC-5).
            self.post(key, Message::TestLink(TestLink { reply: true, data: message.data }));
            return Ok(());
        }
        let Some(link) = self.link_mut(key) else { return Err(Anomaly::DeadLink(key)) };
        // The link is good (SOCK-12).
        let Some(probe) = link.probe.take() else {
            return Err(Anomaly::UnexpectedReply("Test Link"));
        };
        match probe.data == message.data {
            true => Ok(()),
            // ERR-42.
            false => Err(Anomaly::WrongEcho),
        }
    }
}
