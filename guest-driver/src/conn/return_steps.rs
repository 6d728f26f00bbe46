// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The return of a connection from TCP to a ring.
//!
//! The messages of the handshake come in CLC records. A thread of the stack carries out the requested
//! steps ([`Conn::return_to_ring`]), because they take device commands. No lock is held meanwhile.
//!
//! Both directions go to the new ring at once: when the peer's CHANGE is taken. A server has sent its
//! own CHANGE before, and sends nothing in between. To take no longer than the peer's answer, an end
//! awaiting CHANGE takes DATA in front of it out of TCP, also if the program does not read.

use std::sync::Arc;
use std::time::Duration;

use smc_core::carrier::{Input, Renewal, Role};
use smc_core::connection::State;
use smc_core::handshake::AwaitAccept;
use smc_core::stream::RingRenewal;
use smc_core::wire::cdc::StateFlags;

use super::carrier::Carrier;
use super::counts::MovedTime;
use super::parts::{Rx, Shared, Tx};
use crate::handshake::EstablishedConn;
use crate::handshake::link::LinkHandshake;
use crate::handshake::ring::{NoRing, Offer, RingParams, RingStep, Stage};

/// The longest wait of a server for its own device after a Proposal.
const DEVICE_TIME: Duration = Duration::from_millis(500);

/// A step with device commands.
pub(super) enum Step {
    Propose,
    Accept(Vec<u8>),
    Confirm(Box<AwaitAccept>, Vec<u8>),
    Attach(Box<Offer>, Vec<u8>),
    Link(Box<LinkHandshake>, Vec<u8>),
    /// There will be no ring this time.
    Decline(Option<Stage>),
}

impl Tx {
    /// Whether the connection has been on TCP for long enough, at an end that may propose.
    fn is_return_due(&self) -> bool {
        let way = &self.ring_return;
        self.half.carrier().role() == Role::Client
            && self.may_return()
            && way.back_off.may_return(way.now())
    }

    pub(super) fn may_return(&self) -> bool {
        let carrier = self.half.carrier();
        carrier.returns() && carrier.is_on_tcp() && !self.ring_return.has_marked
    }

    /// Takes the next step out, if one is due and no thread is busy with one. `may_begin`: no urgent byte
    /// is unread, and unread bytes of the last ring have room beside the new one. A ring does not begin
    /// before the program has read the urgent byte, and this end would send nothing meanwhile.
    pub(super) fn next_step(&mut self, params: &RingParams, may_begin: bool) -> Option<Step> {
        let is_active = self.half.close.state() == State::Active && may_begin;
        if self.half.carrier().is_over() {
            return None;
        }
        let renewal = self.half.carrier().renewal();
        if matches!(self.ring_return.renewal, RingRenewal::Busy) {
            return None;
        }
        let step = match renewal {
            Renewal::Confirmed { .. } => match self.ring_return.renewal.take_stage() {
                Some(Stage::Linking(link)) => Step::Link(link, Vec::new()),
                Some(stage) => {
                    self.ring_return.renewal = RingRenewal::Stage(stage);
                    return None;
                }
                None => return None,
            },
            Renewal::None if is_active && params.has_device() && self.is_return_due() => {
                Step::Propose
            }
            // A peer reading no answers gets no more of them: they would fill this process.
            Renewal::Accepting if !self.records.out.is_empty() => return None,
            Renewal::Accepting | Renewal::Confirming | Renewal::Attaching => {
                let fits = is_active && self.may_return();
                let way = &mut self.ring_return;
                if !params.has_device() && way.complete.elapsed() < DEVICE_TIME {
                    return None;
                }
                let message = way.message.take();
                match (renewal, way.renewal.take_stage()) {
                    (Renewal::Accepting, None) if fits => Step::Accept(message),
                    (Renewal::Confirming, Some(Stage::Proposed(awaiting))) if fits => {
                        Step::Confirm(awaiting, message)
                    }
                    (Renewal::Attaching, Some(Stage::Accepted(offer))) if fits => {
                        Step::Attach(offer, message)
                    }
                    (_, Some(Stage::Linking(link))) if fits => Step::Link(link, message),
                    (_, stage) => Step::Decline(stage),
                }
            }
            _ => return None,
        };
        self.ring_return.renewal = RingRenewal::Busy;
        Some(step)
    }

