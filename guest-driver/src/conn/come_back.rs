// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The return of a connection from TCP to a ring.
//!
//! The messages of the handshake come in CLC records. A thread of the stack carries out the requested
//! steps ([`Conn::come_back`]), because they take device commands. No lock is held meanwhile.
//!
//! Both directions go to the new ring at once: when the peer's CHANGE is taken. A server has sent its
//! own CHANGE before, and sends nothing in between. To take no longer than the peer's answer, an end
//! awaiting CHANGE takes DATA in front of it out of TCP, also if the program does not read.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use smc_core::carrier::{BackOff, Input, Reading, Renewal, Role};
use smc_core::connection::State;
use smc_core::handshake::AwaitAccept;
use smc_core::stream::{Message, RingRenewal};
use smc_core::time::Tick;
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{HEADER_LEN, Record};

use super::carrier::Carrier;
use super::counts::MovedTime;
use super::from_tcp::first_chunk;
use super::{Conn, Rx, Tx};
use crate::handshake::EstablishedConn;
use crate::handshake::link::LinkHandshake;
use crate::handshake::ring::{NoRing, Offer, RingParams, RingStep, Stage};
use crate::smcd::DeferredDrop;

/// The longest wait of a server for its own device after a Proposal.
const DEVICE_TIME: Duration = Duration::from_millis(500);

/// The state of a connection's return to a ring.
pub(super) struct WayBack {
    pub(super) me: Weak<Conn>,
    begin: Instant,
    back_off: BackOff,
    /// The present or last CLC message.
    pub(super) message: Message,
    /// The time of the message's completion.
    complete: Instant,
    /// The message to the peer in the next CLC record.
    pub(super) answer: Vec<u8>,
    pub(super) renewal: RingRenewal<Stage, Arc<Carrier>>,
    /// Values to be dropped without a lock.
    retired: Vec<DeferredDrop>,
    /// This end has sent an urgent byte by TCP.
    has_marked: bool,
}

/// Knowledge of the device of a connection's peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerDevice {
    /// The connection has had a ring there since this time.
    Ring(Instant),
    /// The connection was refused a ring at this time, and may propose another one.
    Refused(Instant),
}

/// A step with device commands.
enum Step {
    Propose,
    Accept(Vec<u8>),
    Confirm(Box<AwaitAccept>, Vec<u8>),
    Attach(Box<Offer>, Vec<u8>),
    Link(Box<LinkHandshake>, Vec<u8>),
    /// There will be no ring this time.
    Decline(Option<Stage>),
}

