// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parameters of a link group.

use core::time::Duration;

use crate::wire::clc::Version;
use crate::wire::ids::{Gid, LinkLimits, Mac, Mtu, OsType, Psn, Qpn, Rkey};
use crate::wire::llc::Dialect;

use super::{RmbId, RnicId};

/// The end of the group at this host: of the listening or of the connecting socket (LG-3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Adds, deletes and numbers links (LG-15).
    Server,
    /// Asks the server.
    Client,
}

/// The agreement of CLC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// SMC-Rv1: Confirm Link agrees on the number of links.
    V1 {
        /// Own value, 2 to 8 (LLC-18, LG-12); moved into the range.
        max_links: u8,
    },
    /// SMC-Rv2.0: two links.
    V2,
    /// SMC-Rv2.1: final limits come from CLC (LLCV2-11).
    V21(LinkLimits),
}

impl Generation {
    /// LLC version of the group (LLCV2-2).
    pub const fn version(&self) -> Version {
        match self {
            Generation::V1 { .. } => Version::V1,
            Generation::V2 | Generation::V21(_) => Version::V2,
        }
    }
}

/// The first four bytes of every element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EyeCatcher {
    /// None; cursors start at 0, as in Linux. A peer with eye catchers is refused (wire erratum
    /// D-3).
    #[default]
    Off,
    /// Eye catchers of RFC 7609; a peer without is refused.
    On,
}

/// A link group's behaviour towards different kinds of peers.
///
/// A peer conforming to the specifications and a Linux peer need different answers in four places.
/// [`PeerProfile::SPEC`] is for the former and [`PeerProfile::LINUX`] for the latter;
/// [`PeerProfile::of`] chooses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProfile {
    /// Encoding of LLC messages, and the forms accepted from the peer.
    pub dialect: Dialect,
    /// Whether the group answers a Confirm RKey or Delete RKey at once although a link is being
    /// added or deleted. Linux needs an answer at once: Linux fails the connection on a refusal,
    /// and delays an Add Link until its own RKey exchange has ended. When false, the group refuses
    /// the Confirm RKey (LLC-67, LLC-70) and keeps the Delete RKey for later (LLC-78).
    pub rkeys_at_once: bool,
    /// Whether a first contact goes on with one link when Add Link, or the reply to Add Link, does
    /// not arrive. The specification resets the connection (ERR-20, ERR-21; wire errata B-28, D-8).
    /// When true, such silence after the first contact does not fail the link carrying the request
    /// either (ERR-22, ERR-48); Test Link alone judges the link. AF_SMC may be busy with a queue
    /// pair not yet freed by soft-RoCE.
    pub one_link_will_do: bool,
    /// Whether a rejection of a version 2 Add Link carries its reason. Linux sends none (LLCV2-22).
    pub reject_reason: bool,
}

impl PeerProfile {
    /// For an unknown peer: the specifications to the letter.
    pub const SPEC: PeerProfile = PeerProfile {
        dialect: Dialect::SPEC,
        rkeys_at_once: false,
        one_link_will_do: false,
        reject_reason: true,
    };
    /// For a little-endian Linux.
    pub const LINUX: PeerProfile = PeerProfile {
        dialect: Dialect::TO_LINUX,
        rkeys_at_once: true,
        one_link_will_do: true,
        reject_reason: false,
    };

    /// For a peer with this operating system, as its first contact extension says. A Linux is taken
    /// for a little-endian one, because nothing tells.
    pub fn of(os: OsType) -> PeerProfile {
        if os == OsType::LINUX { PeerProfile::LINUX } else { PeerProfile::SPEC }
    }
}

/// A server's attempt at a second link without a second RNIC, as required by v1 and v2.0 (LG-1,
/// LG-18).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SingleRnic {
    /// Over the same RNIC: a client with two RNICs makes an asymmetric link.
    #[default]
    Asymmetric,
    /// With an MTU of 0 and without a queue pair: each client refuses at once.
    InvalidMtu,
}

