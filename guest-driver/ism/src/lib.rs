// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Driver of the virtio-ism device for user space.
//!
//! From the ground up: [`virtqueue`] has the queues of a device, [`transport`] the ways to reach
//! one, and the items of this level are the driver itself: [`IsmDevice`], [`OwnDmb`], [`PeerDmb`].
#![forbid(unsafe_code)]

mod ism;
pub mod transport;
pub mod virtqueue;

pub use ism::{
    CONSUMER_WORD, CONTROL_BLOCK, DeliverError, EVENTS_PER_POLL, IsmDevice, IsmError, IsmEvent,
    LineName, OpenOptions, OwnDmb, PRODUCER_WORD, PeerDmb, PeerFlags, Prefer, SLOWEST_WINDOW,
    WindowSpeed,
};

// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
