// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The return of a connection from TCP to a ring: the messages, and the ring being prepared.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use smc_core::carrier::{BackOff, Input};
use smc_core::stream::{Message, RingRenewal};
use smc_core::time::Tick;

use super::carrier::Carrier;
use crate::handshake::ring::Stage;
use crate::smcd::DeferredDrop;

/// The state of a connection's return to a ring.
pub(super) struct RingReturn {
    pub(super) begin: Instant,
    pub(super) back_off: BackOff,
    /// The present or last CLC message.
    pub(super) message: Message,
    /// The time of the message's completion.
    pub(super) complete: Instant,
    /// The message to the peer in the next CLC record.
    pub(super) answer: Vec<u8>,
    pub(super) renewal: RingRenewal<Stage, Arc<Carrier>>,
    /// Values to be dropped without a lock.
    pub(super) retired: Vec<DeferredDrop>,
    /// This end has sent an urgent byte by TCP.
    pub(super) has_marked: bool,
}

/// Knowledge of the device of a connection's peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerDevice {
    /// The connection has had a ring there since this time.
    Ring(Instant),
    /// The connection was refused a ring at this time, and may propose another one.
    Refused(Instant),
}

impl RingReturn {
    pub(super) fn new() -> RingReturn {
        let begin = Instant::now();
        RingReturn {
            begin,
            back_off: BackOff::new(Tick(0)),
            message: Message::default(),
            complete: begin,
            answer: Vec::new(),
            renewal: RingRenewal::None,
            retired: Vec::new(),
            has_marked: false,
        }
    }

    pub(super) fn now(&self) -> Tick {
        Tick(u64::try_from(self.begin.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Whether the peer may begin the ring, while the link of this end is not up yet.
    pub(super) fn is_linking(&self) -> bool {
        matches!(self.renewal, RingRenewal::Stage(Stage::Linking(_)) | RingRenewal::Busy)
    }

    /// Notes that this end has sent an urgent byte by TCP.
    pub(super) fn note_mark(&mut self) {
        self.has_marked = true;
    }

    /// The connection has left its ring.
    pub(super) fn begin_wait(&mut self) {
        self.back_off.on_tcp(self.now());
    }

    /// The connection stays on TCP this time.
    pub(super) fn stay(&mut self) {
        self.begin_wait();
        self.forget();
    }

    pub(super) fn forget(&mut self) {
        self.message.clear();
        self.answer.clear();
        if let Some(renewal) = self.renewal.forget() {
            self.retired.push(Box::new(renewal));
        }
    }

    /// Takes bytes of a CLC record. Returns the input for the machine after the last byte.
    pub(super) fn take_bytes(&mut self, input: &mut VecDeque<u8>) -> Option<Input> {
        let complete = self.message.fill(input);
        if complete.is_some() {
            self.complete = Instant::now();
        }
        complete
    }
}
