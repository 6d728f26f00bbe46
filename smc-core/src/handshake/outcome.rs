// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The result of a handshake, and the parts shared by both roles.

use super::config::Config;
use super::decline::{DeclineReason, PeerDecline, SmcKind};
use super::error::{Awaited, HandshakeError};
use super::negotiate::{Candidate, MessageR, Terms};
use super::peer_host::PeerHost;
use crate::wire::WireError;
use crate::wire::clc::{CarrierOptions, Fce, Limits, Message, SmcdV1, SmcdV2, Version};
use crate::wire::ids::{Chid, DmbToken, Eid, Gid, GidV1, LinkId, SizeCode};

/// An element of a DMB, announced by the owner to the writing peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dmbe {
    /// Right to write the DMB, bound to the peer's GID (EISM-27).
    pub token: DmbToken,
    /// Element of the DMB, from 0 (CLCV2-66, RMB-32). The writer adds `index * size`: the index is
    /// 0 unless the DMB is really divided. A peer's value has to be checked against the size of its
    /// DMB.
    pub index: u8,
    /// Size of an element, control block included.
    pub size: SizeCode,
}

/// The handshake is complete and this connection is SMC-D.
///
/// The client may write at once; the server may write once its handshake returns this value
/// (CLC-41, CLC-44).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Established {
    /// Version of SMC-D.
    pub version: Version,
    /// The fabric and the two GIDs; `local` is this side's.
    pub devices: Candidate,
    /// The EID of both ends; [`Eid::ZERO`] in version 1, which has none.
    pub eid: Eid,
    /// A new logical link: remember `terms` for this peer. Otherwise `terms` are the remembered
    /// ones (CLCV2-48, CLCV2-50).
    pub first_contact: bool,
    /// Release and features in force with this peer.
    pub terms: Terms,
    /// This side's receive element, written by the peer.
    pub own: Dmbe,
    /// The peer's receive element, written by this side.
    pub peer: Dmbe,
    /// This side's number of the logical link.
    pub own_link: LinkId,
    /// The peer's number of the logical link.
    pub peer_link: LinkId,
    /// The peer's host; at first contact only.
    pub peer_host: Option<PeerHost>,
}

/// Returns the late Decline in bytes on TCP after the client's Confirm, if there is one.
///
/// A server may decline if Confirm does not satisfy the server (CLCV2-60, D-16). A client of SMC-D,
/// or of SMC-R at a subsequent contact, may have written by then, so the connection does not become
/// TCP but is broken (CLC-63); the value has the reason. At first contact of SMC-R either end may
/// decline until the first link is confirmed, and then TCP carries the data (ERR-2, ERR-46). Such a
/// Decline is read with a [`ClcReader`](super::ClcReader) for [`Awaited::Decline`], so no data is
/// consumed.
pub fn late_decline(bytes: &[u8]) -> Option<PeerDecline> {
    match Message::parse(bytes) {
        Ok(Message::Decline(decline)) => Some(PeerDecline::from(&decline)),
        _ => None,
    }
}

/// The vendor options of an Accept (CLCV2-16).
pub(super) fn vendor_of(carriers: Option<CarrierOptions>) -> [u8; 4] {
    carriers.map_or([0; 4], CarrierOptions::answer)
}

/// A message other than the awaited one.
pub(super) enum Received {
    /// The peer declined.
    Decline(PeerDecline),
    /// A reserved value: to be declined, not a protocol error (CLC-29, ERR-10).
    Reserved(DeclineReason),
    /// A protocol error (CLC-54).
    Fail(HandshakeError),
}

/// Parses the message in turn; returns other messages as [`Received`].
pub(super) fn parse(bytes: &[u8], awaited: Awaited, limits: &Limits) -> Result<Message, Received> {
    match Message::parse_with(bytes, limits) {
        Ok(Message::Decline(decline)) => Err(Received::Decline(PeerDecline::from(&decline))),
        Ok(message) if message.kind() == awaited.kind() => Ok(message),
        Ok(message) => {
            Err(Received::Fail(HandshakeError::OutOfTurn { awaited, got: message.kind() }))
        }
        Err(WireError::ReservedValue { field, value }) => {
            Err(Received::Reserved(DeclineReason::ReservedValue { field, value }))
        }
        Err(error) => Err(Received::Fail(HandshakeError::Malformed { awaited, error })),
    }
}

