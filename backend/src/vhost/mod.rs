// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vhost-user: sockets, rings, mappings, notifications. The only room that holds descriptors of
//! front ends.
//!
//! # Threads
//!
//! The `EventLoop` has one thread, which waits for all listening sockets and deadlines. A
//! `DeviceSocket` is the socket of one guest's front end, and a `DevicePool` hands out devices by one
//! socket. Each front end has a thread that makes its device and waits for its end. A `Connection` has
//! a `Device` of its own and these threads:
//!
//! ```text
//! request thread   vhost-user messages, one after the other (made by the framework)
//! worker 0         control queue, event queue, notifications
//! worker 1         all move queues
//! map thread       SHMEM_MAP and SHMEM_UNMAP; started by the first job
//! ```
//!
//! A front end that speaks vfio-user has one more thread (`vfio_user`), which is the vhost-user front
//! end of the connection.
//!
//! A kick for another device takes one hop (`inline_delivery`). Worker 1 carries out the MOVE and
//! publishes it. It then puts the record into the owner's event queue, and the kernel signals the
//! owner's call descriptor. If another thread works on that queue, or anything else is unusual,
//! worker 1 notifies the owner's worker 0, which does the rest.
//!
//! # Rules
//!
//! - Only a device's own threads write its call descriptors: that write can block, because the front
//!   end controls the counter. Threads of other devices have the kernel signal it, which cannot
//!   block ([`ism_device::shm::Kicker`]), or notify the device's worker.
//! - No thread holds a lock while it asks a front end for something, or while it writes a call.
//! - `handle_event` fails only to end its worker: the framework would end it without a log line.
//! - Guest memory is used only through a table that was checked (`guest_memory`), and in which bus
//!   errors are contained ([`ism_device::shm::BusErrorGuard`]). An access can last as long as its owner
//!   likes, so no thread makes one while it holds a lock that another device's thread may want.
//! - A call that a front end can make hang runs in a thread of its own, which the daemon counts and
//!   never waits for without a limit.

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
pub(crate) mod notifier;
pub(crate) mod on_close;
#[allow(unsafe_code, reason = "no crate reads these socket options in a sound way")]
mod peer;
mod pending_moves;
mod pool_shares;
mod processor_account;
mod queues;
mod ring;
pub(crate) mod timers;
pub(crate) mod unix_socket;
mod vfio_user;
mod wake_cost;
pub(crate) mod waker;
pub(crate) mod watched_listener;

pub use faults::{FAULTS, Fault};

/// Requests of ioctl(2) that are made after the start.
pub(crate) const IOCTLS: [u64; 3] = ism_device::shm::USERFAULT_REQUESTS;

/// Opens what the sandbox would not let be opened later. The daemon calls it before.
pub(crate) fn prepare() {
    inline_delivery::prepare();
    if ism_device::shm::userfault().is_none() {
        tracing::warn!("no userfaultfd: memory that guests have not touched is not counted");
    }
    let _ = eventfd::kicker();
    pool_shares::prepare();
    let _ = (crate::config::id_map::users(), crate::config::id_map::groups());
}
