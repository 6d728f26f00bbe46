//! The transport of a host process or container: it is the front end of a vhost-user daemon.
//!
//! The process offers a pool of sealed memory as its "guest memory", with bus addresses equal to
//! its own, and a reservation of address space as the window; the daemon maps slabs into it by
//! requests on the backend channel, which a thread of this transport answers. The same thread
//! notices at once when the daemon goes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use super::TransportError;
use super::running::{Carrier, Running};
use crate::sys::{Reservation, SharedSlice};

mod channel;
mod setup;

pub use setup::connect;

/// A device behind a vhost-user socket.
struct VhostUser {
    running: Running,
    window: Option<Arc<Reservation>>,
    // Keeps the connection.
    frontend: Frontend,
    channel: Option<JoinHandle<()>>,
}

impl Carrier for VhostUser {
    fn running(&self) -> &Running {
        &self.running
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

    fn memory_outlives_device(&self) -> bool {
        // Memory files, mapped as long as somebody looks at them.
        true
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        if !self.running.health.is_gone() {
            // Peers learn that this is an orderly end. No answer is waited for, and a daemon that
            // does not know the request sees the connection end.
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
            let _ = self.frontend.reset_device();
        }
        self.running.health.fail("closed by the driver");
        if let Some(channel) = self.channel.take()
            && channel.join().is_err()
        {
            tracing::error!("the backend channel's thread panicked");
        }
    }
}

impl fmt::Debug for VhostUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUser")
            .field("features", &self.running.features)
            .finish_non_exhaustive()
    }
}

fn connect_error(path: &Path, source: std::io::Error) -> TransportError {
    TransportError::Connect { what: format!("connecting to {}", path.display()), source }
}
