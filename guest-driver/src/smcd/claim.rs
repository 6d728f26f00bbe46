// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client's claim: an own DMB for the next connection, named by the Proposal.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use smc_core::handshake::{Candidate, Dmbe, Terms};
use smc_core::wire::claim::{CLAIM_CONNECTION, CLAIM_WORD, Claim};

use super::{AttachSlot, Fabric, Fabrics, OwnBuffer, Peer, PeerBuffer};
use ism_sys::SharedSlice;
use virtio_ism::IsmError;

/// Addresses of a client's TCP connection, one end each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) client: SocketAddr,
    pub(crate) server: SocketAddr,
}

impl Ends {
    /// The ends of a connection as its client.
    pub(crate) fn of_client(tcp: &TcpStream) -> Option<Ends> {
        Some(Ends { client: tcp.local_addr().ok()?, server: tcp.peer_addr().ok()? })
    }

    /// The ends of a connection as its server, with its client still there: a client's port is not
    /// another connection's as long as the kernel names it.
    pub(crate) fn of_server(tcp: &TcpStream) -> Option<Ends> {
        Some(Ends { client: tcp.peer_addr().ok()?, server: tcp.local_addr().ok()? })
    }

    /// The claim with this number for the connection.
    pub(crate) fn claim(&self, number: NonZeroU16) -> Claim {
        let [client, server] = [self.client, self.server].map(|end| {
            // The same bytes at both ends, through a socket of either family.
            let address = match end.ip().to_canonical() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            (address.octets(), end.port())
        });
        Claim::new(number, client, server)
    }
}

/// A claim under way. Its drop returns the DMB to the pool, unless the server has taken the claim.
pub(crate) struct OpenClaim {
    claim: Claim,
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) peer: Arc<Peer>,
    terms: Terms,
    own: Option<OwnBuffer>,
    slot: Option<AttachSlot>,
    word: ClaimWord,
}

/// The word of a claim, for another thread.
#[derive(Clone, Debug)]
pub(crate) struct ClaimWord {
    memory: SharedSlice,
    claim: Claim,
}

impl ClaimWord {
    /// Ends the claim. `false`: the server has taken the claim, and its Accept is under way.
    pub(crate) fn withdraw(&self) -> bool {
        let Ok(word) = self.memory.atomic_u64(0) else { return false };
        match word.compare_exchange(self.claim.open(), 0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(now) => now != self.claim.taken(),
        }
    }

    fn is_taken(&self) -> bool {
        // Acquire: the server's stores into the DMB come after its change of the word.
        let word = self.memory.atomic_u64(0);
        word.is_ok_and(|word| word.load(Ordering::Acquire) == self.claim.taken())
    }
}

impl OpenClaim {
    /// Claims a DMB for a connection to the server of earlier connections, if the pool has one.
    pub(crate) fn open(fabrics: &Fabrics, ends: &Ends, buffer: u32) -> Option<OpenClaim> {
        let known = |fabric: &Arc<Fabric>| Some((fabric.clone(), fabric.server(&ends.server)?));
        let (fabric, peer) = fabrics.0.iter().find_map(known)?;
        let terms = peer.terms().filter(|terms| terms.carriers.is_some_and(|c| c.has_claims()))?;
        let slot = peer.attach_slot()?;
        let own = peer.take_pooled(buffer)?;
        static COUNT: AtomicU16 = AtomicU16::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let (dmb, number) = (own.dmb(), Claim::number_for(own.dmbe().token, count));
        let claim = ends.claim(number);
        let word = dmb.memory().slice(CLAIM_WORD as usize, size_of::<u64>());
        let stored = dmb.memory().copy_in(CLAIM_CONNECTION as usize, claim.connection());
        let (Ok(word), Ok(())) = (word, stored) else { return None };
        // Release: a server that sees the word sees the connection.
        word.atomic_u64(0).ok()?.store(claim.open(), Ordering::Release);
        let word = ClaimWord { memory: word, claim };
        Some(OpenClaim { claim, fabric, peer, terms, own: Some(own), slot: Some(slot), word })
    }

    /// The claim itself.
    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// The claim for another thread.
    pub(crate) fn word(&self) -> ClaimWord {
        self.word.clone()
    }

    /// The terms with the claimed peer at the time of the claim.
    pub(crate) fn terms(&self) -> Terms {
        self.terms
    }

    /// Whether the server has taken the claim. The answer is final once Accept or Decline is here.
    pub(crate) fn is_taken(&self) -> bool {
        self.word.is_taken()
    }

    /// Whether these are the devices of the claim.
    pub(crate) fn is_between(&self, devices: Candidate) -> bool {
        let fabric = (self.fabric.chid().0, self.fabric.device().gid().0);
        fabric == (devices.chid.0, devices.local.0) && self.peer.gid().0 == devices.peer.0
    }

    /// The parts of the connection after Accept: the own DMB, and the attached DMB of the server.
    ///
    /// # Errors
    /// As [`Fabric::attach_or_gone`].
    pub(crate) fn finish(mut self, theirs: Dmbe) -> Result<Option<Parts>, IsmError> {
        let (Some(own), Some(slot)) = (self.own.take(), self.slot.take()) else { return Ok(None) };
        let theirs = self.fabric.attach_or_gone(&self.peer, theirs, &slot)?;
        Ok(theirs.map(|theirs| (own, theirs, slot)))
    }
}

/// Own DMB, DMB of the server, and its slot.
pub(crate) type Parts = (OwnBuffer, Arc<PeerBuffer>, AttachSlot);

impl Drop for OpenClaim {
    fn drop(&mut self) {
        if let Some(own) = &self.own
            && self.word.withdraw()
        {
            own.allow_reuse(0);
        }
    }
}