/// The kind of an Accept or Confirm; `None` for other messages.
pub(super) fn kind_of(message: &Message) -> Option<SmcKind> {
    match message {
        Message::AcceptD2(_) | Message::ConfirmD2(_) => Some(SmcKind::SmcdV2),
        Message::AcceptD1(_) | Message::ConfirmD1(_) => Some(SmcKind::SmcdV1),
        Message::AcceptR2(_) | Message::ConfirmR2(_) => Some(SmcKind::SmcrV2),
        Message::AcceptR1(_) | Message::ConfirmR1(_) => Some(SmcKind::SmcrV1),
        Message::Proposal(_) | Message::Decline(_) => None,
    }
}

/// The buffer announced in a message.
pub(super) fn dmbe_of(message: &SmcdV2) -> Dmbe {
    Dmbe { token: message.token, index: message.index, size: message.size }
}

/// A version 1 message in the form of version 2. Missing fields come from `fabric` and the device;
/// the extension is present along with the flag.
pub(super) fn widen(message: &SmcdV1, fabric: Chid) -> SmcdV2 {
    let SmcdV1 { first_contact, gid, token, index, size, link_id } = *message;
    SmcdV2 {
        gid: Gid::from_parts(gid, GidV1::NONE),
        token,
        index,
        size,
        link_id,
        chid: fabric,
        eid: Eid::ZERO,
        first_contact: first_contact.then(Fce::default),
    }
}

/// A message of version 2 cut down to the fields of version 1.
fn narrow(message: &SmcdV2) -> SmcdV1 {
    let SmcdV2 { gid, token, index, size, link_id, .. } = *message;
    let first_contact = message.first_contact.is_some();
    SmcdV1 { first_contact, gid: gid.part1(), token, index, size, link_id }
}

/// An Accept or Confirm of this side.
pub(super) struct Answer<'a> {
    pub(super) config: &'a Config,
    pub(super) version: Version,
    pub(super) devices: Candidate,
    pub(super) eid: Eid,
    pub(super) own: Dmbe,
    pub(super) link: LinkId,
    /// Release and features to state, at first contact only (CLCV2-44).
    pub(super) first_contact: Option<Terms>,
    /// Vendor options of the answer. In Accept: the agreed ones, or zero (CLCV2-15, CLCV2-16). In
    /// Confirm: the options of Accept (CLCV2-17).
    pub(super) vendor: [u8; 4],
}

impl Answer<'_> {
    /// The message in the form of version 2. All fields of the extension are filled (CLCV2-40,
    /// CLCV2-42, CLCV2-47).
    pub(super) fn message(&self) -> SmcdV2 {
        SmcdV2 {
            gid: self.devices.local,
            token: self.own.token,
            index: self.own.index,
            size: self.own.size,
            link_id: self.link,
            chid: self.devices.chid,
            eid: self.eid,
            first_contact: self.first_contact.map(|terms| Fce {
                os: self.config.os,
                release: terms.release,
                hostname: self.config.hostname,
                features: terms.features,
                vendor: self.vendor,
            }),
        }
    }

    /// Encodes the server's message.
    pub(super) fn accept(&self) -> Message {
        match self.version {
            Version::V1 => Message::AcceptD1(narrow(&self.message())),
            Version::V2 => Message::AcceptD2(self.message()),
        }
    }

    /// Encodes the client's message.
    pub(super) fn confirm(&self) -> Message {
        match self.version {
            Version::V1 => Message::ConfirmD1(narrow(&self.message())),
            Version::V2 => Message::ConfirmD2(self.message()),
        }
    }
}

/// An Accept or Confirm of SMC-R in the form both versions have; `None` for other messages.
pub(super) fn message_r(message: &Message) -> Option<MessageR> {
    match message {
        Message::AcceptR1(v1) | Message::ConfirmR1(v1) => Some(MessageR {
            version: Version::V1,
            link: v1.link,
            eid: None,
            first_contact: v1.first_contact,
            extension: None,
        }),
        Message::AcceptR2(v2) | Message::ConfirmR2(v2) => Some(MessageR {
            version: Version::V2,
            link: v2.link,
            eid: Some(v2.eid),
            first_contact: v2.first_contact.is_some(),
            extension: v2.first_contact,
        }),
        _ => None,
    }
}
