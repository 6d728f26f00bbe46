// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection in memory, with faults and a seed (feature `testing`).
//!
//! [`Fabric`] holds two ends, their elements as byte vectors between canaries, and the lanes by
//! which the stores of one end reach the other: in order, each at a random time, also between two
//! loads of a reader. Random applications write, read, send urgent bytes, shut down and close. A
//! model of both streams checks that
//!
//! - no byte is lost, doubled or out of order, and the end comes after the last one;
//! - no byte is overwritten that was not read, and none outside the ring is touched;
//! - nothing is stored after an own C or A, nor into an element that serves again;
//! - urgent bytes are marked where they were sent and never slip into the stream;
//! - both ends reach Closed within their timers.
//!
//! The same [`Options`] and seed give the same run. A [`Failure`] prints both.

mod close_table;
mod end;
mod fabric;
pub mod links;
mod memory;
mod rng;

pub use close_table::{close_table, reachable, table_events};
pub use fabric::{Fabric, Failure, Report};
pub use rng::Rng;

/// Which SMC type the elements belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A control block of two words and cursors from 0.
    SmcD,
    /// Messages, an eye catcher and cursors from 4.
    SmcR,
    /// Messages, no eye catcher and cursors from 0.
    SmcRWithoutEyeCatcher,
}

/// What goes wrong. Numbers mean "once in so many steps"; 0 means never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A peer publishes a falsified word.
    pub lie: u32,
    /// An end stops for ever.
    pub stall: u32,
    /// An application aborts.
    pub abort: u32,
    /// The TCP connection is reset from outside.
    pub tcp_reset: u32,
    /// An application closes whatever state it is in; without it, applications send all they
    /// have, shut down, read to the end and close then.
    pub close: u32,
}

/// How a run is set up.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The type of SMC.
    pub kind: Kind,
    /// Ring lengths of the two ends, bytes.
    pub rings: [u32; 2],
    /// Bytes that the two applications want to send.
    pub bytes: [u32; 2],
    /// The first application closes as soon as it has handed over its last byte, before that byte
    /// is in the peer's ring and without looking at what arrives.
    pub hasty: bool,
    /// Steps after which applications that have not closed do.
    pub steps: u32,
    /// A write is urgent once in so many; 0: never.
    pub urgent: u32,
    /// What goes wrong.
    pub faults: Faults,
}
