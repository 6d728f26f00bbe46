//! A device whose queues run, whatever carries them: what all transports with queues in memory of
//! this process have in common.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use virtio_ism_abi::Token;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::EVENT_LEN;

use super::health::Health;
use super::queues::Queues;
use super::{GuestMem, GuestPool, MovePath, Transport, TransportError};
use crate::sys::SharedSlice;

/// The part that does not depend on the carrier.
pub(super) struct Running {
    pub(super) config: Config,
    pub(super) features: Features,
    pub(super) queues: Queues,
    pub(super) pool: Arc<GuestPool>,
    pub(super) health: Arc<Health>,
}

/// The part that does. See [`Transport`] for what each means.
pub(super) trait Carrier: Send + Sync {
    fn running(&self) -> &Running;
    fn window_size(&self) -> u64;
    fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice>;
    fn window_is_cached(&self) -> bool;
    fn memory_outlives_device(&self) -> bool;
}

impl<T: Carrier> Transport for T {
    fn config(&self) -> &Config {
        &self.running().config
    }

    fn features(&self) -> Features {
        self.running().features
    }

    fn control(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<u16, TransportError> {
        self.running().queues.control.command(op, body, reply)
    }

    fn try_event(&self) -> Result<Option<[u8; EVENT_LEN]>, TransportError> {
        self.running().queues.events.take()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.running().queues.events.fd()
    }

    fn clear_event_fd(&self) {
        self.running().queues.events.clear_fd();
    }

    fn arm_events(&self) -> bool {
        self.running().queues.events.arm()
    }

    fn suppress_events(&self) {
        self.running().queues.events.suppress();
    }

    fn open_path(&self, token: Token) -> Result<Arc<MovePath>, TransportError> {
        self.running().queues.open_path(token)
    }

    fn close_path(&self, path: &MovePath) {
        if let Ok(queue) = self.running().queues.of(path) {
            queue.close_path(path);
        }
    }

    fn max_payload(&self) -> usize {
        self.running().queues.max_payload()
    }

    fn post_move(
        &self,
        path: &MovePath,
        pieces: &[(u32, &[u8])],
        signal: bool,
    ) -> Result<(), TransportError> {
        self.running().queues.of(path)?.post(path, pieces, signal)
    }

    fn post_kick(&self, path: &MovePath) -> Result<(), TransportError> {
        self.running().queues.of(path)?.kick(path)
    }

    fn reap(&self) {
        self.running().queues.reap();
    }

    fn window_size(&self) -> u64 {
        Carrier::window_size(self)
    }

    fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        Carrier::window_slice(self, offset, len)
    }

    fn window_is_cached(&self) -> bool {
        Carrier::window_is_cached(self)
    }

    fn alloc_guest(&self, len: usize) -> Result<GuestMem, TransportError> {
        self.running().pool.alloc(len)
    }

    fn is_gone(&self) -> bool {
        self.running().health.is_gone()
    }

    fn memory_outlives_device(&self) -> bool {
        Carrier::memory_outlives_device(self)
    }
}
