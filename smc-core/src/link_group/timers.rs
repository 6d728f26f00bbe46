// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Time-outs: one deadline per awaited event (RFC 7609 appendix C.7).

use super::link::{Probe, SentDelete};
use super::{Cause, LinkEvent, LinkExchange, LinkGroup, LinkKey, Phase, Reason, RmbState, Stage};
use crate::time::Tick;
use crate::wire::llc::{Message, TestLink};

/// The fate of a Delete Link without an answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overdue {
    /// The carrying link is tested, and the answer awaited until then.
    Wait(Tick),
    /// The link goes without an answer.
    Enough,
    /// The carrying link has failed, too.
    Dead,
}

impl LinkGroup {
    /// When [`LinkGroup::handle_timeout`] is due, if at all: each awaited answer has a time (ERR-11).
    pub fn poll_timeout(&self) -> Option<Tick> {
        let mut first: Option<Tick> = None;
        let mut note = |at: Option<Tick>| {
            if let Some(at) = at {
                first = Some(first.map_or(at, |have| have.min(at)));
            }
        };
        match self.phase {
            Phase::Over => return None,
            Phase::FirstConfirm { until, resend } => {
                note(Some(until));
                note(resend);
            }
            Phase::FirstReply { until, .. } | Phase::FirstAddLink { until } => note(Some(until)),
            Phase::Ending(final_delete) => return Some(final_delete.until),
            Phase::SecondLink | Phase::Usable => {}
        }
        note(self.link_exchange_until());
        note(self.keys.exchange.as_ref().map(|exchange| exchange.until()));
        note(self.additions.retry_at);
        note(self.end.idle_at);
        if self.may_start_rkeys() {
            let waiting = self.keys.rmbs.iter().filter(|rmb| rmb.state != RmbState::Unwanted);
            waiting.for_each(|rmb| note(rmb.not_before));
        }
        for link in &self.links {
            note(link.last_message.map(|(_, until)| until));
            note(link.sent_delete.map(|sent_delete| sent_delete.until));
            note(self.probe_at(link));
        }
        first
    }

    fn link_exchange_until(&self) -> Option<Tick> {
        match &self.link_exchange {
            None => None,
            Some(LinkExchange::Add(add)) => Some(add.until),
            Some(LinkExchange::Delete { until, .. } | LinkExchange::Request { until, .. }) => {
                Some(*until)
            }
        }
    }

    /// The time when a link's silence (SOCK-10, SOCK-11), or the silence after a Test Link, is too
    /// long: a dead peer is noticed (LG-58).
    fn probe_at(&self, link: &super::LinkRecord) -> Option<Tick> {
        if !link.state.carries() {
            return None;
        }
        match link.probe {
            Some(probe) => Some(probe.until),
            None => self.params.timers.test_link.map(|silence| link.last_received.after(silence)),
        }
    }

    /// Handles every timer due at `now`; early and needless calls do no harm.
    pub fn handle_timeout(&mut self, now: Tick) {
        self.phase_timeout(now);
        if matches!(self.phase, Phase::Over | Phase::Ending(_)) {
            return;
        }
        if self.link_exchange_until().is_some_and(|until| until.has_passed(now)) {
            self.counters.timeouts += 1;
            self.link_exchange_timeout(now);
        }
        if let Some(exchange) = self.keys.exchange.as_ref().filter(|e| e.until().has_passed(now)) {
            let over = exchange.over();
            self.keys.exchange = None;
            self.counters.timeouts += 1;
            // ERR-33, ERR-47.
            self.fail_link(over, Cause::NoRkeyReply, now);
        }
        self.link_timeouts(now);
        if self.additions.retry_at.is_some_and(|at| at.has_passed(now)) {
            self.retry(now);
        }
        if self.phase == Phase::Usable && self.end.idle_at.is_some_and(|at| at.has_passed(now)) {
            self.on_idle(now);
        }
        self.pump(now);
    }

    fn phase_timeout(&mut self, now: Tick) {
        match self.phase {
            // Server: no reply (LLC-14, ERR-17). Client: no Confirm Link (ERR-14).
            Phase::FirstConfirm { until, .. } if until.has_passed(now) => {
                self.counters.timeouts += 1;
                self.end(Reason::NoConfirmLink, now);
            }
            Phase::FirstConfirm { until, resend: Some(at) } if at.has_passed(now) => {
                self.counters.resent += 1;
                self.post_confirm(LinkKey::FIRST, false);
                self.phase = Phase::FirstConfirm { until, resend: None };
            }
            // The adapter says nothing: the reply has most likely arrived.
            Phase::FirstReply { until, .. } if until.has_passed(now) => {
                self.decided.commit();
                self.phase = Phase::SecondLink;
            }
            // ERR-20.
            Phase::FirstAddLink { until } if until.has_passed(now) => {
                self.counters.timeouts += 1;
                match self.params.profile.one_link_will_do {
                    true => self.phase = Phase::SecondLink,
                    false => self.end(Reason::NoAddLink, now),
                }
            }
            Phase::Ending(final_delete) if final_delete.until.has_passed(now) => {
                self.counters.timeouts += 1;
                match final_delete.answered_by_peer {
                    true => self.resend_final_delete(final_delete, now),
                    false => self.end(final_delete.reason, now),
                }
            }
            _ => {}
        }
    }

