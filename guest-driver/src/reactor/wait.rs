//! How a thread waits: spin a little, then sleep where others can wake it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::thread::futex;

use crate::sys::SignalMask;

/// Longest sleep before shared memory is looked at again. What a peer can write is never the only
/// reason to wake.
pub(crate) const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The thread runs: counting is enough to wake it.
const AWAKE: u8 = 0;
/// The thread sleeps, or is about to, on its futex.
const ASLEEP: u8 = 1;
/// The thread sleeps, or is about to, in `poll` as the leader.
const POLLING: u8 = 2;

/// A thread that can be woken. One per thread, made on its first sleep.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// Counts wake-ups; the futex word.
    seq: AtomicU32,
    /// How the thread sleeps, if it does: one of the constants below.
    state: AtomicU8,
    /// An eventfd to ring instead of the futex, for a thread that sleeps on other descriptors too.
    bell: Option<OwnedFd>,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
}

thread_local! {
    /// A signal was handled while this thread slept.
    static INTERRUPTED: Cell<bool> = const { Cell::new(false) };
}

thread_local! {
    /// What is this thread's signal mask while it sleeps, if not the one that it has.
    static MASK: Cell<Option<SignalMask>> = const { Cell::new(None) };
}

/// Sets the signal mask for this thread's sleeps in `poll`.
pub(crate) fn set_mask(mask: Option<SignalMask>) {
    MASK.set(mask);
}

/// What [`set_mask`] set.
pub(crate) fn mask() -> Option<SignalMask> {
    MASK.get()
}

/// Forgets about signals handled so far; before a wait that wants to know of them.
pub(crate) fn clear_interrupted() {
    INTERRUPTED.set(false);
}

/// Notes that a sleep ended because a signal was handled.
pub(crate) fn note_interrupted() {
    INTERRUPTED.set(true);
}

/// Whether a signal was handled since [`clear_interrupted`], while the thread slept.
pub(crate) fn was_interrupted() -> bool {
    INTERRUPTED.get()
}

impl Waiter {
    /// The calling thread's waiter.
    pub(crate) fn current() -> Arc<Waiter> {
        CURRENT
            .try_with(|cell| cell.borrow_mut().get_or_insert_with(Arc::default).clone())
            // The thread is being torn down; a waiter of its own serves as well.
            .unwrap_or_default()
    }

