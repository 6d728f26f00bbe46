// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The values of SMC-R handshakes: the ends of a link, the terms of a link group, and a caller's
//! keys to its tables of groups and links.
//!
//! The caller keeps the link groups, so the caller decides whether contact is the first: a server
//! looks for the client's [`PeerRnic`] before Accept, a client for the server's [`PeerLink`] when
//! the server reports a subsequent contact (CLC-20, CLC-33).

use super::config::Config;
use super::decline::DeclineReason;
use super::peer_host::PeerHost;
use super::send_decline::{AfterDecline, SendDecline};
use crate::wire::clc::Message;
use crate::wire::clc::{CarrierOptions, Fce, GidList, SmcrFce, SmcrLink, SmcrV1, SmcrV2, Version};
use crate::wire::ids::{
    Eid, Features, Gid, LinkLimits, Mac, Mtu, PeerId, Psn, Qpn, Release, Rkey, SizeCode,
};

/// The side of a link group at this host; a group has one role for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// This host proposed.
    Client,
    /// This host accepted.
    Server,
}

/// An adapter of a peer, as named in the peer's Proposal or Accept: a server's key to its link
/// groups, with the role and, in version 1, the VLAN (CLC-19; Linux uses the same key).
///
/// The values compare by what identifies the adapter: the MAC counts in version 1 only, and an IPv4
/// address is the same in both of its forms (CLCV2-21). No address of TCP counts (LG-60). A
/// restarted peer has another peer id, so a restart makes another peer (LG-62). A peer id of zero,
/// as in Proposals of Linux without SMC-Rv1, only equals itself, so the GID decides (CLCV2-96).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerRnic {
    version: Version,
    peer_id: PeerId,
    gid: Gid,
    mac: Mac,
}

impl PeerRnic {
    /// The adapter with these addresses.
    pub fn new(version: Version, peer_id: PeerId, gid: Gid, mac: Mac) -> PeerRnic {
        match version {
            Version::V1 => PeerRnic { version, peer_id, gid, mac },
            Version::V2 => {
                let gid = gid.to_ipv4().map_or(gid, Gid::from_ipv4);
                PeerRnic { version, peer_id, gid, mac: Mac::NONE }
            }
        }
    }

    /// Version of SMC-R.
    pub const fn version(&self) -> Version {
        self.version
    }

    /// The stack instance; zero if unknown.
    pub const fn peer_id(&self) -> PeerId {
        self.peer_id
    }

    /// The address; IPv4 in its mapped form.
    pub const fn gid(&self) -> Gid {
        self.gid
    }

    /// The Ethernet address; zero in version 2.
    pub const fn mac(&self) -> Mac {
        self.mac
    }
}

/// A peer's end of a link: a client's key to its links (CLC-33).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerLink {
    /// The adapter.
    pub rnic: PeerRnic,
    /// The queue pair.
    pub qpn: Qpn,
}

impl PeerLink {
    pub(super) fn of(version: Version, link: &SmcrLink) -> PeerLink {
        let rnic = PeerRnic::new(version, link.peer_id, link.gid, link.mac);
        PeerLink { rnic, qpn: link.qpn }
    }
}

/// A client's knowledge of the link named in a subsequent contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownLink {
    /// No link group with this peer: the ends are out of sync (CLC-35, ERR-6).
    NoGroup,
    /// A link group with this peer, but without the link.
    NoLink,
    /// The link, with the terms of its group.
    Link(TermsR),
}

/// The terms of a link group of SMC-R for its life (CLCV2-50).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TermsR {
    /// Version of SMC-R.
    pub version: Version,
    /// The lower of the two releases; v2.0, without a meaning, in version 1 (CLCV2-36).
    pub release: Release,
    /// The features announced by both ends; none in version 1 (CLCV2-61).
    pub features: Features,
    /// Connections and links of the group. From v2.1 on the values are final values of Accept
    /// (CLCV2-57, CLCV2-58); before, the values are this end's own, and LLC agrees on the links.
    pub limits: LinkLimits,
    /// Records on TCP; `None` unless both ends have announced them (CLCV2-15).
    pub carriers: Option<CarrierOptions>,
}

/// This host's end of a link, and the element for receiving, for Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEnd {
    /// Address of the adapter. At first contact a client uses the proposed address instead, because
    /// the server connects to that one.
    pub gid: Gid,
    /// Ethernet address of the adapter; ignored at a client's first contact, like `gid`.
    pub mac: Mac,
    /// Queue pair.
    pub qpn: Qpn,
    /// First packet sequence number this end sends with (CLC-31).
    pub psn: Psn,
    /// The largest MTU this end can use; of meaning at first contact only (CLC-28).
    pub mtu: Mtu,
    /// Remote key of the RMB, valid on this link.
    pub rkey: Rkey,
    /// Virtual address of the start of the RMB.
    pub address: u64,
    /// Element of the RMB, from 1 (RMB-2).
    pub index: u8,
    /// Alert token for the peer's CDC messages of this connection.
    pub token: u32,
    /// Size of an element; the peer's size may differ (RMB-12).
    pub size: SizeCode,
    /// No router is on the way to the peer; of meaning in version 2 at first contact (CLCV2-54).
    pub direct: bool,
}

impl LinkEnd {
    /// With the fields in the order of the message.
    pub(super) fn link(&self, peer_id: PeerId) -> SmcrLink {
        let LinkEnd { gid, mac, qpn, psn, mtu, rkey, address, index, token, size, .. } = *self;
        // An index of zero names no element and is refused by every receiver.
        let index = index.max(1);
        SmcrLink { peer_id, gid, mac, qpn, rkey, index, token, size, mtu, address, psn }
    }
}

