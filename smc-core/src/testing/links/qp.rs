// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of a simulated queue pair.

use std::collections::VecDeque;

use super::types::{EndId, HalfId};
use crate::connection::Span;
use crate::link_group::{LinkKey, Receipt};
use crate::wire::cdc::CDC_LEN;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QpState {
    Up,
    /// Flushed; arrived messages can still be read.
    Error,
    Gone,
}

/// An entry of a send queue.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// A piece of a send element, read at the time of the transfer.
    Write {
        from: HalfId,
        span: Span,
        rkey: u32,
        address: u64,
    },
    Cdc {
        from: HalfId,
        number: u16,
        bytes: [u8; CDC_LEN],
    },
    Llc {
        bytes: Vec<u8>,
        receipt: Option<Receipt>,
    },
}

/// A send completion.
#[derive(Clone, Copy, Debug)]
pub(super) enum Done {
    Cdc { from: HalfId, number: u16 },
    Receipt(Receipt),
}

/// An arrived message.
#[derive(Clone, Debug)]
pub(super) enum Message {
    Cdc([u8; CDC_LEN]),
    Llc(Vec<u8>),
}

#[derive(Debug)]
pub(super) struct Qp {
    pub(super) owner: EndId,
    pub(super) link: LinkKey,
    pub(super) rnic: usize,
    pub(super) qpn: u32,
    pub(super) peer: Option<usize>,
    pub(super) state: QpState,
    pub(super) sends: VecDeque<Op>,
    /// How many of them have arrived and are not acknowledged.
    pub(super) arrived: usize,
    pub(super) moving: bool,
    pub(super) acking: bool,
    pub(super) ack_lost: bool,
    pub(super) give_up: Option<u64>,
    pub(super) slow_until: u64,
    pub(super) room: u32,
    pub(super) inbox: VecDeque<Message>,
    pub(super) done: VecDeque<Done>,
    pub(super) polling: bool,
}
