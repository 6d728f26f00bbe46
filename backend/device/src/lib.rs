// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ISM device without virtio: bytes of commands and moves in, bytes of replies and events out.
//!
//! # A primer
//!
//! A [`Fabric`] is one CHID. Each connected front end (a VM, a process) becomes a [`Device`] on the fabric. A
//! *session* of a device begins with HELLO. A session ends with reset, with the next HELLO, or with the loss
//! of the front end. A session has one GID, and a GID names one session. Only on the loopback fabric do all
//! devices share one GID.
//!
//! **Owners.** A driver *registers* a DMB and thereby owns the DMB. The driver names one GID, the DMB's user,
//! and gets a token. A DMB is guest memory of the owner, or a range of a *slab*: sealed memory of this owner
//! and this user. The front ends of both may map the slab; no other front end ever does. A device pays for
//! the slabs it owns. Only its own commands spend its budgets for bytes, counts, mapping slots and rates
//! ([`Limits`]); commands of a peer never do.
//!
//! **Grants.** The right to write a DMB is its token *and* being its user: the device looks up the token, and
//! the GID of the asking device must be the DMB's user. There is nothing else to hold, pass on or take away.
//! With the grant a user may *move* (the device copies, checked each time) and *attach* (the slab is mapped
//! into the user's window). The owner cannot undo an attach: a front end with a mapped slab can write all of
//! the slab until it unmaps. Hence a slab has a single pair. A range of the slab serves another DMB only
//! after its owner has unregistered **and** its user has detached. In the code both hold the DMB by `Arc`,
//! and dropping the last `Arc` clears the range.
//!
//! **Events.** The events of a driver wait in a queue bounded against any action of peers: a mark per slab, a
//! mask per DMB, an entry per peer and per attached DMB, a few software events. A device not taking events
//! loses only software events, and slows no other device.
//!
//! **The end of a session**, for whatever reason:
//!
//! 1. the fabric removes the session's GID: no new command can name the session;
//! 2. running moves of the session finish, and moves into its DMBs as well;
//! 3. the session's DMBs are closed, and each user with an attached DMB gets DMB_GONE;
//! 4. each related peer gets PEER_DOWN, the last event of the GID;
//! 5. mappings stay. An owned slab exists for as long as its user maps it, and never serves another pair.
//!    Ranges of the session's own window are kept aside until the front end has confirmed an empty range.
//!
//! # Locks
//!
//! A thread takes locks in this order: `Device::lifecycle` (while a session begins or ends), a device's
//! `state`, a DMB's gate, a session's pending events. While locking a table of the fabric or the room of a
//! slab, a thread takes no other lock. No thread holds the states of two devices. No thread holds a lock
//! during a request to a front end: a command with work for the front end becomes a [`MapJob`] or an
//! [`UnmapJob`], carried there and back by the virtio side.
//!
//! A move takes no device's `state`. A move holds the read side of its own device's `moving` lock (awaited by
//! the end of the session) and of the DMB's gate (awaited by UNREGISTER), both for no longer than a copy of
//! `max_move` bytes.
//!
//! # Where things are
//!
//! `request` checks the form of a driver's request. `command`, `register` and `attach` check the request
//! against existing objects. `accounts` keeps the quotas of a session; `transfer` moves, and `copy_watch`
//! finds the cause of a slow move; `leave` asks a driver to leave, and `leave_group` waits; `pending_events`
//! holds the driver's unread events, and `wake_slot` the state shared by events with slabs and DMBs. `device`
//! is a device and its sessions; `fabric` is the state shared by devices. `window` keeps the ranges of a
//! front end that maps on request, and `fixed_window` the areas of one that maps at its start only.
#![deny(unsafe_code)]

mod accounts;
mod attach;
mod command;
mod copy_watch;
mod counters;
mod device;
mod dmb;
mod doorbell;
mod fabric;
mod fixed_window;
mod gid;
mod handle;
mod info;
mod leave;
mod leave_group;
mod limits;
mod lines;
mod map;
mod pending_events;
mod rate;
mod register;
mod reply;
mod request;
mod session;
pub mod shm;
mod slab;
pub mod sync;
mod transfer;
mod wake_slot;
mod window;

pub use counters::{Counter, Counts};
pub use device::{CloseReason, Device};
pub use doorbell::DoorbellFd;
pub use fabric::{DeviceConfig, Fabric, FabricConfig, FabricError, JoinError};
pub use fixed_window::{FixedWindow, MAX_AREAS};
pub use gid::GidPool;
pub use handle::{Delivery, EventNotifier};
pub use info::{DeviceInfo, FabricInfo};
pub use leave_group::LeaveGroup;
pub use limits::{Clock, FabricCaps, Limits, MonotonicClock};
pub use map::{DoorbellRequest, MapJob, MapRequest, Outcome, StaleMap, UnmapJob};
pub use reply::Reply;
pub use transfer::{Moved, SliceReader, Wake};

#[cfg(test)]
mod tests;
