// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a connection: the cut of its link, and the exit of its workers.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use ism_device::sync::lock;
use vhost_user_backend::ShutdownHandle;

/// How far a connection is on the way to its end.
#[derive(Default)]
pub(super) struct ConnectionPhase {
    /// The lock of `link` orders the word: either `close` finds the link, or `set_link` finds the word.
    closing: AtomicBool,
    /// Partner: the eventfd by which the workers are told to look.
    exiting: AtomicBool,
    link: Mutex<Option<ShutdownHandle>>,
}

impl ConnectionPhase {
    /// Sets the handle for cutting the connection.
    pub(super) fn set_link(&self, link: Option<ShutdownHandle>) {
        *lock(&self.link) = link;
        // `close` may have run before the handle was set.
        if self.is_closing() {
            self.close();
        }
    }

    /// Cuts the connection. Its port notices and ends the connection.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        if let Some(link) = &*lock(&self.link) {
            link.shutdown();
        }
    }

    /// Has the workers end.
    pub(super) fn exit(&self) {
        self.exiting.store(true, Ordering::Release);
    }

    /// Drops the handle for cutting the connection.
    pub(super) fn release_link(&self) {
        *lock(&self.link) = None;
    }

    /// Whether the connection was cut.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Whether the workers have to end.
    pub(super) fn is_exiting(&self) -> bool {
        self.exiting.load(Ordering::Acquire)
    }
}
