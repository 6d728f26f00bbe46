// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two hosts with RNICs, their link groups and the connections over them, in simulated time.
//!
//! [`Simulation`] has the environment of two hosts' link groups: queue pairs, memory written only
//! with the right key, TCP for the handshakes, and an executor of [`crate::link_group::Output`].
//! Queue pairs are reliable until a failure: in order, with late completions in any order between
//! queue pairs, flushed after a failure, silent when the peer is dead, waiting when the peer has
//! posted no receive. Connections stream known bytes both ways through [`crate::connection`] and
//! move by [`crate::connection::failover`].
//!
//! A seed decides everything: the agreed version and limits, one or two RNICs per host, the
//! profiles of peers, all delays, and the set of faults. Ports go down and come back, one end hears
//! of the change before the other or not at all; paths and queue pairs break; messages take
//! seconds; receivers stall; LLC is doubled at once or late, ignored, or corrupted; hosts are
//! killed with and without a word; both ends call the API at the same moment.
//!
//! Checks after each step:
//!
//! - no byte is lost, doubled or out of order on a connection without a reset, and no connection is
//!   reset without a reason;
//! - every write goes to the element of its connection by a valid key;
//! - a group has no parallel links, at most as many as agreed on, and one asymmetric link at most;
//! - no link, RMB or connection stays in a transient state for longer than its timers allow;
//! - a group's memory and output are bounded, and its timers go forward.
//!
//! In the end the faults stop. Then all connections end, both ends agree on every link and key,
//! every group is redundant if possible, and a group ends at both ends at the wish of one.
//!
//! Corrupted LLC is a lying peer: then only the rules independent of its honesty are checked.

mod app;
mod check;
mod conn;
mod ends;
mod executor;
mod fabric;
mod faults;
mod half;
mod open;
mod plan;
mod qp;
mod types;
mod world;

pub use plan::Faults;
pub use world::{Failure, Report, Simulation};
