//! A link group of SMC-R: the links between two peers, and LLC over them (RFC 7609 sections 2.2, 2.3,
//! 3.5, appendix C; SMCv2 "LLC V2 messages").
//!
//! One [`LinkGroup`] per peer, role and LLC version, and one more for each parallel group. It has no
//! clock, socket or queue pair: whatever happens is told it by a `handle_` function with the time
//! `now`, what is to be done is taken out by [`LinkGroup::poll_output`], strictly in order and after
//! each call, and [`LinkGroup::poll_timeout`] says when [`LinkGroup::handle_timeout`] is due.
//!
//! What a group decides: which links there are, which of them a new connection uses, when the peer
//! knows an RMB, when connections move to another link, when all is over. What it leaves to its
//! caller: queue pairs, memory, connections ([`crate::connection::failover`]), TCP.
//!
//! # First contact
//!
//! The server makes its group when SMC Confirm has come and its queue pair is connected, the client
//! before it sends SMC Confirm. Each end drains [`LinkGroup::poll_output`]; bytes of
//! [`Output::PostLlc`] go to the peer's [`LinkGroup::handle_message`].
//!
//! ```
//! use smc_core::handshake::Instant;
//! use smc_core::link_group::{Conduct, FirstLink, Generation, LinkGroup, LinkKey, Output, Params};
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
//!     let params = Params::new(role, Generation::V21(limits), Conduct::LINUX);
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
//!     LinkGroup::new(params, first, Instant(0))
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
//!                     ends[1 - this].handle_message(link, &bytes, Instant(1)).unwrap();
//!                     if let Some(receipt) = receipt {
//!                         ends[this].handle_sent(receipt, Instant(2));
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
//! # Failure
//!
//! A dead link is reported by [`LinkGroup::handle_link_failed`], a dead RNIC by
//! [`LinkGroup::handle_rnic_down`]; silence the group notices itself. The answer is
//! [`Output::MoveConnections`] if another link is there, else [`Output::Terminated`].
//!
//! What a hostile peer can do is bounded: each odd message is an [`Anomaly`] with a counter, lists
//! have limits, and the worst that follows is the end of this group.

mod anomaly;
mod link;
mod output;
mod params;
mod rmb;

pub use anomaly::{Anomaly, AnomalyKind, Counters};
pub use link::{Link, LinkEvent, LinkKey, LinkState, Topology};
pub use output::{Cause, Ending, Output, Reason, Receipt};
pub use params::{
    Conduct, EyeCatcher, FirstLink, Generation, LoneRnic, Params, Region, RemoteEnd, Rnic, RnicId,
    Role, Timers,
};
pub use rmb::{MAX_RMBS, PeerRmbId, RmbId, RmbState, UseError};

use std::collections::VecDeque;

use crate::handshake::Instant;
use crate::wire::ids::{Psn, Qpn, Rkey};
use crate::wire::llc::DeleteReason;

use rmb::{PeerRmbs, Rmb};

/// Anomalies in a row on one link after which it counts as down.
pub const MOST_ANOMALIES: u32 = 32;

/// Answer to [`Output::PrepareLink`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Own queue pair.
    pub qpn: Qpn,
    /// Its first packet sequence number.
    pub psn: Psn,
    /// Every own RMB of the group on the new link.
    pub regions: Vec<(RmbId, Region)>,
}

/// One link group. See the [module](self).
#[derive(Clone, Debug)]
pub struct LinkGroup {
    params: Params,
    links: Vec<Link>,
    rmbs: Vec<Rmb>,
    peer_rmbs: PeerRmbs,
    outputs: VecDeque<Output>,
    counters: Counters,
}