/// The smaller of two MTUs; an MTU out of range counts as the other (CLC-27, CLCV2-90).
pub(super) fn common_mtu(a: Mtu, b: Mtu) -> Mtu {
    match (a.bytes(), b.bytes()) {
        (Ok(one), Ok(other)) if one <= other => a,
        (Ok(_), Err(_)) => a,
        _ => b,
    }
}

/// The handshake is complete and this connection is SMC-R.
///
/// At first contact the link still has to be confirmed by LLC before data may flow, and until then
/// the connection may become TCP after all: see [`EstablishedR::decline`] and
/// [`late_decline`](super::late_decline) (ERR-2, ERR-46). At a subsequent contact data may flow at
/// once and there is no way back (ERR-4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EstablishedR {
    /// This side.
    pub role: Role,
    /// Version, release, features and limits of the link group.
    pub terms: TermsR,
    /// A new link group begins with this link.
    pub first_contact: bool,
    /// The EID of both ends; `None` in version 1.
    pub eid: Option<Eid>,
    /// This side's parameters. [`SmcrLink::mtu`] of a Confirm is the common one already.
    pub own: SmcrLink,
    /// The peer's parameters: the target of writes, and at first contact of the connection.
    pub peer: SmcrLink,
    /// The peer's adapter: a server's key to the link group. From the first message of a client, or
    /// from the server's Accept.
    pub peer_rnic: PeerRnic,
    /// The common MTU; at first contact only.
    pub mtu: Mtu,
    /// This side's report of a direct path, without routers.
    pub direct: bool,
    /// The peer's report; a copy of `direct` in version 1 and at a subsequent contact.
    pub peer_direct: bool,
    /// The client's addresses, the active one first, received by a server at first contact of
    /// version 2: candidates for further links (CLCV2-70 to CLCV2-75).
    pub peer_gids: Option<GidList>,
    /// The peer's host; at first contact of version 2 only.
    pub peer_host: Option<PeerHost>,
}

impl EstablishedR {
    /// The peer's end of the link, the key for the lookup of a [`KnownLink`].
    pub fn peer_link(&self) -> PeerLink {
        PeerLink { rnic: self.peer_rnic, qpn: self.peer.qpn }
    }

    /// The Decline after a failure during LLC's confirmation of the first link (ERR-2, ERR-15,
    /// ERR-16, ERR-35): TCP then carries the data, because no data went elsewhere. A subsequent
    /// contact has no such Decline; the connection has to be broken (CLC-53, ERR-5).
    pub fn decline(&self, config: &Config, reason: DeclineReason) -> Option<SendDecline> {
        let version = self.terms.version;
        self.first_contact
            .then(|| SendDecline::plain(config, version, reason, AfterDecline::FallBack))
    }
}

/// An Accept or Confirm of this side.
pub(super) struct AnswerR<'a> {
    pub(super) config: &'a Config,
    pub(super) link: SmcrLink,
    /// Version, and at first contact the values of the extension.
    pub(super) terms: TermsR,
    pub(super) first_contact: bool,
    pub(super) eid: Option<Eid>,
    pub(super) direct: bool,
    pub(super) vendor: [u8; 4],
    /// Confirm only (CLCV2-70).
    pub(super) gids: Option<GidList>,
}

impl AnswerR<'_> {
    fn v1(&self) -> SmcrV1 {
        SmcrV1 { first_contact: self.first_contact, link: self.link }
    }

    fn v2(&self) -> SmcrV2 {
        let terms = self.terms;
        let v2_1 = terms.release.has_v2_1_fields();
        let extension = SmcrFce {
            common: Fce {
                os: self.config.os,
                release: terms.release,
                hostname: self.config.hostname,
                features: terms.features,
                vendor: if v2_1 { self.vendor } else { [0; 4] },
            },
            direct: self.direct,
            limits: if v2_1 { terms.limits } else { LinkLimits::NONE },
            gids: self.gids,
        };
        let first_contact = self.first_contact.then_some(extension);
        let eid = self.eid.unwrap_or_default();
        // This end has announced no SMC-D device, so no peer can refer to one (CLCV2-69).
        SmcrV2 { reason_saved: false, link: self.link, eid, first_contact }
    }

    /// Encodes the server's message.
    pub(super) fn accept(&self) -> Message {
        match self.terms.version {
            Version::V1 => Message::AcceptR1(self.v1()),
            Version::V2 => Message::AcceptR2(self.v2()),
        }
    }

    /// Encodes the client's message.
    pub(super) fn confirm(&self) -> Message {
        match self.terms.version {
            Version::V1 => Message::ConfirmR1(self.v1()),
            Version::V2 => Message::ConfirmR2(self.v2()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: CLC-27.
    #[test]
    fn the_common_mtu_is_the_smaller_one_that_is_one() {
        for a in 0..16 {
            for b in 0..16 {
                let common = common_mtu(Mtu::from_code(a), Mtu::from_code(b)).code();
                match ((1..=5).contains(&a), (1..=5).contains(&b)) {
                    (true, true) => assert_eq!(common, a.min(b)),
                    (true, false) => assert_eq!(common, a),
                    (false, _) => assert_eq!(common, b),
                }
            }
        }
    }

    // Shows: RMB-2.
    #[test]
    fn the_element_zero_is_never_named() {
        let end = LinkEnd {
            gid: Gid::NONE,
            mac: Mac::NONE,
            qpn: Qpn::new(1),
            psn: Psn::new(1),
            mtu: Mtu::B1024,
            rkey: Rkey(1),
            address: 1,
            index: 0,
            token: 1,
            size: SizeCode::MIN,
            direct: true,
        };
        assert_eq!(end.link(PeerId::NONE).index, 1);
    }
}
