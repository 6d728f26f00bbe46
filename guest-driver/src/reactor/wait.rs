// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The wait of a thread: it spins for a short time, then sleeps where others can wake it.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::thread::futex;

use ism_sys::{
    EventFd, OnceBox, SignalMask, WordWait, poll_readable, sleep_on_private, sleep_on_words,
    wait_in_set,
};

/// Longest sleep before shared memory is checked again. Never rely only on a wake-up a peer can
/// suppress.
pub(crate) const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Longest single sleep.
const LONGEST: Duration = Duration::from_secs(3600);

/// The thread runs: a new count suffices to wake it.
const AWAKE: u8 = 0;
/// The thread sleeps on its futex, or is about to.
const ASLEEP: u8 = 1;
/// The thread sleeps in `poll`, or is about to.
const POLLING: u8 = 2;

/// A waiting thread, made on its first sleep; or a poller, usable by any thread.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// Counts wake-ups; the futex word. SeqCst: the waker counts, then reads `state`.
    count: AtomicU32,
    /// [`AWAKE`], [`ASLEEP`] or [`POLLING`]. SeqCst: the sleeper stores the state, then reads `count`.
    state: AtomicU8,
    /// Wakes a thread asleep on other descriptors, too, instead of the futex.
    notifier: OnceBox<EventFd>,
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

/// Makes the variables of this thread that have destructors. For each of them, libc takes a lock and
/// the program's memory, and the child of a fork may find both held for ever.
pub(crate) fn prepare_thread() {
    drop(Waiter::current());
    // `arc_swap` has such a variable.
    drop(ArcSwap::from_pointee(()).load());
}

/// Sets the signal mask for this thread's sleeps in `poll`.
pub(crate) fn set_mask(mask: Option<SignalMask>) {
    MASK.set(mask);
}

/// The mask set by [`set_mask`].
pub(crate) fn mask() -> Option<SignalMask> {
    MASK.get()
}

/// Begins a wait interested in signals handled from now on.
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