impl WayBack {
    pub(super) fn new() -> WayBack {
        let begin = Instant::now();
        WayBack {
            me: Weak::new(),
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

    fn now(&self) -> Tick {
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

    fn forget(&mut self) {
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

impl Tx {
    /// Whether the connection has been on TCP for long enough, at an end that may propose.
    fn is_return_due(&self) -> bool {
        let way = &self.way_back;
        self.half.carrier().role() == Role::Client
            && self.may_return()
            && way.back_off.may_return(way.now())
    }

    fn may_return(&self) -> bool {
        let carrier = self.half.carrier();
        carrier.returns() && carrier.is_on_tcp() && !self.way_back.has_marked
    }
}

impl Conn {
    /// The address of this end.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        self.tcp.addresses().ok().map(|(local, _)| local.ip())
    }

    /// Whether the connection is on TCP and may come back to a ring, or has to let go of one.
    pub(crate) fn may_come_back(&self) -> bool {
        let tx = self.tx();
        let may_return = tx.may_return() && tx.half.close.state() == State::Active;
        let is_asked = tx.half.carrier().renewal() != Renewal::None;
        !tx.way_back.retired.is_empty()
            || (may_return || is_asked) && !tx.half.carrier().is_over() && self.tcp.is_open()
    }

    /// Has the connection propose a ring at its next turn, although it was refused one before.
    pub(crate) fn retry_return(&self) {
        let way = &mut self.tx().way_back;
        let now = way.now();
        way.back_off.retry(now);
    }

    /// The connection's knowledge of its peer's device.
    pub(crate) fn sign_of_device(&self) -> Option<(IpAddr, PeerDevice)> {
        if !self.may_outlive() {
            return None;
        }
        let sign = {
            let tx = self.tx();
            let way = &tx.way_back;
            let at = |tick: Tick| way.begin + Duration::from_micros(tick.0);
            match (way.back_off.ring_since(), way.back_off.refused_at()) {
                (Some(since), _) => PeerDevice::Ring(at(since)),
                (None, Some(refused)) => {
                    let may_try = tx.may_return() && tx.half.close.state() == State::Active;
                    (tx.half.carrier().role() == Role::Client && may_try)
                        .then_some(PeerDevice::Refused(at(refused)))?
                }
                (None, None) => return None,
            }
        };
        Some((self.tcp.addresses().ok()?.1.ip(), sign))
    }

    /// Carries out the next step of the return to a ring, if one is due. The step may take device
    /// commands. `true`: LLC is under way, and the return continues after it.
    pub(crate) fn come_back(&self, params: &RingParams) -> bool {
        let (step, retired) = {
            let may_begin = {
                let rx = self.rx();
                !rx.half.receiver.exception() && rx.may_begin_ring(self.own_ring().len() as usize)
            };
            let mut tx = self.tx();
            let step = next_step(&mut tx, params, may_begin);
            let retired = std::mem::take(&mut tx.way_back.retired);
            (step, retired)
        };
        drop(retired);
        let Some(step) = step else { return false };
        let is_proposal = matches!(step, Step::Propose);
        // Dropped behind the Decline.
        let mut declined = None;
        let done = match step {
            Step::Propose => params.propose(),
            Step::Accept(message) => params.accept(&message),
            Step::Confirm(awaiting, message) => params.confirm(*awaiting, &message),
            Step::Attach(offer, message) => params.attach(*offer, &message),
            Step::Link(link, message) => params.link(link, &message),
            Step::Decline(stage) => {
                declined = stage;
                RingStep::No(params.decline())
            }
        };
        let links = matches!(done, RingStep::Later(_) | RingStep::Message(Stage::Linking(_), _));
        if self.end_step(&mut self.tx(), is_proposal, done, params) {
            // The peer may have begun the ring already.
            self.serve_tcp(&mut self.rx());
        }
        drop(declined);
        links
    }

    /// `true`: the ring for the peer's waiting CHANGE is there.
    fn end_step(
        &self,
        tx: &mut Tx,
        is_proposal: bool,
        done: RingStep,
        params: &RingParams,
    ) -> bool {
        let renewal = tx.half.carrier().renewal();
        let is_confirmed = matches!(renewal, Renewal::Confirmed { .. });
        let way = &mut tx.way_back;
        way.renewal.end_step();
        if renewal == Renewal::None && !is_proposal {
            // The renewal has ended meanwhile.
            way.retired.push(Box::new(done));
            way.forget();
            self.tcp.want_return();
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
                let fits = is_ring && carrier.may_come_back() && !way.has_marked;
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
        self.change(tx, input, 0);
        if tx.half.carrier().renewal() == Renewal::None {
            // TCP has ended meanwhile, or there is no ring.
            tx.way_back.forget();
        }
        false
    }

    /// Takes the peer's CHANGE as the next record, and begins both directions of the new ring. `false`:
    /// the program has to read an urgent byte before.
    pub(super) fn begin_ring(&self, rx: &mut Rx) -> bool {
        if self.refresh_rx(rx).is_err()
            || rx.half.receiver.exception()
            || self.keep_unread(rx).is_err()
        {
            return false;
        }
        let mut tx = self.tx();
        let Some(Ok(record)) = first_chunk(&tx.records.input).map(|header| Record::parse(&header))
        else {
            return false;
        };
        tx.records.input.drain(..HEADER_LEN);
        self.change(&mut tx, Input::Record(record), 0);
        if tx.half.carrier().is_over() || tx.half.carrier().incoming().reading() != Reading::Ring {
            return true;
        }
        let Some(next) = tx.way_back.renewal.take_ring() else { return false };
        if tx.records.recv.stored() != Some(rx.half.total()) {
            self.change(&mut tx, Input::Violated, 0);
            return true;
        }
        let me = tx.way_back.me.clone();
        let last = self.carrier().key();
        self.exchange(rx, &mut tx, next.clone());
        drop(tx);
        self.reactor.remove(last, std::ptr::from_ref(self));
        let is_known = self.reactor.enter(next.registration(), me);
        if self.reactor.is_leaving() {
            self.leave_in_order();
        }
        if !is_known || next.is_device_gone() || next.has_failed() {
            self.lost_locked(&mut self.tx());
        }
        // The readiness descriptor arms the new line, and retired values are dropped.
        self.tcp.watch_room();
        self.tcp.want_return();
        true
    }

    /// Has both directions use another carrier, from its beginning.
    fn exchange(&self, rx: &mut Rx, tx: &mut Tx, next: Arc<Carrier>) {
        let (Ok(sender), Ok(ring)) = (next.sender(), next.local_ring()) else { return };
        tracing::debug!(peer = %next, "connection comes back to a device");
        rx.half.begin_ring(ring, sender.ring());
        let writes = tx.half.begin_ring(sender);
        tx.records.recv.begin_ring();
        tx.records.copies = Vec::new();
        self.cursors.restart(rx.half.receiver.cursor());
        // TCP may have brought something just now.
        let [producer, _] = rx.half.seen();
        (rx.last_move, tx.last_move) = (MovedTime::new(producer), MovedTime::new(tx.half.total()));
        tx.lost = None;
        tx.queue.begin_ring();
        let way = &mut tx.way_back;
        way.back_off.on_ring(way.now());
        // The copies first: a thread seeing the new one has one of the locks, or takes none.
        let last = std::mem::replace(&mut tx.carrier, next.clone());
        rx.carrier = next.clone();
        self.carrier.store(next.clone());
        tx.way_back.retired.push(Box::new(last));
        self.end.come_back(writes);
        self.watch_line(&next);
        if !writes {
            next.fail();
        }
        // The ring repeats the state of the own direction already reported by TCP.
        let words = self.out_words(tx);
        if tx.half.close.flags().contains(StateFlags::CLOSED) {
            next.release();
        }
        if writes && next.deliver(&[], words, true).is_ok() {
            self.sent(tx, words);
        }
        self.flush_held(tx);
        self.wake_all();
    }
}

/// Takes the next step out, if one is due and no thread is busy with one. `may_begin`: no urgent byte
/// is unread, and unread bytes of the last ring have room beside the new one. A ring does not begin
/// before the program has read the urgent byte, and this end would send nothing meanwhile.
fn next_step(tx: &mut Tx, params: &RingParams, may_begin: bool) -> Option<Step> {
    let is_active = tx.half.close.state() == State::Active && may_begin;
    if tx.half.carrier().is_over() {
        return None;
    }
    let renewal = tx.half.carrier().renewal();
    if matches!(tx.way_back.renewal, RingRenewal::Busy) {
        return None;
    }
    let step = match renewal {
        Renewal::Confirmed { .. } => match tx.way_back.renewal.take_stage() {
            Some(Stage::Linking(link)) => Step::Link(link, Vec::new()),
            Some(stage) => {
                tx.way_back.renewal = RingRenewal::Stage(stage);
                return None;
            }
            None => return None,
        },
        Renewal::None if is_active && params.has_device() && tx.is_return_due() => Step::Propose,
        // A peer reading no answers gets no more of them: they would fill this process.
        Renewal::Accepting if !tx.records.out.is_empty() => return None,
        Renewal::Accepting | Renewal::Confirming | Renewal::Attaching => {
            let fits = is_active && tx.may_return();
            let way = &mut tx.way_back;
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
    tx.way_back.renewal = RingRenewal::Busy;
    Some(step)
}
