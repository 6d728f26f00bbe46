//! SMC-R over the RNICs of a process.
//!
//! For now nothing but the shape that the rooms above work with: there is no RDMA.

mod outbound;
mod slots;
mod spans;
mod tokens;
mod words;

use std::convert::Infallible;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::connection::Ring;
use thiserror::Error;

use super::facts::{GroupFacts, RnicFacts, SmcRFacts};
use super::source::{News, Source};
use crate::ism::DeliverError;
use crate::sys::OutOfBounds;

/// Which RNICs a process uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Rnics {
    /// None: no SMC-R.
    None,
    /// All that there are. None at all is no error.
    #[default]
    Auto,
    /// Those with these names (as `rxe0` or `mlx5_0`), all ports or one (`mlx5_0/1`).
    Names(Vec<String>),
}

/// How a process does SMC-R.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmcROptions {
    /// Offer and accept version 1 (RFC 7609).
    pub v1: bool,
    /// Offer and accept version 2.
    pub v2: bool,
    /// Links of a link group at most, 1 to 8 (two unless both ends are of release 2.1).
    pub max_links: u8,
    /// Connections of a link group at most, 1 to 255; the group after that is a parallel one.
    pub max_connections: u8,
    /// Write and expect eye catchers at the start of elements (RMB-6); Linux has none.
    pub eye_catcher: bool,
    /// How long a link may be silent before it is tested (TEST LINK); zero: never.
    pub test_link: Duration,
    /// How long a link group outlives its last connection.
    pub idle_group: Duration,
    /// Physical networks: names of network interfaces or RNICs (with port, as `mlx5_0/1`), and the
    /// id of the network that they are on. A connection whose interface is listed uses an RNIC of
    /// the same network; others one whose own interface is that of the connection.
    pub pnet: Vec<(String, String)>,
}

impl Default for SmcROptions {
    fn default() -> SmcROptions {
        SmcROptions {
            v1: true,
            v2: true,
            max_links: 2,
            max_connections: 255,
            eye_catcher: false,
            test_link: Duration::from_secs(30),
            idle_group: Duration::from_secs(600),
            pnet: Vec::new(),
        }
    }
}

/// Why there is no SMC-R.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoRdma {
    /// Nobody asked for it.
    #[error("RDMA is switched off")]
    Off,
    /// libibverbs is not there.
    #[error("no libibverbs")]
    NoLibrary,
    /// There is no RNIC at all.
    #[error("no RNIC")]
    NoDevice,
    /// An RNIC that was asked for by name cannot be used.
    #[error("{name}: {why}")]
    Rnic {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The system has no room for it.
    #[error("no room for RDMA: {0}")]
    System(String),
}

/// The RNICs of a process, and its link groups.
pub(crate) struct RdmaHost(Infallible);

impl RdmaHost {
    /// Opens the RNICs.
    pub(crate) fn open(wanted: &Rnics, _how: &SmcROptions) -> Result<Arc<RdmaHost>, NoRdma> {
        match wanted {
            Rnics::None => Err(NoRdma::Off),
            Rnics::Auto => Err(NoRdma::NoLibrary),
            Rnics::Names(names) => Err(NoRdma::Rnic {
                name: names.first().cloned().unwrap_or_default(),
                why: NoRdma::NoLibrary.to_string(),
            }),
        }
    }

    /// RNIC ports as they are now.
    pub(crate) fn rnics(&self) -> Vec<RnicFacts> {
        match self.0 {}
    }

    /// Link groups as they are now.
    pub(crate) fn groups(&self) -> Vec<GroupFacts> {
        match self.0 {}
    }

    /// Ends the link groups in order and answers nobody any more; the stack is dropped.
    pub(crate) fn shut_down(&self) {
        match self.0 {}
    }
}

