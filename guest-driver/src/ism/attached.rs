//! What is attached, so that notices of the device find it: also those that come before the thread that
//! attached has taken note of the answer.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use virtio_ism_abi::{Gid, Token};

use crate::sys::lock;
use crate::virtqueue::MovePath;

/// Tokens that were gone before anybody knew them are remembered, at most so many: more than threads
/// that wait for an ATTACH.
const GONE: usize = 64;

/// The ways to peers' DMBs.
#[derive(Debug, Default)]
pub(super) struct Attached(Mutex<Paths>);

#[derive(Debug, Default)]
struct Paths {
    by_token: HashMap<u64, (Gid, Weak<MovePath>)>,
    /// DMBs that went while nothing was known of them, the last one last.
    gone: VecDeque<Token>,
}

impl Attached {
    /// Takes note of a way. It is marked as failed if its DMB went meanwhile. Whether the owner left is
    /// for the caller to ask, afterwards.
    pub(super) fn add(&self, token: Token, owner: Gid, path: &Arc<MovePath>) {
        let mut paths = lock(&self.0);
        if paths.gone.contains(&token) {
            path.fail();
        }
        paths.by_token.insert(token.0, (owner, Arc::downgrade(path)));
    }

    /// Forgets a way.
    pub(super) fn remove(&self, token: Token, path: &Arc<MovePath>) {
        let by_token = &mut lock(&self.0).by_token;
        // The token may have been attached anew since.
        if by_token.get(&token.0).is_some_and(|(_, known)| known.as_ptr() == Arc::as_ptr(path)) {
            by_token.remove(&token.0);
        }
    }

    /// A DMB is gone.
    pub(super) fn dmb_is_gone(&self, token: Token) {
        let mut paths = lock(&self.0);
        match paths.by_token.get(&token.0) {
            Some((_, path)) => {
                if let Some(path) = path.upgrade() {
                    path.fail();
                }
            }
            None => {
                if paths.gone.len() >= GONE {
                    paths.gone.pop_front();
                }
                paths.gone.push_back(token);
            }
        }
    }

    /// A peer has left.
    pub(super) fn peer_is_gone(&self, peer: Gid) {
        for (_, path) in lock(&self.0).by_token.values().filter(|(owner, _)| *owner == peer) {
            if let Some(path) = path.upgrade() {
                path.fail();
            }
        }
    }
}
