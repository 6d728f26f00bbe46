// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The workers of a connection, and queues to serve without a kick.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use virtio_ism_abi::config::Config;

use super::chain::Scratch;
use super::notifier::Notifier;
use super::pending_moves::PendingMoves;

/// Workers of a connection: one for control and events, one for moves.
const WORKERS: usize = 2;

/// One of the two workers of a connection.
struct Worker {
    notifier: Arc<Notifier>,
    /// Queues to serve again without a kick, one bit each.
    rescheduled: AtomicU64,
    scratch: Mutex<Scratch>,
}

/// The workers.
pub(super) struct Workers {
    list: [Worker; WORKERS],
    pending_moves: PendingMoves,
}

impl Workers {
    /// The workers of a device with this configuration. `notifier`: of the worker for control and
    /// events.
    pub(super) fn new(notifier: Arc<Notifier>, config: &Config) -> io::Result<Workers> {
        let moves_notifier = Arc::new(Notifier::new()?);
        let list = [notifier, moves_notifier].map(|notifier| Worker {
            notifier,
            rescheduled: AtomicU64::new(0),
            scratch: Mutex::new(Scratch::new(config)),
        });
        Ok(Workers { list, pending_moves: PendingMoves::default() })
    }

    /// The descriptors of the notifiers.
    pub(super) fn notifier_fds(&self) -> [RawFd; WORKERS] {
        [0, 1].map(|worker: usize| self.list[worker].notifier.as_raw_fd())
    }

    /// Wakes the workers.
    pub(super) fn notify(&self) {
        self.list.iter().for_each(|worker| worker.notifier.notify());
    }

    /// Takes back a wake-up.
    pub(super) fn take_notice(&self, worker: usize) {
        self.list.get(worker).into_iter().for_each(|worker| worker.notifier.take());
    }

    /// The buffers of a worker, locked while the worker serves a queue.
    pub(super) fn scratch(&self, worker: usize) -> Option<&Mutex<Scratch>> {
        self.list.get(worker).map(|worker| &worker.scratch)
    }

    /// Makes a worker serve a queue again, after a turn of the other queues.
    pub(super) fn reschedule(&self, worker: usize, queue: u16) {
        if let Some(worker) = self.list.get(worker) {
            worker.rescheduled.fetch_or(1 << queue, Ordering::Release);
            worker.notifier.notify();
        }
    }

    /// Serves the rescheduled queues of a worker by `serve`.
    pub(super) fn serve_rescheduled(&self, worker: usize, mut serve: impl FnMut(u16)) {
        let Some(Worker { rescheduled, .. }) = self.list.get(worker) else { return };
        let mut queues = rescheduled.swap(0, Ordering::Acquire);
        let marked = PendingMoves::take_mark(worker, &mut queues);
        while queues != 0 {
            let queue = queues.trailing_zeros();
            queues &= queues - 1;
            serve(queue as u16);
        }
        if marked {
            self.pending_moves.on_mark(rescheduled, |w, q| self.reschedule(w, q));
        }
    }

    /// Waits until the posted moves are carried out, unless the daemon cuts the connection.
    pub(super) fn finish_moves(&self, move_queues: u16, is_cut: impl Fn() -> bool) {
        self.pending_moves.finish(move_queues, |w, q| self.reschedule(w, q), is_cut);
    }
}
