// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A link group of SMC-R: the links between two peers, and LLC over them (RFC 7609 sections 2.2, 2.3,
//! 3.5, appendix C; SMCv2 "LLC V2 messages").
//!
//! One [`LinkGroup`] per peer, role and LLC version, and one more for each parallel group. A group
//! has no clock, socket or queue pair. The caller reports each event by a `handle_` function with
//! the time `now`. [`LinkGroup::poll_output`] returns the orders to carry out, strictly in order
//! and after each call. [`LinkGroup::poll_timeout`] returns the time for
//! [`LinkGroup::handle_timeout`].
//!
//! Decisions of a group: the set of links, the link of a new connection, the confirmation of an
//! RMB, the moves of connections to another link, the end of the group. Left to the caller: queue
//! pairs, memory, connections ([`crate::connection::failover`]), TCP.
//!
//! # First contact
//!
//! The server makes its group when SMC Confirm has come and its queue pair is connected, the client
//! before sending SMC Confirm. Each end drains [`LinkGroup::poll_output`]; bytes of
//! [`Output::PostLlc`] go to the peer's [`LinkGroup::handle_message`].
//!
//! ```
//! use smc_core::time::Tick;
//! use smc_core::link_group::{
//!     FirstLink, Generation, LinkGroup, LinkKey, Output, Params, PeerProfile,
//! };
//! use smc_core::link_group::{Region, RemoteEnd, RmbId, Rnic, RnicId, Role};
//! use smc_core::wire::ids::{Gid, LinkLimits, Mac, Mtu, Psn, Qpn, Rkey};
//!
//! let limits = LinkLimits { max_conns: 255, max_links: 1 };
//! let rnic = |n| Rnic {
//!     id: RnicId(0),
//!     gid: Gid::from_ipv4([10, 9, 0, n]),
//!     mac: Mac([0x52, 0x54, 0, 0, 0, n]),
//!     mtu: Mtu::B1024,
//!     direct: true,
//! };
//! let region = |n| Region { rkey: Rkey(n), address: 0x1000 };
//! let group = |role, own: u8, peer: u8| {
//!     let params = Params::new(role, Generation::V21(limits), PeerProfile::LINUX);
//!     let remote = RemoteEnd {
//!         gid: rnic(peer).gid,
//!         mac: rnic(peer).mac,
//!         qpn: Qpn::new(peer.into()),
//!         psn: Psn::new(0),
//!         mtu: Mtu::B1024,
//!     };
//!     let first = FirstLink {
//!         rnic: rnic(own),
//!         qpn: Qpn::new(own.into()),
//!         remote,
//!         rmb: RmbId(0),
//!         region: region(own.into()),
//!         peer_region: region(peer.into()),
//!     };
//!     LinkGroup::new(params, first, Tick(0))
//! };
//! let mut ends = [group(Role::Server, 1, 2), group(Role::Client, 2, 1)];
//!
//! let mut done = [false; 2];
//! while done != [true; 2] {
//!     for this in 0..2 {
//!         while let Some(output) = ends[this].poll_output() {
//!             match output {
//!                 Output::PostLlc { link, bytes, receipt } => {
//!                     // One link: both ends call it LinkKey::FIRST.
//!                     ends[1 - this].handle_message(link, &bytes, Tick(1)).unwrap();
//!                     if let Some(receipt) = receipt {
//!                         ends[this].handle_sent(receipt, Tick(2));
//!                     }
//!                 }
//!                 Output::ActivateLink { .. } => {} // queue pair to RTS
//!                 Output::LinkUsable { .. } => {}
//!                 Output::GroupUsable => done[this] = true,
//!                 other => panic!("{other:?}"),
//!             }
//!         }
//!     }
//! }
//! assert_eq!(ends[0].pick_link(), Some(LinkKey::FIRST));
//! ```
//!
//! # Obligations of the caller
//!
//! - Outputs are carried out in order. A failed one is a failed link
//!   ([`LinkGroup::handle_link_failed`]), and the rest goes on.
//! - A [`Receipt`] is handed back as soon as the send completion of its message is there. Without
//!   the receipt the group goes on after a second, a noticeable delay for a first contact with one
//!   link.
//! - [`LinkGroup::handle_received`] is called when connection data arrive on a link, or Test Link
//!   goes out in the middle of traffic; once per batch of completions is enough.
//! - [`Output::PrepareLink`] is answered soon: the peer waits two seconds. Every RMB of the group
//!   gets a key on the new link, including RMBs with [`LinkGroup::add_rmb`] still under way.
//! - The group counts connections per link and moves the counts itself with
//!   [`Output::MoveConnections`].
//! - An RMB kept for the next connection stays confirmed, without any call. A peer may confirm its
//!   own RMBs anew for each connection, as Linux does.
//! - A late SMC Decline with the out-of-sync bit (RFC 7609 C.4) is answered by
//!   [`LinkGroup::terminate`].
//!
//! # Failure
//!
//! A dead link is reported by [`LinkGroup::handle_link_failed`], a dead RNIC by
//! [`LinkGroup::handle_rnic_down`]; the group notices silence itself. The answer is
//! [`Output::MoveConnections`] if another link is there, else [`Output::Terminated`].
//!
//! The effect of a hostile peer is bounded: each odd message is an [`Anomaly`] with a counter,
//! lists have limits, and the worst consequence is the end of this group.