impl LinkGroup {
    /// Starts a group with its first link, at first contact. The server sends Confirm Link, the
    /// client awaits it (RFC 7609 section 3.5.1.5).
    pub fn new(params: Params, _first: FirstLink, _now: Instant) -> LinkGroup {
        LinkGroup {
            params,
            links: Vec::new(),
            rmbs: Vec::new(),
            peer_rmbs: PeerRmbs::default(),
            outputs: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// What has to be done next. To be called until it returns `None`, after every other call.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`LinkGroup::handle_timeout`] is due, if at all.
    pub fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// Does what is due at `now`; early and needless calls do no harm.
    pub fn handle_timeout(&mut self, _now: Instant) {}

    /// Takes a message that one receive completion brought.
    ///
    /// # Errors
    /// [`Anomaly`] if there was something odd about it. It has been dealt with and counted; only
    /// [`Anomaly::NotLlc`] leaves the message to the caller.
    pub fn handle_message(
        &mut self,
        _link: LinkKey,
        _bytes: &[u8],
        _now: Instant,
    ) -> Result<(), Anomaly> {
        Ok(())
    }

    /// Something other than LLC was received on a link: it lives.
    pub fn handle_received(&mut self, _link: LinkKey, _now: Instant) {}

    /// The send completion of a message with a receipt. A failed send is reported by
    /// [`LinkGroup::handle_link_failed`] instead.
    pub fn handle_sent(&mut self, _receipt: Receipt, _now: Instant) {}

    /// Answer to [`Output::PrepareLink`]; if there can be no queue pair, the answer is
    /// [`LinkGroup::handle_link_failed`] with [`Cause::Setup`].
    pub fn handle_link_prepared(&mut self, _link: LinkKey, _prepared: Prepared, _now: Instant) {}

    /// A link does not work any more, or an order for it could not be carried out.
    pub fn handle_link_failed(&mut self, _link: LinkKey, _cause: Cause, _now: Instant) {}

    /// An RNIC that can reach the peer has come, or come back (LLC-77, LLCV2-30, LG-26).
    pub fn handle_rnic_up(&mut self, _rnic: Rnic, _now: Instant) {}

    /// An RNIC has gone: all its links have failed.
    pub fn handle_rnic_down(&mut self, _rnic: RnicId, _now: Instant) {}

    /// The peer's SMC Decline came over TCP during first contact (ERR-46). Too late for it if
    /// [`LinkGroup::may_fall_back`] is false; the group then takes it as a failure (ERR-5).
    pub fn handle_decline(&mut self, _now: Instant) {}

    /// Tells the peer of an own RMB with its region on each link of [`LinkGroup::key_links`];
    /// `on` is the link the first connection wants. The answer is [`Output::RmbConfirmed`] or
    /// [`Output::RmbRefused`] (LLC-46, LLC-51).
    ///
    /// # Errors
    /// [`UseError`]; nothing has happened then.
    pub fn add_rmb(
        &mut self,
        _rmb: RmbId,
        _on: Option<LinkKey>,
        _regions: &[(LinkKey, Region)],
        _now: Instant,
    ) -> Result<(), UseError> {
        Ok(())
    }

    /// Tells the peer that an own RMB, which no connection uses, is gone. The answer is
    /// [`Output::RmbDeleted`] (LLC-57).
    pub fn remove_rmb(&mut self, _rmb: RmbId, _now: Instant) {}

    /// The peer's RMB that SMC Accept or Confirm names by a region on a link. One that is not known
    /// is taken over, as Linux does.
    ///
    /// # Errors
    /// [`UseError::NoLink`], [`UseError::TooManyRmbs`].
    pub fn bind_peer_rmb(
        &mut self,
        _link: LinkKey,
        _region: Region,
    ) -> Result<PeerRmbId, UseError> {
        Err(UseError::Over)
    }

    /// Where to write into an RMB of the peer over a link, or `None` if the peer has named no key
    /// there or has deleted the RMB.
    pub fn peer_region(&self, rmb: PeerRmbId, link: LinkKey) -> Option<Region> {
        self.peer_rmbs.on(rmb, link)
    }

    /// The RMB of the peer that has this key on a link.
    pub fn find_peer_rmb(&self, link: LinkKey, rkey: Rkey) -> Option<PeerRmbId> {
        self.peer_rmbs.find(link, rkey)
    }

    /// The link for a new connection: of the active ones that with the fewest (LG-41).
    pub fn pick_link(&self) -> Option<LinkKey> {
        None
    }

    /// Whether the group takes one more connection; if not, the server makes a parallel group
    /// (LG-48, LG-53).
    pub fn has_room(&self) -> bool {
        true
    }

    /// A connection uses a link from now on.
    ///
    /// # Errors
    /// [`UseError::Full`], [`UseError::NoLink`], [`UseError::Over`].
    pub fn connection_added(&mut self, _link: LinkKey, _now: Instant) -> Result<(), UseError> {
        Ok(())
    }

    /// A connection is gone. `link` is the one it used last, by the outputs taken so far.
    pub fn connection_removed(&mut self, _link: LinkKey, _now: Instant) {}

    /// Deletes a link in an orderly way, as before an RNIC is taken out of service (LG-42).
    pub fn delete_link(&mut self, _link: LinkKey, _reason: DeleteReason, _now: Instant) {}

    /// Ends the group: Delete Link for all links, then [`Output::Terminated`] (LG-57).
    pub fn terminate(&mut self, _reason: DeleteReason, _now: Instant) {}

    /// Whether a failure now would still leave the first connection to TCP (ERR-3).
    pub fn may_fall_back(&self) -> bool {
        false
    }

    /// Whether connections may send.
    pub fn is_usable(&self) -> bool {
        false
    }

    /// Whether [`Output::Terminated`] has been given.
    pub fn is_over(&self) -> bool {
        false
    }

    /// All links, those that are going included, oldest first.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// One link.
    pub fn link(&self, key: LinkKey) -> Option<&Link> {
        self.links.iter().find(|link| link.key == key)
    }

    /// The active link with these two ends, to which an SMC Accept at subsequent contact refers by
    /// the server's GID and queue pair.
    pub fn link_to(&self, peer_qpn: Qpn, peer_gid: crate::wire::ids::Gid) -> Option<LinkKey> {
        let is = |link: &&Link| {
            link.state == LinkState::Active
                && link.remote.is_some_and(|remote| {
                    remote.qpn == peer_qpn && remote.gid.same_address(peer_gid)
                })
        };
        self.links.iter().find(is).map(|link| link.key)
    }

    /// Links for which [`LinkGroup::add_rmb`] needs a region: all that have a queue pair.
    pub fn key_links(&self) -> impl Iterator<Item = LinkKey> + '_ {
        self.links.iter().map(|link| link.key)
    }

    /// How redundant the group is.
    pub fn topology(&self) -> Topology {
        Topology::None
    }

    /// Connections of the group.
    pub fn connections(&self) -> u32 {
        0
    }

    /// Most links of the group that are not asymmetric, once settled.
    pub fn max_links(&self) -> u8 {
        1
    }

    /// Most connections of the group.
    pub fn max_connections(&self) -> u32 {
        255
    }

    /// What has happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What the group was started with; `rnics` is as it is now.
    pub fn params(&self) -> &Params {
        &self.params
    }
}
