// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What one front end may use of the processors.
//!
//! Several of the daemon's threads work for a front end: two workers, the thread of its messages,
//! that of its mappings, and the one that accepts it. A front end that floods all of them would have
//! more of the processors than one that uses a single thread. So their processor time is on one
//! account, which the front end's connections share, and together they get one processor at most.
//! Threads of other devices are never charged and never wait.
//!
//! What costs the front end nothing is charged more than it takes: a kick without work, and a
//! signal of a call eventfd whose watchers the kernel runs in the thread that signals.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use ism_device::sync::lock;

/// Processor time that may be used at once.
const BURST: Duration = Duration::from_millis(50);
/// A thread reads its clock of processor time, which is a system call, this often at most.
const SAMPLE: Duration = Duration::from_millis(1);
/// A thread that has to wait waits this long at least. What comes meanwhile is done at once.
const MIN_WAIT: Duration = Duration::from_millis(1);
/// And so long until it looks whether the connection has ended.
const MAX_WAIT: Duration = Duration::from_millis(10);
/// A thread waits at most this long, whatever was charged.
const MAX_CHARGE: Duration = Duration::from_secs(10);

/// What a kick without work is charged. A front end may kick for nothing 20,000 times a second.
pub(super) const IDLE_KICK: Duration = Duration::from_micros(50);
/// What a connection is charged for the event loop, which takes it out of the queue by a thread.
pub(super) const CONNECTION: Duration = Duration::from_micros(100);
/// A signal takes a few microseconds. One that takes longer than this is charged more.
const LONG_SIGNAL: Duration = Duration::from_micros(100);
/// How many times as much.
const SIGNAL_FACTOR: u32 = 64;
/// How many quick signals make up for a long one. A host that takes the processor away makes one of
/// hundreds long, and watchers make all of them long.
const QUICK_PER_LONG: u32 = 8;
/// At so many long ones more than quick ones make up for, they are charged.
const LONG_SIGNALS: u32 = 4;

thread_local! {
    /// When the calling thread last read its clock of processor time, and what it said.
    static SAMPLED: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// The account of one guest's front ends.
#[derive(Debug)]
pub(crate) struct ProcessorAccount {
    epoch: Instant,
    /// Until when all that was charged is paid for at the rate of one processor, nanoseconds after
    /// `epoch`.
    paid_at: Mutex<u64>,
    /// Long signals that quick ones have not made up for, times [`QUICK_PER_LONG`].
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
    /// Charges what the calling thread has used since its last call, if that is a while ago; at the
    /// first call, since it began.
    pub(super) fn charge_thread(&self, now: Instant) {
        let last = SAMPLED.get();
        if last.is_some_and(|(at, _)| now.saturating_duration_since(at) < SAMPLE) {
            return;
        }
        self.charge_ending_thread(now);
    }

    /// The same, however short the while.
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

    /// How long threads have to wait before they do more.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let owed = lock(&self.paid_at).saturating_sub(self.since_epoch(now));
        let wait = Duration::from_nanos(owed).checked_sub(BURST)?;
        (!wait.is_zero()).then(|| wait.clamp(MIN_WAIT, MAX_WAIT))
    }

    /// Charges what the calling thread has used, and waits for as long as too much was used, unless
    /// `ended`.
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

    /// Signals a front end by `signal`. One that takes the thread long is charged in proportion.
    pub(super) fn signal(&self, signal: impl FnOnce()) {
        let start = Instant::now();
        let long = self.long_signals.load(Ordering::Relaxed);
        let before = (long > 0).then(thread_time);
        signal();
        let end = Instant::now();
        if end.saturating_duration_since(start) <= LONG_SIGNAL {
            // Two threads may do this at a time, and one count is lost.
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
