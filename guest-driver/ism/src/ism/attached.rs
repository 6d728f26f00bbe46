// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The paths to attached DMBs, for the device's notices about removed DMBs and departed owners.
//!
//! A notice can precede the registration of the path by the attaching thread. So the table also remembers
//! DMBs removed before their path came.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use virtio_ism_abi::{Gid, Token};

use crate::virtqueue::MovePath;
use ism_sys::{ForkLocks, is_free, lock};

/// Most remembered tokens of DMBs removed before their path was added: more than the threads waiting for an
/// ATTACH.
const MAX_GONE: usize = 64;

/// The paths to peers' DMBs.
#[derive(Debug, Default)]
pub(super) struct Attached(Mutex<Paths>);

#[derive(Debug, Default)]
struct Paths {
    by_token: HashMap<u64, (Gid, Weak<MovePath>)>,
    /// DMBs removed before their path was added, the latest last.
    gone: VecDeque<Token>,
}

impl ForkLocks for Attached {
    fn is_unlocked(&self) -> bool {
        is_free(&self.0)
    }
}

impl Attached {
    /// Adds a path, and fails the path of an already removed DMB. Afterwards the caller checks whether the
    /// owner has left the fabric.
    pub(super) fn add(&self, token: Token, owner: Gid, path: &Arc<MovePath>) {
        let mut paths = lock(&self.0);
        if paths.gone.contains(&token) {
            path.fail();
        }
        paths.by_token.insert(token.0, (owner, Arc::downgrade(path)));
    }

    pub(super) fn remove(&self, token: Token, path: &Arc<MovePath>) {
        let by_token = &mut lock(&self.0).by_token;
        // Another thread may have attached the same token again since.
        if by_token.get(&token.0).is_some_and(|(_, known)| known.as_ptr() == Arc::as_ptr(path)) {
            by_token.remove(&token.0);
        }
    }

    /// Fails the path to a removed DMB.
    pub(super) fn dmb_is_gone(&self, token: Token) {
        let mut paths = lock(&self.0);
        match paths.by_token.get(&token.0) {
            Some((_, path)) => {
                if let Some(path) = path.upgrade() {
                    path.fail();
                }
            }
            None => {
                if paths.gone.len() >= MAX_GONE {
                    paths.gone.pop_front();
                }
                paths.gone.push_back(token);
            }
        }
    }

    /// Fails the paths to the DMBs of a departed peer.
    pub(super) fn peer_is_gone(&self, peer: Gid) {
        for (_, path) in lock(&self.0).by_token.values().filter(|(owner, _)| *owner == peer) {
            if let Some(path) = path.upgrade() {
                path.fail();
            }
        }
    }
}
