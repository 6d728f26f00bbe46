// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The moves posted by a front end before its end.
//!
//! A killed process has already written these bytes, and its peer will see the end of the TCP connection:
//! without the moves, the end of the stream would be missing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use virtio_ism_abi::FIRST_MOVE_QUEUE;

/// How long a connection without its front end waits for the posted moves.
const LONGEST: Duration = Duration::from_secs(1);
/// Interval between two checks for completion.
const PAUSE: Duration = Duration::from_micros(100);
/// The worker of the move queues.
const WORKER: usize = 1;
/// In place of a queue number: the queues asked for before have to become empty. No move queue has this
/// number.
const MARK: u16 = 0;

/// Whether the worker has carried out the posted moves.
#[derive(Debug, Default)]
pub(super) struct PendingMoves(AtomicBool);

impl PendingMoves {
    /// Takes the mark out of the queues for a worker. `true`: the mark was set, and [`PendingMoves::on_mark`]
    /// is due after these queues.
    pub(super) fn take_mark(worker: usize, queues: &mut u64) -> bool {
        let marked = worker == WORKER && *queues & 1 << MARK != 0;
        if marked {
            *queues &= !(1 << MARK);
        }
        marked
    }

    /// Makes the worker serve all move queues by `ask` (number of the worker, queue), and waits for
    /// completion, unless the daemon cuts the connection (`is_cut`).
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

    /// The worker has served all queues before the mark. If a queue needs another turn, sets the mark again.
    pub(super) fn on_mark(&self, left: &AtomicU64, ask: impl FnOnce(usize, u16)) {
        if left.load(Ordering::Relaxed) != 0 {
            ask(WORKER, MARK);
        } else {
            self.0.store(true, Ordering::Release);
        }
    }
}
