// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC connections that the kernel serves by a pair of Unix sockets.
//!
//! The process that opened the session of a connection owns the connection. Calls that do not come
//! to this library (those of another process, of stdio, of a child between `vfork` and `exec`) find
//! a Unix socket in the place of the TCP socket, and a thread of the owner forwards the bytes
//! between the other end of the pair and the connection.
//!
//! - [`fork`]: connections that a child of a fork inherits (SOCK-21);
//! - [`hand_over`]: connections that go to the kernel, for good or as a temporary relay;
//! - [`take_back`]: temporary relays that come back;
//! - [`keeper`]: the process that goes on with the relays when their owner ends.
//!
//! A relay ends when no process has the program's end any more and the peer has taken the last
//! byte. When the owner ends before, a keeper goes on with it.

mod flow;
pub(crate) mod fork;
pub(crate) mod forward;
pub(crate) mod hand_over;
pub(crate) mod holders;
pub(crate) mod keeper;
mod owner_end;
pub(crate) mod take_back;
