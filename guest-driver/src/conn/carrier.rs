//! What carries a connection's bytes and words: a pair of DMBs, or a pair of SMC-R elements.
//!
//! To the connection both look alike: a ring of its own that it reads, a ring of the peer's that it
//! writes, the peer's two words, and one operation that delivers bytes and its own two words.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use smc_core::connection::{EYE_CATCHER_LEN, Ring, RingError, SMCD_CONTROL_LEN, Sender};
use virtio_ism_abi::signal::Line;

use crate::info::{ConnectionInfo, SmcdInfo};
use crate::ism::DeliverError;
use crate::reactor::Registration;
use crate::smcd::{self, OwnBuffer, Peer, PeerBuffer, SmcdConn};
use crate::smcr::{SmcrConn, SmcrSendError};
use crate::sys::OutOfBounds;

/// Bytes of an element that are held back for links that fail: as many as links may fail in a row
/// before the peer says what it has read.
const RESERVE: u8 = 8;

/// What carries a connection.
#[allow(clippy::large_enum_variant, reason = "one per connection, on the heap with it")]
pub(crate) enum Carrier {
    /// SMC-D.
    D(DmbPair),
    /// SMC-R.
    R(SmcrConn),
}

/// A pair of DMBs.
pub(crate) struct DmbPair {
    theirs: Arc<PeerBuffer>,
    peer: Arc<Peer>,
    info: SmcdInfo,
    // Dropped last: the buffer goes back to its pool when nothing refers to it any more.
    own: OwnBuffer,
}

impl Carrier {
    /// The carrier of an SMC-D connection that a handshake has established.
    pub(crate) fn smcd(established: SmcdConn) -> Carrier {
        Carrier::D(DmbPair::new(established))
    }

    /// The carrier of an SMC-R connection that a handshake has established.
    pub(crate) fn smcr(established: SmcrConn) -> Carrier {
        Carrier::R(established)
    }

    /// The ring that the peer writes.
    pub(super) fn local_ring(&self) -> Result<Ring, RingError> {
        match self {
            Carrier::D(dmbs) => Ring::smcd(dmbs.own.dmb().len()),
            Carrier::R(element) => Ok(element.local_ring()),
        }
    }

    /// The ring that this end writes.
    fn peer_ring(&self) -> Result<Ring, RingError> {
        match self {
            Carrier::D(dmbs) => Ring::smcd(dmbs.theirs.dmb().len()),
            Carrier::R(element) => Ok(element.peer_ring()),
        }
    }

    /// What was negotiated.
    pub(super) fn info(&self) -> ConnectionInfo {
        match self {
            Carrier::D(dmbs) => ConnectionInfo::Smcd(dmbs.info.clone()),
            Carrier::R(element) => ConnectionInfo::Smcr(Box::new(element.info())),
        }
    }

    /// The key by which events of the reactor name the connection.
    pub(super) fn key(&self) -> u32 {
        match self {
            Carrier::D(dmbs) => dmbs.own.dmb().idx(),
            Carrier::R(element) => element.key(),
        }
    }

    /// How the connection registers with its reactor.
    pub(super) fn registration(&self) -> Registration {
        let (group, tags) = match self {
            Carrier::D(dmbs) => {
                let tags = smcd::tags(dmbs.peer.gid(), dmbs.theirs.dmb().token());
                (dmbs.own.dmb().slab_id(), Some(tags))
            }
            // RNICs name each connection that is lost.
            Carrier::R(_) => (None, None),
        };
        Registration { key: self.key(), group, tags }
    }

    /// Whether earlier reads of the own ring and words have read what is there. `false`: the memory
    /// went with its device, and the reads may have found zeros.
    #[inline]
    pub(super) fn has_memory(&self) -> bool {
        match self {
            Carrier::D(dmbs) => dmbs.own.dmb().has_memory(),
            Carrier::R(_) => true,
        }
    }

    /// The producer word and the consumer-and-flags word as the peer last stored them; the second
    /// loaded first, so that the producer word is at least as new as the flags.
    #[inline]
    pub(super) fn words(&self) -> [u64; 2] {
        match self {
            Carrier::D(dmbs) => dmbs.own.dmb().words(),
            Carrier::R(element) => element.words(),
        }
    }

    /// The sending direction, at its start.
    pub(super) fn sender(&self) -> Result<Sender, RingError> {
        let sender = Sender::new(self.peer_ring()?);
        Ok(match self {
            Carrier::D(_) => sender,
            Carrier::R(_) => sender.holding_back(RESERVE),
        })
    }

