//! How a thread waits: it spins for a short time, then sleeps where others can wake it.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fd::BorrowedFd;
use rustix::thread::futex;

use crate::sys::{EventFd, POLLED, SignalMask, WordWait, poll_readable, sleep_on_words, timespec};

/// Longest sleep before shared memory is checked again. A wake-up that a peer can suppress is never
/// the only one.
pub(crate) const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Longest single sleep.
const LONGEST: Duration = Duration::from_secs(3600);

/// The thread runs: to count is enough to wake it.
const AWAKE: u8 = 0;
/// The thread sleeps on its futex, or is about to.
const ASLEEP: u8 = 1;
/// The thread sleeps in `poll`, or is about to.
const POLLING: u8 = 2;

/// A thread that can be woken, made on its first sleep; or a poller, which any thread may use.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// Counts wake-ups; the futex word.
    count: AtomicU32,
    /// [`AWAKE`], [`ASLEEP`] or [`POLLING`].
    state: AtomicU8,
    /// What wakes a thread that sleeps on other descriptors, too, and not on the futex.
    notifier: Option<EventFd>,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
}

thread_local! {
    /// A signal was handled while this thread slept.
    static INTERRUPTED: Cell<bool> = const { Cell::new(false) };
}

thread_local! {
    /// The signal mask of this thread while it sleeps, if another one than usual.
    static MASK: Cell<Option<SignalMask>> = const { Cell::new(None) };
}

/// Sets the signal mask for this thread's sleeps in `poll`.
pub(crate) fn set_mask(mask: Option<SignalMask>) {
    MASK.set(mask);
}

/// The mask that [`set_mask`] has set.
pub(crate) fn mask() -> Option<SignalMask> {
    MASK.get()
}

/// Begins a wait that wants to know of signals handled from now on.
pub(crate) fn clear_interrupted() {
    INTERRUPTED.set(false);
}

/// Notes that a sleep ended because a signal was handled.
fn note_interrupted() {
    INTERRUPTED.set(true);
}

/// Whether a signal was handled since [`clear_interrupted`], while the thread slept.
pub(crate) fn was_interrupted() -> bool {
    INTERRUPTED.get()
}

/// Sleeps until one of the descriptors is readable. Returns which are; none after `timeout` or a
/// signal.
pub(super) fn poll_for(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> [bool; POLLED] {
    let timeout = timeout.map(|timeout| timeout.min(LONGEST));
    note_error(poll_readable(fds, timeout, mask()))
}

/// The result of a sleep; nothing if a signal ended it, which this notes.
pub(super) fn note_error<T: Default>(found: io::Result<T>) -> T {
    found.unwrap_or_else(|error| {
        if error.kind() == io::ErrorKind::Interrupted {
            note_interrupted();
        }
        T::default()
    })
}

impl Waiter {
    /// The calling thread's waiter.
    pub(crate) fn current() -> Arc<Waiter> {
        CURRENT
            .try_with(|cell| cell.borrow_mut().get_or_insert_with(Arc::default).clone())
            // The thread is being torn down; a waiter of its own serves as well.
            .unwrap_or_default()
    }

    /// A waiter that a wake-up makes readable as a descriptor.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn with_notifier() -> io::Result<Waiter> {
        Ok(Waiter { notifier: Some(EventFd::new()?), ..Waiter::default() })
    }

    /// The descriptor of [`Waiter::with_notifier`].
    pub(crate) fn notifier(&self) -> Option<&EventFd> {
        self.notifier.as_ref()
    }

    /// Number of wake-ups so far. A thread reads it before it checks the condition for which it
    /// waits.
    pub(crate) fn wake_count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Wakes the thread. `true`: it sleeps as the leader, so the caller must signal the reactor's
    /// interrupt, too.
    pub(crate) fn wake(&self) -> bool {
        // SeqCst with the accesses of `set_polling` and `sleep`: either the sleeper sees the new
        // count before it sleeps, or this call sees that it is about to.
        self.count.fetch_add(1, Ordering::SeqCst);
        match (self.state.load(Ordering::SeqCst), &self.notifier) {
            (POLLING, None) => return true,
            (POLLING, Some(notifier)) => notifier.signal(),
            (ASLEEP, _) => {
                let _ = futex::wake(&self.count, futex::Flags::PRIVATE, 1);
            }
            _ => {}
        }
        false
    }

    /// Says that the thread is about to sleep in `poll`, or does so no more. Between the two it
    /// checks [`Waiter::is_woken`].
    pub(crate) fn set_polling(&self, on: bool) {
        self.state.store(if on { POLLING } else { AWAKE }, Ordering::SeqCst);
    }

    /// Whether there was a wake-up since [`Waiter::wake_count`] returned `count`.
    pub(crate) fn is_woken(&self, count: u32) -> bool {
        self.count.load(Ordering::SeqCst) != count
    }

    /// Sleeps on the futex while the count of wake-ups is `count`, for at most `timeout`.
    pub(crate) fn sleep(&self, count: u32, timeout: Option<Duration>) {
        let timeout = timeout.map(|timeout| timespec(timeout.min(LONGEST)));
        self.state.store(ASLEEP, Ordering::SeqCst);
        // Whatever ends it (wake-up, new count, timeout, signal), the caller checks again.
        let slept = futex::wait(&self.count, futex::Flags::PRIVATE, count, timeout.as_ref());
        if slept == Err(rustix::io::Errno::INTR) {
            note_interrupted();
        }
        self.state.store(AWAKE, Ordering::SeqCst);
    }

    /// Sleeps while the count of wake-ups is `count` and the shared word has this value, for at most
    /// `timeout`. The connection has called `Reactor::add_unwatched`. Without a timeout, the
    /// background thread wakes this one every [`RECHECK_INTERVAL`].
    pub(crate) fn sleep_on_word(
        &self,
        count: u32,
        shared: (&AtomicU32, u32),
        timeout: Option<Duration>,
    ) -> WordWait {
        self.state.store(ASLEEP, Ordering::SeqCst);
        let slept = sleep_on_words((&self.count, count), shared, timeout);
        if slept == WordWait::Interrupted {
            note_interrupted();
        }
        self.state.store(AWAKE, Ordering::SeqCst);
        slept
    }

    /// Sleeps until `fd` is readable while the count of wake-ups is `count`, for at most `timeout`.
    /// The notifier must be part of `fd`.
    pub(crate) fn sleep_on(&self, fd: BorrowedFd<'_>, count: u32, timeout: Option<Duration>) {
        self.set_polling(true);
        if !self.is_woken(count) {
            poll_for(&[fd], timeout);
        }
        self.set_polling(false);
    }
}