mod add_client;
mod add_keys;
mod add_link;
mod anomaly;
mod confirm_link;
mod decision;
mod delete_link;
mod exchange;
mod failure;
mod ids;
mod inputs;
mod link;
mod numbers;
mod output;
mod params;
mod peer_rkeys;
mod pump;
mod queries;
mod receive;
mod rkeys;
mod rmb;
mod timers;
mod topology;

pub use anomaly::{Anomaly, AnomalyKind, Counters};
pub use ids::{LinkKey, PeerRmbId, Receipt, RmbId, RnicId};
pub use link::{LinkEvent, LinkRecord, LinkState, Topology};
pub use output::{Cause, Ending, Output, Reason};
pub use params::{
    EyeCatcher, FirstLink, Generation, Params, PeerProfile, Region, RemoteEnd, Rnic, Role,
    SingleRnic, Timers,
};
pub use queries::Activity;
pub use rmb::{MAX_RMBS, RmbState, UseError};

use std::collections::VecDeque;

use crate::time::Tick;
use crate::wire::ids::{Psn, Qpn};
use crate::wire::llc::{DeleteReason, DeleteRkey};

use decision::GroupDecision;
use exchange::{Add, LinkExchange, PeerConfirm, Phase, RkeyExchange, Stage};
use numbers::Numbers;
use rmb::{PeerRmbs, Rmb};

/// Anomalies in a row on one link after which it counts as down.
pub const MOST_ANOMALIES: u32 = 32;

/// Answer to [`Output::PrepareLink`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Own queue pair.
    pub qpn: Qpn,
    /// First packet sequence number of the queue pair.
    pub psn: Psn,
    /// Every own RMB of the group on the new link.
    pub regions: Vec<(RmbId, Region)>,
}

/// One link group. See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkGroup {
    params: Params,
    phase: Phase,
    decided: GroupDecision,
    max_links: u8,
    links: Vec<LinkRecord>,
    numbers: Numbers,
    keys: Keys,
    link_exchange: Option<LinkExchange>,
    additions: Additions,
    end: GroupEnd,
    outputs: VecDeque<Output>,
    counters: Counters,
}

/// The memory of both ends, and exchanges of its keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Keys {
    rmbs: Vec<Rmb>,
    peer_rmbs: PeerRmbs,
    exchange: Option<RkeyExchange>,
    peer_confirm: Option<PeerConfirm>,
    kept: VecDeque<(LinkKey, DeleteRkey)>,
}

/// Links still to be added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Additions {
    /// Server: one more link is wanted.
    wanted: bool,
    /// Client: an RNIC is to be announced to the server.
    notice: bool,
    /// Server: Request Add Link came on this link and has no answer.
    request: Option<LinkKey>,
    retry_at: Option<Tick>,
    /// How many attempts at a link may still follow a failed one soon.
    quick_retries: u8,
}

/// When and how the group ends.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GroupEnd {
    idle_at: Option<Tick>,
    delete_code: (DeleteReason, bool),
}

impl LinkGroup {
    /// Starts a group with its first link, at first contact. The server sends Confirm Link, the
    /// client awaits the message (RFC 7609 section 3.5.1.5).
    pub fn new(mut params: Params, first: FirstLink, now: Tick) -> LinkGroup {
        if !params.rnics.iter().any(|rnic| rnic.id == first.rnic.id) {
            params.rnics.insert(0, first.rnic);
        }
        let max_links = match params.generation {
            Generation::V1 { max_links } => max_links.clamp(2, 8),
            Generation::V2 => 2,
            Generation::V21(limits) => limits.max_links.clamp(1, 2),
        };
        let server = params.role == Role::Server;
        let timers = params.timers;
        let resend = server.then(|| now.after(timers.resend));
        let mut group = LinkGroup {
            params,
            phase: Phase::FirstConfirm { until: now.after(timers.first_contact), resend },
            decided: GroupDecision::default(),
            max_links,
            links: Vec::new(),
            numbers: Numbers::default(),
            keys: Keys::default(),
            link_exchange: None,
            additions: Additions::default(),
            end: GroupEnd { idle_at: None, delete_code: (DeleteReason::OPERATOR, false) },
            outputs: VecDeque::new(),
            counters: Counters::default(),
        };
        group.start(&first, now);
        group
    }

    fn start(&mut self, first: &FirstLink, now: Tick) {
        let server = self.is_server();
        let number = self.numbers.set_first_link(u8::from(server));
        let key = self.new_link(first.rnic, number, Some(first.remote), now);
        if let Some(link) = self.link_mut(key) {
            link.qpn = first.qpn;
            link.state = LinkState::Confirming;
        }
        self.keys.rmbs.push(Rmb {
            id: first.rmb,
            state: RmbState::Confirmed,
            reported: true,
            keys: vec![(key, first.region, true)],
            on: None,
            refused: 0,
            not_before: None,
        });
        self.keys.peer_rmbs.learn(key, first.peer_region);
        if server {
            self.outputs.push_back(Output::ActivateLink { link: key });
            self.post_confirm(key, false);
        }
    }
}