    /// Takes the mark of a peer that went over to another link off its words; whether there was one.
    #[cold]
    pub(super) fn take_move(&self) -> bool {
        match self {
            Carrier::D(_) => false,
            Carrier::R(element) => element.take_move(),
        }
    }

    /// Copies out of the own ring's element.
    #[inline]
    pub(super) fn copy_out(&self, offset: u32, into: &mut [u8]) -> Result<(), OutOfBounds> {
        match self {
            Carrier::D(dmbs) => dmbs.own.dmb().memory().copy_out(offset as usize, into),
            Carrier::R(element) => element.copy_out(offset as usize, into),
        }
    }

    /// Copies the pieces (offset in the peer's element, bytes) there, then the words, and with
    /// `signal` tells the peer.
    #[inline]
    pub(super) fn deliver(
        &self,
        pieces: &[(u32, &[u8])],
        words: [u64; 2],
        signal: bool,
    ) -> Result<(), DeliverError> {
        match self {
            Carrier::D(dmbs) => dmbs.theirs.dmb().deliver(pieces, words, signal),
            Carrier::R(element) => {
                element.deliver(pieces, words, signal).map_err(|error| match error {
                    SmcrSendError::Failed => DeliverError::Failed,
                    SmcrSendError::Range { offset, len, element_len } => {
                        DeliverError::Range { offset, len, dmb_len: element_len }
                    }
                })
            }
        }
    }

    /// Has the way to the peer tested if it has been silent for so long; nothing to do where a device
    /// tells when a peer goes.
    pub(super) fn test(&self, silence: Duration) {
        match self {
            Carrier::D(_) => {}
            Carrier::R(element) => element.test(silence),
        }
    }

    /// Called every second: asks a peer for what it may hold back.
    pub(super) fn probe_peer(&self) {
        match self {
            Carrier::D(_) => {}
            Carrier::R(element) => element.coax(),
        }
    }

    /// Whether the peer's words come only to who polls the reactor.
    #[inline]
    pub(super) fn must_be_polled(&self) -> bool {
        matches!(self, Carrier::R(_))
    }

    /// Whether deliveries fail.
    pub(super) fn has_failed(&self) -> bool {
        match self {
            Carrier::D(dmbs) => dmbs.theirs.dmb().is_failed(),
            Carrier::R(element) => element.has_failed(),
        }
    }

    /// Deliveries fail from now on.
    pub(super) fn fail(&self) {
        match self {
            Carrier::D(dmbs) => dmbs.theirs.dmb().fail(),
            Carrier::R(element) => element.fail(),
        }
    }

    /// This end writes no more, except for the very word that says so: the peer may give its
    /// element to another connection.
    pub(super) fn release(&self) {
        match self {
            Carrier::D(dmbs) => dmbs.theirs.release(),
            Carrier::R(element) => element.release(),
        }
    }

    /// Both ends are done with the own element, `received` bytes of which came from the peer.
    pub(super) fn allow_reuse(&mut self, received: u64) {
        // What lies in front of the ring, and what came behind it.
        let dirty = |head: u32| {
            usize::try_from(received.saturating_add(u64::from(head))).unwrap_or(usize::MAX)
        };
        match self {
            Carrier::D(dmbs) => dmbs.own.allow_reuse(dirty(SMCD_CONTROL_LEN)),
            Carrier::R(element) => element.allow_reuse(dirty(EYE_CATCHER_LEN)),
        }
    }

    /// The own signal line; `None` where every signal is an event, asked for or not.
    #[inline]
    pub(super) fn line(&self) -> Option<Line<'_>> {
        match self {
            Carrier::D(dmbs) => dmbs.own.dmb().line(),
            Carrier::R(_) => None,
        }
    }
}

impl DmbPair {
    fn new(link: SmcdConn) -> DmbPair {
        let SmcdConn { fabric, peer, own, theirs, established } = link;
        let info = SmcdInfo {
            chid: fabric.chid(),
            local_gid: fabric.device().gid(),
            peer_gid: peer.gid(),
            eid: established.eid,
            release: established.terms.release.code(),
            first_contact: established.first_contact,
            local_buffer: own.dmb().len(),
            peer_buffer: theirs.dmb().len(),
            window: theirs.dmb().is_window(),
            peer_host: established.peer_host.and_then(|h| h.hostname.text().map(str::to_owned)),
        };
        DmbPair { theirs, peer, info, own }
    }
}

/// Whom it connects with, for log lines.
impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Carrier::D(dmbs) => dmbs.peer.gid().fmt(f),
            Carrier::R(element) => element.info().link.fmt(f),
        }
    }
}

/// A ring that cannot be, as an error of a call.
pub(super) fn no_ring(error: RingError) -> io::Error {
    io::Error::other(error.to_string())
}
