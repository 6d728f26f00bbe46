// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The background thread of a reactor: runs due work, sends delayed updates, and leads while no caller
//! does.
//!
//! On a source that must be polled, the thread leads while the application is in no call, so peers get
//! answers in time. On any other source, the thread leads while threads sleep without being woken by
//! the source. The thread takes the lead when no caller has led or polled for [`TAKEOVER`], and gives
//! the lead to the first caller asking for it. A caller returning soon makes that time longer: a busy
//! connection must not pay for two changes of the lead again and again. While a caller sleeps as the
//! leader, the thread sleeps, too, until that caller stops leading.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::leader::Leadership;
use super::source::PeerObserver;
use super::wait::RECHECK_INTERVAL;
use super::work::Work;
use super::{BACKGROUND, CALLER, ConnectionHandler, DelayedUpdate, FREE, Reactor, Session};
use ism_sys::lock;

/// Time to the next maintenance if none is wanted.
const NO_MAINTENANCE: Duration = Duration::from_secs(3600);
/// The background thread leads when no caller has led or polled for this long.
const TAKEOVER: Duration = Duration::from_millis(5);
/// The upper limit of [`Activity::takeover`], where callers keep coming back: each takeover costs a
/// change of threads.
const LONGEST_TAKEOVER: Duration = Duration::from_millis(100);
/// After this many checks with the same sleeping leader, the thread sleeps until that caller stops
/// leading.
const SAME_LEADER: u32 = 4;
/// An update is sent by the background thread after this delay at the earliest.
const UPDATE_DELAY: Duration = Duration::from_millis(15);
/// The longest such delay, where applications read on and so send their updates in time.
const LONGEST_UPDATE_DELAY: Duration = Duration::from_millis(120);
/// After an update was scheduled, the thread checks for more without being woken for this long.
pub(super) const LINGER: Duration = Duration::from_millis(300);
/// [`ConnectionHandler::on_tick`] is called no more often than this, whatever else wakes the
/// thread.
const TICK_INTERVAL: Duration = Duration::from_millis(10);
/// Ticks take at most this part of the time, unless they take very long.
const TICK_SHARE: u32 = 64;
/// The longest time between two ticks for that reason.
const LONGEST_TICK_INTERVAL: Duration = Duration::from_millis(250);

/// Work for which the thread is woken from any sleep.
const ALWAYS: Work = Work::STOP.union(Work::MAINTENANCE).union(Work::WATCH);

/// The background thread's view of the callers of a source that must be polled.
pub(super) struct Activity {
    /// [`Reactor::activity`] at the last check.
    activity: u32,
    /// How long no caller may lead before the thread does.
    pub(super) takeover: Duration,
    /// How often the thread has found the same sleeping leader.
    same_leader: u32,
}

/// The times of the background thread's work.
pub(super) struct Schedule {
    maintenance: Instant,
    recheck: Instant,
    /// The earliest next tick.
    tick: Instant,
    /// The thread was woken before `tick`, so a tick has to follow.
    tick_pending: bool,
    /// The timer of the source.
    timer: Option<Instant>,
    /// Connections with a delayed update, with the position of the last [`DelayedUpdate::Since`].
    updates: Vec<(u32, Option<u64>)>,
    pub(super) update_delay: Duration,
    /// The end of the thread's own checks for more updates; `None`: schedulers wake the thread.
    linger: Option<Instant>,
}

/// The time from one tick to the next, if the first took so long: a tick visits every connection,
/// idle ones included.
fn tick_interval(took: Duration) -> Duration {
    (took * TICK_SHARE).clamp(TICK_INTERVAL, LONGEST_TICK_INTERVAL)
}

/// The background thread's work, in a process that has no such thread.
pub(crate) struct Upkeep(Schedule);

impl Upkeep {
    /// Everything is due soon.
    pub(crate) fn new() -> Upkeep {
        Upkeep(Schedule::starting(Instant::now()))
    }
}

impl<C: ConnectionHandler> Reactor<C> {
    /// Does the background thread's due work, and handles events. Returns the time until the next call
    /// is due.
    pub(crate) fn keep_up(
        &self,
        upkeep: &mut Upkeep,
        maintenance: impl FnOnce() -> Option<Duration>,
    ) -> Duration {
        let schedule = &mut upkeep.0;
        let now = Instant::now();
        if self.work.take(Work::MAINTENANCE) || now >= schedule.maintenance {
            schedule.maintenance = now + maintenance().unwrap_or(NO_MAINTENANCE);
        }
        if let Some(_leadership) = self.try_lead(CALLER) {
            self.dispatch();
        }
        self.run_due(schedule);
        schedule.pause()
    }

    /// Ends [`Reactor::run`].
    pub(crate) fn stop(&self) {
        self.post(Work::STOP);
    }