    /// A waiter that is woken by a descriptor becoming readable.
    pub(crate) fn with_bell() -> std::io::Result<Waiter> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waiter { bell: Some(bell), ..Waiter::default() })
    }

    /// The descriptor of [`Waiter::with_bell`].
    pub(crate) fn bell(&self) -> Option<&OwnedFd> {
        self.bell.as_ref()
    }

    /// Number of wake-ups so far. Read before looking at the condition that is waited for.
    pub(crate) fn seen(&self) -> u32 {
        self.seq.load(Ordering::Acquire)
    }

    /// Wakes the thread. `true`: it sleeps as the leader, so the reactor's interrupt must be raised too.
    pub(crate) fn wake(&self) -> bool {
        // SeqCst with the accesses of `polling` and `sleep`: either the sleeper sees the new count
        // before it sleeps, or we see that it is about to.
        self.seq.fetch_add(1, Ordering::SeqCst);
        match (self.state.load(Ordering::SeqCst), &self.bell) {
            (POLLING, None) => return true,
            (POLLING, Some(bell)) => {
                // Full (EAGAIN) means that it rings already.
                let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
            }
            (ASLEEP, _) => {
                let _ = futex::wake(&self.seq, futex::Flags::PRIVATE, 1);
            }
            _ => {}
        }
        false
    }

    /// The leader is about to sleep in `poll`, or has come back.
    pub(crate) fn polling(&self, on: bool) {
        self.state.store(if on { POLLING } else { AWAKE }, Ordering::SeqCst);
    }

    /// Whether there was a wake-up since `seen`.
    pub(crate) fn woken(&self, seen: u32) -> bool {
        self.seq.load(Ordering::SeqCst) != seen
    }

    /// Sleeps until woken after `seen`, or for `timeout`.
    pub(crate) fn sleep(&self, seen: u32, timeout: Option<Duration>) {
        let timeout = timeout.map(|timeout| futex::Timespec {
            tv_sec: timeout.as_secs().min(3600) as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        self.state.store(ASLEEP, Ordering::SeqCst);
        // Every outcome (woken, value changed, timeout, signal) means: look again.
        let slept = futex::wait(&self.seq, futex::Flags::PRIVATE, seen, timeout.as_ref());
        if slept == Err(rustix::io::Errno::INTR) {
            note_interrupted();
        }
        self.state.store(AWAKE, Ordering::SeqCst);
    }
}

/// When a call that waits is to end. A timeout counts from when the call first has to sleep: one that
/// need not asks no clock.
#[derive(Debug, Default)]
pub(crate) struct Deadline {
    timeout: Option<Duration>,
    at: Cell<Option<Instant>>,
    again: Cell<bool>,
}

impl Deadline {
    /// After a timeout, or never.
    pub(crate) fn after(timeout: Option<Duration>) -> Deadline {
        Deadline { timeout, ..Deadline::default() }
    }

    /// Asked before each wait of a call: whether the time is over. The first wait may begin unasked.
    pub(crate) fn is_over(&self) -> bool {
        self.again.replace(true) && self.left().is_some_and(|(_, left)| left.is_zero())
    }

    /// What time it is, and how much is left; `None`: without end.
    pub(crate) fn left(&self) -> Option<(Instant, Duration)> {
        if let Some(at) = self.at.get() {
            let now = Instant::now();
            return Some((now, at.saturating_duration_since(now)));
        }
        let timeout = self.timeout?;
        let now = Instant::now();
        // One that is too far away for the clock is none.
        self.at.set(now.checked_add(timeout));
        Some((now, timeout))
    }
}

impl From<Option<Instant>> for Deadline {
    fn from(at: Option<Instant>) -> Deadline {
        Deadline { at: Cell::new(at), ..Deadline::default() }
    }
}

/// Threads of this process that spin right now.
static SPINNERS: AtomicU32 = AtomicU32::new(0);

/// Of so many waits with a reduced budget, one spins for long.
const TRIAL: u32 = 16;
/// After so many first looks without a find there are no more, but in a trial.
const VAIN: u32 = 4;
/// At most so many times the full budget. A trial lasts one and a half waits, so with [`TRIAL`] it
/// costs at most a tenth of the time that is waited anyway.
const TRIAL_FACTOR: u32 = 20;

/// Looks at shared memory between two at the clock.
const LOOKS: u32 = 32;
/// On a machine with one processor, who spins for longer than this lets others run in between.
const GIVE_WAY: Duration = Duration::from_micros(10);

/// How long waits spin before they sleep.
///
/// The budget adapts: a wait that ends while spinning restores it, one that has to sleep after all
/// halves it, so that a connection whose peer is slow, or a process with more to do than it has
/// processors, stops burning them. What connections learn is passed on to those that come later.
///
/// Two ends that both look only for moments never meet, although both would answer at once if they
/// stayed awake. So every now and then a wait spins for longer than waits that slept have taken
/// lately, if that is not out of proportion: if the other end is merely asleep, its answer comes
/// within that time, and both are back. Waking the other end of a virtual machine takes longer than
/// the usual time to spin.
#[derive(Debug)]
pub(crate) struct Spin {
    max_us: u32,
    budget_us: AtomicU32,
    /// Waits that were not over at the first look; shared by all who have the same parent.
    waits: AtomicU32,
    /// How long the last wait took that had to sleep, microseconds.
    slept_us: AtomicU32,
    /// Waits of [`Spin::until_polled`] since its first look found something.
    vain: AtomicU32,
    parent: Option<Arc<Spin>>,
}

impl Spin {
    /// At most `max` of spinning per wait; zero: never.
    pub(crate) fn new(max: Duration) -> Spin {
        let max_us = u32::try_from(max.as_micros()).unwrap_or(u32::MAX);
        let budget_us = AtomicU32::new(max_us);
        let (waits, slept_us, vain) = Default::default();
        Spin { max_us, budget_us, waits, slept_us, vain, parent: None }
    }

    /// One that begins with what `parent` has learned.
    pub(crate) fn of(parent: &Arc<Spin>) -> Spin {
        let max_us = parent.max_us;
        let budget_us = AtomicU32::new(parent.budget_us.load(Ordering::Relaxed));
        let (waits, slept_us, vain) = Default::default();
        let parent = Some(parent.clone());
        Spin { max_us, budget_us, waits, slept_us, vain, parent }
    }

    /// Spins until `changed` says so. `false`: not within the budget.
    pub(crate) fn until(&self, mut changed: impl FnMut() -> bool) -> bool {
        changed() || (self.max_us != 0 && self.within(LOOKS, changed))
    }

    /// As [`Spin::until`] where each look is a system call, or takes as long, and the first one is of
    /// no use: it may not look at all.
    pub(crate) fn until_asked(&self, changed: impl FnMut() -> bool) -> bool {
        self.max_us != 0 && self.within(1, changed)
    }

    /// As [`Spin::until_asked`] where a look finds only what a software adapter may have put there: on
    /// the only processor there is, that one must run instead. Who sleeps then looks once more before,
    /// so where a first look has been in vain for some time, there is one only now and then.
    pub(crate) fn until_polled(&self, mut changed: impl FnMut() -> bool) -> bool {
        let vain = self.vain.load(Ordering::Relaxed);
        let look = vain < VAIN || vain.is_multiple_of(TRIAL);
        if look && changed() {
            self.vain.store(0, Ordering::Relaxed);
            return true;
        }
        self.vain.store(vain.wrapping_add(1), Ordering::Relaxed);
        self.polls() && self.within(1, changed)
    }

    /// Whether [`Spin::until_polled`] looks more than once.
    pub(crate) fn polls(&self) -> bool {
        self.max_us != 0 && processors() > 1
    }

    /// Spins, with so many looks between two at the clock.
    fn within(&self, looks: u32, mut changed: impl FnMut() -> bool) -> bool {
        let budget = self.budget_us.load(Ordering::Relaxed);
        let _counted = Spinning::start();
        // One processor is left to those who have something to do.
        if SPINNERS.load(Ordering::Relaxed) >= processors().max(2) {
            return false;
        }
        let trial = budget < self.max_us && self.is_trial();
        if looks == 1 && !trial && budget <= self.least() {
            // One look takes as long, and did not pay of late.
            return false;
        }
        let limit = if trial { self.trial() } else { budget };
        let limit = Duration::from_micros(u64::from(limit));
        let start = Instant::now();
        loop {
            for _ in 0..looks {
                if changed() {
                    if budget != self.max_us {
                        self.succeeded();
                    }
                    return true;
                }
                std::hint::spin_loop();
            }
            let elapsed = start.elapsed();
            if elapsed >= limit {
                self.failed(budget);
                return false;
            }
            // With one processor, other threads that wait for nothing any more cannot go on: what
            // is a wait for this one would be lost to them.
            if elapsed >= GIVE_WAY && processors() == 1 {
                rustix::thread::sched_yield();
            }
        }
    }

    /// Whether it is of use to know how long waits take that have to sleep.
    pub(crate) fn learns(&self) -> bool {
        self.max_us != 0
    }

    /// Notes how long a wait took that had to sleep.
    pub(crate) fn slept(&self, wait: Duration) {
        let wait = u32::try_from(wait.as_micros()).unwrap_or(u32::MAX);
        self.slept_us.store(wait, Ordering::Relaxed);
    }

    /// Whether this wait spins for long although that has not paid lately.
    fn is_trial(&self) -> bool {
        let waits = self.parent.as_ref().map_or(&self.waits, |parent| &parent.waits);
        waits.fetch_add(1, Ordering::Relaxed) % TRIAL == TRIAL - 1
    }

    /// How long such a wait spins, microseconds.
    fn trial(&self) -> u32 {
        let wanted = self.slept_us.load(Ordering::Relaxed).saturating_mul(3) / 2;
        let most = self.max_us.saturating_mul(TRIAL_FACTOR);
        if wanted > most { self.max_us } else { wanted.max(self.max_us) }
    }

    /// The budget never goes to zero: a short look each time notices when the peer is fast again.
    fn least(&self) -> u32 {
        self.max_us.min(4)
    }

    #[cold]
    fn succeeded(&self) {
        self.budget_us.store(self.max_us, Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            let grown = parent.budget_us.load(Ordering::Relaxed).saturating_mul(2);
            parent.budget_us.store(grown.min(parent.max_us), Ordering::Relaxed);
        }
    }

    #[cold]
    fn failed(&self, budget: u32) {
        self.budget_us.store((budget / 2).max(self.least()), Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            parent.failed(parent.budget_us.load(Ordering::Relaxed));
        }
    }
}

struct Spinning;

impl Spinning {
    fn start() -> Spinning {
        SPINNERS.fetch_add(1, Ordering::Relaxed);
        Spinning
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        SPINNERS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Processors this process may use.
fn processors() -> u32 {
    static COUNT: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *COUNT.get_or_init(|| {
        std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_between_look_and_sleep_is_not_lost() {
        let waiter = Waiter::default();
        let seen = waiter.seen();
        waiter.wake();
        let start = Instant::now();
        waiter.sleep(seen, Some(Duration::from_secs(5)));
        assert!(start.elapsed() < Duration::from_secs(1));
        assert!(waiter.woken(seen));
    }

    #[test]
    fn a_timeout_counts_from_the_first_question() {
        assert!(Deadline::default().left().is_none());
        let hour = Duration::from_secs(3600);
        let deadline = Deadline::after(Some(hour));
        let (first, all) = deadline.left().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let (now, left) = deadline.left().unwrap();
        assert_eq!((all, left), (hour, hour - (now - first)));
        let past = Deadline::from(Some(first));
        assert_eq!(past.left().unwrap().1, Duration::ZERO);
        assert_eq!([past.is_over(), past.is_over(), deadline.is_over()], [false, true, false]);
        // Longer than the clock runs.
        assert!(Deadline::after(Some(Duration::MAX)).left().is_some());
    }

    #[test]
    fn waking_a_leader_asks_for_the_interrupt_only_while_it_polls() {
        let waiter = Waiter::default();
        assert!(!waiter.wake());
        waiter.polling(true);
        assert!(waiter.wake());
        waiter.polling(false);
        assert!(!waiter.wake());
    }

    #[test]
    fn a_failed_spin_halves_the_budget_and_a_good_one_restores_it() {
        let spin = Spin::new(Duration::from_micros(40));
        assert!(!spin.until(|| false));
        assert!(spin.budget_us.load(Ordering::Relaxed) <= 20);
        let mut looks = 0;
        assert!(spin.until(|| {
            looks += 1;
            looks > 3
        }));
        assert_eq!(spin.budget_us.load(Ordering::Relaxed), 40);
    }

    #[test]
    fn one_wait_of_sixteen_is_a_trial_whichever_connection_waits() {
        let parent = Arc::new(Spin::new(Duration::from_micros(50)));
        let spins = [Spin::of(&parent), Spin::of(&parent)];
        let waits = spins.iter().cycle().take(4 * TRIAL as usize);
        assert_eq!(waits.filter(|spin| spin.is_trial()).count(), 4);
    }

    #[test]
    fn first_looks_that_find_nothing_become_rare_and_a_find_brings_them_back() {
        let spin = Spin::new(Duration::ZERO);
        let look = |found| {
            let mut looks = 0;
            let over = spin.until_polled(|| {
                looks += 1;
                found
            });
            (looks, over)
        };
        let waits = |n, found| (0..n).map(|_| look(found).0).sum::<u32>();
        assert_eq!(waits(VAIN, false), VAIN);
        assert_eq!(waits(TRIAL - VAIN, false), 0);
        assert_eq!(waits(2 * TRIAL, false), 2);
        // The next one looks, finds something, and all do so again.
        assert_eq!(look(true), (1, true));
        assert_eq!(waits(VAIN, false), VAIN);
        assert_eq!(look(true), (0, false));
    }

    #[test]
    fn a_trial_outlasts_the_waits_of_late_unless_they_are_out_of_proportion() {
        let spin = Spin::new(Duration::from_micros(50));
        assert_eq!(spin.trial(), 50);
        for (slept, trial) in [(20, 50), (200, 300), (600, 900), (700, 50), (1_000_000, 50)] {
            spin.slept(Duration::from_micros(slept));
            assert_eq!(spin.trial(), trial, "after a wait of {slept} us");
        }
    }

    #[test]
    fn a_budget_of_zero_looks_once_and_does_not_spin() {
        let mut looks = 0;
        assert!(!Spin::new(Duration::ZERO).until(|| {
            looks += 1;
            false
        }));
        assert_eq!(looks, 1);
    }
}
