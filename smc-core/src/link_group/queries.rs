// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The caller's queries of the group, and the sending of messages.

use super::exchange::{LinkExchange, RkeyExchange, Stage};
use super::{
    Counters, Generation, LinkGroup, LinkKey, LinkRecord, Output, Params, Phase, Receipt, Role,
};
use crate::wire::clc::Version;
use crate::wire::ids::{Gid, Qpn};
use crate::wire::llc::{Llc, Message};

/// Connections of a group where nothing else was agreed on.
const MOST_CONNECTIONS: u32 = 255;

/// The event awaited by a group, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activity {
    /// Confirm Link, or its reply, on the first link.
    FirstConfirmLink,
    /// The send completion of the reply to the first Confirm Link.
    FirstReply,
    /// Add Link of the server.
    FirstAddLink,
    /// A queue pair for a new link.
    Preparing,
    /// The reply to Add Link.
    AddLink,
    /// A continuation of Add Link.
    AddLinkKeys,
    /// Confirm Link, or its reply, on a new link.
    ConfirmLink,
    /// The reply to Delete Link, or the server's Delete Link after the client's request.
    DeleteLink,
    /// The reply to Request Add Link.
    RequestAddLink,
    /// The reply to Confirm RKey.
    ConfirmRkey,
    /// The reply to Delete RKey.
    DeleteRkey,
    /// No event.
    Idle,
    /// The end of Delete Link for all links.
    Ending,
    /// Over.
    Over,
}

impl LinkGroup {
    /// The event awaited by the group; the most important one if there are several.
    pub fn activity(&self) -> Activity {
        match self.phase {
            Phase::FirstConfirm { .. } => return Activity::FirstConfirmLink,
            Phase::FirstReply { .. } => return Activity::FirstReply,
            Phase::FirstAddLink { .. } => return Activity::FirstAddLink,
            Phase::Ending(_) => return Activity::Ending,
            Phase::Over => return Activity::Over,
            Phase::SecondLink | Phase::Usable => {}
        }
        match (&self.link_exchange, &self.keys.exchange) {
            (Some(LinkExchange::Add(add)), _) => match add.stage {
                Stage::Prepare => Activity::Preparing,
                Stage::Reply => Activity::AddLink,
                Stage::Keys(_) => Activity::AddLinkKeys,
                Stage::Confirm => Activity::ConfirmLink,
            },
            (Some(LinkExchange::Delete { .. }), _) => Activity::DeleteLink,
            (Some(LinkExchange::Request { .. }), _) => Activity::RequestAddLink,
            _ if self.links.iter().any(|link| link.sent_delete.is_some()) => Activity::DeleteLink,
            (None, Some(RkeyExchange::Confirm { .. })) => Activity::ConfirmRkey,
            (None, Some(RkeyExchange::Delete { .. })) => Activity::DeleteRkey,
            (None, None) => Activity::Idle,
        }
    }

    /// Whether a failure now would still leave the first connection to TCP (ERR-2, ERR-3).
    pub fn may_fall_back(&self) -> bool {
        !self.decided.is_committed() && !self.is_over()
    }

    /// Whether connections may send.
    pub fn is_usable(&self) -> bool {
        self.phase == Phase::Usable
    }

    /// Whether [`Output::Terminated`] has been given.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// The links, oldest first, ending ones included.
    pub fn links(&self) -> &[LinkRecord] {
        &self.links
    }

    /// One link.
    pub fn link(&self, key: LinkKey) -> Option<&LinkRecord> {
        self.links.iter().find(|link| link.key == key)
    }

    /// The active link with this end at the peer. An SMC Accept at subsequent contact refers to the
    /// link by the server's queue pair and GID (LG-5). Without such a link the client is out of
    /// sync (ERR-6).
    pub fn link_to(&self, peer_qpn: Qpn, peer_gid: Gid) -> Option<LinkKey> {
        let is = |link: &&LinkRecord| {
            link.remote
                .is_some_and(|remote| remote.qpn == peer_qpn && remote.gid.same_address(peer_gid))
        };
        self.active().find(is).map(|link| link.key)
    }

    /// Connections of the group.
    pub fn connections(&self) -> u32 {
        self.links.iter().fold(0, |sum, link| sum.saturating_add(link.connections))
    }

    /// Maximum number of links that are not asymmetric; known once the first link is confirmed.
    pub fn max_links(&self) -> u8 {
        self.max_links
    }

    /// Most connections of the group.
    pub fn max_connections(&self) -> u32 {
        match self.params.generation {
            Generation::V21(limits) => u32::from(limits.max_conns),
            _ => MOST_CONNECTIONS,
        }
    }

    /// The counters of events so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The group's parameters, with `rnics` and `peer_gids` up to date.
    pub fn params(&self) -> &Params {
        &self.params
    }

    pub(super) fn is_server(&self) -> bool {
        self.params.role == Role::Server
    }

    pub(super) fn version(&self) -> Version {
        self.params.generation.version()
    }

    pub(super) fn is_v1(&self) -> bool {
        self.version() == Version::V1
    }

    /// Own number of a link, unique over the groups of this end (LLC-16).
    pub(super) fn user_id(&self, key: LinkKey) -> u32 {
        (self.params.number << 8) | (key.0.wrapping_add(1) & 0xff)
    }

    pub(super) fn post(&mut self, link: LinkKey, message: Message) {
        self.post_message(link, message, None);
    }

    pub(super) fn post_with_receipt(&mut self, link: LinkKey, message: Message) -> Receipt {
        let receipt = self.numbers.next_receipt();
        self.post_message(link, message, Some(receipt));
        receipt
    }

    pub(super) fn post_message(
        &mut self,
        link: LinkKey,
        message: Message,
        receipt: Option<Receipt>,
    ) {
        let llc = Llc { version: self.version(), message };
        let bytes = llc.emit(&self.params.profile.dialect);
        self.counters.sent += 1;
        self.outputs.push_back(Output::PostLlc { link, bytes, receipt });
    }
}