/// The end of a call that waits. A timeout starts when the call first has to sleep, so a call that
/// need not sleep reads no clock.
#[derive(Debug, Default)]
pub(crate) struct Deadline {
    timeout: Option<Duration>,
    at: Cell<Option<Instant>>,
    asked: Cell<bool>,
}

impl Deadline {
    /// After a timeout; `None`: never.
    pub(crate) fn after(timeout: Option<Duration>) -> Deadline {
        Deadline { timeout, ..Deadline::default() }
    }

    /// Whether the time is over. A call asks before each of its waits; the first may always begin.
    pub(crate) fn is_over(&self) -> bool {
        self.asked.replace(true) && self.left().is_some_and(|(_, left)| left.is_zero())
    }

    /// The present time, and the time that is left; `None`: without end.
    pub(crate) fn left(&self) -> Option<(Instant, Duration)> {
        if let Some(at) = self.at.get() {
            let now = Instant::now();
            return Some((now, at.saturating_duration_since(now)));
        }
        let timeout = self.timeout?;
        let now = Instant::now();
        // An end beyond the range of the clock is none.
        self.at.set(now.checked_add(timeout));
        Some((now, timeout))
    }
}

impl From<Option<Instant>> for Deadline {
    fn from(at: Option<Instant>) -> Deadline {
        Deadline { at: Cell::new(at), ..Deadline::default() }
    }
}

/// Threads of this process that spin now.
static SPINNERS: AtomicU32 = AtomicU32::new(0);

/// Of this many waits with a reduced budget, one is a probe round.
const PROBE_EVERY: u32 = 16;
/// After this many first checks in vain, only probe rounds check first.
const MAX_MISSES: u32 = 4;
/// A probe round spins for at most this many times the full budget. It lasts one and a half waits,
/// so with [`PROBE_EVERY`] it costs at most a tenth of the time that is waited anyway.
const PROBE_FACTOR: u32 = 20;

/// Checks of shared memory between two reads of the clock.
const CHECKS: u32 = 32;
/// On a machine with one processor, a thread that spins for longer than this lets others run.
const YIELD_AFTER: Duration = Duration::from_micros(10);

/// Spinning before a sleep, for a time that adapts.
///
/// A wait that ends while it spins restores the budget, and a wait that has to sleep halves it. So
/// a connection with a slow peer stops burning processors, and so does a process with more to do
/// than it has processors. Later connections begin with what earlier ones have learnt.
///
/// If both ends spin for a moment only, each misses the other's answer, although both would answer
/// at once if they stayed awake. So every now and then there is a *probe round*: the wait spins for
/// longer than the last wait that slept, unless that is out of proportion. If the other end is
/// merely asleep, its answer comes within that time, and both are in step again. This matters
/// between virtual machines, where a wake-up takes longer than the usual budget.
#[derive(Debug)]
pub(crate) struct Spin {
    max_us: u32,
    budget_us: AtomicU32,
    /// Waits that were not over at the first check. All with the same parent share the parent's.
    waits: AtomicU32,
    /// Duration of the last wait that had to sleep, microseconds.
    slept_us: AtomicU32,
    /// Waits of [`Spin::until_polled`] since its first check found something.
    misses: AtomicU32,
    parent: Option<Arc<Spin>>,
}

