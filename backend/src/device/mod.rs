//! The ISM device without virtio: bytes of commands and moves in, bytes of replies and events out.
//!
//! # A primer
//!
//! A [`Fabric`] is one CHID. Each front end (a VM, a process) that connects becomes a [`Device`] on
//! it. A device's *session* begins with HELLO and ends with reset, the next HELLO, or the loss of the
//! front end; a session has one GID and a GID has one session (but on loopback, where all members share
//! one).
//!
//! **Who owns what.** A driver *registers* a DMB and thereby owns it. It names one GID, the DMB's
//! user, and gets a token. DMBs are guest memory of the owner, or places in a *slab*: sealed memory
//! of this owner and this user, which the front ends of both may map, and nobody else ever. A device
//! pays for the slabs it owns; its budgets for bytes, counts, mapping slots and rates
//! ([`Limits`]) are spent by its own commands only, never by those of a peer.
//!
//! **What a grant is.** The right to write a DMB is its token *and* being its user: the token is
//! looked up, and the GID of the asking device must be the DMB's user. There is nothing else to
//! hold, pass on or take away. With the grant a user may *move* (the device copies, checked each
//! time) and may *attach* (the slab comes into its window). Attaching cannot be undone by the owner:
//! whoever has mapped a slab can write all of it until it lets go. Hence a slab has a single pair,
//! and a range of it serves another DMB only after its owner has unregistered **and** its user has
//! detached. In the code both hold the DMB by `Arc`, and the last one to let go clears the range.
//!
//! **What a driver is told.** Events wait in a pending_events that is bounded whatever the peers do: a bit
//! per slab, a mask per DMB, a bit per peer and per attached DMB, a few software events. A device
//! that takes no events loses nothing but software events and slows nobody.
//!
//! **What happens when a front end dies** (or resets, or says HELLO anew):
//!
//! 1. its GID is retired, so nothing new can name it;
//! 2. moves that it runs finish, and so do those into its DMBs;
//! 3. its DMBs end: who attached one gets DMB_GONE;
//! 4. everybody who is related to it gets PEER_DOWN, the last word of that GID;
//! 5. mappings stay. The slabs it owned live on for the user that has mapped them, and are used for
//!    nobody else. Ranges of its own window are kept aside until the front end has confirmed that
//!    nothing is mapped there.
//!
//! # Locks
//!
//! In this order: `Device::lifecycle` (while a session begins or ends), a device's `state`, a DMB's
//! gate, a pending_events. The fabric's tables and the room of a slab are locked for a look or a change,
//! and nothing else is taken meanwhile. No two devices' states are held together. Nothing is held
//! while a front end is asked for something: a command that needs it becomes a [`MapJob`] or an
//! [`UnmapJob`] that the virtio side carries to the front end and back.
//!
//! A move takes no device's `state`. It holds the read side of its own device's `current` lock (which
//! the end of that session waits for) and of the DMB's gate (which UNREGISTER waits for), both for no
//! longer than a copy of `max_move` bytes.
//!
//! # Where things are
//!
//! `request` reads what a driver claims; `command`, `register` and `attach` judge it against what
//! is there; `account` keeps the accounts of a session; `transfer` moves; `pending_events` holds what was not
//! told yet; `device` is a device and its sessions; `fabric` is what devices share.
#![forbid(unsafe_code)]

mod accounts;
mod attach;
mod command;
mod counters;
#[expect(clippy::module_inception, reason = "the file of the type `Device`")]
mod device;
mod dmb;
mod fabric;
mod gid;
mod handle;
mod info;
mod limits;
mod lines;
mod map;
mod pending_events;
mod rate;
mod register;
mod reply;
mod request;
mod session;
mod slab;
pub(crate) mod sync;
mod transfer;
mod wake_slot;
mod window;

pub use device::{CloseReason, Device};
pub use fabric::{DeviceConfig, Fabric, FabricConfig, FabricError, JoinError};
pub use gid::GidPool;
pub use handle::{Delivery, EventNotifier};
pub use info::{DeviceInfo, FabricInfo};
pub use limits::{Clock, FabricCaps, Limits, MonotonicClock};
pub use map::{MapJob, MapRequest, Outcome, StaleMap, UnmapJob};
pub use reply::Reply;
pub use transfer::{Moved, SliceReader, Wake};

#[cfg(test)]
mod tests;
