//! The transport of a host process or container, which is the front end of a vhost-user daemon.
//!
//! The process offers the daemon a pool of sealed memory as its "guest memory", with bus addresses
//! equal to the addresses in the process. It reserves address space as the window. The daemon maps
//! slabs into the window by requests on the backend channel, which a thread of this transport
//! answers. The same thread notices at once when the daemon goes.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use super::{TransportError, Window};
use crate::sys::{Reservation, SharedSlice};
use crate::virtqueue::Health;

mod channel;
mod setup;

pub use setup::connect;

/// The connection to a device behind a vhost-user socket.
struct VhostUser {
    health: Arc<Health>,
    window: Option<Arc<Reservation>>,
    // Keeps the connection open.
    frontend: Frontend,
    channel: Option<JoinHandle<()>>,
}

impl Window for VhostUser {
    fn size(&self) -> u64 {
        self.window.as_ref().map_or(0, |window| window.size())
    }

    fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.window.as_ref()?.slice(offset, len)
    }

    fn is_cached(&self) -> bool {
        // Slabs are memory files of the same kernel.
        true
    }

    fn outlives_device(&self) -> bool {
        // Memory files, which stay mapped as long as a view of them exists.
        true
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        if !self.health.is_gone() {
            // The request tells the daemon, and so the peers, that this end is orderly. The driver
            // does not wait for an answer. A daemon that does not know the request sees the
            // connection end.
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

fn connect_error(path: &Path, source: std::io::Error) -> TransportError {
    TransportError::Connect { what: format!("connecting to {}", path.display()), source }
}
