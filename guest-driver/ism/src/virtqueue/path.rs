// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way to one DMB of a peer through a move queue.

use std::sync::atomic::{AtomicU16, Ordering};

use virtio_ism_abi::{Status, Token};

/// The way to one DMB of a peer through the device: the DMB's token, and the outcome of its moves and kicks.
///
/// Completions come after the post has returned. The queue notes a refusal here for the next delivery.
#[derive(Debug)]
pub struct MovePath {
    token: Token,
    queue: u16,
    slot: u32,
    failure: AtomicU16,
}

/// `MovePath::failure` if the driver failed the path itself: not the code of any status.
const FAILED_LOCALLY: u16 = u16::MAX;

impl MovePath {
    pub(crate) fn new(token: Token, queue: u16, slot: u32) -> MovePath {
        MovePath { token, queue, slot, failure: AtomicU16::new(0) }
    }

    /// The DMB's token.
    pub fn token(&self) -> Token {
        self.token
    }

    pub(crate) fn queue(&self) -> u16 {
        self.queue
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    /// Whether the DMB can no longer be written: [`fail`](Self::fail) was called, or the device
    /// refused a move or kick.
    #[inline]
    pub fn is_failed(&self) -> bool {
        // Relaxed: a hint to stop further deliveries, guarding no data.
        self.failure.load(Ordering::Relaxed) != 0
    }

    /// The status of the failed move, if any.
    pub fn refusal(&self) -> Option<Status> {
        match self.failure.load(Ordering::Relaxed) {
            0 | FAILED_LOCALLY => None,
            code => Status::from_code(code),
        }
    }

    /// Fails the path: the DMB's owner is gone.
    pub fn fail(&self) {
        self.note(FAILED_LOCALLY);
    }

    /// Fails the path because the device answered a move with this status code.
    pub(crate) fn note(&self, code: u16) {
        // The first reason stays.
        let _ = self.failure.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
    }
}
