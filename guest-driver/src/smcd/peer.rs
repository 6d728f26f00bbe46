// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer: one GID on one fabric, and the buffers shared with it.
//!
//! A connection takes an own DMB from its peer's pool, and returns it when both sides have closed.
//! Token, registration and attachment outlive the connection, so the next connection to the same peer
//! needs no device command.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;

use rustc_hash::FxHashMap;
use smc_core::handshake::{Dmbe, Terms};
use smc_core::wire::claim::{CLAIM_CONNECTION, CLAIM_LEN, CLAIM_WORD, Claim};
use smc_core::wire::ids::{DmbToken, LinkId, SizeCode};
use virtio_ism_abi::command::Op;
use virtio_ism_abi::{Gid, Status, Token};

use super::attachments::{AttachSlot, Attachments};
use ism_sys::{ForkLocks, OnceBox, is_free, lock};
use virtio_ism::{IsmDevice, IsmError, OwnDmb, PeerDmb};

/// Most own DMBs of one size in the pool of a peer.
const POOL_MAX: usize = 256;
/// Bytes of own DMBs in use on a fabric for each halving of the next length. A program with thousands
/// of connections goes through their DMBs in turn, and bytes beyond the caches have to come from
/// memory; the first time, the kernel has to map each page at both ends.
const HALVE_EACH: u64 = 8 << 20;

/// A peer.
pub(crate) struct Peer {
    gid: Gid,
    link: LinkId,
    device: Arc<IsmDevice>,
    in_use: DmbBytes,
    attachments: Attachments,
    live: AtomicUsize,
    state: Mutex<State>,
}

/// Bytes of own DMBs in use by connections now, for every peer of a fabric.
#[derive(Clone, Debug, Default)]
pub(super) struct DmbBytes(Arc<AtomicU64>);

impl DmbBytes {
    /// The length of the next DMB, where `wanted` is configured: half as long for each share in use,
    /// but not below the minimum of CLC.
    fn len_of_next(&self, wanted: u32) -> u32 {
        let halvings = self.0.load(Ordering::Relaxed) / HALVE_EACH;
        let shorter = wanted.checked_shr(halvings.try_into().unwrap_or(u32::MAX)).unwrap_or(0);
        shorter.max(SizeCode::MIN.bytes()).min(wanted)
    }

    fn add(&self, len: u32) {
        self.0.fetch_add(len.into(), Ordering::Relaxed);
    }

    fn remove(&self, len: u32) {
        self.0.fetch_sub(len.into(), Ordering::Relaxed);
    }
}

struct State {
    /// The terms of the first contact; `None` before it.
    terms: Option<Terms>,
    /// The peer's number of the logical link.
    peer_link: Option<LinkId>,
    free: Vec<OwnDmb>,
    attached: FxHashMap<u64, Arc<PeerBuffer>>,
    last_used: Instant,
    /// The peer has left the fabric: no DMB returns to the pool.
    gone: bool,
}

/// A peer's DMB, marked while one of our connections writes it.
pub(crate) struct PeerBuffer {
    dmb: PeerDmb,
    busy: AtomicBool,
}

impl PeerBuffer {
    fn new(dmb: PeerDmb, busy: bool) -> PeerBuffer {
        PeerBuffer { dmb, busy: AtomicBool::new(busy) }
    }

    /// The DMB.
    #[inline]
    pub(crate) fn dmb(&self) -> &PeerDmb {
        &self.dmb
    }

