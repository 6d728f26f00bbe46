// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The carrier of a connection's bytes and words: a pair of DMBs, or a pair of SMC-R elements.
//!
//! Both look alike to the connection: an own ring to read, a ring of the peer to write, the peer's two
//! words, and one operation for delivering bytes and the own two words.

use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smc_core::connection::{EYE_CATCHER_LEN, Ring, RingError, SMCD_CONTROL_LEN, Sender};
use smc_core::stream::{last_of, pieces_before};
use smc_core::wire::clc::CarrierFeatures;
use smc_core::wire::cursor::Cursor;
use smc_core::wire::record::Reason;
use virtio_ism_abi::signal::Line;

use crate::reactor::Registration;
use crate::smcd::dmb_pair::DmbPair;
use crate::smcd::{self, SmcdConn};
use crate::smcr::{BufferError, SmcrConn, SmcrSendError};
use smc_info::ConnectionInfo;
use virtio_ism::{CONSUMER_WORD, DeliverError, PRODUCER_WORD};

/// Bytes of an element held back by the sender: one for each link failing in a row before the peer's
/// next acknowledgement.
const RESERVE: u8 = 8;

/// The carrier of a connection.
#[allow(clippy::large_enum_variant, reason = "one per connection, on the heap with it")]
pub(crate) enum Carrier {
    /// SMC-D.
    D(DmbPair),
    /// SMC-R.
    R(SmcrConn),
}

impl Carrier {
    /// The carrier of an established SMC-D connection.
    pub(crate) fn smcd(established: SmcdConn) -> Carrier {
        Carrier::D(DmbPair::new(established))
    }

    /// The carrier of an established SMC-R connection.
    pub(crate) fn smcr(established: SmcrConn) -> Carrier {
        Carrier::R(established)
    }

    /// The ring written by the peer.
    pub(super) fn local_ring(&self) -> Result<Ring, RingError> {
        match self {
            Carrier::D(pair) => Ring::smcd(pair.own.dmb().len()),
            Carrier::R(element) => Ok(element.local_ring()),
        }
    }

    /// The ring written by this end.
    fn peer_ring(&self) -> Result<Ring, RingError> {
        match self {
            Carrier::D(pair) => Ring::smcd(pair.theirs.dmb().len()),
            Carrier::R(element) => Ok(element.peer_ring()),
        }
    }

    /// The negotiated values.
    pub(super) fn info(&self) -> ConnectionInfo {
        match self {
            Carrier::D(pair) => ConnectionInfo::Smcd(pair.info.clone()),
            Carrier::R(element) => ConnectionInfo::Smcr(Box::new(element.info())),
        }
    }

    /// The connection's key in events of the reactor.
    pub(super) fn key(&self) -> u32 {
        match self {
            Carrier::D(pair) => pair.own.dmb().idx(),
            Carrier::R(element) => element.key(),
        }
    }

    /// The connection's registration with its reactor.
    pub(super) fn registration(&self) -> Registration {
        let (group, line, tags) = match self {
            Carrier::D(pair) => {
                let (own, theirs) = (pair.own.dmb(), pair.theirs.dmb());
                let tags = smcd::tags(pair.peer.gid(), theirs.token());
                (own.slab_id(), own.line_index(), Some(tags))
            }
            // RNICs name each lost connection.
            Carrier::R(_) => (None, None, None),
        };
        Registration { key: self.key(), group, line, tags }
    }

    /// Whether earlier reads of the own ring and words were valid. `false`: the memory went with its
    /// device, and the reads may have found zeros.
    #[inline]
    pub(super) fn has_memory(&self) -> bool {
        match self {
            Carrier::D(pair) => pair.own.dmb().has_memory(),
            Carrier::R(_) => true,
        }
    }

    /// Whether the device lives and has reported that the peer left. The processes on a loopback fabric
    /// share a GID, so the loss of a buffer serves as the report there. RNICs report nothing of the
    /// kind: a link fails in the same way whether its peer's process has ended or not.
    pub(super) fn peer_has_left(&self) -> bool {
        match self {
            Carrier::D(pair) => pair.peer.has_left(),
            Carrier::R(_) => false,
        }
    }

