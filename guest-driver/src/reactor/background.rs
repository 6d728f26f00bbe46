//! The background thread of a reactor: chores, answers that no caller gives, and the lead where no
//! caller takes it.
//!
//! On a source that must be polled the thread leads while the application is in no call, so that
//! peers get their answers in time. It takes the lead when no caller has led or polled for
//! [`PATIENCE`], and gives it to the first that wants it; a caller that comes back soon makes it
//! more patient, so that a busy connection does not pay for the change again and again. While a
//! caller sleeps as the leader, the thread sleeps too, and is woken when that one leaves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::wait::RECHECK_INTERVAL;
use super::{BACKGROUND, CALLER, ConnectionHandler, DelayedUpdate, FREE, Reactor};
use crate::reactor::Attend;

/// How long the background thread sleeps when it has nothing to do.
const NO_CHORES: Duration = Duration::from_secs(3600);
/// How long nobody leads before the background thread does.
const PATIENCE: Duration = Duration::from_millis(5);
/// The same when callers keep coming back. Each look costs them a change of threads.
const LONG_PATIENCE: Duration = Duration::from_millis(100);
/// After so many looks at the same sleeping leader the thread sleeps until that one leaves.
const SAME_LEADER: u32 = 4;
/// How often connections are looked at whose peers have not been told all.
const OWING_PAUSE: Duration = Duration::from_millis(15);
/// The same while their applications tell them in time.
const LONG_OWING_PAUSE: Duration = Duration::from_millis(120);
/// How long the thread stays up for more of them, so that callers need not wake it each time.
const OWING_VIGIL: Duration = Duration::from_millis(300);
/// Connections are not glanced at more often than this, whatever else wakes the thread.
const GLANCE_PAUSE: Duration = Duration::from_millis(10);

/// What the background thread knows of the callers.
struct Watch {
    /// [`Reactor::led`] at the last look.
    led: u32,
    patience: Duration,
    /// Looks at the same sleeping leader.
    same: u32,
}

/// What the background thread has to do, and when.
struct Diary {
    chores: Instant,
    /// When those who sleep are woken to look again.
    nap: Instant,
    /// When connections may be glanced at again, and whether there was a reason to since.
    glance: Instant,
    overlooked: bool,
    timer: Option<Instant>,
    /// Connections whose peers have not been told all, with what was read at the last look.
    owing: Vec<(u32, Option<u64>)>,
    /// How long until they are looked at again.
    owing_pause: Duration,
    /// Until when more of them are expected, if they are.
    vigil: Option<Instant>,
}

