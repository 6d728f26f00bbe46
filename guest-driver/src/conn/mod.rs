// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One SMC connection, from its handshake to the last use of its buffer.
//!
//! # A connection's life
//!
//! *Begin* (`connection`): the handshake makes a [`Carrier`], a pair of DMBs or of RDMA elements: the
//! own ring, filled by the peer, the peer's ring, filled by this end, and two control words for each
//! end. `Conn::new` registers the connection with the reactor, and with the watch of TCP if both ends
//! can do without their devices.
//!
//! *Send* (`send`): the send half of `smc_core::stream` names the path of the next bytes: into the
//! peer's ring, by one delivery of bytes and words (`delivery`); nowhere, between two carriers; or as a
//! record on TCP (`records_out`). Bytes without room wait in the send queue (`queueing`), or their
//! writer waits (`wait`).
//!
//! *Receive* (`recv`): a reader copies bytes out of the own ring, whether the peer has stored them or
//! this end has, out of records (`records_in`). So reads and readiness are the same on both paths. The
//! peer may change its words at any time: a thread copies them out, the receive half checks the copy,
//! and impossible words abort the connection.
//!
//! *Switch the carrier* (`carrier_switch`): the device is about to go, or is gone. The machine of the
//! send half gives actions: the end of the ring, records, bytes to repeat, and the position of the
//! first byte from TCP. `Tx::switch` carries the actions out. If the process ends now, `reset_at_end`
//! has the kernel reset TCP as long as bytes are unread.
//!
//! *Return to a ring* (`return_steps`): a thread of the stack negotiates a new ring, step by step and
//! without a lock, by CLC messages in records. The peer's CHANGE begins both directions of the ring.
//!
//! *End* (`close`): an event and its actions by the table of RFC 7609. The end word (`end_word`) has
//! the result for threads without a lock. The buffer returns to its pool when both ends have finished.
//!
//! # Parts and locks
//!
//! A connection (`parts`) has three parts:
//!
//! - `Shared` has no lock of a side: atomics such as the consumer cursor, part of every control word,
//!   and the end of the connection; its waiters, its carrier, and its TCP connection.
//! - `Tx`, the send side, has a lock. Only a thread with this lock sends to the peer. The methods take
//!   `&Shared`, so none of them can take the lock of a side again.
//! - `Rx`, the receive side, has a lock of its own, so one thread can write while another reads. Lock
//!   order: receive side, then send side. A thread takes records under both.
//!
//! `Conn` has the calls of the program, the stack and the reactor (`events`). A call takes the locks,
//! has the parts do the work, and wakes or waits after the release of the locks.

mod captured;
mod carrier;
mod carrier_switch;
mod close;
mod connection;
mod counts;
mod cursors;
mod delivery;
mod end_word;
mod events;
mod lifecycle;
mod local_end;
mod moved;
mod options;
mod parts;
mod queueing;
mod records;
mod records_in;
mod records_out;
mod recv;
mod reset_at_end;
mod return_steps;
mod ring_return;
mod send;
mod shared;
mod tcp_io;
mod wait;
mod waiting;

pub(crate) use crate::byte_queue::send_queue::{
    forget_unsent_bytes, has_unsent_bytes, hold_queues,
};
pub(crate) use carrier::Carrier;
pub(crate) use local_end::LocalEnd;
pub(crate) use parts::{Common, Conn};
pub(crate) use ring_return::PeerDevice;
pub(crate) use wait::sleep_on_lines;
