// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread for connections that may outlive their device.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::stack::Stack;
use super::upkeep::SWEEP_PAUSE;
use crate::conn::Conn;
use crate::reactor::ConnectionHandler;
use crate::reactor::tcp_watch::TcpWatch;
use crate::smcd::Fabric;
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

    /// Tells a device that its driver needs it no more, if the device asks for that and no connection
    /// is about to leave it. Returns when to look again at the latest.
    pub(super) fn answer_leave(&self, fabric: &Fabric) -> Option<Duration> {
        fabric.answer_leave(self.config().testing.leave_time, || {
            let live = self.live_devices();
            let device = live.iter().find(|live| std::ptr::eq(&*live.fabric, fabric));
            device.is_some_and(|live| {
                live.reactor.connections().iter().any(|c| c.must_leave_device())
            })
        })
    }

    /// The connections that go on although their device is gone.
    pub(super) fn without_device(&self) -> Vec<Arc<Conn>> {
        let watch = self.tcp_watch.get();
        let mut all = watch.map(|watch| watch.connections()).unwrap_or_default();
        let known = self.reactors();
        all.retain(|conn| !known.iter().any(|reactor| Arc::ptr_eq(reactor, conn.reactor())));
        all
    }

    /// Does what the thread for TCP would do, in a process without it: calls the connections that are
    /// not on their device. `true`: there are some.
    pub(super) fn serve_tcp(&self) -> bool {
        let watch = self.tcp_watch.get();
        let all = watch.map(|watch| watch.connections()).unwrap_or_default();
        let mut any = false;
        for conn in all.iter().filter(|conn| conn.needs_turns()) {
            conn.on_tcp();
            any = true;
        }
        any
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
            watch.stop_after(Vec::new());
        }
        Ok(self.tcp_watch.get().cloned().unwrap_or(watch))
    }
}
