// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two DMBs of one connection.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use smc_core::wire::clc::CarrierFeatures;

use super::{AttachSlot, OwnBuffer, Peer, PeerBuffer, SmcdConn};
use smc_info::SmcdInfo;

/// The pair of DMBs of one connection.
pub(crate) struct DmbPair {
    pub(crate) theirs: Arc<PeerBuffer>,
    /// This end writes the peer's buffer no more, so another connection may.
    pub(crate) released: AtomicBool,
    pub(crate) peer: Arc<Peer>,
    pub(crate) info: SmcdInfo,
    /// The agreed features of records on TCP, if the connection may continue without its device;
    /// `None`: it may not, or there are no records.
    pub(crate) agreed: Option<CarrierFeatures>,
    // Dropped after `theirs`, which can be detached then.
    _slot: AttachSlot,
    // Dropped last: the buffer returns to its pool after its last user.
    pub(crate) own: OwnBuffer,
}

impl DmbPair {
    /// The pair of an established connection.
    pub(crate) fn new(link: SmcdConn) -> DmbPair {
        let SmcdConn { fabric, peer, own, theirs, slot, established } = link;
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
        let agreed = established.terms.carriers.map(|options| options.features());
        DmbPair { agreed, theirs, released: AtomicBool::new(false), peer, info, _slot: slot, own }
    }
}
