// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Arriving messages of a connection, and the actions of its application.

use super::super::memory::stream_byte;
use super::conn::Release;
use super::half::token_of;
use super::plan::Faults;
use super::types::{Check, EndId, Event, HalfId};
use super::world::Simulation;
use crate::connection::Order;
use crate::connection::close::{Actions, Event as CloseEvent, State};
use crate::connection::failover::{Validation, judge};
use crate::wire::cdc::{Cdc, ConsumerWord, ProducerFlags, ProducerWord};

/// The default of the close machine, microseconds.
const CLOSE_TIME: u64 = crate::connection::close::CLOSE_TIMEOUT_US;
const ABORT_TIME: u64 = crate::connection::close::ABORT_TIMEOUT_US;

impl Simulation {
    /// A control message comes in.
    pub(super) fn take(&mut self, end: EndId, q: usize, cdc: Cdc) -> Check {
        let EndId { session, role } = end;
        let conn = cdc.token as usize / 2;
        let id = HalfId { session, conn, role };
        if conn >= self.sessions[session].conns.len() || token_of(id) != cdc.token {
            return match self.sessions[session].lied {
                true => Ok(()),
                false => Err(format!("{end:?}: unknown token {}", cdc.token)),
            };
        }
        let validates = cdc.producer_flags.contains(ProducerFlags::FAILOVER);
        let Some(half) = self.half(id) else { return Ok(()) };
        if !half.paths_used.contains(&q) {
            if !validates && !half.validating && !half.paths_used.is_empty() {
                return Err(format!("{id:?} hears on {q} and nothing was validated there"));
            }
            half.paths_used.push(q);
        }
        if validates {
            half.validating = true;
            // Messages of other links may still be unread.
            self.take_all_cdc_but(end, Some(q))?;
            let Some(half) = self.half(id) else { return Ok(()) };
            half.validating = false;
            let Some(half) = self.half_ref(id) else { return Ok(()) };
            return match judge(&half.seen, cdc.sequence) {
                Validation::Intact => Ok(()),
                lost => Err(format!("{id:?}: {lost:?} although nothing was lost")),
            };
        }
        let Some(half) = self.half(id) else { return Ok(()) };
        if half.seen.judge(cdc.sequence) == Order::Old || half.state() == State::Closed {
            return Ok(());
        }
        let producer = ProducerWord { cursor: cdc.producer };
        let consumer = ConsumerWord {
            cursor: cdc.consumer,
            producer_flags: cdc.producer_flags,
            state_flags: cdc.state_flags,
        };
        let delivery = match half.connection.on_control(producer, consumer, false) {
            Ok(delivery) => delivery,
            Err(error) => return Err(format!("{id:?}: honest peer refused: {error}, {cdc:?}")),
        };
        if delivery.received.update.is_due() {
            self.publish_if_allowed(id)?;
        }
        self.act(id, delivery.actions)?;
        self.wake(id);
        self.finish(id)
    }

    /// Publishes, unless nothing more may be said.
    fn publish_if_allowed(&mut self, id: HalfId) -> Check {
        match self.half_ref(id).is_some_and(|half| half.connection.close.may_publish()) {
            true => self.publish(id),
            false => Ok(()),
        }
    }

    pub(super) fn close_event(&mut self, id: HalfId, event: CloseEvent) -> Check {
        let Some(half) = self.half(id) else { return Ok(()) };
        let actions = half.connection.close.on(event, false);
        self.act(id, actions)?;
        self.finish(id)
    }

