//! Accept and Confirm, one struct per SMC type and version (RFC 7609 A.2.3, A.2.4; SMCv2 "CLC
//! Accept", "CLC Confirm"). Both messages of a type have the same fields: the server's in Accept,
//! the client's in Confirm.

use super::MAX_ENTRIES;
use crate::wire::List;
use crate::wire::ids::{
    Chid, DmbToken, Eid, Features, Gid, GidV1, Hostname, LinkId, LinkLimits, Mac, Mtu, OsType,
    PeerId, Psn, Qpn, Release, Rkey, SizeCode,
};

/// First contact extension (SMCv2 "FCE"): what holds for a new link group or ISM peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fce {
    /// Sender's operating system.
    pub os: OsType,
    /// Release in Accept: the negotiated one; Confirm repeats it (CLCV2-86).
    pub release: Release,
    /// Sender's host name.
    pub hostname: Hostname,
    /// Accept: the server's features; Confirm: the common ones (CLCV2-61). v2.1 only.
    pub features: Features,
    /// Vendor's answer; zero without (CLCV2-15). v2.1 only.
    pub vendor: [u8; 4],
}

/// SMC-Dv1 Accept or Confirm (wire errata D-1: as Linux has it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcdV1 {
    /// The server thinks that this is a new peer; Confirm repeats it.
    pub first_contact: bool,
    /// Sender's ISM GID.
    pub gid: GidV1,
    /// Right to write the sender's DMB.
    pub token: DmbToken,
    /// Element of the DMB, from 0 (CLCV2-66).
    pub index: u8,
    /// Size of an element.
    pub size: SizeCode,
    /// Sender's logical link.
    pub link_id: LinkId,
}

/// SMC-Dv2 Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcdV2 {
    /// Sender's GID. Part 2 is sent, and looked at, only if the CHID is an emulated one (EISM-18 to
    /// EISM-20).
    pub gid: Gid,
    /// Right to write the sender's DMB.
    pub token: DmbToken,
    /// Element of the DMB, from 0 (CLCV2-66).
    pub index: u8,
    /// Size of an element.
    pub size: SizeCode,
    /// Sender's logical link.
    pub link_id: LinkId,
    /// Fabric that both are on (CLCV2-64).
    pub chid: Chid,
    /// Negotiated EID.
    pub eid: Eid,
    /// First contact flag and extension, which go together (CLCV2-44).
    pub first_contact: Option<Fce>,
}

/// How to write to the sender of an SMC-R Accept or Confirm; bytes 8 to 63 of v1 and v2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrLink {
    /// Sender's stack instance.
    pub peer_id: PeerId,
    /// Sender's GID; an IP address in v2.
    pub gid: Gid,
    /// Sender's RNIC.
    pub mac: Mac,
    /// Queue pair.
    pub qpn: Qpn,
    /// Key of the RMB.
    pub rkey: Rkey,
    /// Element of the RMB, from 1.
    pub index: u8,
    /// Alert token for CDC messages to the sender.
    pub token: u32,
    /// Size of an element.
    pub size: SizeCode,
    /// MTU code; parsing refuses a reserved one when the first contact flag is on. A v1 Confirm has
    /// no flag: ask [`Mtu::bytes`] at first contact.
    pub mtu: Mtu,
    /// Virtual address of the start of the RMB.
    pub address: u64,
    /// First packet sequence number of the sender.
    pub psn: Psn,
}

/// SMC-Rv1 Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrV1 {
    /// A new link group begins. Accept only: in Confirm it is not sent and not looked at (CLC-25).
    pub first_contact: bool,
    /// How to write to the sender.
    pub link: SmcrLink,
}

/// First contact extension of SMC-R.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrFce {
    /// What SMC-D has too.
    pub common: Fce,
    /// Same subnet, no router between (CLCV2-54).
    pub direct: bool,
    /// Final limits of the link group; v2.1 only (CLCV2-57, CLCV2-58).
    pub limits: LinkLimits,
    /// Confirm only: the client's addresses. If absent there, the one GID of the message is sent.
    pub gids: Option<GidList>,
}

/// A client's RoCEv2 addresses: the active link's, then alternates in order of preference, 1 to 8
/// in all (CLCV2-71, CLCV2-72).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidList {
    /// Address of the active link.
    pub active: Gid,
    /// Other addresses.
    pub alternates: List<Gid, { MAX_ENTRIES - 1 }>,
}

/// SMC-Rv2 Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrV2 {
    /// Accept only: the server has stored why SMC-D was not chosen (CLCV2-69).
    pub reason_saved: bool,
    /// How to write to the sender.
    pub link: SmcrLink,
    /// Negotiated EID.
    pub eid: Eid,
    /// First contact flag and extension, which go together (CLCV2-44).
    pub first_contact: Option<SmcrFce>,
}