    /// The exchange under way does not go on (RFC 7609 C.7.1).
    fn link_exchange_timeout(&mut self, now: Tick) {
        match self.link_exchange.clone() {
            None => {}
            Some(LinkExchange::Request { over, .. }) => {
                // ERR-48.
                self.link_exchange = None;
                match self.params.profile.one_link_will_do {
                    true => self.send_probe(over, now),
                    false => self.fail_link(over, Cause::NoAddLinkReply, now),
                }
            }
            Some(LinkExchange::Delete { link, over, last, .. }) => {
                match self.overdue_deletion(over, last, now) {
                    Overdue::Wait(until) => {
                        self.link_exchange = Some(LinkExchange::Delete { link, over, until, last });
                    }
                    Overdue::Enough => {
                        self.link_exchange = None;
                        self.set_state(link, LinkEvent::DeletionAgreed);
                        self.destroy(link, now);
                        self.schedule_retry_of_failed(now);
                    }
                    Overdue::Dead => {
                        self.link_exchange = None;
                        self.fail_link(over, Cause::NoDeleteReply, now);
                    }
                }
            }
            Some(LinkExchange::Add(add)) => match add.stage {
                Stage::Prepare => self.abort_add(Cause::Setup, now),
                // ERR-19 at the server, ERR-24 and ERR-25 at the client.
                Stage::Confirm => self.abort_add(Cause::NoConfirmLink, now),
                // At first contact (ERR-21, ERR-27).
                Stage::Reply | Stage::Keys(_) if !self.decided.was_usable() => {
                    match self.params.profile.one_link_will_do {
                        true => self.abort_add(Cause::NoAddLinkReply, now),
                        false => self.end(Reason::NoAddLinkReply, now),
                    }
                }
                // Later (ERR-22, ERR-23, ERR-26, ERR-28).
                Stage::Reply | Stage::Keys(_) => {
                    self.abort_add(Cause::NoAddLinkReply, now);
                    if !self.params.profile.one_link_will_do {
                        self.additions.wanted = true;
                        self.fail_link(add.over, Cause::NoAddLinkReply, now);
                    }
                }
            },
        }
    }

    fn link_timeouts(&mut self, now: Tick) {
        let keys: Vec<LinkKey> = self.links.iter().map(|link| link.key).collect();
        for key in keys {
            let Some(link) = self.link(key) else { continue };
            if link.last_message.is_some_and(|(_, until)| until.has_passed(now)) {
                self.destroy(key, now);
                continue;
            }
            if let Some(sent_delete) =
                link.sent_delete.filter(|sent_delete| sent_delete.until.has_passed(now))
            {
                self.counters.timeouts += 1;
                self.asked_in_vain(key, sent_delete, now);
                continue;
            }
            if self.probe_at(link).is_none_or(|at| !at.has_passed(now)) {
                continue;
            }
            if link.probe.is_some() {
                self.counters.timeouts += 1;
                // SOCK-13, ERR-34.
                self.fail_link(key, Cause::NoTestReply, now);
            } else {
                self.send_probe(key, now);
            }
        }
    }

    /// Client: the server has not answered a request to delete a link.
    fn asked_in_vain(&mut self, key: LinkKey, sent_delete: SentDelete, now: Tick) {
        let overdue = self.overdue_deletion(sent_delete.over, sent_delete.last, now);
        if overdue == Overdue::Enough {
            self.set_state(key, LinkEvent::DeletionAgreed);
            self.destroy(key, now);
            return;
        }
        if let Some(link) = self.link_mut(key) {
            link.sent_delete = match overdue {
                Overdue::Wait(until) => Some(SentDelete { until, ..sent_delete }),
                _ => None,
            };
        }
        if overdue == Overdue::Dead {
            self.fail_link(sent_delete.over, Cause::NoDeleteReply, now);
        }
    }

    /// Delete Link was not answered in time. The carrying link does not work either (ERR-29,
    /// ERR-32), or its peer is slow: Test Link decides.
    fn overdue_deletion(&mut self, over: LinkKey, last: Tick, now: Tick) -> Overdue {
        let timers = &self.params.timers;
        let patient = self.decided.was_usable() && !timers.deletion.is_zero();
        let until = now.after(timers.reply);
        match self.link(over) {
            Some(link) if patient && link.state.carries() => {
                self.send_probe(over, now);
                if last.has_passed(now) { Overdue::Enough } else { Overdue::Wait(until) }
            }
            _ => Overdue::Dead,
        }
    }

    /// Test Link, unless its answer is awaited already. Its data distinguish one Test Link from
    /// the next.
    pub(super) fn send_probe(&mut self, key: LinkKey, now: Tick) {
        if self.link(key).is_none_or(|link| link.probe.is_some()) {
            return;
        }
        let mut data = [0; 16];
        if let Some(head) = data.first_chunk_mut() {
            *head = self.numbers.next_probe().to_be_bytes();
        }
        let until = now.after(self.params.timers.reply);
        if let Some(link) = self.link_mut(key) {
            link.probe = Some(Probe { data, until });
        }
        // Over the link under test (LLC-6).
        self.post(key, Message::TestLink(TestLink { reply: false, data }));
    }
}
