// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limit of one front end's processor time.
//!
//! Several of the daemon's threads work for a front end: two workers, the message thread, the map thread and
//! the accepting thread. A front end flooding all of them would get more of the processors than a front end
//! with a single thread. So their processor time is on one account, shared by the front end's connections,
//! with a limit of one processor in total. Threads of other devices are never charged and never wait.
//!
//! Work free of cost for the front end is charged more than its time: a kick without work, and a signal of a
//! call eventfd whose watchers the kernel runs in the signalling thread.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use ism_device::sync::lock;

/// Processor time usable at once.
const BURST: Duration = Duration::from_millis(50);
/// Shortest interval between a thread's readings of its processor clock (a system call).
const SAMPLE: Duration = Duration::from_millis(1);
/// Shortest wait of a thread. Work arriving during the wait is then done in one go.
const MIN_WAIT: Duration = Duration::from_millis(1);
/// Longest wait until the next check for the end of the connection.
const MAX_WAIT: Duration = Duration::from_millis(10);
/// Longest total wait, for any charge.
const MAX_CHARGE: Duration = Duration::from_secs(10);

/// Charge of a kick without work. Allows 20,000 empty kicks a second.
pub(super) const IDLE_KICK: Duration = Duration::from_micros(50);
/// Charge of a connection, for the event loop's work to take the connection out of the queue by a thread.
pub(super) const CONNECTION: Duration = Duration::from_micros(100);
/// A signal takes a few microseconds. A signal over this limit is charged more.
const LONG_SIGNAL: Duration = Duration::from_micros(100);
/// Multiplier for the charge.
const SIGNAL_FACTOR: u32 = 64;
/// Number of quick signals to make up for a long one. A busy host makes one of hundreds long; watchers make
/// all of them long.
const QUICK_PER_LONG: u32 = 8;
/// Number of long signals, not made up for by quick ones, from which on signals are charged.
const LONG_SIGNALS: u32 = 4;