/// The notifier of a sleeping waiter, with other descriptors that end the sleep.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaiterNotifier<'a> {
    /// An epoll set with the waiter's notifier.
    Set(BorrowedFd<'a>),
    /// The waiter's notifier, and a list with the awaited events in the bits of poll(2).
    List(&'a EventFd, &'a [(BorrowedFd<'a>, i16)]),
}

/// Sleeps until one of the descriptors is readable, or one `beside` them has an event. Returns which; none
/// after `timeout` or a signal.
pub(super) fn poll_for(
    [first, second]: [Option<BorrowedFd<'_>>; 2],
    beside: Option<WaiterNotifier<'_>>,
    timeout: Option<Duration>,
) -> ([bool; 2], bool) {
    let timeout = timeout.map(|timeout| timeout.min(LONGEST));
    let (third, others) = match beside {
        None => (None, &[][..]),
        Some(WaiterNotifier::Set(set)) => (Some(set), &[][..]),
        Some(WaiterNotifier::List(notifier, others)) => (Some(notifier.as_fd()), others),
    };
    let polled = poll_readable([first, second, third], others, timeout, mask());
    let ([by_first, by_second, by_third], by_other) = note_error(polled);
    if let Some(WaiterNotifier::List(notifier, _)) = beside
        && by_third
    {
        notifier.clear();
    }
    ([by_first, by_second], by_third || by_other)
}

/// The result of a sleep; the default after a signal, which this notes.
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

    /// A waiter with a descriptor, made readable by a wake-up.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn with_notifier() -> io::Result<Waiter> {
        let waiter = Waiter::default();
        waiter.make_notifier()?;
        Ok(waiter)
    }

    /// Makes the descriptor of [`Waiter::with_notifier`], unless there is one.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn make_notifier(&self) -> io::Result<()> {
        if self.notifier.get().is_none() {
            let _ = self.notifier.set(EventFd::new()?);
        }
        Ok(())
    }

    /// The descriptor of [`Waiter::with_notifier`].
    pub(crate) fn notifier(&self) -> Option<&EventFd> {
        self.notifier.get()
    }

    /// Number of wake-ups so far. A thread reads the number before it checks the awaited condition.
    pub(crate) fn wake_count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Wakes the thread. `true`: the thread sleeps as the leader, so the caller must signal the
    /// reactor's interrupt, too.
    pub(crate) fn wake(&self) -> bool {
        // SeqCst with the accesses of `set_polling` and `sleep`: either the sleeper sees the new count
        // before it sleeps, or this call sees the sleep begin.
        self.count.fetch_add(1, Ordering::SeqCst);
        match (self.state.load(Ordering::SeqCst), self.notifier.get()) {
            (POLLING, None) => return true,
            // Once is enough until the poller sleeps again.
            (POLLING, Some(notifier)) if self.state.swap(AWAKE, Ordering::SeqCst) == POLLING => {
                notifier.signal();
            }
            (ASLEEP, _) => {
                let _ = futex::wake(&self.count, futex::Flags::PRIVATE, 1);
            }
            _ => {}
        }
        false
    }

    /// Notes the beginning or the end of a sleep in `poll`. Between the two the thread checks
    /// [`Waiter::is_woken`].
    pub(crate) fn set_polling(&self, on: bool) {
        self.state.store(if on { POLLING } else { AWAKE }, Ordering::SeqCst);
    }

    /// Whether there was a wake-up since [`Waiter::wake_count`] returned `count`.
    pub(crate) fn is_woken(&self, count: u32) -> bool {
        self.count.load(Ordering::SeqCst) != count
    }

    /// Sleeps on the futex while the count of wake-ups is `count`, for at most `timeout`.
    pub(crate) fn sleep(&self, count: u32, timeout: Option<Duration>) {
        let timeout = timeout.map(|timeout| timeout.min(LONGEST));
        self.state.store(ASLEEP, Ordering::SeqCst);
        // After any end of the sleep (wake-up, new count, timeout, signal), the caller checks again.
        note_error(sleep_on_private((&self.count, count), timeout));
        self.state.store(AWAKE, Ordering::SeqCst);
    }

    /// Sleeps while the count of wake-ups is `count` and the shared words have these values, for at
    /// most `timeout`. The connections of these words have called `Reactor::add_unwatched`. Without a
    /// timeout, the background thread wakes this one every [`RECHECK_INTERVAL`].
    pub(crate) fn sleep_on_words(
        &self,
        count: u32,
        shared: &[(&AtomicU32, u32)],
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

    /// Sleeps until one of these descriptors has an event while the count of wake-ups is `count`, for at
    /// most `timeout`.
    pub(crate) fn sleep_on(&self, ends: WaiterNotifier<'_>, count: u32, timeout: Option<Duration>) {
        self.set_polling(true);
        if !self.is_woken(count) {
            poll_for([None; 2], Some(ends), timeout);
        }
        self.set_polling(false);
    }

    /// The name of the notifier in the sets of [`Waiter::sleep_in`].
    pub(crate) const NOTIFIER: u64 = 0;

    /// Sleeps until an epoll set has an event while the count of wake-ups is `count`, for at most
    /// `timeout`. The notifier must be in the set by its name.
    pub(crate) fn sleep_in(&self, set: BorrowedFd<'_>, count: u32, timeout: Duration) {
        self.set_polling(true);
        if !self.is_woken(count) {
            match wait_in_set(set, Some(timeout), mask()) {
                Ok(mut names) => {
                    if names.any(|name| name == Self::NOTIFIER)
                        && let Some(notifier) = self.notifier.get()
                    {
                        notifier.clear();
                    }
                }
                Err(error) => note_error(Err(error)),
            }
        }
        self.set_polling(false);
    }
}

/// The end of a waiting call. A timeout starts at the call's first sleep, so a call without a sleep
/// reads no clock.
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

    /// The present time, and the remaining time; `None`: without end.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_up_between_check_and_sleep_is_not_missed() {
        let waiter = Waiter::default();
        let count = waiter.wake_count();
        waiter.wake();
        let start = Instant::now();
        waiter.sleep(count, Some(2 * smc_test_support::TIMEOUT));
        assert!(start.elapsed() < smc_test_support::TIMEOUT);
        assert!(waiter.is_woken(count));
    }

    #[test]
    fn a_sleeper_on_words_is_woken_by_one_of_them_and_by_its_own_count() {
        let waiter = Arc::new(Waiter::default());
        let word = Arc::new(AtomicU32::new(2));
        let other = AtomicU32::new(7);
        let shared = [(&other, 7), (&*word, 2)];
        let sleep = |timeout| waiter.sleep_on_words(waiter.wake_count(), &shared, timeout);
        assert_eq!(sleep(Some(Duration::from_millis(1))), WordWait::Ended, "the time is over");
        for by_word in [true, false] {
            let (waker, taken) = (waiter.clone(), word.clone());
            let asleep = std::thread::spawn(move || {
                while waker.state.load(Ordering::SeqCst) != ASLEEP {
                    std::thread::yield_now();
                }
                if by_word {
                    taken.store(0, Ordering::SeqCst);
                    ism_sys::wake_sleepers(&taken, 1);
                } else {
                    waker.wake();
                }
            });
            let expected = [WordWait::Ended, WordWait::Woken(1)][usize::from(by_word)];
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
    fn a_wake_up_ends_one_sleep_beside_a_list() {
        let waiter = Arc::new(Waiter::with_notifier().unwrap());
        let notifier = waiter.notifier().unwrap();
        let count = waiter.wake_count();
        let waker = waiter.clone();
        let asleep = std::thread::spawn(move || {
            while waker.state.load(Ordering::SeqCst) != POLLING {
                std::thread::yield_now();
            }
            waker.wake();
        });
        let sleep =
            |count, most| waiter.sleep_on(WaiterNotifier::List(notifier, &[]), count, Some(most));
        let start = Instant::now();
        while !waiter.is_woken(count) {
            sleep(count, 2 * smc_test_support::TIMEOUT);
        }
        asleep.join().unwrap();
        assert!(start.elapsed() < smc_test_support::TIMEOUT);
        // A signal of a waker that came late ends one more sleep at most.
        sleep(waiter.wake_count(), Duration::from_millis(1));
        assert!(!notifier.clear());
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
}
