// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC-D over a virtio-ism device: fabrics, their peers, and the buffers shared with them.

pub(crate) mod attachments;
pub(crate) mod claim;
pub(crate) mod dmb_pair;
mod fabric;
pub(crate) mod peer;
mod source;

use std::sync::Arc;

use smc_core::handshake::Established;

pub(crate) use attachments::AttachSlot;
pub(crate) use fabric::{DeferredDrop, Fabric, Fabrics};
pub(crate) use peer::{OwnBuffer, Peer, PeerBuffer};
pub(crate) use source::{DeviceUser, SmcdSource, tags};

/// The parts of an established SMC-D connection.
pub struct SmcdConn {
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) peer: Arc<Peer>,
    pub(crate) own: OwnBuffer,
    pub(crate) theirs: Arc<PeerBuffer>,
    pub(crate) slot: AttachSlot,
    pub(crate) established: Established,
}

impl SmcdConn {
    /// Notes the terms of the handshake, valid for later connections with the peer.
    pub(crate) fn note_terms(&self) {
        self.peer.established(self.established.terms, self.established.peer_link);
    }
}
