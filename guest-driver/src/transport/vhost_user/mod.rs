//! The transport of a host process or container: it is the front end of a vhost-user daemon.
//!
//! The process offers a pool of sealed memory as its "guest memory", with bus addresses equal to
//! its own, and a reservation of address space as the window; the daemon maps slabs into it by
//! requests on the backend channel, which a thread of this transport answers. The same thread
//! notices at once when the daemon goes.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use virtio_ism_abi::Token;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::EVENT_LEN;

use super::health::Health;
use super::queues::Queues;
use super::{GuestMem, GuestPool, MovePath, Transport, TransportError};
use crate::sys::{Reservation, SharedSlice};

mod channel;
mod setup;

pub use setup::connect;

/// A device behind a vhost-user socket.
struct VhostUser {
    config: Config,
    features: Features,
    queues: Queues,
    pool: Arc<GuestPool>,
    window: Option<Arc<Reservation>>,
    health: Arc<Health>,
    // Keeps the connection.
    frontend: Frontend,
    channel: Option<JoinHandle<()>>,
}

impl Transport for VhostUser {
    fn config(&self) -> &Config {
        &self.config
    }

    fn features(&self) -> Features {
        self.features
    }

    fn control(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<u16, TransportError> {
        self.queues.control.command(op, body, reply)
    }

    fn try_event(&self) -> Result<Option<[u8; EVENT_LEN]>, TransportError> {
        self.queues.events.take()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.queues.events.fd()
    }

    fn clear_event_fd(&self) {
        self.queues.events.clear_fd();
    }

    fn arm_events(&self) -> bool {
        self.queues.events.arm()
    }

    fn suppress_events(&self) {
        self.queues.events.suppress();
    }

    fn open_path(&self, token: Token) -> Result<Arc<MovePath>, TransportError> {
        self.queues.open_path(token)
    }

    fn close_path(&self, path: &MovePath) {
        if let Ok(queue) = self.queues.of(path) {
            queue.close_path(path);
        }
    }

    fn max_payload(&self) -> usize {
        self.queues.max_payload()
    }

    fn post_move(
        &self,
        path: &MovePath,
        pieces: &[(u32, &[u8])],
        signal: bool,
    ) -> Result<(), TransportError> {
        self.queues.of(path)?.post(path, pieces, signal)
    }

    fn post_kick(&self, path: &MovePath) -> Result<(), TransportError> {
        self.queues.of(path)?.kick(path)
    }

    fn reap(&self) {
        self.queues.reap();
    }

    fn window_size(&self) -> u64 {
        self.window.as_ref().map_or(0, |window| window.size())
    }

    fn window_slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.window.as_ref()?.slice(offset, len)
    }

    fn window_is_cached(&self) -> bool {
        // Slabs are memory files of the same kernel.
        true
    }

    fn alloc_guest(&self, len: usize) -> Result<GuestMem, TransportError> {
        self.pool.alloc(len)
    }

    fn is_gone(&self) -> bool {
        self.health.is_gone()
    }

    fn memory_outlives_device(&self) -> bool {
        // Memory files, mapped as long as somebody looks at them.
        true
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        if !self.health.is_gone() {
            // Peers learn that this is an orderly end. No answer is waited for, and a daemon that
            // does not know the request sees the connection end.
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
            let _ = self.frontend.reset_device();
        }
        self.health.fail("closed by the driver");
        if let Some(channel) = self.channel.take()
            && channel.join().is_err()
        {
            tracing::error!("the backend channel's thread panicked");
        }
    }
}

impl fmt::Debug for VhostUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUser").field("features", &self.features).finish_non_exhaustive()
    }
}

fn connect_error(path: &Path, source: std::io::Error) -> TransportError {
    TransportError::Connect { what: format!("connecting to {}", path.display()), source }
}
