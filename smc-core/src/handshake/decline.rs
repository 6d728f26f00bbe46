// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reasons for not using SMC: the reason, the code on the wire, and the text for the
//! application.
//!
//! Three types, from the wire inwards:
//!
//! - [`DeclineCode`] is the 32-bit "peer diagnosis" of a Decline (RFC 7609 A.2.5). The RFC leaves
//!   its values to implementations (CLC-49); the values are Linux's, so both ends use the same
//!   names.
//! - [`DeclineReason`] is the event at this end, with the offending value. There is exactly one
//!   mapping from reasons to codes, [`DeclineReason::code`].
//! - [`FallbackReason`] is for applications: the reason for TCP on this connection.

use core::fmt;

use super::code::DeclineCode;
use crate::wire::clc::{Decline, TypeReasons};
use crate::wire::ids::{Chid, Features, Gid, OsType, Qpn, Release};

/// One of the four types of SMC a Proposal can offer (CLCV2-2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SmcKind {
    /// SMC-D version 2: ISM fabrics, EIDs.
    SmcdV2,
    /// SMC-D version 1: ISM fabrics, one IP subnet.
    SmcdV1,
    /// SMC-R version 2: RoCEv2, EIDs.
    SmcrV2,
    /// SMC-R version 1: RoCE, one IP subnet (RFC 7609).
    SmcrV1,
}

impl SmcKind {
    /// The kinds in a server's order of preference (CLCV2-32).
    pub const PREFERENCE: [SmcKind; 4] =
        [SmcKind::SmcdV2, SmcKind::SmcdV1, SmcKind::SmcrV2, SmcKind::SmcrV1];
}

impl fmt::Display for SmcKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SmcKind::SmcdV2 => "SMC-Dv2",
            SmcKind::SmcdV1 => "SMC-Dv1",
            SmcKind::SmcrV2 => "SMC-Rv2",
            SmcKind::SmcrV1 => "SMC-Rv1",
        })
    }
}

