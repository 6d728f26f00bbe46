// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a link group is started with.

use core::time::Duration;

use crate::wire::clc::Version;
use crate::wire::ids::{Gid, LinkLimits, Mac, Mtu, OsType, Psn, Qpn, Rkey};
use crate::wire::llc::Dialect;

use super::{RmbId, RnicId};

/// Which end of the group this is: that of the listening or of the connecting socket (LG-3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Adds and deletes links, numbers them (LG-15).
    Server,
    /// Asks the server.
    Client,
}

/// What CLC agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// SMC-Rv1: Confirm Link agrees on the number of links.
    V1 {
        /// Own value, 2 to 8 (LLC-18, LG-12); moved into that range.
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
    /// None, cursors start at 0, as in Linux; a peer that has some is refused (wire erratum D-3).
    #[default]
    Off,
    /// As RFC 7609 has them; a peer without is refused.
    On,
}

/// What a link group does differently for different kinds of peers.
///
/// A peer that keeps to the specifications and a Linux peer need different answers in four places.
/// [`PeerProfile::SPEC`] is for the former and [`PeerProfile::LINUX`] for the latter;
/// [`PeerProfile::of`] tells which it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProfile {
    /// How LLC messages are written, and which forms are accepted from the peer.
    pub dialect: Dialect,
    /// Whether the group answers a Confirm RKey or Delete RKey at once although a link is being
    /// added or deleted. Linux needs this: it fails the connection when the peer refuses, and it
    /// delays an Add Link until its own RKey exchange has ended. When false, the group refuses the
    /// Confirm RKey (LLC-67, LLC-70) and keeps the Delete RKey for later (LLC-78).
    pub rkeys_at_once: bool,
    /// Whether a first contact goes on with one link when Add Link, or the reply to it, does not
    /// arrive. The specification resets the connection (ERR-20, ERR-21; wire errata B-28, D-8).
    /// When true, such silence after the first contact does not fail the link that carried the
    /// request either (ERR-22, ERR-48); Test Link alone judges that link. AF_SMC may be busy with
    /// a queue pair that soft-RoCE does not free.
    pub one_link_will_do: bool,
    /// Whether a rejection of a version 2 Add Link carries its reason. Linux sends none (LLCV2-22).
    pub reject_reason: bool,
}

impl PeerProfile {
    /// For a peer of which nothing is known: the specifications to the letter.
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

/// How a server with no second RNIC makes the attempt at a second link that v1 and v2.0 ask for
/// (LG-1, LG-18).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SingleRnic {
    /// Over the same RNIC: a client that has two makes an asymmetric link of it.
    #[default]
    Asymmetric,
    /// With an MTU of 0 and no queue pair behind it: each client refuses at once.
    InvalidMtu,
}

/// Times of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// First link: for Confirm Link at the client and its reply at the server (ERR-12, ERR-14,
    /// ERR-17).
    pub first_contact: Duration,
    /// First link: silence after which the server sends Confirm Link once more, as Linux drops
    /// one that arrives before it is ready.
    pub resend: Duration,
    /// For every other reply (ERR-11).
    pub reply: Duration,
    /// For the Add Link of a first contact, at the client (ERR-20).
    pub add_link: Duration,
    /// For Confirm Link on an added link, at the client (ERR-24, ERR-25).
    pub confirm_added: Duration,
    /// Silence on a link after which Test Link is sent; `None` for never.
    pub test_link: Option<Duration>,
    /// How long a group without connections lives (LG-45).
    pub idle: Duration,
    /// Until the server tries again to make the group redundant (LG-26); `None` for never. When
    /// an RNIC of either end has come back, attempts that fail are made again sooner: after
    /// [`Timers::FIRST_RETRY`], and twice as long each time, [`Timers::QUICK_RETRIES`] times.
    pub retry_add_link: Option<Duration>,
    /// Until a Confirm RKey that was refused "for now" is sent again (LLC-50).
    pub retry_rkey: Duration,
    /// For the adapter to say that a last message has arrived (LLC-39, LLC-43).
    pub last_message: Duration,
    /// How long the answer to Delete Link for one link is awaited at most while the link over which
    /// that went answers Test Link. AF_SMC answers when it has freed the queue pair, which it can
    /// only do when the network has let go of the last packet. Zero: `reply`, and who does not
    /// answer has lost the carrying link, too (ERR-29, ERR-32).
    pub deletion: Duration,
}

impl Timers {
    /// Until the next attempt at a link after the first one that failed. The network may need a
    /// moment more than the port of an adapter that has come back.
    pub const FIRST_RETRY: Duration = Duration::from_secs(2);
    /// How many attempts follow sooner than others.
    pub const QUICK_RETRIES: u8 = 4;

    /// The times of Linux where it has such a time.
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

/// A local RNIC port that can reach the peer: on the group's LAN in v1 (LG-28), routed in v2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rnic {
    /// The caller's number of it.
    pub id: RnicId,
    /// Its GID; an IP address in v2.
    pub gid: Gid,
    /// Its MAC.
    pub mac: Mac,
    /// Largest MTU of its port.
    pub mtu: Mtu,
    /// Whether the peer is in its subnet; v2 (LLCV2-19). Links of a group may differ (LLCV2-24).
    pub direct: bool,
}

/// What the peer says of its end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteEnd {
    /// GID of its RNIC.
    pub gid: Gid,
    /// MAC of its RNIC. May be zero for the first link of v2: a Linux client proposes so.
    pub mac: Mac,
    /// Its queue pair.
    pub qpn: Qpn,
    /// Its first packet sequence number.
    pub psn: Psn,
    /// MTU of its port.
    pub mtu: Mtu,
}

/// A memory region on one link: what a write to it needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Region {
    /// Key.
    pub rkey: Rkey,
    /// Virtual address of its start.
    pub address: u64,
}

/// The link that CLC set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstLink {
    /// Own RNIC.
    pub rnic: Rnic,
    /// Own queue pair.
    pub qpn: Qpn,
    /// Peer's end, from Accept or Confirm.
    pub remote: RemoteEnd,
    /// The RMB that Accept or Confirm announced to the peer; it needs no Confirm RKey.
    pub rmb: RmbId,
    /// That RMB on this link.
    pub region: Region,
    /// Peer's RMB, from Accept or Confirm.
    pub peer_region: Region,
}

/// All that a group is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Params {
    /// Which end this is.
    pub role: Role,
    /// What CLC agreed on.
    pub generation: Generation,
    /// Eye catchers or none.
    pub eye_catcher: EyeCatcher,
    /// What the group does differently for this kind of peer.
    pub profile: PeerProfile,
    /// Times.
    pub timers: Timers,
    /// Own number of the group, 24 bits, for link user ids, which are to be unique (LLC-16).
    pub number: u32,
    /// RNICs for further links, in order of preference; that of the first link may be among them.
    pub rnics: Vec<Rnic>,
    /// What a server without a second RNIC does.
    pub single_rnic: SingleRnic,
    /// Addresses that a v2 client listed in its Confirm (CLCV2-75, LLCV2-20).
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
