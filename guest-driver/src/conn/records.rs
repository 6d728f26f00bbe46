// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The TCP connection of a connection as another carrier.

use std::collections::VecDeque;
use std::time::Duration;

use smc_core::stream::RecordRecv;

use crate::byte_queue::record_queue::RecordQueue;

/// The TCP connection as a carrier: what it has not taken yet, and what it has brought.
pub(super) struct Records {
    /// Records not yet taken by TCP.
    pub(super) out: RecordQueue,
    /// The last deliveries to the former ring, until the peer reports its received bytes.
    pub(super) copies: Vec<u8>,
    /// Bytes from TCP not yet processed.
    pub(super) input: VecDeque<u8>,
    /// The way of these bytes into the own ring.
    pub(super) recv: RecordRecv,
    /// TCP has delivered the peer's FIN, and the machine knows.
    pub(super) ended: bool,
    /// SO_LINGER of the program, while the socket's own value makes the kernel reset the connection at
    /// the end of the process, because bytes are unread.
    pub(super) linger: Option<Option<Duration>>,
}

impl Records {
    /// The state without records. `inheritable`: the child of a fork can take the connection over.
    pub(super) fn new(inheritable: bool) -> Records {
        Records {
            out: RecordQueue::new(inheritable),
            copies: Vec::new(),
            input: VecDeque::new(),
            recv: RecordRecv::default(),
            ended: false,
            linger: None,
        }
    }
}