/// A reason of this end to decline: an orderly end of the handshake, after which TCP carries the
/// data (ERR-1).
///
/// A protocol error is not in this list; see [`HandshakeError`](super::HandshakeError).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum DeclineReason {
    /// This end has no SMC device to offer or use.
    #[error("no SMC device here")]
    NoDevice,
    /// The server has no device for SMC-D version 2.
    #[error("no device for SMC-D version 2 here")]
    NoIsmDevice,
    /// The offered type is not implemented or not configured here.
    #[error("{0} is not configured here")]
    NotConfigured(SmcKind),
    /// The Proposal offers no type at all.
    #[error("the Proposal offers no type of SMC")]
    NothingOffered,
    /// No EID is configured at this end.
    #[error("no EID is configured here: configure the same --eid on both ends")]
    NoEidConfigured,
    /// The Proposal carries neither a UEID nor an SEID.
    #[error("the peer offers no EID: configure the same --eid on both ends")]
    NoEidOffered,
    /// No EID is known at both ends (EID-8).
    #[error("no common EID: configure the same --eid on both ends")]
    NoCommonEid,
    /// No user EID is known at both ends, as needed by SMC-R (EID-8, CLCV2-26).
    #[error("no common user EID, which SMC-R needs: configure the same --eid on both ends")]
    NoCommonUeid,
    /// No RDMA adapter here is associated with the connection, or the adapter lacks a GID for this
    /// version.
    #[error("no RDMA adapter with a suitable GID for this connection here")]
    NoRnic,
    /// No platform ISM device is associated with the connection, as needed by SMC-Dv1.
    #[error("no ISM device for SMC-D version 1 on this connection")]
    NoAssociatedIsm,
    /// The ends are not in one IP subnet, as needed by version 1 (CLC-17, CLC-18).
    #[error("the ends are not in one IP subnet")]
    DifferentSubnet,
    /// The peer's RoCEv2 address is not of the IP family of the TCP connection (CLCV2-20,
    /// CLCV2-68).
    #[error("the peer's RoCE address {0} is not of the IP family of the connection")]
    GidFamily(Gid),
    /// The peer's RDMA address has no IP route from here (CLCV2-35).
    #[error("no route to the peer's RoCE address {0}")]
    NoRoute(Gid),
    /// The peer reports a router in between, but there is none (CLCV2-54).
    #[error("the peer says that a router is on the RDMA path, but there is none")]
    NotIndirect,
    /// Subsequent contact with a known peer, but on a link unknown here.
    #[error("the server named the link of queue pair {}, which is not known here", .0.get())]
    UnknownLink(Qpn),
    /// The link group has no working link.
    #[error("the link group has no active link")]
    NoActiveLink,
    /// A queue pair could not be brought into service.
    #[error("the queue pair could not be brought into service")]
    LinkNotReady,
    /// No CONFIRM LINK came over the first link (ERR-2, ERR-14).
    #[error("no CONFIRM LINK came over the new link")]
    ConfirmLinkTimeout,
    /// No ADD LINK came, or no answer to ADD LINK, at first contact.
    #[error("no ADD LINK came over the new link")]
    AddLinkTimeout,
    /// The peer uses eye catchers in its buffer elements, and this end does not.
    #[error("the peer uses eye catchers in its buffer elements")]
    RmbEyeCatcher,
    /// There is no room for another remote key.
    #[error("no room for another remote key of the peer")]
    TooManyRkeys,
    /// No offered CHID belongs to a local device (EISM-29).
    #[error("no common CHID: both ends must be on one fabric of one host")]
    NoCommonChid,
    /// The CHIDs fit, but the device does not reach the peer's GID.
    #[error("no device reaches the peer's GID")]
    Unreachable,
    /// The CHIDs fit, and the peer's machine has the other byte order.
    #[error("the peer's machine has the other byte order, so the ends cannot share memory")]
    ByteOrder,
    /// A CHID reserved for emulated devices stands alone (EISM-13, EISM-14).
    #[error(
        "the offered CHID {0} is reserved for emulated devices but its second entry is missing"
    )]
    UnpairedChid(Chid),
    /// An emulated device, but not both ends support the feature (EISM-3, EISM-22).
    #[error("CHID {0} is an emulated device, but not both ends announced that feature")]
    EmulatedNotShared(Chid),
    /// The loopback CHID with a GID of another operating system (EISM-25).
    #[error("the loopback device of another operating system was named")]
    ForeignLoopback,
    /// Accept chose a type or version never offered (CLCV2-89).
    #[error("{0} was chosen but not offered")]
    NotOffered(SmcKind),
    /// Subsequent contact with a peer unknown here (CLC-35, ERR-6).
    #[error("the server reuses a link that is not known here")]
    OutOfSync,
    /// Accept or Confirm carries another release than agreed (CLCV2-36, CLCV2-60).
    #[error("release {got} where at most {agreed} was agreed")]
    Release {
        /// The proposed or accepted release.
        agreed: Release,
        /// The release in the message.
        got: Release,
    },
    /// Confirm carries another feature mask than the common one (CLCV2-60, CLCV2-61).
    #[error("feature mask {:#06x} where {:#06x} is common", got.bits(), agreed.bits())]
    Features {
        /// The features both ends announced.
        agreed: Features,
        /// The mask in the message.
        got: Features,
    },
    /// Vendor options of Accept never offered, or vendor options of Confirm different from Accept's
    /// (CLCV2-17).
    #[error("vendor options {got:02x?} where {agreed:02x?} were agreed")]
    Vendor {
        /// The offered or accepted options.
        agreed: [u8; 4],
        /// The options in the message.
        got: [u8; 4],
    },
    /// A reserved value of an enumerated field, such as a buffer size code (CLC-29, ERR-10).
    #[error("{field} has the reserved value {value}")]
    ReservedValue {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: u8,
    },
    /// Link group limit out of range: connections (SMC-R, D-12).
    #[error("{0} connections per link group is out of range")]
    MaxConnections(u8),
    /// Link group limit out of range: links (SMC-R, D-12).
    #[error("{0} links per link group is out of range")]
    MaxLinks(u8),
    /// Memory ran out.
    #[error("no memory")]
    NoMemory,
    /// Descriptors or threads of the process ran out.
    #[error("descriptors or threads are short")]
    NoResources,
    /// The device refused another DMB.
    #[error("the device has no room for another DMB")]
    NoDmb,
    /// The device is about to go, or is kept free of new connections.
    #[error("the device takes on no new connections: it is drained, or about to go")]
    Drained,
    /// The device is gone.
    #[error("the device is gone")]
    DeviceGone,
    /// The device, or over RDMA the peer, left a command about the buffer unanswered.
    #[error("no answer to a command about the buffer")]
    NoAnswer,
    /// The peer offered a DMB that an open connection uses, or an element beyond the DMB.
    #[error("the peer offered a DMB that is not free")]
    DmbInUse,
    /// A buffer could not be registered or attached for another reason, or the peer refused its key.
    #[error("the buffer could not be registered")]
    Registration,
    /// Local policy: the application or the administrator said no.
    #[error("local policy")]
    Policy,
    /// The connection is under an IPsec policy (SEC-4).
    #[error("the connection is under an IPsec policy")]
    IpSec,
    /// The application asked for something SMC cannot do.
    #[error("a socket option or a call that SMC does not have was asked for")]
    OptionUnsupported,
    /// The program makes system calls that its SMC library does not see.
    #[error("the program makes system calls that the library does not see")]
    OwnCalls,
    /// An internal error of this end.
    #[error("internal error")]
    Internal,
}

