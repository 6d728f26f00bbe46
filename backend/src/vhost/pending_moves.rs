// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The moves that a front end had posted before it went.
//!
//! A process that is killed has written these bytes, and its peer will see the end of its TCP
//! connection: without them a part of the stream would be missing in front of that end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use virtio_ism_abi::FIRST_MOVE_QUEUE;

/// How long a connection whose front end has gone waits for its moves.
const LONGEST: Duration = Duration::from_secs(1);
/// How often it looks whether they are done.
const PAUSE: Duration = Duration::from_micros(100);
/// The worker that serves the move queues.
const WORKER: usize = 1;
/// In the place of a queue: the queues that were asked for before are to be empty. The worker of
/// moves does not serve the queue of this number.
const MARK: u16 = 0;

/// Whether the worker has carried them out.
#[derive(Debug, Default)]
pub(super) struct PendingMoves(AtomicBool);

impl PendingMoves {
    /// Takes the mark out of the queues that a worker has to serve. `true`: it was there, and
    /// [`PendingMoves::on_mark`] is due when they are served.
    pub(super) fn take_mark(worker: usize, queues: &mut u64) -> bool {
        let marked = worker == WORKER && *queues & 1 << MARK != 0;
        if marked {
            *queues &= !(1 << MARK);
        }
        marked
    }

    /// Has the worker serve all move queues by `ask`, which gets its number and a queue, and waits
    /// until it has done so, as long as the daemon does not cut the connection (`is_cut`).
    pub(super) fn finish(
        &self,
        move_queues: u16,
        ask: impl Fn(usize, u16),
        is_cut: impl Fn() -> bool,
    ) {
        let end = Instant::now() + LONGEST;
        for queue in FIRST_MOVE_QUEUE..FIRST_MOVE_QUEUE + move_queues {
            ask(WORKER, queue);
        }
        ask(WORKER, MARK);
        while !self.0.load(Ordering::Acquire) && !is_cut() && Instant::now() < end {
            std::thread::sleep(PAUSE);
        }
    }

    /// The worker has served all queues before the mark. If it has to serve one again, because that
    /// had more than one turn can do, it is asked again.
    pub(super) fn on_mark(&self, left: &AtomicU64, ask: impl FnOnce(usize, u16)) {
        if left.load(Ordering::Relaxed) != 0 {
            ask(WORKER, MARK);
        } else {
            self.0.store(true, Ordering::Release);
        }
    }
}