impl Source for RdmaHost {
    fn event_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }

    fn arm_interrupts(&self) -> bool {
        match self.0 {}
    }

    fn suppress_interrupts(&self) {
        match self.0 {}
    }

    fn poll_events(&self, _handle: &mut dyn FnMut(News)) -> usize {
        match self.0 {}
    }

    fn is_gone(&self) -> bool {
        match self.0 {}
    }

    fn has_memory(&self) -> bool {
        match self.0 {}
    }

    fn must_be_polled(&self) -> bool {
        true
    }

    fn has_peers(&self) -> bool {
        match self.0 {}
    }

    fn on_timer(&self, _now: Instant) -> Option<Instant> {
        match self.0 {}
    }
}

/// How the LLC side of a handshake went.
pub(crate) enum Contact {
    /// The connection can carry data.
    Done(Element),
    /// A first contact: LLC messages have to be exchanged. Whoever leads the hub moves it on.
    Under(FirstContact),
}

/// A first contact whose LLC messages are under way.
pub(crate) struct FirstContact(Infallible);

impl FirstContact {
    /// What it ended in, once; `None`: not yet. The error breaks the connection: it is too late for
    /// TCP.
    pub(crate) fn result(&mut self) -> Option<Result<Element, String>> {
        match self.0 {}
    }

    /// Becomes readable, for good, when [`FirstContact::result`] has one.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }

    /// When there will be a result at the latest.
    pub(crate) fn deadline(&self) -> Instant {
        match self.0 {}
    }
}

/// Both ends' elements of one SMC-R connection: what a pair of DMBs is to SMC-D.
///
/// Dropped, the own RMB goes back to its pool if [`Element::allow_reuse`] was called, and else is
/// removed from the link group.
pub(crate) struct Element(Infallible);

impl Element {
    /// Under which number [`News::Element`] names it: the own alert token. Unique on the host for as
    /// long as the element lives.
    pub(crate) fn key(&self) -> u32 {
        match self.0 {}
    }

    /// The peer's words as the CDC message that arrived last has them, in the form of SMC-D's
    /// control block: the producer's, then the consumer's with all flags. Stored in this order with
    /// Release, so loaded in the other with Acquire.
    #[inline]
    pub(crate) fn words(&self) -> [u64; 2] {
        match self.0 {}
    }

    /// Copies out of the own element; offsets are those of [`Element::local_ring`]'s spans.
    #[inline]
    pub(crate) fn copy_out(&self, _offset: usize, _into: &mut [u8]) -> Result<(), OutOfBounds> {
        match self.0 {}
    }

    /// The ring that the peer writes.
    pub(crate) fn local_ring(&self) -> Ring {
        match self.0 {}
    }

    /// The ring that this end writes.
    pub(crate) fn peer_ring(&self) -> Ring {
        match self.0 {}
    }

    /// Writes the pieces (offset in the peer's element, bytes) and then sends the words. One thread
    /// at a time calls this, in the order of the stream. It does not wait: what the queue pair has
    /// no room for now follows by itself (the bytes are in the send element until the peer has read
    /// them), a failover included. Words that wait may be replaced by newer ones, except that each
    /// change of flags is told.
    #[inline]
    pub(crate) fn deliver(
        &self,
        _pieces: &[(u32, &[u8])],
        _words: [u64; 2],
        _signal: bool,
    ) -> Result<(), DeliverError> {
        match self.0 {}
    }

    /// Deliveries fail from now on.
    pub(crate) fn fail(&self) {
        match self.0 {}
    }

    /// This end has sent the last words that the peer will get (or is about to): nothing follows
    /// them.
    pub(crate) fn release(&self) {
        match self.0 {}
    }

    /// Both ends are done: the own RMB may serve another connection once its first `dirty` bytes are
    /// zeroed, which happens when this is dropped.
    pub(crate) fn allow_reuse(&mut self, _dirty: usize) {
        match self.0 {}
    }

    /// What was negotiated, and how it travels now.
    pub(crate) fn facts(&self) -> SmcRFacts {
        match self.0 {}
    }
}
