// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs, and the transfers between two pairs.

use std::collections::VecDeque;

use super::qp::{Done, Message, Op, Qp, QpState};
use super::types::{Check, EndId, Event};
use super::world::Simulation;
use crate::link_group::LinkKey;
use crate::wire::cdc::CDC_LEN;

/// Receives posted on a queue pair.
const RECEIVES: u32 = 6;

impl Simulation {
    pub(super) fn new_qp(&mut self, owner: EndId, link: LinkKey, rnic: usize) -> usize {
        let qpn = 0x10 + self.qpns[owner.role][rnic];
        self.qpns[owner.role][rnic] += 1;
        self.qps.push(Qp {
            owner,
            link,
            rnic,
            qpn,
            peer: None,
            state: QpState::Up,
            sends: VecDeque::new(),
            arrived: 0,
            moving: false,
            acking: false,
            ack_lost: false,
            give_up: None,
            slow_until: 0,
            room: RECEIVES,
            inbox: VecDeque::new(),
            done: VecDeque::new(),
            polling: false,
        });
        self.qps.len() - 1
    }

    /// Whether packets of `q` reach its peer, and the answers come back.
    fn reaches(&self, q: usize) -> Option<usize> {
        let this = &self.qps[q];
        let peer = this.peer?;
        let there = &self.qps[peer];
        let host = this.owner.role;
        let rnics = if host == 0 { (this.rnic, there.rnic) } else { (there.rnic, this.rnic) };
        let up = this.state == QpState::Up
            && there.state == QpState::Up
            && there.peer == Some(q)
            && self.ports[host][this.rnic]
            && self.ports[1 - host][there.rnic]
            && !self.cuts[rnics.0][rnics.1];
        up.then_some(peer)
    }

    pub(super) fn post(&mut self, q: usize, op: Op) {
        if self.qps[q].state != QpState::Up {
            // Flushed; the affected ends are already notified.
            return;
        }
        self.qps[q].sends.push_back(op);
        self.move_on(q);
    }

    fn move_on(&mut self, q: usize) {
        if !self.qps[q].moving {
            self.qps[q].moving = true;
            let latency = self.time(self.plan.latency);
            let at = (self.now + latency).max(self.qps[q].slow_until);
            self.at(at, Event::Deliver(q));
        }
    }

    /// The head of a send queue goes over the wire.
    pub(super) fn deliver(&mut self, q: usize) -> Check {
        self.qps[q].moving = false;
        if self.qps[q].state != QpState::Up || self.qps[q].sends.is_empty() {
            return Ok(());
        }
        let Some(peer) = self.reaches(q) else {
            let limit = 200_000 + self.time(3_000_000);
            let give_up = *self.qps[q].give_up.get_or_insert(self.now + limit);
            if self.now >= give_up {
                self.break_qp(q);
            } else {
                self.qps[q].moving = true;
                let again = self.now + 20_000 + self.time(100_000);
                self.at(again.min(give_up), Event::Deliver(q));
            }
            return Ok(());
        };
        self.qps[q].give_up = None;
        for _ in 0..1 + self.rng.below(6) {
            let Some(op) = self.qps[q].sends.get(self.qps[q].arrived).cloned() else { break };
            if !matches!(op, Op::Write { .. }) && self.qps[peer].room == 0 {
                // Receiver not ready: repeated without limit.
                self.qps[q].moving = true;
                let wait = 500 + self.time(5000);
                self.at(self.now + wait, Event::Deliver(q));
                break;
            }
            match op {
                Op::Write { from, span, rkey, address } => {
                    if !self.land(from, peer, span, rkey, address)? {
                        // Remote access error: both queue pairs go to error.
                        self.break_qp(q);
                        self.break_qp(peer);
                        return Ok(());
                    }
                }
                Op::Cdc { bytes, .. } => self.receive(peer, Message::Cdc(bytes)),
                Op::Llc { bytes, .. } => self.receive(peer, Message::Llc(bytes)),
            }
            self.qps[q].arrived += 1;
        }
        if !self.qps[q].acking && self.qps[q].arrived > 0 {
            self.qps[q].acking = true;
            let latency = self.time(self.plan.latency);
            self.at(self.now + latency, Event::Ack(q));
        }
        if self.qps[q].sends.len() > self.qps[q].arrived {
            self.move_on(q);
        }
        Ok(())
    }

