// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Both ends' elements of one connection.

use std::sync::Arc;
use std::time::Duration;

use ism_sys::OnceBox;
use smc_core::connection::Ring;
use smc_core::handshake::EstablishedR;
use smc_core::wire::clc::CarrierFeatures;

use super::buffers::{BufferError, Rmb};
use super::endpoint::{Endpoint, SmcrSendError};
use super::group::Group;
use super::groups::LinkGroups;
use super::inbox::Input;
use super::info;
use super::options::ring;
use smc_info::SmcrInfo;

/// Both ends' elements of one SMC-R connection, the counterpart of a pair of DMBs in SMC-D.
///
/// The drop returns the own RMB to its pool if [`SmcrConn::allow_reuse`] was called, and else removes
/// the RMB from the link group.
pub struct SmcrConn {
    groups: Arc<LinkGroups>,
    group: Arc<Group>,
    endpoint: Arc<Endpoint>,
    rmb: Arc<Rmb>,
    established: EstablishedR,
    eye_catcher: bool,
    /// Bytes from the start with values possibly other than zero; set if the RMB may be reused.
    dirty: OnceBox<usize>,
}

impl SmcrConn {
    pub(crate) fn new(
        groups: Arc<LinkGroups>,
        group: Arc<Group>,
        endpoint: Arc<Endpoint>,
        rmb: Arc<Rmb>,
        established: EstablishedR,
    ) -> SmcrConn {
        let eye_catcher = group.shared().options.eye_catcher;
        SmcrConn { groups, group, endpoint, rmb, established, eye_catcher, dirty: OnceBox::new() }
    }

    /// The key in [`ReactorEvent::Arrived`](crate::reactor::source::ReactorEvent::Arrived): the own
    /// alert token. Unique in the process for as long as the element lives.
    pub(crate) fn key(&self) -> u32 {
        self.endpoint.token()
    }

    /// The peer's words of the CDC message taken last, in the form of SMC-D's control block: the
    /// producer's, then the consumer's with all flags. Both are of one message.
    #[inline]
    pub(crate) fn words(&self) -> [u64; 2] {
        self.endpoint.words().load()
    }

    /// Removes the failover mark (F) of the peer from the words. `true`: the mark was set, and the
    /// peer's last message on the old link may be lost.
    pub(crate) fn take_failover_flag(&self) -> bool {
        self.endpoint.words().take_failover_flag()
    }

