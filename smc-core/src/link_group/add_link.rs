// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Add Link at the server, and the common part of both ends (RFC 7609 sections 3.5.1.6, 3.5.5.1).

use super::exchange::Keys;
use super::link::DeleteRequest;
use super::{
    Add, Anomaly, AnomalyKind, Cause, LinkEvent, LinkExchange, LinkGroup, LinkKey, LinkRecord,
    LinkState, Output, Prepared, RemoteEnd, Rnic, SingleRnic, Stage, Timers,
};
use crate::time::Tick;
use crate::wire::clc::GidList;
use crate::wire::ids::{Gid, Mac, Mtu, Psn, Qpn};
use crate::wire::llc::{
    AddLink, AddLinkV2, DeleteReason, Message, RejectReason, RequestAddLink, RkeyPair,
};

impl LinkGroup {
    /// Server: begins to add a link by LLC (LG-1, LG-6), if there is an RNIC for the link.
    pub(super) fn start_add(&mut self, now: Tick) {
        self.additions.wanted = false;
        let (Some(over), Some(rnic)) = (self.carrier(None), self.server_rnic()) else { return };
        let number = self.new_number();
        let lone = self.active().any(|link| !link.asymmetric && link.rnic.id == rnic.id);
        if lone && self.full_links() == 1 && self.params.single_rnic == SingleRnic::InvalidMtu {
            self.add_in_vain(over, &rnic, number, now);
            return;
        }
        let new = self.new_link(rnic, number, None, now);
        self.prepare(over, new, number, now);
    }

    /// Server: sends an Add Link with an invalid MTU, without a queue pair. The client's answer is
    /// the permission to go on with one link.
    pub(super) fn add_in_vain(&mut self, over: LinkKey, rnic: &Rnic, number: u8, now: Tick) {
        let until = self.add_deadline(now);
        let (stage, announced) = (Stage::Reply, Vec::new());
        self.link_exchange =
            Some(LinkExchange::Add(Add { over, new: None, number, stage, until, announced }));
        let message = self.add_message(rnic, number, (Qpn::new(0), Psn::new(0)), Vec::new());
        self.post_add(over, AddLink { mtu: Mtu::from_code(0), ..message });
    }

    /// Makes the caller make a queue pair. Connections go on over the other links (LG-27).
    pub(super) fn prepare(&mut self, over: LinkKey, new: LinkKey, number: u8, now: Tick) {
        let Some(link) = self.link(new) else { return };
        let (rnic, remote) = (link.rnic.id, link.remote);
        let until = now.after(self.params.timers.reply);
        let (stage, announced) = (Stage::Prepare, Vec::new());
        self.link_exchange =
            Some(LinkExchange::Add(Add { over, new: Some(new), number, stage, until, announced }));
        self.outputs.push_back(Output::PrepareLink { link: new, rnic, remote });
    }

    /// A link with a number, and later a queue pair and keys of its own (LG-19).
    pub(super) fn new_link(
        &mut self,
        rnic: Rnic,
        number: u8,
        remote: Option<RemoteEnd>,
        now: Tick,
    ) -> LinkKey {
        let key = self.numbers.next_key();
        self.links.push(LinkRecord {
            key,
            state: LinkState::Preparing,
            number,
            user_id: self.user_id(key),
            peer_user_id: 0,
            rnic,
            qpn: Qpn::new(0),
            psn: Psn::new(0),
            remote,
            asymmetric: false,
            connections: 0,
            last_received: now,
            probe: None,
            delete_request: None,
            sent_delete: None,
            last_message: None,
            anomalies_in_a_row: 0,
        });
        key
    }

    fn new_number(&mut self) -> u8 {
        let links = &self.links;
        self.numbers.next_link(|number| links.iter().any(|link| link.number == number))
    }

    /// At first contact a reply may take longer (ERR-12).
    pub(super) fn add_deadline(&self, now: Tick) -> Tick {
        let timers = &self.params.timers;
        now.after(if self.decided.was_usable() { timers.reply } else { timers.first_contact })
    }