    /// Takes the client's claim of the DMB, if this one is the claim.
    fn take_claim(&self, claim: &Claim) -> bool {
        let Some(word) = self.dmb.shared_word(CLAIM_WORD) else { return false };
        let now = word.load(Ordering::Acquire);
        let mut connection = [0; CLAIM_LEN];
        if now != claim.open()
            || !self.dmb.copy_stored(CLAIM_CONNECTION, &mut connection)
            || !claim.is_open_in(now, &connection)
            || self.busy.swap(true, Ordering::Acquire)
        {
            return false;
        }
        let is_taken =
            word.compare_exchange(now, claim.taken(), Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !is_taken {
            self.release();
        }
        is_taken
    }

    /// The DMB's description in CLC.
    pub(crate) fn dmbe(&self) -> Dmbe {
        dmbe(self.dmb.token(), self.dmb.len())
    }

    /// This side writes no more, so the peer may use the DMB for another connection.
    pub(crate) fn release(&self) {
        self.busy.store(false, Ordering::Release);
    }
}

/// An own DMB in use by a connection. Its drop unregisters the DMB, or returns it to the pool after
/// [`OwnBuffer::allow_reuse`].
pub(crate) struct OwnBuffer {
    dmb: Option<OwnDmb>,
    in_use: DmbBytes,
    peer: Weak<Peer>,
    /// Bytes from the start with values possibly other than zero; unset: the DMB must not be used
    /// again.
    dirty: OnceBox<usize>,
}

impl OwnBuffer {
    /// The DMB.
    #[inline]
    #[allow(clippy::unwrap_used, reason = "taken only by drop")]
    pub(crate) fn dmb(&self) -> &OwnDmb {
        self.dmb.as_ref().unwrap()
    }

    /// The DMB's description for the peer.
    pub(crate) fn dmbe(&self) -> Dmbe {
        dmbe(self.dmb().token(), self.dmb().len())
    }

