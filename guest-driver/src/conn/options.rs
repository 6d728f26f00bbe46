// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of a connection, without an immediate effect visible to the peer.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ism_sys::{OnceBox, is_free};

/// The options of one connection.
#[derive(Debug)]
pub(super) struct Options {
    nonblocking: AtomicBool,
    /// TCP_NODELAY, once set, or its value when the ring was left. Without effect.
    nodelay: OnceBox<AtomicBool>,
    /// The beginning of the peer's silence; `None`: silence is not tested.
    pub(super) keepalive: Mutex<Option<Silence>>,
    /// The longest wait of a closed connection for the closing words of its peer.
    pub(super) close_timeout: Duration,
}

impl Options {
    pub(super) fn new(close_timeout: Duration) -> Options {
        Options {
            nonblocking: AtomicBool::new(false),
            nodelay: OnceBox::new(),
            keepalive: Mutex::new(None),
            close_timeout,
        }
    }

    /// Whether no thread holds the lock.
    pub(super) fn is_unlocked(&self) -> bool {
        is_free(&self.keepalive)
    }

    /// Sets whether calls return `WouldBlock` instead of waiting.
    pub(super) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    /// Whether calls return `WouldBlock` instead of waiting.
    #[inline]
    pub(super) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Remembers TCP_NODELAY.
    pub(super) fn set_nodelay(&self, on: bool) {
        self.nodelay.get_or_init(AtomicBool::default).store(on, Ordering::Relaxed);
    }

    /// Remembers TCP_NODELAY, unless it was set before.
    pub(super) fn keep_nodelay(&self, on: bool) {
        self.nodelay.get_or_init(|| AtomicBool::new(on));
    }

    /// TCP_NODELAY as set; `None`: never set.
    pub(super) fn nodelay(&self) -> Option<bool> {
        self.nodelay.get().map(|on| on.load(Ordering::Relaxed))
    }
}

/// The silence of a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    /// The longest silence without a test.
    pub(super) limit: Duration,
    /// The last words of the peer, and the time of their change.
    pub(super) words: [u64; 2],
    pub(super) since: Instant,
}
