// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The part of the sockets for a library in place of functions of libc: handshakes in steps, a wait for
//! many connections with the program's signals, bytes written before the choice of a carrier, and
//! processes that fork. Any version may change this interface. The methods of
//! [`SmcStream`](crate::SmcStream) and [`Stack`](crate::Stack) for such a library are hidden as well.

pub use crate::byte_queue::{BytePiece, ByteQueue};
pub use crate::handshake::{ClcPrefix, FirstBytes};
pub use crate::socket::handshake::{Handshake, Side};
pub use crate::socket::incoming::{Incoming, ServerSide};
pub use crate::socket::inherit::{AfterFork, PendingDecline, StackUpkeep};
pub use crate::socket::outgoing::{ClientSide, Outgoing, ProposalClaim};
pub use crate::socket::watch::{ArmedLines, SignalMask, Watch, WatchedStream, Woken};
pub use ism_sys::ForkLocks;
pub use smc_core::handshake::DeclineReason;