impl<C: ConnectionHandler> Reactor<C> {
    /// Ends [`Reactor::run`].
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.background.wake();
        self.interrupt();
    }

    /// The background thread. `chores` is called now and then while it returns how soon it wants
    /// to be called again; `None`: there is nothing to do until somebody wakes the thread.
    pub(crate) fn run(&self, mut chores: impl FnMut() -> Option<Duration>) {
        let start = Instant::now();
        let mut diary = Diary {
            chores: start,
            nap: start + RECHECK_INTERVAL,
            glance: start,
            overlooked: false,
            timer: None,
            owing: Vec::new(),
            owing_pause: OWING_PAUSE,
            vigil: None,
        };
        let mut watch = Watch { led: 0, patience: PATIENCE, same: 0 };
        while !self.is_over() {
            let seen = self.background.seen();
            let now = Instant::now();
            if self.chores_due.swap(false, Ordering::AcqRel) || now >= diary.chores {
                diary.chores = now + chores().unwrap_or(NO_CHORES);
            }
            self.keep(&mut diary);
            let pause = diary.pause();
            if self.pollables.load(Ordering::SeqCst) > 0 {
                // A caller that leads was interrupted and leaves at once.
                if self.try_lead(BACKGROUND) {
                    self.lead_in_background(pause, false);
                } else {
                    self.background.sleep(seen, Some(Duration::from_millis(1)));
                }
            } else if self.polled && self.source.has_peers() {
                self.stand_by(&mut watch, seen, pause);
            } else {
                // Peers and devices go without anybody waiting for them.
                if self.try_lead(CALLER) {
                    self.dispatch();
                    self.stop_leading();
                }
                watch.led = self.led.load(Ordering::Relaxed);
                // SeqCst, as in `attend`: either that sees this, or the peers are seen here.
                self.idle.store(true, Ordering::SeqCst);
                if !(self.polled && self.source.has_peers()) {
                    self.rest(seen, pause);
                }
                self.idle.store(false, Ordering::SeqCst);
            }
        }
    }

    /// Makes the background thread do its chores soon.
    pub(crate) fn wake_background(&self) {
        self.chores_due.store(true, Ordering::Release);
        self.background.wake();
        if self.lead.load(Ordering::SeqCst) == BACKGROUND {
            self.interrupt();
        }
    }

    /// Has [`ConnectionHandler::on_delayed_update`](super::ConnectionHandler::on_delayed_update) called soon.
    pub(crate) fn schedule_update(&self, key: u32) {
        super::lock(&self.owing).push(key);
        // SeqCst, as in `pay`: either this sees that the thread does not stay up any more, or that
        // sees the debt before it sleeps.
        if !self.vigil.load(Ordering::SeqCst) {
            self.rouse();
        }
    }

    /// Wakes the background thread if it sleeps for long.
    pub(super) fn rouse(&self) {
        // SeqCst, as in `rest`: either the thread sees what there is to do, or we see it resting.
        if self.resting.load(Ordering::SeqCst) && self.resting.swap(false, Ordering::SeqCst) {
            self.background.wake();
            if self.lead.load(Ordering::SeqCst) == BACKGROUND {
                self.interrupt();
            }
        }
    }

    /// Asks the background thread for the lead.
    pub(super) fn want_lead(&self) {
        if !self.wanted.swap(true, Ordering::SeqCst) {
            self.interrupt();
        }
    }

    /// Does what is due.
    fn keep(&self, diary: &mut Diary) {
        let now = Instant::now();
        if now >= diary.nap {
            diary.nap = now + RECHECK_INTERVAL;
            self.each(|member| member.on_recheck());
        }
        diary.overlooked = now < diary.glance;
        if !diary.overlooked {
            diary.glance = now + GLANCE_PAUSE;
            // A peer may be blocked until it hears what an application has read that is busy with
            // other things now (CDC-20).
            self.each(|member| member.on_tick());
        }
        if self.timers_due.swap(false, Ordering::SeqCst)
            || diary.timer.is_some_and(|timer| now >= timer)
        {
            diary.timer = self.source.on_timer(now);
        }
        self.pay(diary, now);
    }

    /// Has peers told what they were not told yet.
    fn pay(&self, diary: &mut Diary, now: Instant) {
        let new = std::mem::take(&mut *super::lock(&self.owing));
        if new.is_empty() && diary.owing.is_empty() {
            if diary.vigil.take_if(|end| now >= *end).is_some() {
                diary.owing_pause = OWING_PAUSE;
                self.vigil.store(false, Ordering::SeqCst);
            }
            return;
        }
        diary.vigil = Some(now + OWING_VIGIL);
        self.vigil.store(true, Ordering::SeqCst);
        diary.owing.extend(new.into_iter().map(|key| (key, None)));
        let mut in_time = true;
        diary.owing.retain_mut(|(key, read)| {
            let Some(member) = self.member(*key) else { return false };
            match member.on_delayed_update(*read) {
                DelayedUpdate::None => false,
                DelayedUpdate::Sent => {
                    in_time = false;
                    false
                }
                DelayedUpdate::Since(now) => {
                    *read = Some(now);
                    true
                }
            }
        });
        diary.owing_pause = match in_time {
            true => (diary.owing_pause * 2).min(LONG_OWING_PAUSE),
            false => OWING_PAUSE,
        };
    }

    /// Sleeps for as long as there is nothing to do.
    fn rest(&self, seen: u32, pause: Duration) {
        let _resting = self.resting(pause);
        if !self.is_roused() {
            self.background.sleep(seen, Some(pause));
        }
    }

    /// Has [`Reactor::rouse`] wake this thread from now on, if it is going to sleep for long.
    fn resting(&self, pause: Duration) -> impl Drop + '_ {
        struct Resting<'a>(&'a AtomicBool);
        impl Drop for Resting<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::SeqCst);
            }
        }
        self.resting.store(pause > OWING_PAUSE, Ordering::SeqCst);
        Resting(&self.resting)
    }

    /// Whether there is something to do for which [`Reactor::rouse`] was called.
    fn is_roused(&self) -> bool {
        self.timers_due.load(Ordering::SeqCst) || !super::lock(&self.owing).is_empty()
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.is_lost()
    }

    /// Leads if no caller does, and otherwise waits for that.
    fn stand_by(&self, watch: &mut Watch, seen: u32, pause: Duration) {
        let led = self.led.load(Ordering::Relaxed);
        let changed = std::mem::replace(&mut watch.led, led) != led;
        let lead = self.lead.load(Ordering::SeqCst);
        watch.same = if lead == CALLER && !changed { watch.same + 1 } else { 0 };
        if changed {
            watch.patience = (watch.patience * 2).min(LONG_PATIENCE);
        }
        if lead == FREE && !changed {
            // Before the lead is taken: a caller that sees who has it asks for it after this.
            self.wanted.store(false, Ordering::SeqCst);
            if self.try_lead(BACKGROUND) {
                let wanted = self.lead_in_background(pause, true);
                watch.led = self.led.load(Ordering::Relaxed);
                if !wanted {
                    watch.patience = PATIENCE;
                    return;
                }
                watch.patience = (watch.patience * 2).min(LONG_PATIENCE);
            }
        }
        if watch.same < SAME_LEADER {
            self.background.sleep(seen, Some(pause.min(watch.patience)));
            return;
        }
        watch.same = 0;
        // SeqCst, as in `stop_leading`: either that sees this, or the leader is seen to be gone.
        self.relief.store(true, Ordering::SeqCst);
        if self.lead.load(Ordering::SeqCst) == CALLER {
            self.rest(seen, pause);
        }
        self.relief.store(false, Ordering::SeqCst);
    }

    /// Leads for `pause`, or until there is a reason to look at everything else, which may be
    /// (`yielding`) that a caller wants to lead: `true`.
    fn lead_in_background(&self, pause: Duration, yielding: bool) -> bool {
        let wanted = || yielding && self.wanted.load(Ordering::SeqCst);
        self.dispatch();
        {
            let _resting = self.resting(pause);
            let stay = !(wanted() || self.is_roused() || self.is_over());
            if stay && self.source.arm_interrupts() {
                self.poll_once(Some(pause), None);
                self.dispatch();
            }
        }
        self.source.suppress_interrupts();
        self.stop_leading();
        wanted()
    }
}

impl<C: ConnectionHandler> Attend for Reactor<C> {
    fn attend(&self) {
        // While the thread leads, or looks every few milliseconds whether it should, it needs no
        // call.
        if self.idle.swap(false, Ordering::SeqCst) {
            self.background.wake();
        }
    }
}

impl Diary {
    /// How long nothing is due.
    fn pause(&self) -> Duration {
        let now = Instant::now();
        let mut pause = self.chores.min(self.nap).saturating_duration_since(now);
        if let Some(timer) = self.timer {
            pause = pause.min(timer.saturating_duration_since(now));
        }
        if self.overlooked {
            pause = pause.min(self.glance.saturating_duration_since(now));
        }
        if self.vigil.is_some() { pause.min(self.owing_pause) } else { pause }
    }
}
