// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC connections served by the kernel by a pair of Unix sockets.
//!
//! The process with the session of a connection owns the connection. Calls outside of this library (of
//! another process, of stdio, of a child between `vfork` and `exec`) find a Unix socket in the place of
//! the TCP socket, and a thread of the owner forwards the bytes between the other end of the pair and
//! the connection.
//!
//! - [`fork`]: connections inherited by a child of a fork (SOCK-21);
//! - [`hand_over`]: connections left to the kernel, for good or as a temporary relay;
//! - [`take_back`]: temporary relays taken back;
//! - [`keeper`]: the process in charge of the relays after the end of their owner.
//!
//! A relay ends when no process has the program's end any more and the peer has taken the last byte.
//! When the owner ends earlier, a keeper continues the relay.

mod flow;
pub(crate) mod fork;
pub(crate) mod forward;
pub(crate) mod hand_over;
pub(crate) mod holders;
pub(crate) mod keeper;
mod keeper_limit;
pub(crate) mod list;
pub(crate) mod offers;
mod owner_end;
pub(crate) mod take_back;
mod temporary;