    /// The own end of a new link (LLC-19).
    fn add_message(
        &self,
        rnic: &Rnic,
        number: u8,
        (qpn, psn): (Qpn, Psn),
        rkeys: Vec<RkeyPair>,
    ) -> AddLink {
        let target = if self.is_server() { self.target_gid() } else { Gid::NONE };
        let v2 = AddLinkV2 { direct: rnic.direct, target, rkeys };
        AddLink {
            reply: !self.is_server(),
            rejected: None,
            mac: rnic.mac,
            gid: rnic.gid,
            qpn,
            link_number: number,
            mtu: rnic.mtu,
            psn,
            v2: (!self.is_v1()).then_some(v2),
        }
    }

    /// The first address of the client's list without a link (CLCV2-74, LLCV2-20).
    fn target_gid(&self) -> Gid {
        let used = |gid: &&Gid| {
            let ends =
                |link: &LinkRecord| link.remote.is_some_and(|end| end.gid.same_address(**gid));
            self.links.iter().any(ends)
        };
        self.params.peer_gids.iter().find(|gid| !used(gid)).copied().unwrap_or(Gid::NONE)
    }

    fn post_add(&mut self, over: LinkKey, message: AddLink) {
        let message = Message::AddLink(message);
        if self.decided.is_committed() {
            self.post(over, message);
        } else {
            let receipt = self.post_with_receipt(over, message);
            self.decided.commit_by(receipt);
        }
    }

    /// The answer to [`Output::PrepareLink`].
    pub(super) fn prepared(&mut self, key: LinkKey, prepared: &Prepared, now: Tick) {
        let Some(add) = self.adding() else { return };
        if add.new != Some(key) || add.stage != Stage::Prepare {
            return;
        }
        let (over, number) = (add.over, add.number);
        let without = |rmb: &super::Rmb| !prepared.regions.iter().any(|(id, _)| *id == rmb.id);
        // All links have all RMBs (LG-2).
        if self.keys.rmbs.iter().any(|rmb| rmb.reported && without(rmb)) {
            self.abort_add(Cause::Setup, now);
            return;
        }
        for rmb in &mut self.keys.rmbs {
            if let Some((_, region)) = prepared.regions.iter().find(|(id, _)| *id == rmb.id) {
                rmb.keys.push((key, *region, false));
            }
        }
        let Some(link) = self.link_mut(key) else { return };
        (link.qpn, link.psn) = (prepared.qpn, prepared.psn);
        link.state = link.state.next(LinkEvent::Prepared).unwrap_or(link.state);
        let rnic = link.rnic;
        let pairs = self.own_pairs(over, key);
        let mut message = self.add_message(&rnic, number, (prepared.qpn, prepared.psn), Vec::new());
        let v1_pairs = match &mut message.v2 {
            Some(v2) => {
                v2.rkeys = pairs;
                None
            }
            None => Some(pairs),
        };
        let server = self.is_server();
        if !server {
            self.connect(key);
        }
        self.post_add(over, message);
        let (stage, until) = match (server, v1_pairs) {
            (true, _) => (Stage::Reply, self.add_deadline(now)),
            (false, Some(own)) => {
                let keys = Keys { own, ..Keys::default() };
                (Stage::Keys(keys), now.after(self.params.timers.reply))
            }
            (false, None) => (Stage::Confirm, now.after(self.params.timers.confirm_added)),
        };
        self.set_stage(stage, until);
    }

    pub(super) fn set_stage(&mut self, stage: Stage, until: Tick) {
        if let Some(LinkExchange::Add(add)) = &mut self.link_exchange {
            (add.stage, add.until) = (stage, until);
        }
    }

    /// Queue pair to RTR.
    pub(super) fn connect(&mut self, key: LinkKey) {
        self.set_state(key, LinkEvent::Connected);
        let Some(link) = self.link(key) else { return };
        let Some(remote) = link.remote else { return };
        // LLC-22.
        let mtu = Mtu::from_code(link.rnic.mtu.code().min(remote.mtu.code()));
        self.outputs.push_back(Output::ConnectLink { link: key, remote, mtu });
    }