    fn receive(&mut self, q: usize, message: Message) {
        self.qps[q].room -= 1;
        self.qps[q].inbox.push_back(message);
        self.poll_later(q);
    }

    fn poll_later(&mut self, q: usize) {
        if !self.qps[q].polling {
            self.qps[q].polling = true;
            let wait = self.time(self.plan.polling);
            self.at(self.now + wait, Event::Poll(q));
        }
    }

    /// An acknowledgement comes back, unless the path has gone meanwhile.
    pub(super) fn ack(&mut self, q: usize) {
        self.qps[q].acking = false;
        if self.qps[q].state != QpState::Up {
            return;
        }
        if self.reaches(q).is_none() {
            // Sent again until the peer acknowledges the copy, or never does.
            self.qps[q].ack_lost = true;
            self.move_on(q);
            return;
        }
        self.qps[q].ack_lost = false;
        let arrived = std::mem::take(&mut self.qps[q].arrived);
        for op in self.qps[q].sends.drain(..arrived).collect::<Vec<_>>() {
            let done = match op {
                Op::Write { .. } | Op::Llc { receipt: None, .. } => continue,
                Op::Cdc { from, number, .. } => Done::Cdc { from, number },
                Op::Llc { receipt: Some(receipt), .. } => Done::Receipt(receipt),
            };
            self.qps[q].done.push_back(done);
        }
        if !self.qps[q].done.is_empty() {
            self.poll_later(q);
        }
    }

    /// Moves the queue pair to the error state; its owner is notified later.
    pub(super) fn break_qp(&mut self, q: usize) {
        if self.stop_qp(q) {
            let wait = if self.rng.one_in(8) { self.time(2_000_000) } else { self.time(20_000) };
            self.at(self.now + wait, Event::Broken(q));
        }
    }

    /// Stops the queue pair on behalf of its owner.
    pub(super) fn stop_qp(&mut self, q: usize) -> bool {
        let qp = &mut self.qps[q];
        if qp.state != QpState::Up {
            return false;
        }
        qp.state = QpState::Error;
        qp.sends.clear();
        qp.arrived = 0;
        true
    }

    pub(super) fn destroy_qp(&mut self, q: usize) {
        let qp = &mut self.qps[q];
        qp.state = QpState::Gone;
        qp.sends.clear();
        qp.inbox.clear();
        qp.done.clear();
    }

    /// The owner polls completions.
    pub(super) fn poll(&mut self, q: usize) -> Check {
        let host = self.qps[q].owner.role;
        if self.stalled[host] > self.now {
            self.at(self.stalled[host], Event::Poll(q));
            return Ok(());
        }
        self.qps[q].polling = false;
        let sends_first = self.rng.one_in(2);
        for sends in [sends_first, !sends_first] {
            if sends {
                while let Some(done) = self.qps[q].done.pop_front() {
                    self.on_done(q, done)?;
                    self.drain_dirty()?;
                }
            } else {
                while let Some(message) = self.take_message(q) {
                    self.on_message(q, message)?;
                    self.drain_dirty()?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn take_message(&mut self, q: usize) -> Option<Message> {
        let message = self.qps[q].inbox.pop_front()?;
        self.qps[q].room += 1;
        Some(message)
    }

    /// Takes the messages of connections, and leaves LLC.
    pub(super) fn take_cdc(&mut self, q: usize) -> Option<[u8; CDC_LEN]> {
        let inbox = &mut self.qps[q].inbox;
        let at = inbox.iter().position(|message| matches!(message, Message::Cdc(_)))?;
        self.qps[q].room += 1;
        match self.qps[q].inbox.remove(at) {
            Some(Message::Cdc(bytes)) => Some(bytes),
            _ => None,
        }
    }
}
