// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vhost-user: sockets, rings, mappings, notifications. The only module holding descriptors of front ends.
//!
//! # Threads
//!
//! The `EventLoop` has one thread waiting for all listening sockets and deadlines. A `DeviceSocket` is the
//! socket of one guest's front end. A `DevicePool` hands out devices by one socket. Each front end has a
//! thread to make its device and wait for its end. A `Connection` has a `Device` of its own and these
//! threads:
//!
//! ```text
//! request thread   vhost-user messages, one after the other (made by the framework)
//! worker 0         control queue, event queue, notifications
//! worker 1         all move queues
//! map thread       SHMEM_MAP and SHMEM_UNMAP; started by the first job
//! ```
//!
//! A vfio-user front end has one more thread (`vfio_user`), the vhost-user front end of the connection.
//!
//! A kick for another device takes one hop (`inline_delivery`). Worker 1 carries out the MOVE and publishes
//! the record. Worker 1 then puts the record into the owner's event queue, and the kernel signals the owner's
//! call descriptor. If another thread works on the event queue, or in any unusual case, worker 1 notifies the
//! owner's worker 0 to do the rest.
//!
//! # Rules
//!
//! - Only a device's own threads write its call descriptors: such a write can block, because the front end
//!   controls the counter. Threads of other devices have the kernel signal the descriptor without blocking
//!   ([`ism_device::shm::Kicker`]), or notify the device's worker.
//! - No thread holds a lock while sending the front end a request, or while writing a call.
//! - `handle_event` fails only to end its worker: the framework ends a worker without a log line.
//! - Guest memory is used only through a checked table (`guest_memory`) with contained bus errors
//!   ([`ism_device::shm::BusErrorGuard`]). The owner can delay an access for any time, so no thread accesses
//!   guest memory under a lock another device's thread may want.
//! - A call a front end can block runs in a thread of its own. The daemon counts such threads and never waits
//!   for one without a limit.

mod call;
mod chain;
mod connection;
pub(crate) mod counted_threads;
pub(crate) mod device_pool;
pub(crate) mod device_slot;
pub(crate) mod device_socket;
pub(crate) mod event_loop;
mod eventfd;
mod faults;
mod guest_memory;
mod inline_delivery;
mod mapper;
mod memory_table;
pub(crate) mod notifier;
pub(crate) mod on_close;
#[allow(unsafe_code, reason = "no crate reads these socket options in a sound way")]
mod peer;
mod pending_moves;
mod phase;
mod pool_shares;
mod processor_account;
mod queues;
mod ring;
mod stopped_rings;
pub(crate) mod timers;
pub(crate) mod unix_socket;
mod vfio_user;
mod wake_cost;
pub(crate) mod waker;
pub(crate) mod watched_listener;
mod workers;

pub use faults::{FAULTS, Fault};

/// ioctl(2) requests made after the start, for the filter of system calls.
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
pub(crate) const IOCTLS: [u64; 3] = ism_device::shm::USERFAULT_REQUESTS;

/// Opens descriptors the sandbox forbids to open later. Called before the sandbox.
pub(crate) fn prepare() {
    inline_delivery::prepare();
    if ism_device::shm::userfault().is_none() {
        tracing::warn!("no userfaultfd: memory that guests have not touched is not counted");
    }
    let _ = eventfd::kicker();
    pool_shares::prepare();
    let _ = (crate::config::id_map::users(), crate::config::id_map::groups());
}
