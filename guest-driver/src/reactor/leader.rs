// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The leader: the one thread that sleeps on the source, and how the lead changes hands.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd};

use super::source::REACTOR_NAME;
use super::wait::{
    Waiter, WaiterNotifier, clear_interrupted, note_error, poll_for, was_interrupted,
};
use super::work::Work;
use super::{BACKGROUND, CALLER, ConnectionHandler, FREE, Limit, Reactor, Session, wait};
use ism_sys::{SignalMask, lock, wait_in_set};

/// The right to lead. Its drop wakes a follower, which may lead next.
pub(super) struct Leadership<'a, C: ConnectionHandler>(&'a Reactor<C>);

impl<C: ConnectionHandler> Drop for Leadership<'_, C> {
    fn drop(&mut self) {
        let reactor = self.0;
        reactor.note_activity();
        // SeqCst, as in `sleep` and `stand_by`: either the other thread sees the lead free, or this one
        // sees the follower, or the wish of the background thread.
        reactor.lead.store(FREE, Ordering::SeqCst);
        if reactor.work.wakes(Work::LEAD_FREE) {
            reactor.wake_background_thread();
        }
        let next = lock(&reactor.followers).pop();
        if let Some(next) = next {
            reactor.wake(&next);
        }
    }
}

impl<C: ConnectionHandler> Reactor<C> {
    /// Makes the calling thread the leader, as `who`, unless another thread leads. Callers do not
    /// lead while the kernel must learn of readiness.
    pub(super) fn try_lead(&self, who: u32) -> Option<Leadership<'_, C>> {
        if who == CALLER && self.pollables.all.load(Ordering::SeqCst) > 0 {
            return None;
        }
        self.lead
            .compare_exchange(FREE, who, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
            .then(|| Leadership(self))
    }

    /// Asks the background thread for the lead.
    pub(super) fn request_lead(&self) {
        if !self.work.is_pending(Work::LEAD_WANTED) {
            self.post(Work::LEAD_WANTED);
        }
    }

    /// Sleeps, as leader or follower, until the waiter's count of wake-ups is not `count` any more,
    /// or `limit` is over. Without a limit the background thread wakes a thread that sleeps for a
    /// connection every [`wait::RECHECK_INTERVAL`].
    ///
    /// With `extra`, the call also returns when `extra` has an event.
    pub(crate) fn sleep(
        &self,
        waiter: &Arc<Waiter>,
        count: u32,
        limit: Limit,
        extra: Option<WaiterNotifier<'_>>,
    ) {
        clear_interrupted();
        if self.is_lost() {
            // No event will come, and the source would report one at once.
            let timeout = limit.map_or(wait::RECHECK_INTERVAL, |(_, timeout)| timeout);
            match extra {
                None => waiter.sleep(count, Some(timeout)),
                Some(extra) => waiter.sleep_on(extra, count, Some(timeout)),
            }
            return;
        }
        if let Some(leadership) = self.try_lead(CALLER) {
            self.lead_until(leadership, waiter, count, limit, extra);
            return;
        }
        lock(&self.followers).push(waiter.clone());
        // The leader may have stopped between the two lines above, before it could see this thread.
        if let Some(leadership) = self.try_lead(CALLER) {
            self.remove_follower(waiter);
            self.lead_until(leadership, waiter, count, limit, extra);
            return;
        }
        let timeout = limit.map(|(_, timeout)| timeout);
        let yields = self.polled || self.pollables.all.load(Ordering::SeqCst) == 0;
        if yields && self.lead.load(Ordering::SeqCst) == BACKGROUND {
            self.request_lead();
        }
        match extra {
            None => waiter.sleep(count, timeout),
            Some(extra) => waiter.sleep_on(extra, count, timeout),
        }
        self.remove_follower(waiter);
    }

    fn remove_follower(&self, waiter: &Arc<Waiter>) {
        lock(&self.followers).retain(|other| !Arc::ptr_eq(other, waiter));
    }

    fn lead_until(
        &self,
        leadership: Leadership<'_, C>,
        waiter: &Waiter,
        count: u32,
        limit: Limit,
        extra: Option<WaiterNotifier<'_>>,
    ) {
        // The first sleep, mostly the only one, needs no read of the clock.
        let (mut left, mut slept) = (limit.map(|(_, timeout)| timeout), false);
        // On a polled source the first poll is skipped, because one follows once it is armed.
        let (mut skip, mut has_polled) = (self.polled, false);
        let session = self.session();
        loop {
            // After a sleep, its cause comes first.
            if slept && let Some(polled) = &session.polled {
                while polled.poll_arrivals(&mut |event| self.handle(event)) {}
                if waiter.is_woken(count) {
                    break;
                }
            }
            if !std::mem::take(&mut skip) {
                self.dispatch();
                has_polled = true;
            }
            let has_to_stop = session.is_lost() || self.pollables.all.load(Ordering::SeqCst) > 0;
            if waiter.is_woken(count) || has_to_stop {
                break;
            }
            if std::mem::take(&mut slept) {
                left = limit.map(|(start, timeout)| timeout.saturating_sub(start.elapsed()));
            }
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            // Another thread may have armed the source, and then an earlier event is still there.
            if !session.source.arm_interrupts() || !has_polled {
                continue;
            }
            waiter.set_polling(true);
            let by_extra = !waiter.is_woken(count) && self.wait_for_source(left, extra);
            waiter.set_polling(false);
            if by_extra || was_interrupted() {
                break;
            }
            slept = true;
        }
        session.source.suppress_interrupts();
        drop(leadership);
    }

    /// Waits for the source or the interrupt. `true`: `extra` has an event.
    pub(super) fn wait_for_source(
        &self,
        timeout: Option<Duration>,
        extra: Option<WaiterNotifier<'_>>,
    ) -> bool {
        let (interrupt, session) = (self.interrupt.as_fd(), self.session());
        let edges = session.edges.as_ref().map(AsFd::as_fd);
        match (edges.or_else(|| session.source.event_set()), extra) {
            (Some(set), None) => {
                self.wait_in_set(&session, set, timeout, wait::mask());
                return false;
            }
            (Some(set), Some(_)) if edges.is_none() && !self.polled => {
                let ([by_set, _], by_extra) = poll_for([Some(set), None], extra, timeout);
                if by_set {
                    self.wait_in_set(&session, set, Some(Duration::ZERO), None);
                }
                return by_extra;
            }
            _ => {}
        }
        let source = session.source.event_fd();
        let fds = [Some(source), Some(interrupt)];
        let ([by_source, by_interrupt], by_extra) = poll_for(fds, extra, timeout);
        if by_source {
            session.source.clear_event_fd();
        }
        if by_interrupt {
            self.interrupt.clear();
        }
        by_extra
    }

    fn wait_in_set(
        &self,
        session: &Session,
        set: BorrowedFd<'_>,
        timeout: Option<Duration>,
        mask: Option<SignalMask>,
    ) {
        note_error(wait_in_set(set, timeout, mask).map(|events| {
            // The reactor's own set reports only the presence of an event.
            events.filter(|_| session.edges.is_none()).for_each(|event| match event {
                // Edges need not be cleared.
                REACTOR_NAME if !self.polled => {}
                REACTOR_NAME => {
                    self.interrupt.clear();
                }
                name => session.source.on_reported(name),
            });
        }));
    }
}