    /// Both sides have finished with the DMB, and the first `dirty` bytes were written.
    pub(crate) fn allow_reuse(&self, dirty: usize) {
        let _ = self.dirty.set(dirty);
    }
}

/// The description of a DMB with one element.
fn dmbe(token: Token, len: u32) -> Dmbe {
    let size = SizeCode::at_least(u64::from(len)).unwrap_or(SizeCode::MIN);
    Dmbe { token: DmbToken(token.0), index: 0, size }
}

impl Drop for OwnBuffer {
    fn drop(&mut self) {
        let Some(dmb) = self.dmb.take() else { return };
        self.in_use.remove(dmb.len());
        let Some(peer) = self.peer.upgrade() else { return };
        peer.live.fetch_sub(1, Ordering::Relaxed);
        // The kept copy is not the memory written by the peer.
        let Some(&dirty) = self.dirty.get().filter(|_| !dmb.is_kept()) else { return };
        // The next connection must not see a byte of this one (SEC-8), and its control block starts at
        // zero. A claim is behind the control block.
        let memory = dmb.memory();
        let dirty = dirty.max(CLAIM_CONNECTION as usize + CLAIM_LEN);
        if memory.zero(0, dirty.min(memory.len())).is_err() {
            return;
        }
        peer.return_to_pool(dmb);
    }
}

impl ForkLocks for Peer {
    fn is_unlocked(&self) -> bool {
        is_free(&self.state)
    }
}

impl Peer {
    pub(super) fn new(
        gid: Gid,
        link: LinkId,
        device: Arc<IsmDevice>,
        (in_use, attachments): (DmbBytes, Attachments),
    ) -> Arc<Peer> {
        let state = State {
            terms: None,
            peer_link: None,
            free: Vec::new(),
            attached: FxHashMap::default(),
            last_used: Instant::now(),
            gone: false,
        };
        let (live, state) = (AtomicUsize::new(0), Mutex::new(state));
        Arc::new(Peer { gid, link, device, in_use, attachments, live, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn gid(&self) -> Gid {
        self.gid
    }

    /// Our number of the logical link.
    pub(crate) fn link(&self) -> LinkId {
        self.link
    }

    /// The terms of the first contact; `None` before it.
    pub(crate) fn terms(&self) -> Option<Terms> {
        self.state().terms
    }

    /// The peer's number of the logical link.
    pub(crate) fn peer_link(&self) -> Option<LinkId> {
        self.state().peer_link
    }

    /// Notes the result of a completed handshake with this peer.
    pub(crate) fn established(&self, terms: Terms, peer_link: LinkId) {
        let mut state = self.state();
        state.terms = Some(terms);
        state.peer_link = Some(peer_link);
        state.last_used = Instant::now();
    }

    /// An own DMB of `wanted` bytes, writable by this peer only (RMB-33), from the pool if possible.
    /// Shorter if many are in use.
    ///
    /// # Errors
    /// The device refuses to register another one, or is gone.
    pub(crate) fn take(self: &Arc<Self>, wanted: u32) -> Result<OwnBuffer, IsmError> {
        if let Some(pooled) = self.take_pooled(wanted) {
            return Ok(pooled);
        }
        let len = self.in_use.len_of_next(wanted);
        // A wait group of its own: a signal wakes this connection and no other.
        Ok(self.own(self.device.register(self.gid, len, next_wait_group())?))
    }

    /// A DMB of the pool, by the rules of [`Peer::take`].
    pub(super) fn take_pooled(self: &Arc<Self>, wanted: u32) -> Option<OwnBuffer> {
        let len = self.in_use.len_of_next(wanted);
        let pooled = {
            let mut state = self.state();
            state.last_used = Instant::now();
            let at = state.free.iter().rposition(|dmb| (len..=wanted).contains(&dmb.len()))?;
            state.free.swap_remove(at)
        };
        Some(self.own(pooled))
    }

    fn own(self: &Arc<Self>, dmb: OwnDmb) -> OwnBuffer {
        self.live.fetch_add(1, Ordering::Relaxed);
        self.in_use.add(dmb.len());
        let in_use = self.in_use.clone();
        OwnBuffer { dmb: Some(dmb), in_use, peer: Arc::downgrade(self), dirty: OnceBox::new() }
    }

    /// Takes the DMB claimed by the peer as a client of a connection.
    pub(crate) fn take_claim(&self, claim: &Claim) -> Option<Arc<PeerBuffer>> {
        let state = self.state();
        let named = state.attached.iter().filter(|(token, _)| claim.may_be_for(DmbToken(**token)));
        let mut usable = named.filter(|(_, buffer)| !buffer.dmb.is_failed());
        usable.find(|(_, buffer)| buffer.take_claim(claim)).map(|(_, buffer)| buffer.clone())
    }

    fn return_to_pool(&self, dmb: OwnDmb) {
        let mut state = self.state();
        state.last_used = Instant::now();
        let same = state.free.iter().filter(|other| other.len() == dmb.len()).count();
        if !state.gone && same < POOL_MAX {
            state.free.push(dmb);
            return;
        }
        drop(state);
        drop(dmb);
    }

    /// A slot for a DMB of the peer, to be taken before the last message with a fallback to TCP.
    /// `None`: connections already write the most DMBs allowed by the device.
    pub(crate) fn attach_slot(&self) -> Option<AttachSlot> {
        self.attachments.take()
    }

    /// Detaches the DMBs not written by any connection. The device has no place for another one.
    pub(super) fn detach_idle(&self) {
        let mut idle = Vec::new();
        self.state().attached.retain(|_, buffer| {
            let is_idle = Arc::strong_count(buffer) == 1;
            if is_idle {
                idle.push(buffer.clone());
            }
            !is_idle
        });
        // Dropped here, without the lock: each is a device command.
    }

    /// The peer's DMB for one connection, attached now or before. `Ok(None)`: the peer must not offer
    /// the DMB, because a connection of ours still writes it, or its index lies beyond the DMB.
    ///
    /// # Errors
    /// The DMB cannot be attached, or belongs to another peer.
    pub(super) fn attach(&self, theirs: Dmbe) -> Result<Option<Arc<PeerBuffer>>, IsmError> {
        // The DMB is as long as one element, so there is no other.
        if theirs.index != 0 {
            return Ok(None);
        }
        let token = theirs.token.0;
        let len = theirs.size.bytes();
        let known = self.state().attached.get(&token).cloned();
        let buffer = match known {
            Some(buffer) if !buffer.dmb.is_failed() && buffer.dmb.len() == len => buffer,
            _ => {
                let dmb = self.device.attach(Token(token), len)?;
                if dmb.owner() != self.gid {
                    return Err(IsmError::PeerOwner { got: dmb.owner(), expected: self.gid });
                }
                let buffer = Arc::new(PeerBuffer::new(dmb, false));
                self.state().attached.insert(token, buffer.clone());
                if buffer.dmb.is_failed() {
                    // The DMB_GONE record has come already, and there is no other.
                    self.remove_attachment(Token(token));
                }
                buffer
            }
        };
        let free =
            buffer.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        Ok(free.then_some(buffer))
    }

    /// Asks the device whether the peer has left. Without a reliable answer for peers on a loopback
    /// fabric: they share a GID, and any of them may have left.
    pub(crate) fn ask_whether_left(&self) -> bool {
        if self.gid == self.device.gid() {
            return true;
        }
        let left = matches!(self.device.query_gid(self.gid), Ok(None));
        if left {
            self.device.note_left(self.gid);
        }
        left
    }

    /// Whether the device lives and has reported that the peer left. Sends no command. On a loopback
    /// fabric, any peer with the same GID may be meant.
    pub(crate) fn has_left(&self) -> bool {
        !self.device.is_gone() && (self.gid == self.device.gid() || self.device.has_left(self.gid))
    }

    /// The result of [`Peer::attach`] for a peer possibly already writing into our DMB. If the peer has
    /// left since, or our device is gone or about to go, the peer's own DMB cannot be attached any
    /// more. Bytes already written are still to be read, and the connection continues over TCP if both
    /// ends support this.
    ///
    /// # Errors
    /// As [`Peer::attach`].
    pub(super) fn or_gone(
        &self,
        theirs: Dmbe,
        attached: Result<Option<Arc<PeerBuffer>>, IsmError>,
    ) -> Result<Option<Arc<PeerBuffer>>, IsmError> {
        let is_gone = match &attached {
            Ok(_) => false,
            Err(IsmError::Refused { op: Op::Attach, status: Status::Enoent }) => {
                self.device.is_gone() || self.ask_whether_left()
            }
            // The device is about to go, and refuses new work.
            Err(IsmError::Refused { op: Op::Attach, status: Status::Estate }) => true,
            Err(_) => self.device.is_gone(),
        };
        if !is_gone {
            return attached;
        }
        let (token, len) = (Token(theirs.token.0), theirs.size.bytes());
        let dmb = self.device.gone_dmb(token, len, self.gid)?;
        Ok(Some(Arc::new(PeerBuffer::new(dmb, true))))
    }

    /// Removes and returns the attachment of a lost DMB.
    pub(crate) fn remove_attachment(&self, token: Token) -> Option<Arc<PeerBuffer>> {
        self.state().attached.remove(&token.0)
    }

    /// Ends the logical link, so the next connection is a first contact (CLC-50).
    pub(crate) fn reset_link(&self) {
        let mut state = self.state();
        state.terms = None;
        state.peer_link = None;
    }

    /// Takes the buffers of a departed peer. Their drop sends device commands, so the caller drops them
    /// on a thread allowed to block.
    #[must_use = "its drop sends device commands"]
    pub(crate) fn take_resources(&self) -> impl Send + use<> {
        let mut state = self.state();
        state.gone = true;
        state.terms = None;
        (std::mem::take(&mut state.free), std::mem::take(&mut state.attached))
    }

    /// Number of connections now.
    pub(crate) fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Number of own DMBs in the pool.
    pub(crate) fn pooled(&self) -> usize {
        self.state().free.len()
    }

    /// The beginning of the time without a connection; `None` while there is one.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        (self.live() == 0).then_some(state.last_used)
    }
}

fn next_wait_group() -> u16 {
    use std::sync::atomic::AtomicU16;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: RMB-34.
    #[test]
    fn many_connections_get_shorter_buffers_and_few_get_what_is_configured() {
        let in_use = DmbBytes::default();
        let mut lengths = Vec::new();
        for _ in 0..10_000 {
            let len = in_use.len_of_next(64 << 10);
            in_use.add(len);
            lengths.push(len);
        }
        let of = |len: u32| lengths.iter().filter(|other| **other == len).count();
        assert_eq!([of(64 << 10), of(32 << 10), of(16 << 10)], [128, 256, 10_000 - 384]);
        assert!(lengths.is_sorted_by(|one, other| one >= other));
        lengths.iter().for_each(|len| in_use.remove(*len));
        assert_eq!(in_use.len_of_next(1 << 20), 1 << 20);
    }

    #[test]
    fn no_buffer_is_shorter_than_a_size_code_can_say() {
        let in_use = DmbBytes::default();
        in_use.0.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(in_use.len_of_next(1 << 20), 16 << 10);
        assert_eq!(in_use.len_of_next(16 << 10), 16 << 10);
    }
}