    /// The background thread; returns after [`Reactor::stop`], or once the source is gone.
    ///
    /// Calls `maintenance` at first and whenever due. `maintenance` returns the time to its next call;
    /// `None`: nothing is due until [`Reactor::wake_background`]. The caller calls [`Reactor::stopped`]
    /// when the thread needs the source no more.
    pub(crate) fn run(&self, mut maintenance: impl FnMut() -> Option<Duration>) {
        let mut schedule = Schedule::starting(Instant::now());
        let mut callers = Activity::unknown();
        let session = self.session.load_full();
        while !self.is_over(&session) {
            let count = self.background.wake_count();
            // Taken before this thread checks what to watch for.
            self.work.take(Work::WATCH);
            let now = Instant::now();
            if self.work.take(Work::MAINTENANCE) || now >= schedule.maintenance {
                schedule.maintenance = now + maintenance().unwrap_or(NO_MAINTENANCE);
            }
            self.run_due(&mut schedule);
            if self.pollables.all.load(Ordering::SeqCst) > 0 {
                if let Some(leadership) = self.try_lead(BACKGROUND) {
                    self.lead_in_background(leadership, &schedule, Work::empty());
                } else {
                    // A caller still leads. The interrupted caller stops at once.
                    self.sleep_in_background(count, Duration::from_millis(1), ALWAYS);
                }
            } else if self.must_watch() {
                self.stand_by(&mut callers, count, &schedule);
            } else {
                // Peers and the source may have gone although no caller waits for them.
                if let Some(_leadership) = self.try_lead(CALLER) {
                    self.dispatch();
                }
                callers.activity = self.activity.load(Ordering::Relaxed);
                let (pause, wanted) = schedule.next_sleep();
                self.sleep_in_background(count, pause, wanted);
            }
        }
    }

    /// Has the background thread do its maintenance soon.
    pub(crate) fn wake_background(&self) {
        self.post(Work::MAINTENANCE);
    }

    /// Has the background thread call [`ConnectionHandler::on_delayed_update`] of the connection
    /// with this key, after [`UPDATE_DELAY`] or later.
    pub(crate) fn schedule_update(&self, key: u32) {
        lock(&self.delayed_updates).push(key);
        self.post(Work::UPDATES);
    }

    /// Gives work to the background thread, and wakes the thread if it waits for this work.
    pub(super) fn post(&self, work: Work) {
        if self.work.post(work) {
            self.wake_background_thread();
        }
    }

    /// Ends a sleep of the background thread, as a leader or not.
    pub(super) fn wake_background_thread(&self) {
        self.background.wake();
        if self.lead.load(Ordering::SeqCst) == BACKGROUND {
            self.interrupt.signal();
        }
    }

    /// Does what is due, except for maintenance.
    fn run_due(&self, schedule: &mut Schedule) {
        let now = Instant::now();
        if now >= schedule.recheck {
            schedule.recheck = now + RECHECK_INTERVAL;
            self.each(|connection| connection.on_recheck());
            if self.pollables.marked.load(Ordering::SeqCst) > 0 {
                self.recheck_lines();
            }
        }
        schedule.tick_pending = now < schedule.tick;
        if !schedule.tick_pending {
            // A peer may be blocked until it learns how far an application has read, while the
            // application is busy with something else (CDC-20).
            self.each(|connection| connection.on_tick());
            if self.pollables.marked.load(Ordering::SeqCst) > 0 {
                self.session().lines.iter().for_each(|lines| lines.age_lines());
            }
            schedule.tick = now + tick_interval(now.elapsed());
        }
        if self.work.take(Work::TIMERS) || schedule.timer.is_some_and(|timer| now >= timer) {
            schedule.timer = self.session().polled.as_ref().and_then(|polled| polled.on_timer(now));
        }
        self.flush_updates(schedule, now);
    }

    /// Has connections send updates past their delay.
    pub(super) fn flush_updates(&self, schedule: &mut Schedule, now: Instant) {
        self.work.take(Work::UPDATES);
        let new = std::mem::take(&mut *lock(&self.delayed_updates));
        if new.is_empty() && schedule.updates.is_empty() {
            if schedule.linger.take_if(|end| now >= *end).is_some() {
                schedule.update_delay = UPDATE_DELAY;
            }
            return;
        }
        schedule.linger = Some(now + LINGER);
        schedule.updates.extend(new.into_iter().map(|key| (key, None)));
        let mut sent_by_callers = true;
        schedule.updates.retain_mut(|(key, read)| {
            let Some(connection) = self.connection(*key) else { return false };
            match connection.on_delayed_update(*read) {
                DelayedUpdate::None => false,
                DelayedUpdate::Sent => {
                    sent_by_callers = false;
                    false
                }
                DelayedUpdate::Since(now) => {
                    *read = Some(now);
                    true
                }
            }
        });
        schedule.update_delay = match sent_by_callers {
            true => (schedule.update_delay * 2).min(LONGEST_UPDATE_DELAY),
            false => UPDATE_DELAY,
        };
    }

    /// Sleeps for `pause`, or until there is some of this work.
    fn sleep_in_background(&self, count: u32, pause: Duration, wanted: Work) {
        let _asleep = self.work.prepare_sleep(wanted);
        if !self.work.is_pending(wanted) {
            self.background.sleep(count, Some(pause));
        }
    }

    fn is_over(&self, session: &Session) -> bool {
        self.work.is_pending(Work::STOP) || session.is_lost()
    }