    /// `true`: the ring for the peer's waiting CHANGE is there.
    pub(super) fn end_step(
        &mut self,
        shared: &Shared,
        is_proposal: bool,
        done: RingStep,
        params: &RingParams,
    ) -> bool {
        let renewal = self.half.carrier().renewal();
        let is_confirmed = matches!(renewal, Renewal::Confirmed { .. });
        let way = &mut self.ring_return;
        way.renewal.end_step();
        if renewal == Renewal::None && !is_proposal {
            // The renewal has ended meanwhile.
            way.retired.push(Box::new(done));
            way.forget();
            shared.tcp.want_return();
            return false;
        }
        let input = match done {
            RingStep::Later(stage) => {
                way.renewal = RingRenewal::Stage(stage);
                return false;
            }
            RingStep::Message(stage, message) => {
                way.renewal = RingRenewal::Stage(stage);
                way.answer = message;
                if is_proposal { Input::Return } else { Input::Prepared(true) }
            }
            RingStep::Ring(established, message) => {
                let carrier = Arc::new(match established {
                    EstablishedConn::D(ring) => Carrier::smcd(*ring),
                    EstablishedConn::R(element) => Carrier::smcr(*element),
                });
                let is_ring = carrier.sender().is_ok() && carrier.local_ring().is_ok();
                // An urgent byte may have gone by TCP meanwhile.
                let fits = is_ring && carrier.may_return_to_ring() && !way.has_marked;
                if fits {
                    way.renewal = RingRenewal::Ready(carrier);
                    way.answer = message;
                } else {
                    way.retired.push(Box::new(carrier));
                    if let NoRing::Decline(message) = params.decline() {
                        way.answer = message;
                    }
                }
                if is_confirmed {
                    if !fits {
                        way.renewal = RingRenewal::Failed;
                    }
                    return true;
                }
                Input::Prepared(fits)
            }
            // It is too late to decline, except for the peer.
            RingStep::No(_) if is_confirmed => {
                way.renewal = RingRenewal::Failed;
                return true;
            }
            RingStep::No(NoRing::Decline(message)) => {
                way.answer = message;
                if renewal == Renewal::None {
                    way.begin_wait();
                }
                Input::Prepared(false)
            }
            RingStep::No(NoRing::Violated) => Input::Violated,
        };
        self.switch(shared, input, 0);
        if self.half.carrier().renewal() == Renewal::None {
            // TCP has ended meanwhile, or there is no ring.
            self.ring_return.forget();
        }
        false
    }

    /// Has both directions use another carrier, from its beginning.
    pub(super) fn exchange(&mut self, shared: &Shared, rx: &mut Rx, next: Arc<Carrier>) {
        let (Ok(sender), Ok(ring)) = (next.sender(), next.local_ring()) else { return };
        tracing::debug!(peer = %next, "connection comes back to a device");
        rx.half.begin_ring(ring, sender.ring());
        let writes = self.half.begin_ring(sender);
        self.records.recv.begin_ring();
        self.records.copies = Vec::new();
        shared.cursors.restart(rx.half.receiver.cursor());
        // TCP may have brought something just now.
        let [producer, _] = rx.half.seen();
        (rx.last_move, self.last_move) =
            (MovedTime::new(producer), MovedTime::new(self.half.total()));
        self.lost = None;
        self.queue.begin_ring();
        let way = &mut self.ring_return;
        way.back_off.on_ring(way.now());
        // The copies first: a thread seeing the new one has one of the locks, or takes none.
        let last = std::mem::replace(&mut self.carrier, next.clone());
        rx.carrier = next.clone();
        shared.carrier.store(next.clone());
        self.ring_return.retired.push(Box::new(last));
        shared.end.return_to_ring(writes);
        shared.watch_line(&next);
        if !writes {
            next.fail();
        }
        // The ring repeats the state of the own direction already reported by TCP.
        let words = self.out_words(shared);
        if self.half.close.flags().contains(StateFlags::CLOSED) {
            next.release();
        }
        if writes && next.deliver(&[], words, true).is_ok() {
            self.sent(shared, words);
        }
        self.flush_queue(shared);
        shared.wake_all();
    }
}