    /// Server: the client's reply (LG-24, ERR-36).
    pub(super) fn on_add_reply(
        &mut self,
        key: LinkKey,
        message: AddLink,
        now: Tick,
    ) -> Result<(), Anomaly> {
        let awaited = self.adding().filter(|add| add.over == key && add.stage == Stage::Reply);
        let Some(add) = awaited else { return Err(Anomaly::UnexpectedReply("Add Link")) };
        if message.link_number != add.number {
            return Err(Anomaly::WrongAddLink("link number"));
        }
        let new = add.new;
        self.decided.commit();
        if message.rejected.is_some() {
            self.counters.add_links_refused += 1;
            self.abort_add(Cause::NoAddLinkReply, now);
            return Ok(());
        }
        let Some(new) = new else {
            // The client accepts an invalid MTU.
            self.link_exchange = None;
            self.fail_link(key, Cause::Violation(AnomalyKind::WrongAddLink), now);
            return Err(Anomaly::WrongAddLink("MTU"));
        };
        let rnic = self.link(new).map(|link| link.rnic.id).unwrap_or_default();
        let wrong = if message.mtu.bytes().is_err() {
            Some("MTU")
        } else if message.gid.is_none() {
            Some("GID")
        } else if message.mac == Mac::NONE {
            // LLCV2-15.
            Some("MAC")
        } else if !self.fits(rnic, message.gid) {
            Some("RNIC")
        } else {
            None
        };
        if let Some(link) = self.link_mut(new) {
            let AddLink { gid, mac, qpn, psn, mtu, .. } = message;
            link.remote = Some(RemoteEnd { gid, mac, qpn, psn, mtu });
        }
        if let Some(wrong) = wrong {
            // The client has a link now, to be deleted again.
            self.set_stage(Stage::Confirm, now);
            self.abort_add(Cause::Violation(AnomalyKind::WrongAddLink), now);
            return Err(Anomaly::WrongAddLink(wrong));
        }
        self.connect(new);
        match message.v2 {
            Some(v2) => {
                let unknown = self.take_pairs(key, new, &v2.rkeys);
                self.send_confirm(new, now);
                unknown
            }
            None => {
                let own = self.own_pairs(key, new);
                self.set_stage(Stage::Keys(Keys { own, ..Keys::default() }), now);
                self.send_keys(key, now);
                Ok(())
            }
        }
    }

    /// Server: Confirm Link on the new link (LLC-11, LLC-33).
    pub(super) fn send_confirm(&mut self, new: LinkKey, now: Tick) {
        self.outputs.push_back(Output::ActivateLink { link: new });
        self.post_confirm(new, false);
        let until = self.add_deadline(now);
        self.set_stage(Stage::Confirm, until);
    }

    /// Server, version 1: the client has one more RNIC (LLC-23 to LLC-26).
    pub(super) fn on_client_add(&mut self) -> Result<(), Anomaly> {
        // An Add Link crossing the notice is its answer (LLC-64). A new one waits (LLC-68, LLC-71).
        if !self.add_is_answer() {
            self.additions.wanted = true;
            self.additions.quick_retries = Timers::QUICK_RETRIES;
        }
        Ok(())
    }

    /// Whether an Add Link is under way without an answer at the time of the client's last message.
    /// The client's Confirm Link goes over another queue pair, and is overtaken by later messages.
    fn add_is_answer(&self) -> bool {
        self.adding().is_some_and(|add| matches!(add.stage, Stage::Prepare | Stage::Reply))
    }

    /// Server, version 2: the client has other addresses (LLCV2-27, LLCV2-28, LLCV2-40).
    pub(super) fn on_request_add_link(
        &mut self,
        key: LinkKey,
        gids: &GidList,
    ) -> Result<(), Anomaly> {
        // CLCV2-75.
        self.params.peer_gids = gids.iter().collect();
        if self.max_links == 1 {
            let reply = RequestAddLink::Reply(Some(RejectReason::NO_PATH));
            self.post(key, Message::RequestAddLink(reply));
            return Err(Anomaly::WrongTime("Request Add Link"));
        }
        // An Add Link under way is the answer (LLCV2-29).
        if !self.add_is_answer() {
            self.additions.request = Some(key);
            self.additions.wanted = true;
            self.additions.quick_retries = Timers::QUICK_RETRIES;
        }
        Ok(())
    }

    /// Server: a symmetric group needs no asymmetric link any more (LG-14).
    pub(super) fn drop_needless_asymmetric(&mut self) {
        if !self.is_server() || self.full_links() < 2 {
            return;
        }
        let asymmetric: Vec<LinkKey> =
            self.active().filter(|link| link.asymmetric).map(|link| link.key).collect();
        for key in asymmetric {
            self.begin_removal(
                key,
                DeleteRequest { reason: DeleteReason::ASYMMETRIC, orderly: true },
            );
        }
    }
}
