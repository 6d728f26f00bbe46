// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One connection: cursors, window, ring pieces, urgent data, and its end.
//!
//! Plain data and pure functions: no IO, clock, thread, lock or heap. Every type is `Copy`. The
//! module serves SMC-D and both modes of SMC-R; only [`Ring`] knows the difference.
//!
//! - [`Sender`]: the permitted writes into the peer's ring, and their places.
//! - [`Receiver`]: the arrived bytes in the own ring, and the time to announce their reading.
//! - [`close`]: the ten states of RFC 7609 section 4.8.
//! - [`control`]: reading the control block in the safe order, and one struct for the whole
//!   connection.
//! - [`Sequence`]: the numbers of SMC-R's control messages.
//! - [`Outbound`]: the posts of an end of SMC-R, repeated on another link if necessary.
//! - [`failover`]: the judgement of a failover validation.
//!
//! # For users with two locks
//!
//! The send side and the receive side share nothing. Both publish into the control block of the
//! peer, so the two need five rules:
//!
//! 1. Stores into the peer's control block happen in one order, under one lock, and take the newest
//!    [`Receiver::cursor`] and [`Close::flags`]; an older consumer cursor behind a newer one looks
//!    to the peer like a move backwards.
//! 2. Bytes, then (rarely) [`Sender::flags_ahead`], then the producer word, then the consumer
//!    word, then the signal.
//! 3. The own control block is read by [`control::read_words`].
//! 4. End of data is reported only after a load of the producer word begun with
//!    [`Close::peer_done`] already known, and only if nothing is left to read. The other thread may
//!    have seen D before this thread has seen the last bytes.
//! 5. [`Close::may_publish`] is asked before each publication, window updates included.
//!
//! A [`CursorError`] means a lying peer: report [`close::Event::Abort`] and carry out its actions.

pub mod close;
pub mod control;
pub mod failover;
mod outbound;
mod receiver;
mod ring;
pub mod sender;
mod sequence;
mod urgent;

pub use close::{Actions, Close, Event, State};
pub use control::{Connection, Delivery, read_words};
pub use outbound::{Outbound, Post};
pub use receiver::{ProducerUpdate, Receiver, UpdateDecision};
pub use ring::{
    CursorError, EYE_CATCHER, EYE_CATCHER_LEN, MAX_RING_LEN, Position, Ring, RingError,
    SMCD_CONTROL_LEN, Span,
};
pub use sender::Sender;
pub use sequence::{Order, Sequence};
pub use urgent::{OobError, UrgentEvent};
