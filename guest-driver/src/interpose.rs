// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The part of the sockets that a library needs which stands in for functions of libc: handshakes
//! in steps, a wait for many connections with the program's signals, bytes that were written before
//! a connection was decided, and processes that fork. It may change with any version. The methods of
//! [`SmcStream`](crate::SmcStream) and [`Stack`](crate::Stack) for it are hidden as well.

pub use crate::byte_queue::{BytePiece, ByteQueue};
pub use crate::handshake::{ClcPrefix, FirstBytes};
pub use crate::socket::incoming::Incoming;
pub use crate::socket::inherit::{AfterFork, PendingDecline, StackUpkeep};
pub use crate::socket::outgoing::Outgoing;
pub use crate::socket::watch::{ArmedLines, SignalMask, Watch, WatchedStream, Woken};
pub use ism_sys::ForkLocks;
