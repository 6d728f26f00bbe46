//! vhost-user: sockets, rings, mappings, notifications. The only room that holds descriptors of
//! front ends.
//!
//! # Who runs what
//!
//! A *port* is a socket for one guest's front end. Its thread (`port`) waits for a connection
//! and then for its end; a connection is a `connection`, with a `Device` of its own:
//!
//! ```text
//! request thread   vhost-user messages, one after the other (made by the framework)
//! worker 0         control queue, event queue, doorbell
//! worker 1         all move queues
//! map thread       SHMEM_MAP and SHMEM_UNMAP; made at the first need
//! ```
//!
//! A kick for another device takes one hop: worker 1 carries out the MOVE, publishes it, puts the
//! record into the owner's event queue and has the kernel signal the owner's call descriptor. If
//! somebody is at work on that queue, or anything else is unusual, it rings the owner's notifier
//! instead, and the owner's worker 0 does the rest.
//!
//! # Rules
//!
//! - Only a device's own threads write its call descriptors: that write can block, for the front
//!   end decides about its counter. Threads of other devices have the kernel signal it, which
//!   cannot ([`crate::shm::Kicker`]), or ring the device's notifier.
//! - No lock is replies while a front end is asked for something, nor while a call is written.
//! - `handle_event` fails only to end its worker: the framework would end it without a word.
//! - Guest memory is used only through a table that was checked (`guest_memory`).
//! - What can hang by a front end's will hangs in a thread that is counted and abandoned, never in
//!   one that others need.

mod chain;
mod connection;
pub(crate) mod counted_threads;
pub(crate) mod device_socket;
mod eventfd;
mod faults;
mod guest_memory;
mod inline_delivery;
mod mapper;
pub(crate) mod notifier;
mod queues;
mod ring;
pub(crate) mod unix_socket;

pub use faults::{FAULTS, Fault};
pub(crate) use inline_delivery::prepare;