    fn act(&mut self, id: HalfId, actions: Actions) -> Check {
        if actions.intersects(Actions::REPORT_RESET | Actions::REPORT_ABORTED) {
            let HalfId { session, conn, .. } = id;
            let over = self.sessions[session].ends.iter().any(|end| !end.lives());
            let conn = &mut self.sessions[session].conns[conn];
            let excused = conn.excuse || over;
            conn.reset = true;
            if !excused && !self.sessions[session].lied {
                return Err(format!("{id:?} is reset for no reason"));
            }
        }
        for action in actions.each() {
            let now = self.now;
            let Some(half) = self.half(id) else { return Ok(()) };
            match action {
                Actions::PURGE => {
                    half.connection.receiver.purge();
                    half.failed = true;
                }
                Actions::SEND_DONE | Actions::SEND_CLOSED => self.publish(id)?,
                Actions::SEND_ABORT => {
                    self.publish(id)?;
                    self.close_event(id, CloseEvent::AbortDelivered)?;
                }
                Actions::STOP_TIMER => half.timer = None,
                Actions::START_CLOSE_TIMER | Actions::START_ABORT_TIMER => {
                    let time = match action == Actions::START_CLOSE_TIMER {
                        true => CLOSE_TIME,
                        false => ABORT_TIME,
                    };
                    half.timer = Some(now + time);
                    self.at(now + time, Event::ConnTimer(id));
                }
                Actions::REUSE_BUFFER => half.release = Some(Release::Reuse),
                Actions::WITHDRAW_BUFFER => half.release = Some(Release::Withdraw),
                Actions::RESET_TCP => self.send_reset(id),
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn on_conn_timer(&mut self, id: HalfId) -> Check {
        let (now, calm) = (self.now, self.calm);
        let Some(half) = self.half(id) else { return Ok(()) };
        if half.timer.is_none_or(|at| at > now) {
            return Ok(());
        }
        half.timer = None;
        if !calm {
            // A minute of trouble.
            self.sessions[id.session].conns[id.conn].excuse = true;
        }
        self.close_event(id, CloseEvent::Timeout)
    }

    /// Removes a half after its end and its last acknowledgement.
    pub(super) fn finish(&mut self, id: HalfId) -> Check {
        let Some(half) = self.half_ref(id) else { return Ok(()) };
        if half.state() != State::Closed {
            return Ok(());
        }
        let said = half.said_all();
        let mute = half.peer_rmb.is_none();
        if said || mute {
            let how = half.release.unwrap_or(Release::Withdraw);
            let complete = !half.failed && half.saw_end && half.budget == 0;
            self.remove_half(id, how, complete);
        }
        Ok(())
    }

    pub(super) fn remove_half(&mut self, id: HalfId, how: Release, complete: bool) {
        let conn = &mut self.sessions[id.session].conns[id.conn];
        let Some(half) = conn.halves[id.role].take() else { return };
        conn.ended[id.role] = true;
        conn.complete[id.role] = complete;
        if conn.ended == [true; 2] && !conn.declined {
            match conn.complete == [true; 2] {
                true => self.report.completed += 1,
                false => self.report.reset += 1,
            }
        }
        self.trace(|| format!("{id:?} is gone"));
        let end = id.end();
        let moved = self.sessions[id.session].conns[id.conn].moved;
        self.release_rmb(end, half.rmb, how, moved);
        let now = self.instant();
        if let Some(group) = &mut self.end(end).group {
            group.connection_removed(half.link, now);
        }
        self.dirty.push(end);
    }

    // ---- the application

    pub(super) fn on_app(&mut self, id: HalfId) -> Check {
        let calm = self.calm;
        let abort = !calm && self.plan.faults.contains(Faults::ABORT) && self.rng.one_in(400);
        let usable = self.group(id.end()).is_some_and(crate::link_group::LinkGroup::is_usable);
        let Some(half) = self.half(id) else { return Ok(()) };
        half.scheduled = false;
        if !usable {
            // The application has no socket before the end of first contact, and no working one
            // after the end of the group.
            return Ok(());
        }
        if half.state() == State::Closed || half.failed || half.closed {
            return Ok(());
        }
        if abort {
            self.sessions[id.session].conns[id.conn].excuse = true;
            return self.close_event(id, CloseEvent::Abort);
        }
        self.read(id)?;
        self.write(id)?;
        let Some(half) = self.half(id) else { return Ok(()) };
        if half.budget == 0 && !half.shut {
            half.shut = true;
            self.close_event(id, CloseEvent::ShutdownWrite)?;
        }
        let Some(half) = self.half(id) else { return Ok(()) };
        if half.saw_end && half.shut && !half.closed {
            half.closed = true;
            let unread = half.connection.receiver.available() != 0;
            self.close_event(id, CloseEvent::Close { unread })?;
        }
        let Some(half) = self.half(id) else { return Ok(()) };
        let can_write = half.budget > 0 && half.connection.sender.space() > 0;
        if half.connection.receiver.readable() > 0 || can_write {
            self.wake(id);
        }
        Ok(())
    }

    fn read(&mut self, id: HalfId) -> Check {
        let n = if self.rng.one_in(2) { u32::MAX } else { 1 + self.rng.below(200) };
        let session = &mut self.sessions[id.session];
        let conn = &mut session.conns[id.conn];
        let written = conn.written[1 - id.role];
        let Some(half) = conn.halves[id.role].as_mut() else { return Ok(()) };
        let n = n.min(half.connection.receiver.readable());
        if n > 0 {
            let memory = session.ends[id.role].rmbs.iter().find(|rmb| rmb.id == half.rmb);
            let Some(memory) = memory else { return Err(format!("{id:?} has no memory")) };
            for span in half.connection.receiver.spans(n) {
                for at in span.offset..span.offset + span.len {
                    let want = stream_of(id.peer(), half.read);
                    let have = memory.memory.get(at as usize).copied();
                    if have != Some(want) && !conn.spoiled {
                        return Err(format!("{id:?}: wrong byte at position {}", half.read));
                    }
                    half.read += 1;
                }
            }
            if half.read > written {
                return Err(format!("{id:?} has read {} of {written} bytes", half.read));
            }
            let update = half.connection.receiver.consume(n);
            self.report.bytes += u64::from(n);
            if update.is_due() {
                self.publish_if_allowed(id)?;
            }
        }
        let Some(half) = self.half(id) else { return Ok(()) };
        let nothing = half.connection.receiver.readable() == 0;
        if nothing && half.connection.close.peer_done() && !half.saw_end {
            half.saw_end = true;
            if half.read != written {
                let read = half.read;
                return Err(format!("{id:?}: end of data at {read} of {written} bytes"));
            }
        }
        Ok(())
    }

    fn write(&mut self, id: HalfId) -> Check {
        let want = 1 + self.rng.below(600);
        let conn = &mut self.sessions[id.session].conns[id.conn];
        let Some(half) = conn.halves[id.role].as_mut() else { return Ok(()) };
        if half.budget == 0 || !half.connection.close.can_write() {
            half.budget = if half.connection.close.can_write() { half.budget } else { 0 };
            return Ok(());
        }
        let want = want.min(half.budget);
        let sender = &mut half.connection.sender;
        let spans = sender.spans(want);
        let n = spans[0].len + spans[1].len;
        if n == 0 {
            sender.block();
            return if sender.publish_due() { self.publish_if_allowed(id) } else { Ok(()) };
        }
        for span in spans {
            for at in span.offset..span.offset + span.len {
                let byte = stream_of(id, half.written);
                let Some(place) = half.element.get_mut(at as usize) else {
                    return Err(format!("{id:?}: {span:?} leaves the element"));
                };
                *place = byte;
                half.written += 1;
            }
        }
        sender.advance(n, n < want);
        half.budget -= n;
        conn.written[id.role] = half.written;
        self.publish(id)
    }
}

/// Byte number `position` of the stream sent by a half.
fn stream_of(id: HalfId, position: u64) -> u8 {
    stream_byte(id.role, position ^ ((id.conn as u64) << 40) ^ ((id.session as u64) << 50))
}
