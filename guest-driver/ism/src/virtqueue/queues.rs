// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The queues of one virtio-ism device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use virtio_ism_abi::Token;

use super::{
    ControlQueue, EventQueue, GuestPool, MovePath, MoveQueue, QueueAddresses, QueueError, Wiring,
};
use ism_sys::{ForkLocks, LockGuardList};

/// The queues of a device.
pub(crate) struct Queues {
    pub(crate) control: ControlQueue,
    pub(crate) events: EventQueue,
    moves: Vec<MoveQueue>,
    next_path: AtomicUsize,
}

impl ForkLocks for Queues {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        self.control.try_hold(held)
            && self.events.try_hold(held)
            && self.moves.iter().all(|queue| queue.try_hold(held))
    }

    fn is_unlocked(&self) -> bool {
        self.control.is_unlocked()
            && self.events.is_unlocked()
            && self.moves.iter().all(|queue| queue.is_unlocked())
    }
}

impl Queues {
    /// Makes the control queue, the event queue, and a move queue for each further wiring.
    pub(crate) fn new(
        pool: &Arc<GuestPool>,
        max_move: usize,
        control: Wiring,
        events: Wiring,
        moves: impl IntoIterator<Item = Wiring>,
    ) -> Result<Queues, QueueError> {
        Ok(Queues {
            control: ControlQueue::new(pool, control)?,
            events: EventQueue::new(pool, events)?,
            moves: moves
                .into_iter()
                .map(|wiring| MoveQueue::new(pool, max_move, wiring))
                .collect::<Result<_, _>>()?,
            next_path: AtomicUsize::new(0),
        })
    }

    /// The addresses of each queue, in the order of queue numbers.
    pub(crate) fn addresses(&self) -> Vec<QueueAddresses> {
        let mut all = vec![self.control.addresses(), self.events.addresses()];
        all.extend(self.moves.iter().map(MoveQueue::addresses));
        all
    }

    /// Prepares moves and kicks to a DMB, with its kick chain, on the next move queue. The path stays
    /// there, since moves in different queues have no order.
    ///
    /// # Errors
    /// No memory for the kick chain is left, or the device has no move queue.
    pub(crate) fn open_path(&self, token: Token) -> Result<Arc<MovePath>, QueueError> {
        let n = self.next_path.fetch_add(1, Ordering::Relaxed) % self.moves.len().max(1);
        match self.moves.get(n) {
            Some(queue) => queue.open_path(token, n as u16),
            None => Err(QueueError::NoMoveQueue(n)),
        }
    }

    /// The queue of a path.
    pub(crate) fn of(&self, path: &MovePath) -> Result<&MoveQueue, QueueError> {
        let n = usize::from(path.queue());
        self.moves.get(n).ok_or(QueueError::NoMoveQueue(n))
    }

    /// Closes a path; a chain under way keeps its memory until its completion.
    pub(crate) fn close_path(&self, path: &MovePath) {
        if let Ok(queue) = self.of(path) {
            queue.close_path(path);
        }
    }

    /// Most payload bytes of one move.
    pub(crate) fn max_payload(&self) -> usize {
        self.moves.first().map_or(0, MoveQueue::max_payload)
    }

    /// Notes the outcome of completed moves, as does each post.
    pub(crate) fn reap(&self) {
        for queue in &self.moves {
            queue.reap();
        }
    }
}