impl Spin {
    /// A budget of at most `max` per wait; zero: never spin.
    pub(crate) fn new(max: Duration) -> Spin {
        let max_us = u32::try_from(max.as_micros()).unwrap_or(u32::MAX);
        let budget_us = AtomicU32::new(max_us);
        let (waits, slept_us, misses) = Default::default();
        Spin { max_us, budget_us, waits, slept_us, misses, parent: None }
    }

    /// A budget that begins with what `parent` has learnt, and teaches it.
    pub(crate) fn of(parent: &Arc<Spin>) -> Spin {
        let max_us = parent.max_us;
        let budget_us = AtomicU32::new(parent.budget_us.load(Ordering::Relaxed));
        let (waits, slept_us, misses) = Default::default();
        let parent = Some(parent.clone());
        Spin { max_us, budget_us, waits, slept_us, misses, parent }
    }

    /// Spins until `changed` returns `true`. `false`: it did not within the budget.
    pub(crate) fn until(&self, mut changed: impl FnMut() -> bool) -> bool {
        changed() || (self.max_us != 0 && self.within(CHECKS, changed))
    }

    /// As [`Spin::until`], where each check is a system call, or takes as long. The first check of
    /// all is useless then, so there may be none.
    pub(crate) fn until_asked(&self, changed: impl FnMut() -> bool) -> bool {
        self.max_us != 0 && self.within(1, changed)
    }

    /// As [`Spin::until_asked`], where a check finds only what a software adapter may have put
    /// there.
    ///
    /// On the only processor there is, that adapter must run instead. A thread that goes to sleep
    /// checks once more anyway. So after some first checks in vain, only probe rounds check first.
    pub(crate) fn until_polled(&self, mut changed: impl FnMut() -> bool) -> bool {
        let misses = self.misses.load(Ordering::Relaxed);
        let checks = misses < MAX_MISSES || misses.is_multiple_of(PROBE_EVERY);
        if checks && changed() {
            self.misses.store(0, Ordering::Relaxed);
            return true;
        }
        self.misses.store(misses.wrapping_add(1), Ordering::Relaxed);
        self.spins_polled() && self.within(1, changed)
    }

    /// Whether [`Spin::until_polled`] checks more than once.
    pub(crate) fn spins_polled(&self) -> bool {
        self.max_us != 0 && processors() > 1
    }

    /// Spins, with this many checks between two reads of the clock.
    fn within(&self, checks: u32, changed: impl FnMut() -> bool) -> bool {
        let _counted = Spinning::start();
        // One processor is left to threads that have something to do.
        SPINNERS.load(Ordering::Relaxed) < processors().max(2) && self.spin(checks, changed)
    }