impl DeclineReason {
    /// The one mapping from reasons to codes on the wire.
    pub const fn code(self) -> DeclineCode {
        match self {
            DeclineReason::NoDevice => DeclineCode::NoSmcDevice,
            DeclineReason::NoIsmDevice => DeclineCode::NoIsm2Support,
            DeclineReason::NotConfigured(kind) => match kind {
                SmcKind::SmcdV2 => DeclineCode::NoIsm2Support,
                SmcKind::SmcdV1 => DeclineCode::NoSmcdDevice,
                SmcKind::SmcrV2 | SmcKind::SmcrV1 => DeclineCode::NoSmcrDevice,
            },
            DeclineReason::NothingOffered => DeclineCode::PeerNoSmc,
            DeclineReason::NoEidConfigured | DeclineReason::NoEidOffered => DeclineCode::NoUeid,
            // Linux says this code too when no EID is common.
            DeclineReason::NoCommonEid => DeclineCode::NoSmcdDevice,
            DeclineReason::NoCommonChid
            | DeclineReason::Unreachable
            | DeclineReason::UnpairedChid(_)
            | DeclineReason::EmulatedNotShared(_)
            | DeclineReason::ForeignLoopback => DeclineCode::NoSmcdV2Device,
            // Linux: none of both kinds of device will do.
            DeclineReason::NoCommonUeid => DeclineCode::NoSmcDevice,
            DeclineReason::NoRnic | DeclineReason::GidFamily(_) => DeclineCode::NoSmcrDevice,
            DeclineReason::NoAssociatedIsm => DeclineCode::NoSmcdDevice,
            DeclineReason::DifferentSubnet => DeclineCode::DifferentPrefix,
            DeclineReason::NoRoute(_) => DeclineCode::NoRoute,
            DeclineReason::NotIndirect => DeclineCode::NotIndirect,
            DeclineReason::UnknownLink(_) => DeclineCode::NoServerLink,
            DeclineReason::NoActiveLink => DeclineCode::NoActiveLink,
            DeclineReason::LinkNotReady => DeclineCode::LinkNotReady,
            DeclineReason::ConfirmLinkTimeout => DeclineCode::ConfirmLinkTimeout,
            DeclineReason::AddLinkTimeout => DeclineCode::AddLinkTimeout,
            DeclineReason::RmbEyeCatcher => DeclineCode::RmbEyeCatcher,
            DeclineReason::TooManyRkeys => DeclineCode::RTokenTable,
            DeclineReason::NotOffered(_) => DeclineCode::ModeUnsupported,
            DeclineReason::OutOfSync => DeclineCode::OutOfSync,
            DeclineReason::Release { .. }
            | DeclineReason::Features { .. }
            | DeclineReason::Vendor { .. } => DeclineCode::ReleaseMismatch,
            DeclineReason::ReservedValue { .. } => DeclineCode::Configuration,
            DeclineReason::Policy => DeclineCode::Policy,
            DeclineReason::MaxConnections(_) => DeclineCode::MaxConnections,
            DeclineReason::MaxLinks(_) => DeclineCode::MaxLinks,
            DeclineReason::NoMemory => DeclineCode::NoMemory,
            DeclineReason::NoResources => DeclineCode::NoDescriptor,
            DeclineReason::NoDmb => DeclineCode::TooManyDmbs,
            DeclineReason::Drained => DeclineCode::Drained,
            DeclineReason::ByteOrder => DeclineCode::ByteOrder,
            DeclineReason::DeviceGone => DeclineCode::NoSmcDevice,
            DeclineReason::NoAnswer => DeclineCode::NoAnswer,
            DeclineReason::DmbInUse => DeclineCode::DmbInUse,
            DeclineReason::Registration => DeclineCode::BufferRegistration,
            DeclineReason::IpSec => DeclineCode::IpSec,
            DeclineReason::OptionUnsupported => DeclineCode::OptionUnsupported,
            DeclineReason::OwnCalls => DeclineCode::OwnCalls,
            DeclineReason::Internal => DeclineCode::Internal,
        }
    }