/// Times of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// First link: for Confirm Link at the client and its reply at the server (ERR-12, ERR-14,
    /// ERR-17).
    pub first_contact: Duration,
    /// First link: silence after which the server repeats Confirm Link, as Linux drops a message
    /// arriving before Linux is ready.
    pub resend: Duration,
    /// For every other reply (ERR-11).
    pub reply: Duration,
    /// For the Add Link of a first contact, at the client (ERR-20).
    pub add_link: Duration,
    /// For Confirm Link on an added link, at the client (ERR-24, ERR-25).
    pub confirm_added: Duration,
    /// Silence on a link after which Test Link is sent; `None` for never.
    pub test_link: Option<Duration>,
    /// Lifetime of a group without connections (LG-45).
    pub idle: Duration,
    /// Until the server tries again to make the group redundant (LG-26); `None` for never. When an
    /// RNIC of either end has come back, failed attempts are repeated sooner: after
    /// [`Timers::FIRST_RETRY`], and twice as long each time, [`Timers::QUICK_RETRIES`] times.
    pub retry_add_link: Option<Duration>,
    /// Until a Confirm RKey refused "for now" is sent again (LLC-50).
    pub retry_rkey: Duration,
    /// For the adapter to report the arrival of a last message (LLC-39, LLC-43).
    pub last_message: Duration,
    /// Maximum wait for the answer to Delete Link for one link while the carrying link answers Test
    /// Link. AF_SMC answers after freeing the queue pair, and can free it only when the network has
    /// released the last packet. Zero: `reply` applies, and a peer without an answer has lost the
    /// carrying link, too (ERR-29, ERR-32).
    pub deletion: Duration,
}

impl Timers {
    /// Until the next attempt at a link after the first failure. The network may need a moment more
    /// than the port of a returning adapter.
    pub const FIRST_RETRY: Duration = Duration::from_secs(2);
    /// Number of attempts repeated sooner than others.
    pub const QUICK_RETRIES: u8 = 4;

    /// The times of Linux where Linux has such a time.
    pub const fn of(role: Role) -> Timers {
        Timers {
            first_contact: Duration::from_secs(5),
            resend: Duration::from_secs(1),
            reply: Duration::from_secs(2),
            add_link: Duration::from_secs(3),
            confirm_added: Duration::from_secs(5),
            test_link: Some(Duration::from_secs(30)),
            idle: Duration::from_secs(match role {
                Role::Server => 600,
                Role::Client => 610,
            }),
            retry_add_link: Some(Duration::from_secs(60)),
            retry_rkey: Duration::from_millis(100),
            last_message: Duration::from_secs(1),
            deletion: Duration::from_secs(60),
        }
    }
}

/// A local RNIC port with a path to the peer: on the group's LAN in v1 (LG-28), routed in v2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rnic {
    /// The caller's number of the port.
    pub id: RnicId,
    /// GID of the port; an IP address in v2.
    pub gid: Gid,
    /// MAC of the port.
    pub mac: Mac,
    /// Largest MTU of the port.
    pub mtu: Mtu,
    /// Whether the peer is in the port's subnet; v2 (LLCV2-19). Links of a group may differ
    /// (LLCV2-24).
    pub direct: bool,
}

/// The peer's description of its end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteEnd {
    /// GID of the peer's RNIC.
    pub gid: Gid,
    /// MAC of the peer's RNIC. May be zero for the first link of v2: a Linux client proposes so.
    pub mac: Mac,
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// First packet sequence number of the peer.
    pub psn: Psn,
    /// MTU of the peer's port.
    pub mtu: Mtu,
}

/// A memory region on one link, with the parameters of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Region {
    /// Key.
    pub rkey: Rkey,
    /// Virtual address of its start.
    pub address: u64,
}

/// The link set up by CLC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstLink {
    /// Own RNIC.
    pub rnic: Rnic,
    /// Own queue pair.
    pub qpn: Qpn,
    /// Peer's end, from Accept or Confirm.
    pub remote: RemoteEnd,
    /// The RMB announced to the peer by Accept or Confirm; no Confirm RKey is needed.
    pub rmb: RmbId,
    /// The region of `rmb` on this link.
    pub region: Region,
    /// Peer's RMB, from Accept or Confirm.
    pub peer_region: Region,
}

/// The parameters of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Params {
    /// The role of this end.
    pub role: Role,
    /// The agreement of CLC.
    pub generation: Generation,
    /// Eye catchers or none.
    pub eye_catcher: EyeCatcher,
    /// The group's behaviour towards this kind of peer.
    pub profile: PeerProfile,
    /// Times.
    pub timers: Timers,
    /// Own number of the group, 24 bits, for unique link user ids (LLC-16).
    pub number: u32,
    /// RNICs for further links, in order of preference; the first link's may be among them.
    pub rnics: Vec<Rnic>,
    /// The behaviour of a server without a second RNIC.
    pub single_rnic: SingleRnic,
    /// Addresses listed in a v2 client's Confirm (CLCV2-75, LLCV2-20).
    pub peer_gids: Vec<Gid>,
}

impl Params {
    /// Usual values: the times of Linux, no eye catchers, no second RNIC.
    pub fn new(role: Role, generation: Generation, profile: PeerProfile) -> Params {
        Params {
            role,
            generation,
            eye_catcher: EyeCatcher::Off,
            profile,
            timers: Timers::of(role),
            number: 1,
            rnics: Vec::new(),
            single_rnic: SingleRnic::Asymmetric,
            peer_gids: Vec::new(),
        }
    }
}