    /// Spins, however many threads do.
    #[inline]
    fn spin(&self, checks: u32, mut changed: impl FnMut() -> bool) -> bool {
        let budget = self.budget_us.load(Ordering::Relaxed);
        let probe = budget < self.max_us && self.is_probe_round();
        if checks == 1 && !probe && budget <= self.least() {
            // One check takes as long as the budget, and did not pay lately.
            return false;
        }
        let limit = if probe { self.probe_us() } else { budget };
        let limit = Duration::from_micros(u64::from(limit));
        let start = Instant::now();
        loop {
            for _ in 0..checks {
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
            // With one processor, threads that wait for nothing any more cannot go on while this
            // one spins.
            if elapsed >= YIELD_AFTER && processors() == 1 {
                rustix::thread::sched_yield();
            }
        }
    }

    /// Whether [`Spin::note_sleep`] is of use.
    pub(crate) fn learns(&self) -> bool {
        self.max_us != 0
    }

    /// Notes the duration of a wait that had to sleep.
    pub(crate) fn note_sleep(&self, wait: Duration) {
        let wait = u32::try_from(wait.as_micros()).unwrap_or(u32::MAX);
        self.slept_us.store(wait, Ordering::Relaxed);
    }

    /// Whether this wait spins for long although that has not paid lately.
    fn is_probe_round(&self) -> bool {
        let waits = self.parent.as_ref().map_or(&self.waits, |parent| &parent.waits);
        waits.fetch_add(1, Ordering::Relaxed) % PROBE_EVERY == PROBE_EVERY - 1
    }

    /// How long a probe round spins, microseconds.
    fn probe_us(&self) -> u32 {
        let wanted = self.slept_us.load(Ordering::Relaxed).saturating_mul(3) / 2;
        let most = self.max_us.saturating_mul(PROBE_FACTOR);
        if wanted > most { self.max_us } else { wanted.max(self.max_us) }
    }

    /// The least budget. It is not zero, because a short check each time notices when the peer is
    /// fast again.
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

/// Counts a thread that spins.
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

/// Number of processors that this process may use.
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
    fn a_wake_up_between_check_and_sleep_is_not_missed() {
        let waiter = Waiter::default();
        let count = waiter.wake_count();
        waiter.wake();
        let start = Instant::now();
        waiter.sleep(count, Some(Duration::from_secs(20)));
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(waiter.is_woken(count));
    }

    #[test]
    fn a_sleeper_on_a_word_is_woken_by_the_word_and_by_its_own_count() {
        let waiter = Arc::new(Waiter::default());
        let word = Arc::new(AtomicU32::new(2));
        let sleep = |timeout| waiter.sleep_on_word(waiter.wake_count(), (&word, 2), timeout);
        assert_eq!(sleep(Some(Duration::from_millis(1))), WordWait::Ended, "the time is over");
        for by_word in [true, false] {
            let (waker, taken) = (waiter.clone(), word.clone());
            let asleep = std::thread::spawn(move || {
                while waker.state.load(Ordering::SeqCst) != ASLEEP {
                    std::thread::yield_now();
                }
                if by_word {
                    taken.store(0, Ordering::SeqCst);
                    crate::sys::wake_sleepers(&taken, 1);
                } else {
                    waker.wake();
                }
            });
            let expected = [WordWait::Ended, WordWait::Woken][usize::from(by_word)];
            let slept = sleep(None);
            // The other thread may have been faster than the system call.
            assert!(slept == expected || slept == WordWait::NotAsleep, "{slept:?}");
            asleep.join().unwrap();
            word.store(2, Ordering::SeqCst);
        }
        word.store(3, Ordering::SeqCst);
        assert_eq!(sleep(None), WordWait::NotAsleep, "another value");
    }

    #[test]
    fn a_timeout_starts_at_the_first_question() {
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
        waiter.set_polling(true);
        assert!(waiter.wake());
        waiter.set_polling(false);
        assert!(!waiter.wake());
    }

    #[test]
    fn a_failed_spin_halves_the_budget_and_a_good_one_restores_it() {
        let spin = Spin::new(Duration::from_micros(40));
        // Other tests spin at the same time.
        assert!(!spin.spin(CHECKS, || false));
        assert!(spin.budget_us.load(Ordering::Relaxed) <= 20);
        let mut checks = 0;
        assert!(spin.spin(CHECKS, || {
            checks += 1;
            checks > 3
        }));
        assert_eq!(spin.budget_us.load(Ordering::Relaxed), 40);
    }

    #[test]
    fn one_wait_of_sixteen_is_a_probe_round_whichever_connection_waits() {
        let parent = Arc::new(Spin::new(Duration::from_micros(50)));
        let spins = [Spin::of(&parent), Spin::of(&parent)];
        let waits = spins.iter().cycle().take(4 * PROBE_EVERY as usize);
        assert_eq!(waits.filter(|spin| spin.is_probe_round()).count(), 4);
    }

    #[test]
    fn first_checks_in_vain_become_rare_until_one_finds_something() {
        let spin = Spin::new(Duration::ZERO);
        let wait = |found| {
            let mut checks = 0;
            let over = spin.until_polled(|| {
                checks += 1;
                found
            });
            (checks, over)
        };
        let waits = |n, found| (0..n).map(|_| wait(found).0).sum::<u32>();
        assert_eq!(waits(MAX_MISSES, false), MAX_MISSES);
        assert_eq!(waits(PROBE_EVERY - MAX_MISSES, false), 0);
        assert_eq!(waits(2 * PROBE_EVERY, false), 2);
        // The next one checks and finds something, so all of them check again.
        assert_eq!(wait(true), (1, true));
        assert_eq!(waits(MAX_MISSES, false), MAX_MISSES);
        assert_eq!(wait(true), (0, false));
    }

    #[test]
    fn a_probe_round_outlasts_the_last_wait_unless_that_is_out_of_proportion() {
        let spin = Spin::new(Duration::from_micros(50));
        assert_eq!(spin.probe_us(), 50);
        for (slept, probe) in [(20, 50), (200, 300), (600, 900), (700, 50), (1_000_000, 50)] {
            spin.note_sleep(Duration::from_micros(slept));
            assert_eq!(spin.probe_us(), probe, "after a wait of {slept} us");
        }
    }

    #[test]
    fn a_budget_of_zero_checks_once_and_does_not_spin() {
        let mut checks = 0;
        assert!(!Spin::new(Duration::ZERO).until(|| {
            checks += 1;
            false
        }));
        assert_eq!(checks, 1);
    }
}
