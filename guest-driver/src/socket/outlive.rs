// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread for connections that may outlive their device.

use std::io;
use std::sync::Arc;

use super::stack::Stack;
use super::upkeep::SWEEP_PAUSE;
use crate::conn::Conn;
use crate::reactor::tcp_watch::TcpWatch;
use ism_sys::lock;

impl Stack {
    /// The watch for the TCP connections of connections that may outlive their device, if such are
    /// wanted.
    pub(super) fn tcp_watch(self: &Arc<Self>) -> Option<Arc<TcpWatch<Conn>>> {
        if !self.config().outlive_device {
            return None;
        }
        if let Some(watch) = self.tcp_watch.get() {
            return Some(watch.clone());
        }
        self.start_watch()
            .inspect_err(|error| tracing::warn!(%error, "connections end with their device"))
            .ok()
    }

    fn start_watch(self: &Arc<Self>) -> io::Result<Arc<TcpWatch<Conn>>> {
        let watch = TcpWatch::new()?;
        let (stack, set) = (Arc::downgrade(self), watch.clone());
        std::thread::Builder::new().name("smc-tcp".into()).spawn(move || {
            set.run(|| {
                let stack = stack.upgrade()?;
                // A connection may have lost the reactor that would do this.
                stack.sweep();
                (!lock(&stack.closing).is_empty()).then_some(SWEEP_PAUSE)
            });
        })?;
        // Only a watch with a thread, and only one of them.
        if self.tcp_watch.set(watch.clone()).is_err() {
            watch.stop();
        }
        Ok(self.tcp_watch.get().cloned().unwrap_or(watch))
    }
}