    /// Whether the device has carried out or dropped every delivery of the peer, because the peer has
    /// left the device. Unknown on a loopback fabric, and then `false`.
    pub(super) fn brings_no_more(&self) -> bool {
        match self {
            Carrier::D(pair) => pair.info.local_gid != pair.info.peer_gid && pair.peer.has_left(),
            Carrier::R(_) => false,
        }
    }

    /// Whether the device may still report that the peer left, after the loss of the peer's buffer.
    pub(super) fn may_hear_of_peer(&self) -> bool {
        match self {
            Carrier::D(pair) => !pair.own.dmb().is_device_gone() && !self.peer_has_left(),
            Carrier::R(_) => false,
        }
    }

    /// Asks the device whether the peer has left, by a device command.
    pub(super) fn ask_for_peer(&self) {
        if let Carrier::D(pair) = self
            && self.may_hear_of_peer()
        {
            pair.peer.ask_whether_left();
        }
    }

    /// The producer word and the consumer-and-flags word as last stored by the peer. The second is
    /// loaded first, so the producer word is at least as new as the flags.
    #[inline]
    pub(super) fn words(&self) -> [u64; 2] {
        match self {
            Carrier::D(pair) => pair.own.dmb().words(),
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

    /// Clears the failover flag in the words of a peer after a switch of links; `true` if it was set.
    #[cold]
    pub(super) fn take_failover_flag(&self) -> bool {
        match self {
            Carrier::D(_) => false,
            Carrier::R(element) => element.take_failover_flag(),
        }
    }

    /// Copies bytes out of the own buffer.
    #[inline]
    pub(super) fn copy_out(&self, offset: u32, into: &mut [u8]) -> io::Result<()> {
        match self {
            Carrier::D(pair) => {
                pair.own.dmb().memory().copy_out(offset as usize, into).map_err(io::Error::other)
            }
            Carrier::R(element) => element.copy_out(offset as usize, into).map_err(|error| {
                match error {
                    BufferError::Range(range) => io::Error::other(range),
                    // The connection is being reset.
                    BufferError::Overlaid => io::ErrorKind::ConnectionReset.into(),
                }
            }),
        }
    }

    /// Copies the pieces (offset in the peer's buffer, bytes) and then the words to the peer, and with
    /// `signal` signals the peer.
    #[inline]
    pub(super) fn deliver(
        &self,
        pieces: &[(u32, &[u8])],
        words: [u64; 2],
        signal: bool,
    ) -> Result<(), DeliverError> {
        match self {
            Carrier::D(pair) => pair.theirs.dmb().deliver(pieces, words, signal),
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

    /// Whether the peer had to be woken for the last bytes. `None`: there were none since the last
    /// call, or this is not known.
    pub(super) fn found_asleep(&self) -> Option<bool> {
        match self {
            Carrier::D(pair) => pair.theirs.dmb().found_asleep(),
            Carrier::R(_) => None,
        }
    }

    /// Has the path to the peer tested after a silence of this duration. Does nothing for SMC-D,
    /// because the device reports a lost peer.
    pub(super) fn test(&self, silence: Duration) {
        match self {
            Carrier::D(_) => {}
            Carrier::R(element) => element.test(silence),
        }
    }

    /// Asks a peer for an update possibly held back. The connection calls this every second.
    pub(super) fn probe_peer(&self) {
        match self {
            Carrier::D(_) => {}
            Carrier::R(element) => element.probe_peer(),
        }
    }

    /// Stores bytes into the own ring, at this offset of its element: bytes from TCP after the peer's
    /// end of the ring.
    pub(super) fn store(&self, offset: u32, bytes: &[u8]) {
        match self {
            Carrier::D(pair) => {
                let stored = pair.own.dmb().memory().copy_in(offset as usize, bytes);
                debug_assert!(stored.is_ok(), "{stored:?}");
            }
            Carrier::R(element) => element.store(offset, bytes),
        }
    }

    /// Stores the words of a peer after its end of the ring.
    pub(super) fn store_words(&self, [producer, consumer]: [u64; 2]) {
        let pair = match self {
            Carrier::D(pair) => pair,
            Carrier::R(element) => return element.store_words([producer, consumer]),
        };
        // Release, as the peer does: a reader of a word sees the bytes announced by it.
        for (at, word) in [(PRODUCER_WORD, producer), (CONSUMER_WORD, consumer)] {
            if let Ok(place) = pair.own.dmb().memory().atomic_u64(at as usize) {
                place.store(word, Ordering::Release);
            }
        }
    }

    /// Whether both ends have agreed to continue over TCP, with the received bytes known after the loss
    /// of the device or the links: both rings lie in memory mapped by both processes, or the sender has
    /// copies of bytes possibly lost.
    pub(super) fn may_be_outlived(&self) -> bool {
        match self {
            Carrier::D(pair) => pair.agreed.is_some(),
            Carrier::R(element) => element.may_be_outlived(),
        }
    }

    /// Whether both ends have agreed on returns from TCP to a ring.
    pub(super) fn may_return_to_ring(&self) -> bool {
        let agreed = match self {
            Carrier::D(pair) => pair.agreed,
            Carrier::R(element) => element.agreed(),
        };
        agreed.is_some_and(|features| features.contains(CarrierFeatures::RETURN))
    }

    /// Whether the own device is gone.
    pub(super) fn is_device_gone(&self) -> bool {
        match self {
            Carrier::D(pair) => pair.own.dmb().is_device_gone(),
            Carrier::R(_) => false,
        }
    }

    /// Whether a connection with a lost carrier can continue from local memory.
    pub(super) fn can_be_left(&self) -> bool {
        match self {
            Carrier::D(_) => self.has_memory(),
            Carrier::R(element) => element.has_lost_links(),
        }
    }

    /// The reason for the carrier's loss, for reports.
    pub(super) fn reason(&self) -> Reason {
        match self {
            Carrier::D(pair) if pair.own.dmb().is_device_gone() => Reason::DeviceGone,
            Carrier::D(_) => Reason::PeerGone,
            Carrier::R(_) => Reason::LinksGone,
        }
    }

    /// Has the loss of the carrier reported, if the peer has lost it: bytes not arrived by now never
    /// will. A device reports a lost peer by itself.
    pub(super) fn give_up(&self) {
        if let Carrier::R(element) = self {
            element.give_up_links();
        }
    }

    /// Whether delivered words and bytes may never arrive, while copies of the bytes are kept here.
    pub(super) fn keeps_copies(&self) -> bool {
        match self {
            Carrier::D(pair) => !pair.theirs.dmb().is_window(),
            Carrier::R(_) => true,
        }
    }

    /// The last `most` bytes delivered before a cursor of the peer's ring, or the part of them possibly
    /// not arrived. `None`: the peer's ring lacks bytes in the middle.
    ///
    /// Bytes in the window have arrived, with one exception: a restored machine uses its saved copy of
    /// the window, until its driver hears of the lost device. The bytes are still there.
    pub(super) fn last_sent(&self, end: Cursor, most: u32, ring: &Ring) -> Option<Vec<u8>> {
        let pieces = || pieces_before(end, most, ring);
        match self {
            Carrier::D(pair) if pair.theirs.dmb().is_window() => {
                let stored = |offset, into: &mut [u8]| pair.theirs.dmb().copy_stored(offset, into);
                Some(copy_pieces(pieces(), stored).unwrap_or_default())
            }
            Carrier::D(pair) => {
                let pieces = pair.theirs.dmb().unconfirmed()?;
                Some(last_of(&pieces, end, most, ring))
            }
            Carrier::R(element) => {
                copy_pieces(pieces(), |offset, into| element.copy_sent(offset, into))
            }
        }
    }

    /// Protects the own ring from deliveries still being carried out, and from the loss of its memory
    /// with the device, by a copy in its place. Even after the peer has left, a working device carries
    /// out the peer's moves of words alone, behind the last bytes. The caller has the locks of both
    /// sides. `false`: no copy was possible.
    pub(super) fn keep_ring(&self) -> bool {
        let Carrier::D(pair) = self else { return true };
        let kept = pair.own.dmb().keep();
        if let Err(error) = &kept {
            tracing::debug!(peer = %self, %error, "a ring is not kept");
        }
        kept.is_ok()
    }

    /// Whether the own ring stays as long as the connection, even without its device.
    pub(super) fn ring_stays(&self) -> bool {
        match self {
            Carrier::D(pair) => pair.own.dmb().memory_stays(),
            Carrier::R(_) => true,
        }
    }

    /// Whether the peer's words arrive only when a thread polls the reactor.
    #[inline]
    pub(super) fn must_be_polled(&self) -> bool {
        matches!(self, Carrier::R(_))
    }

    /// Whether deliveries fail.
    pub(super) fn has_failed(&self) -> bool {
        match self {
            Carrier::D(pair) => pair.theirs.dmb().is_failed(),
            Carrier::R(element) => element.has_failed(),
        }
    }

    /// Deliveries fail from now on.
    pub(super) fn fail(&self) {
        match self {
            Carrier::D(pair) => pair.theirs.dmb().fail(),
            Carrier::R(element) => element.fail(),
        }
    }

    /// Lets the peer use its buffer for another connection: this end sends at most its last words.
    pub(super) fn release(&self) {
        match self {
            Carrier::D(pair) => {
                if !pair.released.swap(true, Ordering::Relaxed) {
                    pair.theirs.release();
                }
            }
            Carrier::R(element) => element.release(),
        }
    }

    /// Both ends have finished with the own buffer, with `received` bytes written by the peer.
    pub(super) fn allow_reuse(&self, received: u64) {
        // The part before the ring, and the bytes written after it.
        let dirty = |head: u32| {
            usize::try_from(received.saturating_add(u64::from(head))).unwrap_or(usize::MAX)
        };
        match self {
            Carrier::D(pair) => pair.own.allow_reuse(dirty(SMCD_CONTROL_LEN)),
            Carrier::R(element) => element.allow_reuse(dirty(EYE_CATCHER_LEN)),
        }
    }

    /// The own signal line; `None`: every signal becomes an event, armed or not.
    #[inline]
    pub(super) fn line(&self) -> Option<Line<'_>> {
        match self {
            Carrier::D(pair) => pair.own.dmb().line(),
            Carrier::R(_) => None,
        }
    }

    /// The own signal line, if the reactor's poll of lines can see its state.
    #[inline]
    pub(super) fn line_in_slab(&self) -> Option<Line<'_>> {
        match self {
            Carrier::D(pair) => pair.own.dmb().line_in_slab(),
            Carrier::R(_) => None,
        }
    }

    /// The own signal line, if threads may sleep on its armed word.
    #[inline]
    pub(super) fn futex_line(&self) -> Option<Line<'_>> {
        match self {
            Carrier::D(pair) => pair.own.dmb().futex_line(),
            Carrier::R(_) => None,
        }
    }
}

/// Pieces of an element (offset, length), one behind the other. `None`: one of them is missing.
fn copy_pieces(pieces: [(u32, u32); 2], copy: impl Fn(u32, &mut [u8]) -> bool) -> Option<Vec<u8>> {
    let mut bytes = vec![0; pieces.iter().map(|(_, len)| *len as usize).sum()];
    let mut into = bytes.as_mut_slice();
    for (offset, len) in pieces {
        let (now, later) = into.split_at_mut_checked(len as usize)?;
        if !copy(offset, now) {
            return None;
        }
        into = later;
    }
    Some(bytes)
}

/// The peer, for log lines.
impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Carrier::D(pair) => pair.peer.gid().fmt(f),
            Carrier::R(element) => element.info().link.fmt(f),
        }
    }
}

/// The error of a call for an invalid ring.
pub(super) fn no_ring(error: RingError) -> io::Error {
    io::Error::other(error.to_string())
}
