// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fabrics of a process: one open device each, with the reachable peers.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smc_core::handshake::{Candidate, Dmbe, Terms};
use smc_core::wire::ids as wire;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::{Chid, Gid, Status, Token};

use super::attachments::{AttachSlot, Attachments};
use super::peer::{DmbBytes, Peer, PeerBuffer};
use ism_sys::{ForkLocks, is_free, lock};
use virtio_ism::{IsmDevice, IsmError};

/// Code of the software event used by Linux to end a logical link.
pub(crate) const SW_SHUTDOWN: u32 = 0x80;
/// Code of the software event used by Linux to test a logical link. The answer has the same code.
pub(crate) const SW_TEST_LINK: u32 = 0x83;

/// One open device and its reachable peers.
pub(crate) struct Fabric {
    device: Arc<IsmDevice>,
    in_use: DmbBytes,
    attachments: Attachments,
    peers: Mutex<FxHashMap<Gid, Arc<Peer>>>,
    /// The last peers of servers, by address.
    servers: Mutex<FxHashMap<SocketAddr, KnownServer>>,
    next_link: AtomicU32,
    /// The device's unanswered request to leave, if it is about to go.
    leaving: Mutex<Option<LeaveRequest>>,
}

/// The most addresses of servers in memory.
const MAX_SERVERS: usize = 1024;

/// Claims in a row not taken by a server, after which the next connections have none: another
/// process accepts, or addresses are translated on the way.
const MAX_MISSES: u8 = 8;

/// The process behind an address.
#[derive(Clone, Copy, Debug)]
struct KnownServer {
    gid: Gid,
    misses: u8,
}

/// A request of the device to leave it.
#[derive(Clone, Copy, Debug)]
struct LeaveRequest {
    number: u32,
    since: Instant,
    within: Duration,
}

/// Objects whose `drop` sends device commands, and so may block.
pub(crate) type DeferredDrop = Box<dyn Send>;

impl ForkLocks for Fabric {
    fn is_unlocked(&self) -> bool {
        let locks = is_free(&self.peers) && is_free(&self.servers) && is_free(&self.leaving);
        locks && self.all().iter().all(|peer| peer.is_unlocked())
    }
}

impl Fabric {
    /// Wraps an open device.
    pub(crate) fn new(device: Arc<IsmDevice>) -> Arc<Fabric> {
        let (peers, servers, next_link) = (Mutex::default(), Mutex::default(), AtomicU32::new(1));
        let attachments = Attachments::new(device.config().max_attach.get());
        let (in_use, leaving) = (DmbBytes::default(), Mutex::default());
        Arc::new(Fabric { device, in_use, attachments, peers, servers, next_link, leaving })
    }