    /// Whether the Decline carries the out-of-sync bit (CLC-35, CLC-50, CLCV2-83).
    pub const fn out_of_sync(self) -> bool {
        matches!(self, DeclineReason::OutOfSync)
    }
}

/// The contents of a peer's Decline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerDecline {
    /// The peer's diagnosis: the reason evaluated last (CLCV2-80).
    pub code: DeclineCode,
    /// The peer no longer knows the logical link: drop the state of that peer, to make the next
    /// connection a first contact (CLC-50, CLCV2-83).
    pub out_of_sync: bool,
    /// The peer's operating system; zero if unknown.
    pub os: OsType,
    /// A reason for each offered type; all zero if the peer gives none (CLCV2-79, CLCV2-82).
    pub reasons: TypeReasons,
}

impl From<&Decline> for PeerDecline {
    fn from(message: &Decline) -> PeerDecline {
        PeerDecline {
            code: DeclineCode::from(message.diagnosis.0),
            out_of_sync: message.out_of_sync,
            os: message.os,
            reasons: message.reasons,
        }
    }
}

impl fmt::Display for PeerDecline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.code.fmt(f)?;
        if self.out_of_sync { f.write_str(" (out of sync)") } else { Ok(()) }
    }
}

/// Why a connection is TCP although SMC was wanted; the value an application can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FallbackReason {
    /// The peer is an ordinary TCP program, and neither announced SMC nor sent a CLC message.
    #[error("the peer speaks plain TCP")]
    PeerNotSmc,
    /// This end declined.
    #[error("declined here: {0}")]
    DeclinedHere(DeclineReason),
    /// The peer declined.
    #[error("declined by the peer: {0}")]
    DeclinedByPeer(PeerDecline),
}