thread_local! {
    /// Time and value of the calling thread's last reading of its processor clock.
    static SAMPLED: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// The account of one guest's front ends.
#[derive(Debug)]
pub(crate) struct ProcessorAccount {
    epoch: Instant,
    /// The time by which all charges are paid at the rate of one processor, nanoseconds after `epoch`.
    paid_at: Mutex<u64>,
    /// Long signals not made up for by quick ones, times [`QUICK_PER_LONG`].
    long_signals: AtomicU32,
}

impl Default for ProcessorAccount {
    fn default() -> Self {
        ProcessorAccount {
            epoch: Instant::now(),
            paid_at: Mutex::new(0),
            long_signals: AtomicU32::new(0),
        }
    }
}

impl ProcessorAccount {
    /// Charges the calling thread's processor time since its last call, or since its begin at the first call;
    /// without effect within [`SAMPLE`] of the last call.
    pub(super) fn charge_thread(&self, now: Instant) {
        let last = SAMPLED.get();
        if last.is_some_and(|(at, _)| now.saturating_duration_since(at) < SAMPLE) {
            return;
        }
        self.charge_ending_thread(now);
    }

    /// Like [`Self::charge_thread`], but at any time.
    pub(super) fn charge_ending_thread(&self, now: Instant) {
        let used = thread_time();
        let before =
            SAMPLED.replace(Some((now, used))).map_or(Duration::ZERO, |(_, before)| before);
        self.charge(now, used.saturating_sub(before));
    }

    /// Charges an amount of processor time.
    pub(super) fn charge(&self, now: Instant, used: Duration) {
        let now = self.since_epoch(now);
        let most = now.saturating_add(nanos(MAX_CHARGE));
        let mut paid_at = lock(&self.paid_at);
        *paid_at = (*paid_at).max(now).saturating_add(nanos(used)).min(most);
    }

    /// How long threads have to wait before further work.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let owed = lock(&self.paid_at).saturating_sub(self.since_epoch(now));
        let wait = Duration::from_nanos(owed).checked_sub(BURST)?;
        (!wait.is_zero()).then(|| wait.clamp(MIN_WAIT, MAX_WAIT))
    }

    /// Charges the calling thread's processor time and waits while too much was used, unless `ended`.
    pub(super) fn charge_and_wait(&self, ended: impl Fn() -> bool) {
        let mut now = Instant::now();
        self.charge_thread(now);
        while let Some(wait) = self.wait(now)
            && !ended()
        {
            std::thread::sleep(wait);
            now = Instant::now();
        }
    }

    /// Signals a front end by `signal`. A long signal is charged in proportion.
    pub(super) fn signal(&self, signal: impl FnOnce()) {
        let start = Instant::now();
        let long = self.long_signals.load(Ordering::Relaxed);
        let before = (long > 0).then(thread_time);
        signal();
        let end = Instant::now();
        if end.saturating_duration_since(start) <= LONG_SIGNAL {
            // Two threads may race here, losing one count.
            if long > 0 {
                self.long_signals.store(long - 1, Ordering::Relaxed);
            }
            return;
        }
        let used = before.map(|before| thread_time().saturating_sub(before));
        if used.is_some_and(|used| used <= LONG_SIGNAL) {
            return; // the thread was not given a processor
        }
        let most = LONG_SIGNALS * QUICK_PER_LONG;
        self.long_signals.store((long + QUICK_PER_LONG).min(most), Ordering::Relaxed);
        if long + QUICK_PER_LONG >= most {
            self.charge(end, used.unwrap_or_default().saturating_mul(SIGNAL_FACTOR));
        }
    }

    fn since_epoch(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(self.epoch))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Processor time of the calling thread.
pub(super) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn one_processor_is_never_made_to_wait_and_two_are() {
        let account = ProcessorAccount::default();
        let at = |ms: u32| account.epoch + ms * MS;
        for ms in 1..1_000 {
            account.charge(at(ms), MS);
            assert_eq!(account.wait(at(ms)), None, "after {ms} ms");
        }
        let waits = (1_000..1_200).filter(|ms| {
            account.charge(at(*ms), 2 * MS);
            account.wait(at(*ms)).is_some()
        });
        assert!((140..=152).contains(&waits.count()), "after the burst");
    }

    #[test]
    fn what_was_not_used_is_not_saved_beyond_the_burst() {
        let account = ProcessorAccount::default();
        let later = account.epoch + Duration::from_secs(100);
        account.charge(later, BURST);
        assert_eq!(account.wait(later), None);
        account.charge(later, MS);
        assert_eq!(account.wait(later), Some(MS));
        assert_eq!(account.wait(later + MS), None);
    }

    #[test]
    fn what_is_owed_is_bounded_and_waited_for_in_parts() {
        let account = ProcessorAccount::default();
        let now = account.epoch;
        account.charge(now, Duration::from_secs(3600));
        assert_eq!(account.wait(now), Some(MAX_WAIT));
        assert_eq!(account.wait(now + MAX_CHARGE), None);
        account.charge_and_wait(|| true); // the connection has ended: it does not wait
    }

    #[test]
    fn a_thread_is_charged_what_it_uses() {
        let account = ProcessorAccount::default();
        account.charge_and_wait(|| false);
        let began = thread_time();
        while thread_time() - began < 100 * MS {}
        let before = *lock(&account.paid_at);
        account.charge_thread(Instant::now());
        let charged = *lock(&account.paid_at) - before.max(account.since_epoch(Instant::now()));
        assert!(charged > nanos(90 * MS), "{charged} ns");
    }

    #[test]
    fn signals_that_last_are_charged_in_proportion_from_the_fourth_on() {
        let account = ProcessorAccount::default();
        let signal = || {
            let began = thread_time();
            while thread_time() - began < 2 * MS {}
        };
        (0..3).for_each(|_| account.signal(signal));
        assert_eq!(*lock(&account.paid_at), 0, "perhaps the machine was busy");
        account.signal(signal);
        let owed = *lock(&account.paid_at) - account.since_epoch(Instant::now());
        assert!(owed > nanos(64 * MS), "{owed} ns");
        let quick = ProcessorAccount::default();
        for _ in 0..20 {
            quick.signal(signal);
            (0..QUICK_PER_LONG + 1).for_each(|_| quick.signal(|| ()));
        }
        assert_eq!(*lock(&quick.paid_at), 0, "few are long");
    }
}
