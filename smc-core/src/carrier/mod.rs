// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a connection outlives its carrier: by the records of [`crate::wire::record`], each direction
//! goes from a ring to the TCP connection of the handshake, and back to a new ring.
//!
//! Plain data and pure functions, as in [`crate::connection`]. An [`End`] is one end of a
//! connection: what it sends ([`Outgoing`]), what it receives ([`Incoming`]), and the handshake for
//! a new ring ([`Renewal`]). The caller tells it an [`Input`] and the [`Positions`] at that moment,
//! and carries out the [`Action`]s in their order. `docs/carriers.md` describes the protocol, and
//! lists what [`End::step`] does for every state and input.
//!
//! # For users with two locks
//!
//! - The machine belongs to the lock under which the end writes to its peer. Records are given to
//!   it one at a time, in the order of the stream, with the bytes of DATA left out.
//! - On the hot path nobody asks it: a ring is in use until [`Action::StopRing`] (bytes and words
//!   of the own direction) and until [`Action::ReadTcp`] (bytes of the peer's).
//! - [`Positions::arrived`] is judged as the words of a peer always are, before it gets here.
//! - Records leave in the order of the actions, and never in the middle of another record.

mod action;
mod back_off;
mod end;
mod incoming;
mod outgoing;
mod positions;

pub use action::{Action, Violation};
pub use back_off::BackOff;
pub use end::{End, Input, Renewal, Role};
pub use incoming::{Incoming, Reading};
pub use outgoing::Outgoing;
pub use positions::Positions;
