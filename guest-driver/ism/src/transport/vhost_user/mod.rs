// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The transport of a host process or container: the front end of a vhost-user daemon.
//!
//! The process offers the daemon a pool of sealed memory as its "guest memory", with bus addresses equal to
//! the addresses in the process, and reserves address space as the window. The daemon maps slabs into the
//! window by requests on the backend channel, answered by a thread of this transport. The same thread notices
//! at once when the daemon goes.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use super::doorbells::Doorbells;
use super::{ForkTransport, TransportError, Window};
use crate::virtqueue::Health;
use ism_sys::{
    EventFd, ForkLocks, JoinOutcome, LockGuardList, Reservation, SharedSlice, join_within,
    peer_process,
};

mod channel;
mod pool;
mod setup;

use channel::BackendChannel;
pub use setup::connect;

/// Longest wait for the end of the thread. The end takes a moment, unless the program has closed the thread's
/// descriptors.
const END: Duration = Duration::from_secs(1);

/// The connection to a device behind a vhost-user socket.
struct VhostUser {
    health: Arc<Health>,
    window: Option<Arc<Reservation>>,
    doorbells: Option<Arc<Doorbells>>,
    // Keeps the connection open.
    frontend: Frontend,
    channel: Arc<BackendChannel>,
    thread: Option<JoinHandle<()>>,
    /// Eventfds for notifications between queues and device.
    events: Vec<Arc<EventFd>>,
    /// The user of the daemon.
    owner: u32,
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
        // Memory files: the bytes stay mapped until the last view is gone.
        true
    }

    fn doorbells(&self) -> Option<&Doorbells> {
        self.doorbells.as_deref()
    }

    fn owner(&self) -> Option<u32> {
        Some(self.owner)
    }

    fn inheritance(&self) -> Option<&dyn ForkTransport> {
        // Memory files and descriptors are all there is.
        Some(self)
    }
}

impl ForkLocks for VhostUser {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        self.channel.try_hold(held)
    }

    fn is_unlocked(&self) -> bool {
        self.channel.is_unlocked()
            && self.window.as_ref().is_none_or(|window| window.is_unlocked())
            && self.doorbells.as_ref().is_none_or(|doorbells| doorbells.is_unlocked())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut all: Vec<_> = self.events.iter().map(|e| e.as_fd().as_raw_fd()).collect();
        all.extend(self.channel.descriptors());
        all.extend(self.doorbells.iter().flat_map(|doorbells| doorbells.descriptors()));
        all.push(self.frontend.as_raw_fd());
        all
    }
}

impl ForkTransport for VhostUser {
    fn waits_for(&self) -> Vec<RawFd> {
        self.channel.waits_for().to_vec()
    }

    fn serve(&self) {
        self.channel.serve_now();
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        if !self.health.is_gone() {
            // The request tells the daemon, and so the peers, of an orderly end. The driver does not wait for
            // an answer. A daemon without this request sees the connection end.
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
            let _ = self.frontend.reset_device();
        }
        self.health.fail("closed by the driver");
        match self.thread.take().map(|thread| join_within(thread, END)) {
            Some(JoinOutcome::Panicked) => tracing::error!("the backend channel's thread panicked"),
            // The resources of the thread live as long as the thread.
            Some(JoinOutcome::Runs) => tracing::error!(
                "the backend channel's thread does not end: has the program closed its descriptors?"
            ),
            Some(JoinOutcome::Ended) | None => {}
        }
    }
}

/// The owner of the device behind the connected socket at `path`, if `wanted` allows the user. Root may have
/// made the socket for a daemon of another user: then the owner is the owner of the file.
fn owner(path: &Path, socket: impl AsFd, wanted: Option<u32>) -> Result<u32, TransportError> {
    let asked = peer_process(socket);
    let uid = asked.map_err(|source| TransportError::System { what: "SO_PEERCRED", source })?.uid;
    match wanted {
        Some(before) if uid != before && uid != 0 => {
            Err(TransportError::OtherOwner { uid, before })
        }
        _ if uid == 0 => Ok(std::fs::metadata(path).map_or(0, |file| file.uid())),
        _ => Ok(uid),
    }
}

fn connect_error(path: &Path, source: std::io::Error) -> TransportError {
    TransportError::Connect { what: format!("connecting to {}", path.display()), source }
}
