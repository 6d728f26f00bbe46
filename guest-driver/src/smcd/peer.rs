//! Peers: what is known of one GID on one fabric, and the buffers shared with it.
//!
//! A connection takes an own DMB from its peer's pool and gives it back when both sides have
//! closed. Token, registration and attachment outlive the connection, so that the next one to the
//! same peer costs no device command.
//!
//! Rules kept here: RMB-33.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use smc_core::handshake::{Dmbe, Terms};
use smc_core::wire::ids::{DmbToken, LinkId, SizeCode};
use virtio_ism_abi::{Gid, Token};

use crate::ism::{IsmDevice, IsmError, OwnDmb, PeerDmb};
use rustc_hash::FxHashMap;

/// Own DMBs of one size that a peer's pool keeps at most.
const POOL_MAX: usize = 256;

/// A peer.
pub(crate) struct Peer {
    gid: Gid,
    link: LinkId,
    device: Arc<IsmDevice>,
    live: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    /// What a first contact agreed on; `None` before it.
    terms: Option<Terms>,
    /// The peer's number of the logical link.
    peer_link: Option<LinkId>,
    free: Vec<OwnDmb>,
    attached: FxHashMap<u64, Arc<PeerBuffer>>,
    last_used: Instant,
    /// The peer left the fabric or forgot us: nothing goes back into the pool.
    gone: bool,
}

/// A peer's DMB that we write, and whether a connection does so right now.
pub(crate) struct PeerBuffer {
    dmb: PeerDmb,
    busy: AtomicBool,
}

impl PeerBuffer {
    /// The DMB.
    #[inline]
    pub(crate) fn dmb(&self) -> &PeerDmb {
        &self.dmb
    }

    /// This side writes no more: the peer may give the DMB to another connection.
    pub(crate) fn release(&self) {
        self.busy.store(false, Ordering::Release);
    }
}

/// An own DMB in use by a connection. Dropped, it is unregistered, unless it was allowed back into
/// the pool.
pub(crate) struct OwnBuffer {
    dmb: Option<OwnDmb>,
    peer: Weak<Peer>,
    /// Bytes from the start that may be other than zero, if it may be reused.
    dirty: Option<usize>,
}

impl OwnBuffer {
    /// The DMB.
    #[inline]
    #[allow(clippy::unwrap_used, reason = "taken only by drop")]
    pub(crate) fn dmb(&self) -> &OwnDmb {
        self.dmb.as_ref().unwrap()
    }

    /// How it is told to the peer.
    pub(crate) fn dmbe(&self) -> Dmbe {
        let dmb = self.dmb();
        Dmbe {
            token: DmbToken(dmb.token().0),
            index: 0,
            size: SizeCode::at_least(u64::from(dmb.len())).unwrap_or(SizeCode::MIN),
        }
    }

    /// Both sides are done with it. The first `dirty` bytes were written.
    pub(crate) fn allow_reuse(&mut self, dirty: usize) {
        self.dirty = Some(dirty);
    }
}

impl Drop for OwnBuffer {
    fn drop(&mut self) {
        let Some(dmb) = self.dmb.take() else { return };
        let Some(peer) = self.peer.upgrade() else { return };
        peer.live.fetch_sub(1, Ordering::Relaxed);
        let Some(dirty) = self.dirty else { return };
        // No byte of this connection is shown to the next one (SEC-8), and its control block starts
        // at zero.
        let memory = dmb.memory();
        if memory.zero(0, dirty.min(memory.len())).is_err() {
            return;
        }
        peer.put_back(dmb);
    }
}

impl Peer {
    pub(crate) fn new(gid: Gid, link: LinkId, device: Arc<IsmDevice>) -> Arc<Peer> {
        let state = State {
            terms: None,
            peer_link: None,
            free: Vec::new(),
            attached: FxHashMap::default(),
            last_used: Instant::now(),
            gone: false,
        };
        let (live, state) = (AtomicUsize::new(0), Mutex::new(state));
        Arc::new(Peer { gid, link, device, live, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who it is.
    pub(crate) fn gid(&self) -> Gid {
        self.gid
    }

    /// Our number of the logical link.
    pub(crate) fn link(&self) -> LinkId {
        self.link
    }

    /// What the first contact agreed on; `None` before it.
    pub(crate) fn terms(&self) -> Option<Terms> {
        self.state().terms
    }

    /// The peer's number of the logical link.
    pub(crate) fn peer_link(&self) -> Option<LinkId> {
        self.state().peer_link
    }

    /// A handshake with this peer was completed.
    pub(crate) fn established(&self, terms: Terms, peer_link: LinkId) {
        let mut state = self.state();
        state.terms = Some(terms);
        state.peer_link = Some(peer_link);
        state.last_used = Instant::now();
    }

    /// An own DMB of `len` bytes that this peer may write, from the pool if there is one.
    pub(crate) fn take(self: &Arc<Self>, len: u32) -> Result<OwnBuffer, IsmError> {
        let pooled = {
            let mut state = self.state();
            state.last_used = Instant::now();
            let at = state.free.iter().rposition(|dmb| dmb.len() == len);
            at.map(|at| state.free.swap_remove(at))
        };
        let dmb = match pooled {
            Some(dmb) => dmb,
            // A line of its own: a sleeping connection is woken for itself alone.
            None => self.device.register(self.gid, len, next_wait_group())?,
        };
        self.live.fetch_add(1, Ordering::Relaxed);
        Ok(OwnBuffer { dmb: Some(dmb), peer: Arc::downgrade(self), dirty: None })
    }

    fn put_back(&self, dmb: OwnDmb) {
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

    /// The peer's DMB, attached now or before, for one connection.
    ///
    /// # Errors
    /// It cannot be attached, or is not the peer's. `Ok(None)`: a connection of ours still writes it,
    /// so the peer has no right to offer it again, or it names an element beyond the DMB.
    pub(crate) fn attach(&self, theirs: Dmbe) -> Result<Option<Arc<PeerBuffer>>, IsmError> {
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
                let buffer = Arc::new(PeerBuffer { dmb, busy: AtomicBool::new(false) });
                self.state().attached.insert(token, buffer.clone());
                if buffer.dmb.is_failed() {
                    // Gone already: nobody will say so again.
                    self.forget_token(Token(token));
                }
                buffer
            }
        };
        let free =
            buffer.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        Ok(free.then_some(buffer))
    }

    /// Drops the attachment of a DMB that is gone.
    pub(crate) fn forget_token(&self, token: Token) -> Option<Arc<PeerBuffer>> {
        self.state().attached.remove(&token.0)
    }

    /// The logical link is no more: the next connection is a first contact (CLC-50).
    pub(crate) fn forget_link(&self) {
        let mut state = self.state();
        state.terms = None;
        state.peer_link = None;
    }

    /// The peer left: its buffers are of no use. Unregistering takes device commands, so the caller
    /// drops what this returns where that does not matter.
    #[must_use = "dropping this talks to the device"]
    pub(crate) fn take_resources(&self) -> impl Send + use<> {
        let mut state = self.state();
        state.gone = true;
        state.terms = None;
        (std::mem::take(&mut state.free), std::mem::take(&mut state.attached))
    }

    /// Connections now.
    pub(crate) fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Own DMBs in the pool.
    pub(crate) fn pooled(&self) -> usize {
        self.state().free.len()
    }

    /// Since when it has had no connection; `None` while it has one.
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
