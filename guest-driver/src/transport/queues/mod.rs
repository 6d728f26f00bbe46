//! The queues of a virtio-ism device as the driver works them, for any transport whose queues
//! lie in memory of this process and whose interrupts are eventfds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use virtio_ism_abi::Token;

use super::health::Health;
use super::{GuestPool, MovePath, TransportError};
use crate::sys::{EventFd, RingAddresses};

mod control;
mod events;
mod moves;

pub(crate) use control::ControlQueue;
pub(crate) use events::EventQueue;
pub(crate) use moves::MoveQueue;

/// Tells the device that a queue has something new.
pub(crate) trait Notify: Send + Sync {
    fn notify(&self);
}

impl Notify for Arc<EventFd> {
    fn notify(&self) {
        self.signal();
    }
}

/// What a queue needs besides its ring.
pub(crate) struct Wiring {
    /// Where new chains are announced.
    pub(crate) kick: Box<dyn Notify>,
    /// Where the device announces completions.
    pub(crate) call: Arc<EventFd>,
    pub(crate) health: Arc<Health>,
    pub(crate) event_idx: bool,
}

/// All queues of a device.
pub(crate) struct Queues {
    pub(crate) control: ControlQueue,
    pub(crate) events: EventQueue,
    moves: Vec<MoveQueue>,
    next_path: AtomicUsize,
}

impl Queues {
    /// Makes the rings of control queue, event queue and one move queue per further wiring.
    pub(crate) fn new(
        pool: &Arc<GuestPool>,
        max_move: usize,
        control: Wiring,
        events: Wiring,
        moves: impl IntoIterator<Item = Wiring>,
    ) -> Result<Queues, TransportError> {
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

    /// Where each ring lies, in the order of queue numbers.
    pub(crate) fn addresses(&self) -> Vec<RingAddresses> {
        let mut all = vec![self.control.addresses(), self.events.addresses()];
        all.extend(self.moves.iter().map(MoveQueue::addresses));
        all
    }

    /// A path on the next move queue; it stays there, since queues have no order among them.
    pub(crate) fn open_path(&self, token: Token) -> Result<Arc<MovePath>, TransportError> {
        let n = self.next_path.fetch_add(1, Ordering::Relaxed) % self.moves.len().max(1);
        match self.moves.get(n) {
            Some(queue) => queue.open_path(token, n as u16),
            None => Err(TransportError::Missing("a move queue")),
        }
    }

    pub(crate) fn of(&self, path: &MovePath) -> Result<&MoveQueue, TransportError> {
        self.moves
            .get(usize::from(path.queue()))
            .ok_or(TransportError::Missing("the path's move queue"))
    }

    pub(crate) fn max_payload(&self) -> usize {
        self.moves.first().map_or(0, MoveQueue::max_payload)
    }

    pub(crate) fn reap(&self) {
        for queue in &self.moves {
            queue.reap();
        }
    }
}
