// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One connection: cursors, window, ring pieces, urgent data, and how it ends.
//!
//! Plain data and pure functions: no IO, clock, thread, lock or heap. Every type is `Copy`. It
//! serves SMC-D and both modes of SMC-R; only [`Ring`] knows the difference.
//!
//! - [`Sender`]: what may be written into the peer's ring, and where.
//! - [`Receiver`]: what has arrived in the own ring, and when to announce that it was read.
//! - [`close`]: the ten states of RFC 7609 section 4.8.
//! - [`control`]: reading the control block in the safe order, and all of it in one struct.
//! - [`Sequence`]: the numbers of SMC-R's control messages.
//! - [`Outbound`]: what an end of SMC-R posts, and what it posts again on another link.
//! - [`failover`]: the judgement of a failover validation.
//!
//! # For users with two locks
//!
//! The send side and the receive side share nothing. What they have to agree on is the control
//! block of the peer, into which both publish. Five rules:
//!
//! 1. Stores into the peer's control block happen in one order, under one lock, and take the
//!    newest [`Receiver::cursor`] and [`Close::flags`]; an older consumer cursor behind a newer
//!    cursor looks to the peer like one that moves back.
//! 2. Bytes, then (rarely) [`Sender::flags_ahead`], then the producer word, then the consumer
//!    word, then the signal.
//! 3. The own control block is read by [`control::read_words`].
//! 4. End of data is reported only after a load of the producer word that began when
//!    [`Close::peer_done`] was already known, and that left nothing to read. The other thread may
//!    have seen D before this one has seen the last bytes.
//! 5. [`Close::may_publish`] is asked before each publication, window updates included.
//!
//! A [`CursorError`] means that the peer lies: report [`close::Event::Abort`] and do what it says.

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
