// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Add Link at the client: accepting, rejecting, and announcing new RNICs to the server.

use super::{Anomaly, LinkExchange, LinkGroup, LinkKey, Phase, RemoteEnd};
use crate::time::Tick;
use crate::wire::List;
use crate::wire::clc::GidList;
use crate::wire::ids::{Gid, Mac, Psn, Qpn};
use crate::wire::llc::{AddLink, AddLinkV2, Message, RejectReason, RequestAddLink};

impl LinkGroup {
    /// The server wants to add a link (RFC 7609 section 3.5.1.6.1).
    pub(super) fn on_add_request(
        &mut self,
        key: LinkKey,
        message: AddLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        match self.phase {
            Phase::FirstAddLink { .. } => self.phase = Phase::SecondLink,
            Phase::SecondLink | Phase::Usable => {}
            _ => return Err(Anomaly::WrongTime("Add Link")),
        }
        if let Some(known) = self.by_number(message.link_number) {
            let same = self
                .link(known)
                .is_some_and(|link| link.remote.is_some_and(|remote| remote.qpn == message.qpn));
            if same {
                return Err(Anomaly::Repeated("Add Link"));
            }
            self.reject(key, &message, RejectReason::NO_PATH);
            return Err(Anomaly::WrongAddLink("link number"));
        }
        // A server beginning anew has given up its former attempt. Add Link is also the answer to a
        // Request Add Link (LLCV2-27).
        match self.link_exchange.take() {
            Some(LinkExchange::Add(add)) => {
                if let Some(new) = add.new {
                    self.destroy(new, now);
                }
            }
            other => drop(other),
        }
        // LLC-22.
        if message.mtu.bytes().is_err() {
            self.reject(key, &message, RejectReason::BAD_MTU);
            return Ok(());
        }
        if message.gid.is_none() || message.mac == Mac::NONE {
            self.reject(key, &message, RejectReason::NO_PATH);
            return Err(Anomaly::WrongAddLink("address"));
        }
        // LLCV2-20.
        let target = message.v2.as_ref().map_or(Gid::NONE, |v2| v2.target);
        let Some(rnic) = self.client_rnic(message.gid, target) else {
            self.reject(key, &message, RejectReason::NO_PATH);
            return Ok(());
        };
        let AddLink { gid, mac, qpn, psn, mtu, .. } = message;
        let remote = Some(RemoteEnd { gid, mac, qpn, psn, mtu });
        // With the link's number from the server (LLC-20).
        let new = self.new_link(rnic, message.link_number, remote, now);
        self.prepare(key, new, message.link_number, now);
        match message.v2 {
            Some(v2) => self.take_pairs(key, new, &v2.rkeys),
            None => Ok(()),
        }
    }

    /// Refuses: the request comes back, with flags (LLC-21, LLCV2-22, LLCV2-41).
    fn reject(&mut self, over: LinkKey, request: &AddLink, reason: RejectReason) {
        self.counters.add_links_refused += 1;
        let v1 = self.is_v1();
        let says_why = v1 || self.params.profile.reject_reason;
        let message = AddLink {
            reply: true,
            rejected: Some(if says_why { reason } else { RejectReason(0) }),
            v2: None,
            ..request.clone()
        };
        self.post(over, Message::AddLink(message));
        // Too late for TCP from here on (ERR-3).
        self.decided.commit();
    }

    /// Refuses an Add Link after a failure to make the queue pair.
    pub(super) fn refuse_add(&mut self, over: LinkKey, new: LinkKey) {
        let Some(link) = self.link(new) else { return };
        let Some(RemoteEnd { gid, mac, qpn, psn, mtu }) = link.remote else { return };
        let request = AddLink {
            reply: false,
            rejected: None,
            mac,
            gid,
            qpn,
            link_number: link.number,
            mtu,
            psn,
            v2: None,
        };
        if self.state_of(over).carries() {
            self.reject(over, &request, RejectReason::NO_PATH);
        }
    }

    /// Tells the server of an RNIC without a link (LLC-77, LLCV2-30).
    pub(super) fn notify_rnic(&mut self, now: Tick) {
        self.additions.notice = false;
        let (Some(over), Some(rnic)) = (self.carrier(None), self.unused_rnic()) else { return };
        if !self.below_maximum() {
            return;
        }
        if self.is_v1() {
            // For the server's information: no answer is awaited (LLC-23).
            let message = AddLink {
                reply: false,
                rejected: None,
                mac: rnic.mac,
                gid: rnic.gid,
                qpn: Qpn::new(0),
                link_number: 0,
                mtu: rnic.mtu,
                psn: Psn::new(0),
                v2: None::<AddLinkV2>,
            };
            self.post(over, Message::AddLink(message));
            return;
        }
        let mut alternates = List::new();
        for other in self.params.rnics.iter().filter(|other| other.id != rnic.id) {
            let _ = alternates.push(other.gid);
        }
        // The new address first: Linux reads no other.
        let gids = GidList { active: rnic.gid, alternates };
        // LLCV2-9, LLCV2-25.
        self.post(over, Message::RequestAddLink(RequestAddLink::Request(gids)));
        let until = now.after(self.params.timers.reply);
        self.link_exchange = Some(LinkExchange::Request { over, until });
    }

    /// The server has taken note of the addresses.
    pub(super) fn on_request_reply(&mut self, key: LinkKey) -> Result<(), Anomaly> {
        match self.link_exchange {
            Some(LinkExchange::Request { over, .. }) if over == key => {
                self.link_exchange = None;
                Ok(())
            }
            _ => Err(Anomaly::UnexpectedReply("Request Add Link")),
        }
    }
}