impl FallbackReason {
    /// The code to count and show.
    pub const fn code(&self) -> DeclineCode {
        match self {
            FallbackReason::PeerNotSmc => DeclineCode::PeerNoSmc,
            FallbackReason::DeclinedHere(reason) => reason.code(),
            FallbackReason::DeclinedByPeer(peer) => peer.code,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: ERR-1.
    #[test]
    fn reasons_map_to_the_codes_linux_uses() {
        let table = [
            (DeclineReason::NoDevice, 0x0303_0000),
            (DeclineReason::NoIsmDevice, 0x0303_0003),
            (DeclineReason::NoResources, 0x0a07_0000),
            (DeclineReason::NotConfigured(SmcKind::SmcdV2), 0x0303_0003),
            (DeclineReason::NotConfigured(SmcKind::SmcdV1), 0x0303_0001),
            (DeclineReason::NotConfigured(SmcKind::SmcrV2), 0x0303_0002),
            (DeclineReason::NotConfigured(SmcKind::SmcrV1), 0x0303_0002),
            (DeclineReason::NothingOffered, 0x0301_0000),
            (DeclineReason::NoEidConfigured, 0x0303_0008),
            (DeclineReason::NoEidOffered, 0x0303_0008),
            (DeclineReason::NoCommonEid, 0x0303_0001),
            (DeclineReason::NoCommonUeid, 0x0303_0000),
            (DeclineReason::NoRnic, 0x0303_0002),
            (DeclineReason::GidFamily(Gid([3; 16])), 0x0303_0002),
            (DeclineReason::NoAssociatedIsm, 0x0303_0001),
            (DeclineReason::DifferentSubnet, 0x0307_0000),
            (DeclineReason::NoRoute(Gid([3; 16])), 0x030e_0000),
            (DeclineReason::NotIndirect, 0x030f_0000),
            (DeclineReason::UnknownLink(Qpn::new(17)), 0x030b_0000),
            (DeclineReason::NoActiveLink, 0x030a_0000),
            (DeclineReason::LinkNotReady, 0x0999_0002),
            (DeclineReason::ConfirmLinkTimeout, 0x0201_0000),
            (DeclineReason::AddLinkTimeout, 0x0202_0000),
            (DeclineReason::RmbEyeCatcher, 0x0305_0000),
            (DeclineReason::TooManyRkeys, 0x0999_0001),
            (DeclineReason::NoCommonChid, 0x0303_0007),
            (DeclineReason::Unreachable, 0x0303_0007),
            (DeclineReason::ByteOrder, 0x0a0d_0000),
            (DeclineReason::UnpairedChid(Chid(0xff01)), 0x0303_0007),
            (DeclineReason::EmulatedNotShared(Chid(0xff01)), 0x0303_0007),
            (DeclineReason::ForeignLoopback, 0x0303_0007),
            (DeclineReason::NotOffered(SmcKind::SmcrV2), 0x0304_0000),
            (DeclineReason::OutOfSync, 0x0400_0000),
            (DeclineReason::Release { agreed: Release::V2_1, got: Release::V2_0 }, 0x0303_0009),
            (
                DeclineReason::Features { agreed: Features::EMULATED_ISM, got: Features::empty() },
                0x0303_0009,
            ),
            (DeclineReason::ReservedValue { field: "size", value: 9 }, 0x0300_0000),
            (DeclineReason::MaxConnections(3), 0x0303_000a),
            (DeclineReason::MaxLinks(3), 0x0303_000b),
            (DeclineReason::NoMemory, 0x0101_0000),
            (DeclineReason::NoDmb, 0x030d_0000),
            (DeclineReason::DeviceGone, 0x0303_0000),
            (DeclineReason::NoAnswer, 0x0a0e_0000),
            (DeclineReason::DmbInUse, 0x0a0f_0000),
            (DeclineReason::Registration, 0x0999_0003),
            (DeclineReason::Policy, 0x0a01_0000),
            (DeclineReason::IpSec, 0x0302_0000),
            (DeclineReason::OptionUnsupported, 0x0306_0000),
            (DeclineReason::OwnCalls, 0x0a0a_0000),
            (DeclineReason::Internal, 0x0999_0000),
        ];
        for (reason, value) in table {
            assert_eq!(reason.code().value(), value, "{reason:?}");
            assert_eq!(reason.out_of_sync(), reason == DeclineReason::OutOfSync);
        }
    }

    // Shows: ERR-1.
    #[test]
    fn the_text_of_a_fallback_says_what_to_change() {
        let here = FallbackReason::DeclinedHere(DeclineReason::NoCommonEid);
        assert!(here.to_string().contains("--eid"), "{here}");
        assert_eq!(here.code().name(), "NOSMCDDEV");
        assert_eq!(FallbackReason::PeerNotSmc.code().value(), 0x0301_0000);
    }
}
