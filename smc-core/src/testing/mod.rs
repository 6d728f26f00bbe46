// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection in memory, with faults and a seed (feature `testing`).
//!
//! [`Fabric`] holds two ends, their elements as byte vectors between canaries, and the lanes for
//! the stores of one end to the other: in order, each at a random time, also between two loads of a
//! reader. Random applications write, read, send urgent bytes, shut down and close. A model of both
//! streams checks:
//!
//! - no byte is lost, doubled or out of order, and the end comes after the last one;
//! - no unread byte is overwritten, and none outside the ring is touched;
//! - nothing is stored after an own C or A, nor into a reused element;
//! - urgent bytes are marked at their place of sending and never slip into the stream;
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

/// The SMC type of the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A control block of two words and cursors from 0.
    SmcD,
    /// Messages, an eye catcher and cursors from 4.
    SmcR,
    /// Messages, no eye catcher and cursors from 0.
    SmcRWithoutEyeCatcher,
}

/// The faults of a run. Numbers mean "once in so many steps"; 0 means never.
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
    /// An application closes in any state; otherwise, applications send everything, shut down, read
    /// to the end and close then.
    pub close: u32,
}

/// How a run is set up.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The type of SMC.
    pub kind: Kind,
    /// Ring lengths of the two ends, bytes.
    pub rings: [u32; 2],
    /// Bytes to be sent by the two applications.
    pub bytes: [u32; 2],
    /// The first application closes as soon as its last byte is handed over, before the byte is in
    /// the peer's ring and without looking at arriving data.
    pub hasty: bool,
    /// Steps after which applications still open close.
    pub steps: u32,
    /// A write is urgent once in so many; 0: never.
    pub urgent: u32,
    /// The faults.
    pub faults: Faults,
}
