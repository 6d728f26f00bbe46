// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection as two values: its sending half and its receiving half.
//!
//! [`crate::connection`] has the rules of a ring and of the end, [`crate::carrier`] the records by
//! which a connection leaves its ring and comes back. This module puts both together: the state of
//! one end that needs no clock, lock, socket, descriptor or heap. The owner keeps each half under a
//! lock of its own, moves the bytes, and reports what has happened.
//!
//! - [`SendHalf`]: the program's bytes, on their [`SendPath`] to the peer, and the end of the
//!   connection. [`SendHalf::next`] says what to do with bytes, and the actions of
//!   [`SendHalf::change`] and [`SendHalf::end`] what else.
//! - [`RecvHalf`]: the bytes of the own ring, for the reader.
//! - [`RecordRecv`]: the peer's bytes out of records, on their [`RecvPath`] into the own ring.
//!   Records are taken under the lock of the sending half.
//! - [`RingRenewal`]: the way from TCP back to a ring.

mod places;
mod recv;
mod renewal;
mod send;

pub use places::{cursor_at, distance, last_of, offset_of, pieces_before};
pub use recv::{Place, RecordRecv, RecvHalf, RecvPath, first_words, reader_view};
pub use renewal::{Message, RingRenewal};
pub use send::{
    CHUNK, Leaving, OwnerState, RecordSend, SendHalf, SendPath, SwitchReason, Transmit, WriteError,
};
