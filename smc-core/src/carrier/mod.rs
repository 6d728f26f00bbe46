// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Moves a connection between carriers: by the records of [`crate::wire::record`], each direction
//! goes from a ring to the TCP connection of the handshake, and back to a new ring.
//!
//! Plain data and pure functions, as in [`crate::connection`]. An [`End`] is one end of a
//! connection: the sending direction ([`Outgoing`]), the receiving direction ([`Incoming`]), and
//! the handshake for a new ring ([`Renewal`]). The caller reports an [`Input`] and the present
//! [`Positions`], and carries out the [`Action`]s in their order. `docs/ends.md` describes the
//! protocol, and `tests/carrier_table.md` lists the result of [`End::step`] for every state and input.
//!
//! # For users with two locks
//!
//! - The machine belongs to the lock of the end's writes to its peer. Records are given to the
//!   machine one at a time, in the order of the stream, with the bytes of DATA left out.
//! - The hot path does not ask the machine: a ring is in use until [`Action::StopRing`] (bytes and
//!   words of the own direction) and until [`Action::ReadTcp`] (bytes of the peer's).
//! - [`Positions::arrived`] is checked beforehand, like all words of a peer.
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
