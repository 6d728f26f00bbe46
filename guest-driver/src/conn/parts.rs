// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of a connection: the send side, the receive side, and the rest, without a lock.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use smc_core::stream::{RecvHalf, SendHalf};

use super::carrier::Carrier;
use super::counts::MovedTime;
use super::cursors::ConsumerCursors;
use super::end_word::EndWord;
use super::moved::MovedBytes;
use super::options::Options;
use super::records::Records;
use super::ring_return::RingReturn;
use super::waiting::Waiting;
use crate::byte_queue::send_queue::SendQueue;
use crate::byte_queue::unread_bytes::UnreadBytes;
use crate::reactor::Reactor;
use crate::reactor::spin::Spin;
use crate::reactor::watched_tcp::WatchedTcp;

/// The send side.
pub(super) struct Tx {
    /// The carrier of both directions, as [`Shared::carrier`].
    pub(super) carrier: Arc<Carrier>,
    pub(super) half: SendHalf,
    /// The end of the wait for the peer's closing words.
    pub(super) timer: Option<Instant>,
    /// The time of the peer's loss, while TCP may still report the end of its process.
    pub(super) lost: Option<Instant>,
    /// The time of the last send, by `total`.
    pub(super) last_move: MovedTime,
    /// Bytes for which the ring has no room.
    pub(super) queue: SendQueue,
    /// The TCP connection as another carrier.
    pub(super) records: Records,
    /// The return from TCP to a ring.
    pub(super) ring_return: RingReturn,
}

/// The receive side.
pub(super) struct Rx {
    /// The carrier of both directions, as [`Shared::carrier`].
    pub(super) carrier: Arc<Carrier>,
    pub(super) half: RecvHalf,
    /// Unread bytes of an earlier ring.
    pub(super) unread: Option<UnreadBytes>,
    /// The time of the last arrival, by the peer's producer word.
    pub(super) last_move: MovedTime,
}

/// The settings shared by the connections of a stack.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) spin: Arc<Spin>,
    pub(crate) moved: Arc<MovedBytes>,
    /// The longest wait of a closed connection for its peer.
    pub(crate) close_timeout: Duration,
}

/// The part of a connection used by threads without the lock of a side.
pub(super) struct Shared {
    pub(super) cursors: ConsumerCursors,
    pub(super) end: EndWord,
    pub(super) waiting: Waiting,
    pub(super) options: Options,
    pub(super) tcp: WatchedTcp<Conn>,
    pub(super) reactor: Arc<Reactor<Conn>>,
    /// The carrier of both directions. Exchanged under both locks, so a thread with one of them uses
    /// the copy there.
    pub(super) carrier: ArcSwap<Carrier>,
}

/// One SMC connection.
pub(crate) struct Conn {
    pub(super) tx: Mutex<Tx>,
    pub(super) rx: Mutex<Rx>,
    pub(super) shared: Shared,
    pub(super) moved: Arc<MovedBytes>,
    /// The connection itself, for its entry in the reactor at each new ring.
    pub(super) me: Weak<Conn>,
}
