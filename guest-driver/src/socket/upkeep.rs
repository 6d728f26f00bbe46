// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The background threads' work beside events: closed connections, idle peers, requests of devices to
//! leave them, and objects with a blocking drop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::stack::Stack;
use crate::conn::Conn;
use crate::smcd::{DeferredDrop, DeviceUser, Fabric};
use ism_sys::lock;

/// Shortest pause between two rounds of maintenance, for any configuration.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
/// Pause between two rounds of maintenance while connections are closing.
pub(super) const SWEEP_PAUSE: Duration = Duration::from_millis(500);

/// The work of the background threads.
#[derive(Default)]
pub(super) struct Maintenance {
    /// Connections closed by the application, but not by the peer.
    pub(super) closing: Mutex<Vec<Arc<Conn>>>,
    /// The stack adopted a connection since the last round of maintenance. SeqCst: set before `ticking` is
    /// read.
    adopted: AtomicBool,
    /// The background threads do maintenance every [`SWEEP_PAUSE`]. SeqCst: cleared before `adopted` is
    /// read.
    ticking: AtomicBool,
    /// Objects to be dropped by the background threads, because their drop takes device commands.
    pub(super) deferred_drops: Mutex<Vec<DeferredDrop>>,
}

impl Stack {
    /// Takes over a connection closed by the application, but not by the peer.
    pub(crate) fn adopt(&self, conn: Arc<Conn>) {
        if conn.is_over() {
            return;
        }
        let reactor = conn.reactor().clone();
        lock(&self.maintenance.closing).push(conn);
        self.maintenance.adopted.store(true, Ordering::SeqCst);
        // Behind the push: the loss itself wakes that thread only once.
        if reactor.is_lost() {
            self.wake_tcp_watch();
        }
        // Background threads that tick find the connection without a wake-up.
        if !self.maintenance.ticking.swap(true, Ordering::SeqCst) {
            self.wake_backgrounds();
        }
    }

    /// Has the thread for TCP do its upkeep now, if there is such a thread.
    pub(super) fn wake_tcp_watch(&self) {
        if let Some(watch) = self.outliving.watch() {
            watch.wake();
        }
    }

    /// Drops closed connections also closed by the peer, and frees their buffers.
    pub(crate) fn sweep(&self) {
        let mut over = Vec::new();
        let mut closing = lock(&self.maintenance.closing);
        let mut at = 0;
        while let Some(conn) = closing.get(at) {
            if conn.is_over() {
                over.push(closing.swap_remove(at));
            } else {
                at += 1;
            }
        }
        // Outside the lock, because dropping a connection may take a device command.
        drop(closing);
        drop(over);
    }

    /// One round of maintenance, on a background thread: drops deferred objects, and checks closing
    /// connections and idle peers. Returns the pause before the next round.
    pub(super) fn maintain(&self, fabric: Option<&Fabric>) -> Option<Duration> {
        drop(std::mem::take(&mut *lock(&self.maintenance.deferred_drops)));
        self.sweep();
        let leave = fabric.and_then(|fabric| self.answer_leave(fabric));
        let closing: Vec<_> = lock(&self.maintenance.closing).clone();
        for conn in &closing {
            conn.check_tcp();
        }
        // No event reports an idle peer, so each round checks every peer.
        let timeout = self.config().testing.idle_peer_timeout.max(SHORTEST_PAUSE);
        let idle = fabric.and_then(|fabric| fabric.remove_idle_peers(timeout));
        let idle = idle.map_or(timeout, |idle| idle.max(SHORTEST_PAUSE));
        let mut quiet =
            !self.maintenance.adopted.swap(false, Ordering::SeqCst) && closing.is_empty();
        if quiet {
            self.maintenance.ticking.store(false, Ordering::SeqCst);
            // `adopt` may have seen `ticking` and not woken this thread between the two lines above.
            quiet = !self.maintenance.adopted.load(Ordering::SeqCst);
            self.maintenance.ticking.store(!quiet, Ordering::SeqCst);
        }
        let pause = if quiet { timeout } else { SWEEP_PAUSE };
        Some(pause.min(idle).min(leave.unwrap_or(idle)))
    }
}

impl DeviceUser for Stack {
    fn defer_drop(&self, object: DeferredDrop) {
        lock(&self.maintenance.deferred_drops).push(object);
        self.wake_backgrounds();
    }

    fn device_stays(&self) {
        self.outliving.device_opened();
        if let Some(watch) = self.outliving.watch() {
            watch.want_return();
        }
    }
}
