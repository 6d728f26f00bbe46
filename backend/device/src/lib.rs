// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ISM device without virtio: bytes of commands and moves in, bytes of replies and events out.
//!
//! # A primer
//!
//! A [`Fabric`] is one CHID. Each front end (a VM, a process) that connects becomes a [`Device`] on
//! it. A *session* of a device begins with HELLO. It ends with reset, with the next HELLO, or when
//! the front end is gone. A session has one GID, and a GID names one session. Only on the loopback
//! fabric do all devices share one GID.
//!
//! **Owners.** A driver *registers* a DMB and thereby owns it. It names one GID, the DMB's user, and
//! gets a token. A DMB is guest memory of the owner, or a range of a *slab*: sealed memory of this
//! owner and this user. The front ends of both may map the slab, and no other front end ever does. A
//! device pays for the slabs it owns. Only its own commands spend its budgets for bytes, counts,
//! mapping slots and rates ([`Limits`]); commands of a peer never do.
//!
//! **Grants.** The right to write a DMB is its token *and* being its user: the device looks up the
//! token, and the GID of the asking device must be the DMB's user. There is nothing else to hold,
//! pass on or take away. With the grant a user may *move* (the device copies, checked each time) and
//! may *attach* (the slab is mapped into its window). The owner cannot undo an attach: a front end
//! that has mapped a slab can write all of it until it unmaps. Hence a slab has a single pair. A
//! range of it serves another DMB only after its owner has unregistered **and** its user has
//! detached. In the code both hold the DMB by `Arc`, and dropping the last `Arc` clears the range.
//!
//! **Events.** The events of a driver wait in a queue that is bounded whatever the peers do: a mark
//! per slab, a mask per DMB, an entry per peer and per attached DMB, a few software events. A device
//! that takes no events loses only software events, and slows no other device.
//!
//! **The end of a session**, for whatever reason:
//!
//! 1. the fabric removes its GID, so that no new command can name it;
//! 2. moves that it runs finish, and so do those into its DMBs;
//! 3. its DMBs are closed, and each user that has attached one gets DMB_GONE;
//! 4. each related peer gets PEER_DOWN, the last event of that GID;
//! 5. mappings stay. A slab that it owned exists for as long as its user has mapped it, and never
//!    serves another pair. Ranges of its own window are kept aside until the front end has confirmed
//!    that nothing is mapped there.
//!
//! # Locks
//!
//! A thread takes locks in this order: `Device::lifecycle` (while a session begins or ends), a
//! device's `state`, a DMB's gate, a session's pending events. A thread that locks a table of the
//! fabric or the room of a slab takes no other lock meanwhile. No thread holds the states of two
//! devices. No thread holds a lock while it asks a front end for something: a command that needs the
//! front end becomes a [`MapJob`] or an [`UnmapJob`], which the virtio side carries to it and back.
//!
//! A move takes no device's `state`. It holds the read side of its own device's `current` lock (which
//! the end of that session waits for) and of the DMB's gate (which UNREGISTER waits for), both for no
//! longer than a copy of `max_move` bytes.
//!
//! # Where things are
//!
//! `request` checks the form of a driver's request. `command`, `register` and `attach` check it
//! against what exists. `accounts` keeps the quotas of a session; `transfer` moves
//! and `copy_watch` tells who makes a move last;
//! `leave` asks a driver to leave and waits for it;
//! `pending_events` holds the events that the driver has not read, and `wake_slot` what these share
//! with slabs and DMBs. `device` is a device and its sessions; `fabric` is what devices share.
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
mod gid;
mod handle;
mod info;
mod leave;
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
pub use gid::GidPool;
pub use handle::{Delivery, EventNotifier};
pub use info::{DeviceInfo, FabricInfo};
pub use leave::LeaveGroup;
pub use limits::{Clock, FabricCaps, Limits, MonotonicClock};
pub use map::{DoorbellRequest, MapJob, MapRequest, Outcome, StaleMap, UnmapJob};
pub use reply::Reply;
pub use transfer::{Moved, SliceReader, Wake};

#[cfg(test)]
mod tests;