    fn peers(&self) -> MutexGuard<'_, FxHashMap<Gid, Arc<Peer>>> {
        lock(&self.peers)
    }

    /// The device.
    pub(crate) fn device(&self) -> &Arc<IsmDevice> {
        &self.device
    }

    /// Notes the device's request for its driver to leave within this time.
    pub(crate) fn leave_within(&self, number: u32, within: Duration) {
        *lock(&self.leaving) = Some(LeaveRequest { number, since: Instant::now(), within });
    }

    /// Notes the withdrawal of the device's request.
    pub(crate) fn stay(&self) {
        *lock(&self.leaving) = None;
    }

    /// Answers the device's request to leave, if there is one, when no connection stays or the time is
    /// over, `longest` at most. Otherwise returns the time left. `stays` returns whether a connection
    /// stays.
    pub(crate) fn answer_leave(
        &self,
        longest: Duration,
        stays: impl FnOnce() -> bool,
    ) -> Option<Duration> {
        let LeaveRequest { number, since, within } = (*lock(&self.leaving))?;
        let left = within.min(longest).saturating_sub(since.elapsed());
        let stays = stays();
        if stays && !left.is_zero() {
            return Some(left);
        }
        // Another request may have come since. The device knows the request by its number.
        lock(&self.leaving).take_if(|request| request.number == number);
        match self.device.left(number) {
            Ok(_) => tracing::debug!(in_time = !stays, "connections have left the device"),
            Err(error) => tracing::debug!(%error, "the device has no answer to its request"),
        }
        None
    }

    /// The fabric's CHID.
    pub(crate) fn chid(&self) -> Chid {
        self.device.chid()
    }

    /// The peer with this GID. The first call makes it.
    pub(crate) fn peer(&self, gid: Gid) -> Arc<Peer> {
        let mut peers = self.peers();
        let new = || {
            let number = self.next_link.fetch_add(1, Ordering::Relaxed);
            let link = wire::LinkId(number.to_be_bytes());
            let shared = (self.in_use.clone(), self.attachments.clone());
            Peer::new(gid, link, self.device.clone(), shared)
        };
        peers.entry(gid).or_insert_with(new).clone()
    }

    /// The peer with this GID, if there is one.
    pub(crate) fn known(&self, gid: Gid) -> Option<Arc<Peer>> {
        self.peers().get(&gid).cloned()
    }

    /// The peer behind the address of a server, if claims are worthwhile there.
    pub(super) fn server(&self, address: &SocketAddr) -> Option<Arc<Peer>> {
        let server = lock(&self.servers).get(address).copied()?;
        (server.misses < MAX_MISSES).then(|| self.known(server.gid)).flatten()
    }

    /// Notes the peer behind the address of a server, and whether the peer has taken a claim, if there
    /// was one. The processes on a loopback fabric share a GID, so nothing is noted there.
    pub(crate) fn note_server(&self, address: SocketAddr, gid: Gid, is_taken: Option<bool>) {
        if gid == self.device.gid() {
            return;
        }
        let mut servers = lock(&self.servers);
        if servers.len() >= MAX_SERVERS && !servers.contains_key(&address) {
            servers.clear();
        }
        let server = servers.entry(address).or_insert(KnownServer { gid, misses: 0 });
        server.gid = gid;
        server.misses = match is_taken {
            Some(true) => 0,
            Some(false) => server.misses.saturating_add(1),
            None => server.misses,
        };
    }

    /// A peer's DMB for one connection with a slot: attached now or before. `Ok(None)`: the peer must
    /// not offer this DMB.
    ///
    /// # Errors
    /// As [`Peer::attach`].
    pub(crate) fn attach(
        &self,
        peer: &Peer,
        theirs: Dmbe,
        _slot: &AttachSlot,
    ) -> Result<Option<Arc<PeerBuffer>>, IsmError> {
        let full = |error: &IsmError| {
            matches!(error, IsmError::Refused { op: Op::Attach, status: Status::Enospc })
        };
        match peer.attach(theirs) {
            Err(error) if full(&error) => {
                // There is room, because this connection has a slot: others have left theirs attached.
                self.all().iter().for_each(|peer| peer.detach_idle());
                peer.attach(theirs)
            }
            attached => attached,
        }
    }

    /// Like [`Fabric::attach`], for a peer possibly already writing into our DMB. If the peer has left
    /// since, or our device is gone or about to go, nothing is delivered to the buffer.
    ///
    /// # Errors
    /// As [`Peer::attach`].
    pub(crate) fn attach_or_gone(
        &self,
        peer: &Peer,
        theirs: Dmbe,
        slot: &AttachSlot,
    ) -> Result<Option<Arc<PeerBuffer>>, IsmError> {
        peer.or_gone(theirs, self.attach(peer, theirs, slot))
    }

    /// The known peers.
    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        self.peers().values().cloned().collect()
    }

    /// Removes a departed peer of the fabric. The caller drops the peer's resources.
    pub(crate) fn peer_down(&self, gid: Gid) -> DeferredDrop {
        // Dropped in this order: the slabs are of no use after the last buffer of the peer.
        let resources = self.peers().remove(&gid).map(|peer| (peer.take_resources(), peer));
        Box::new((resources, IdleSlabs(self.device.clone())))
    }

    /// Removes the attachment of a peer's lost DMB. The caller drops the attachment.
    pub(crate) fn dmb_gone(&self, token: Token) -> Option<DeferredDrop> {
        let buffer = self.all().into_iter().find_map(|peer| peer.remove_attachment(token))?;
        Some(Box::new(buffer))
    }

    /// Removes the peers without a connection for `timeout`, and reports the end of the logical link to
    /// them (as Linux does). Returns the time until the next peer is due.
    pub(crate) fn remove_idle_peers(&self, timeout: Duration) -> Option<Duration> {
        let now = Instant::now();
        let mut next: Option<Duration> = None;
        for peer in self.all() {
            let Some(since) = peer.idle_since() else { continue };
            let age = now.saturating_duration_since(since);
            if age < timeout {
                let left = timeout - age;
                next = Some(next.map_or(left, |n| n.min(left)));
                continue;
            }
            self.send_shutdown(&peer);
            drop(self.peer_down(peer.gid()));
        }
        next
    }

    /// Reports the end of an unused logical link to a peer.
    fn send_shutdown(&self, peer: &Peer) {
        let Some(link) = peer.terms().map(|_| peer.link()) else { return };
        if let Err(error) =
            self.device.signal_event(peer.gid(), SW_SHUTDOWN, sw_info(link, SW_NO_VLAN, 1))
        {
            tracing::debug!(%error, "SHUTDOWN was not sent");
        }
    }

    /// Answers a test of the logical link, or ends the link at the peer's request. `true`: the link has
    /// ended.
    pub(crate) fn sw_event(&self, gid: Gid, code: u32, info: u64) -> bool {
        let Some(peer) = self.known(gid) else { return false };
        let [a, b, c, d, _, _, kind @ ..] = info.to_ne_bytes();
        let link = wire::LinkId([a, b, c, d]);
        match code {
            SW_TEST_LINK if u16::from_ne_bytes(kind) == 1 => {
                let answer = sw_info(peer.link(), 0, 2);
                if let Err(error) = self.device.signal_event(gid, SW_TEST_LINK, answer) {
                    tracing::debug!(%error, "link test was not answered");
                }
                false
            }
            // The sender may have made another link since; the new link continues.
            SW_SHUTDOWN if peer.peer_link() == Some(link) => {
                peer.reset_link();
                true
            }
            _ => false,
        }
    }
}