    /// Whether the background thread leads while no caller does.
    fn must_watch(&self) -> bool {
        self.unwatched.load(Ordering::SeqCst) > 0
            || self.polled
                && self.session().polled.as_ref().is_some_and(|polled| polled.has_peers())
    }

    /// Leads if callers have not led for some time, and otherwise sleeps a little.
    pub(super) fn stand_by(&self, callers: &mut Activity, count: u32, schedule: &Schedule) {
        let activity = self.activity.load(Ordering::Relaxed);
        let active = std::mem::replace(&mut callers.activity, activity) != activity;
        let lead = self.lead.load(Ordering::SeqCst);
        callers.same_leader = if lead == CALLER && !active { callers.same_leader + 1 } else { 0 };
        if active {
            callers.extend_takeover();
        }
        if lead == FREE && !active {
            // Cleared before the lead is taken, because a caller seeing this thread lead asks
            // afterwards.
            self.work.take(Work::LEAD_WANTED);
            if let Some(leadership) = self.try_lead(BACKGROUND) {
                let wanted = self.lead_in_background(leadership, schedule, Work::LEAD_WANTED);
                callers.activity = self.activity.load(Ordering::Relaxed);
                if !wanted {
                    callers.takeover = TAKEOVER;
                    return;
                }
                callers.extend_takeover();
            }
        }
        if callers.same_leader < SAME_LEADER {
            self.sleep_in_background(count, schedule.pause().min(callers.takeover), ALWAYS);
            return;
        }
        callers.same_leader = 0;
        let (pause, wanted) = schedule.next_sleep();
        let wanted = wanted | Work::LEAD_FREE;
        let _asleep = self.work.prepare_sleep(wanted);
        // SeqCst, as in the drop of `Leadership`: either the leader sees the mask, or this thread sees
        // the lead free.
        let led = self.lead.load(Ordering::SeqCst) == CALLER;
        if led && !self.work.is_pending(wanted) {
            self.background.sleep(count, Some(pause));
        }
    }

    /// Leads until something is due, or until there is other work for this thread. `yields_for` ends
    /// the lead, too; `true`: such work has come.
    fn lead_in_background(
        &self,
        leadership: Leadership<'_, C>,
        schedule: &Schedule,
        yields_for: Work,
    ) -> bool {
        let (pause, wanted) = schedule.next_sleep();
        // This thread watches already.
        let wanted = (wanted - Work::WATCH) | yields_for;
        let by_lines = self.pollables.marked.load(Ordering::SeqCst) > 0;
        if by_lines {
            self.poll_lines();
        }
        self.dispatch();
        let session = self.session();
        {
            let _asleep = self.work.prepare_sleep(wanted);
            let stay = !(self.work.is_pending(wanted) || session.is_lost());
            if stay && session.source.arm_interrupts() {
                if !by_lines || self.arm_lines() {
                    self.wait_for_source(Some(pause), None);
                }
                if by_lines {
                    self.disarm_lines();
                    self.poll_lines();
                }
                self.dispatch();
            }
        }
        session.source.suppress_interrupts();
        drop(leadership);
        self.work.is_pending(yields_for)
    }
}

impl<C: ConnectionHandler> PeerObserver for Reactor<C> {
    fn on_peer_added(&self) {
        self.post(Work::WATCH);
    }
}

impl Activity {
    pub(super) fn unknown() -> Activity {
        Activity { activity: 0, takeover: TAKEOVER, same_leader: 0 }
    }

    fn extend_takeover(&mut self) {
        self.takeover = (self.takeover * 2).min(LONGEST_TAKEOVER);
    }
}

impl Schedule {
    pub(super) fn starting(now: Instant) -> Schedule {
        Schedule {
            maintenance: now,
            recheck: now + RECHECK_INTERVAL,
            tick: now,
            tick_pending: false,
            timer: None,
            updates: Vec::new(),
            update_delay: UPDATE_DELAY,
            linger: None,
        }
    }

    /// The longest sleep of the thread, and the work for which to wake it.
    fn next_sleep(&self) -> (Duration, Work) {
        let pause = self.pause();
        let mut wanted = ALWAYS;
        // After a short sleep the thread checks by itself.
        if pause > UPDATE_DELAY {
            wanted |= Work::TIMERS;
            if self.linger.is_none() {
                wanted |= Work::UPDATES;
            }
        }
        (pause, wanted)
    }

    /// The time until something is due.
    fn pause(&self) -> Duration {
        let now = Instant::now();
        let mut pause = self.maintenance.min(self.recheck).saturating_duration_since(now);
        if let Some(timer) = self.timer {
            pause = pause.min(timer.saturating_duration_since(now));
        }
        if self.tick_pending {
            pause = pause.min(self.tick.saturating_duration_since(now));
        }
        if self.linger.is_some() { pause.min(self.update_delay) } else { pause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_over_many_connections_are_rarer() {
        let us = Duration::from_micros;
        assert_eq!(tick_interval(us(3)), TICK_INTERVAL);
        assert_eq!(tick_interval(us(1000)), Duration::from_millis(64));
        assert_eq!(tick_interval(us(10_000)), LONGEST_TICK_INTERVAL);
    }
}