    /// Copies out of the own element, only read by this end (RMB-11); offsets are those of
    /// [`SmcrConn::local_ring`]'s spans.
    ///
    /// # Errors
    /// The piece does not lie in the element, or the peer has written over the eye catcher.
    #[inline]
    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), BufferError> {
        let result = self.rmb.copy_out(offset, into);
        if result == Err(BufferError::Overlaid) {
            self.overlaid();
        }
        result
    }

    /// The peer has written over the eye catcher: the connection is reset (RMB-8).
    #[cold]
    fn overlaid(&self) {
        if !self.endpoint.has_failed() {
            tracing::warn!(connection = self.key(), "the eye catcher of an element is gone: reset");
            self.group.fail_connection(&self.endpoint);
        }
    }

    /// The ring written by the peer.
    pub(crate) fn local_ring(&self) -> Ring {
        ring(self.rmb.buffer().len(), self.eye_catcher)
    }

    /// The ring written by this end.
    pub(crate) fn peer_ring(&self) -> Ring {
        ring(self.established.peer.size.bytes(), self.eye_catcher)
    }

    /// Writes the pieces (offset in the peer's element, bytes) and then sends the words. One thread at
    /// a time calls this, in the order of the stream. The call does not wait: pieces and words without
    /// room in the queue pair follow later (the send buffer keeps the bytes until the peer has read
    /// them), a failover included. Waiting words are replaced by newer ones; a receiver sees flags and
    /// cursors of one message together, so nothing is lost.
    ///
    /// # Errors
    /// A piece does not lie in the peer's element, or the connection cannot go on.
    #[inline]
    pub(crate) fn deliver(
        &self,
        pieces: &[(u32, &[u8])],
        words: [u64; 2],
        signal: bool,
    ) -> Result<(), SmcrSendError> {
        if let Some(congestion) = self.endpoint.deliver(pieces, words, signal)? {
            self.group.shared().make_room(&self.endpoint, &congestion);
        }
        Ok(())
    }

    /// Whether the connection cannot go on.
    pub(crate) fn has_failed(&self) -> bool {
        self.endpoint.has_failed()
    }

    /// Tests the link after a silence of this duration (RFC 7609 section 4.5.3).
    pub(crate) fn test(&self, silence: Duration) {
        let Some(link) = self.endpoint.link() else { return };
        let (key, last_receipt) = (link.key(), link.take_last_receipt());
        self.group.with(|machine, now| {
            if let Some(last_receipt) = last_receipt {
                machine.handle_received(key, last_receipt);
            }
            machine.handle_keepalive(key, silence, now);
        });
        self.group.shared().timers_changed();
    }

    /// Asks for the cursor of a peer possibly holding back bytes since a failover. The helper thread
    /// calls this every second.
    pub(crate) fn probe_peer(&self) {
        if let Some(congestion) = self.endpoint.probe_peer() {
            self.group.shared().make_room(&self.endpoint, &congestion);
        }
    }

    /// Whether both ends have agreed to go on over TCP when no link is left.
    pub(crate) fn may_be_outlived(&self) -> bool {
        self.agreed().is_some()
    }

    /// The agreed features of records on TCP; `None`: no records.
    pub(crate) fn agreed(&self) -> Option<CarrierFeatures> {
        Some(self.group.terms()?.carriers?.features())
    }

    /// Whether no link is left.
    pub(crate) fn has_lost_links(&self) -> bool {
        self.endpoint.has_lost_links()
    }

    /// Gives up the links of the group after the peer has: bytes not yet arrived never will. Each
    /// connection of the group gets an event later.
    pub(crate) fn give_up_links(&self) {
        self.group.put(Input::PeerGaveUp);
    }

    /// Copies sent bytes out of the send buffer, from an offset in the peer's element on. `false`: the
    /// range is not in the send buffer.
    pub(crate) fn copy_sent(&self, offset: u32, into: &mut [u8]) -> bool {
        self.endpoint.copy_sent(offset, into)
    }

    /// Stores bytes received over TCP into the own element, as the peer would.
    pub(crate) fn store(&self, offset: u32, bytes: &[u8]) {
        let stored = self.rmb.buffer().memory().copy_in(offset as usize, bytes);
        debug_assert!(stored.is_ok(), "{stored:?}");
    }

    /// Stores the words of a peer now using TCP.
    pub(crate) fn store_words(&self, words: [u64; 2]) {
        self.endpoint.words().put(words);
    }

    /// Deliveries fail from now on.
    pub(crate) fn fail(&self) {
        self.endpoint.fail();
    }

    /// This end has sent the last words for the peer, or is about to: nothing follows.
    pub(crate) fn release(&self) {
        self.endpoint.release();
    }

    /// Both ends are done: the own RMB may serve another connection once its first `dirty` bytes are
    /// zeroed, in the drop of this value.
    pub(crate) fn allow_reuse(&self, dirty: usize) {
        let _ = self.dirty.set(dirty);
    }

    /// The negotiated values, and the present path.
    pub(crate) fn info(&self) -> SmcrInfo {
        let rmb = self.rmb.buffer();
        info::connection(&self.group, &self.endpoint, rmb, &self.established, self.peer_ring())
    }
}

impl Drop for SmcrConn {
    fn drop(&mut self) {
        self.endpoint.release();
        // Writes of the peer on a link no longer in use may still be under way (LG-32).
        let dirty = self.dirty.get().copied().filter(|_| !self.endpoint.has_moved());
        self.group.release_rmb(&self.rmb, dirty);
        self.groups.close(self.group.clone(), self.endpoint.clone());
    }
}
