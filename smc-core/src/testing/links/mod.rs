// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two hosts with RNICs, their link groups and the connections over them, in simulated time.
//!
//! [`Simulation`] has what the link groups of two hosts need to live: queue pairs that are reliable
//! until they fail (in order, with completions that come late and in any order between queue pairs,
//! flushed when a queue pair fails, silent when the peer is dead, waiting when it has posted no
//! receive), memory that is written only with the right key, TCP for the handshakes, and an
//! executor that does what [`crate::link_group::Output`] says. Connections stream known bytes both
//! ways through [`crate::connection`] and move by [`crate::connection::failover`].
//!
//! A seed decides everything: the agreed version and limits, one or two RNICs per host, how peers
//! are treated, how long things take, and which faults there are. Ports go down and come back, one
//! end hears of it before the other or not at all; paths and queue pairs break; messages take
//! seconds; receivers stall; LLC is doubled at once or late, ignored, or corrupted; hosts are killed with
//! and without a word; both ends call the API at the same moment.
//!
//! After each step it must hold that
//!
//! - no byte is lost, doubled or out of order on a connection that is not reset, and no connection
//!   is reset without a reason;
//! - every write goes to the element of its connection by a key that is valid there;
//! - a group has no parallel links, at most as many as agreed on, and one asymmetric link at most;
//! - no link, RMB or connection stays in between for longer than its timers allow;
//! - what a group remembers and says is bounded, and its timers go forward.
//!
//! In the end the faults stop. Then all connections end, both ends agree on every link and key, a
//! group that could be redundant is so, and it ends at both ends when one of them wants.
//!
//! Corrupted LLC is a peer that lies: then only what does not depend on its honesty must hold.

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