/// Releases the slabs of departed peers in its drop. A peer without DMBs of ours leaves no other object
/// with such a drop.
struct IdleSlabs(Arc<IsmDevice>);

impl Drop for IdleSlabs {
    fn drop(&mut self) {
        self.0.release_departed_slabs();
    }
}

/// The VLAN of an event for every VLAN.
const SW_NO_VLAN: u16 = 0x1fff;

/// The 64 bits of a software event in the layout of Linux: the sender's number of the link, a VLAN,
/// then 1 for a request or 2 for a response.
fn sw_info(link: wire::LinkId, vlan: u16, kind: u16) -> u64 {
    let ([a, b, c, d], [e, f], [g, h]) = (link.0, vlan.to_ne_bytes(), kind.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// The fabrics usable by a handshake.
#[derive(Clone, Default)]
pub(crate) struct Fabrics(pub(crate) Vec<Arc<Fabric>>);

impl Fabrics {
    /// The fabric of a pair of devices chosen by the handshake.
    pub(crate) fn of(&self, candidate: Candidate) -> Option<&Arc<Fabric>> {
        self.0.iter().find(|fabric| {
            fabric.chid().0 == candidate.chid.0 && fabric.device().gid().0 == candidate.local.0
        })
    }

    /// The terms of an earlier handshake with this peer.
    pub(crate) fn terms(&self, chid: wire::Chid, gid: wire::Gid) -> Option<Terms> {
        let fabric = self.0.iter().find(|fabric| fabric.chid().0 == chid.0)?;
        fabric.known(Gid(gid.0))?.terms()
    }
}
