// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Spinning before a sleep, for a time that adapts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ism_sys::OnceBox;

/// Number of spinning threads in this process.
static SPINNERS: AtomicU32 = AtomicU32::new(0);

/// Of this many waits with a reduced budget, one is a probe round, as long as probe rounds pay.
const PROBE_EVERY: u32 = 16;
/// The same after many probe rounds that did not pay.
const PROBE_SELDOM: u32 = 1024;
/// After this many failed first checks, only one of [`PROBE_EVERY`] waits checks first.
const MAX_MISSES: u32 = 4;
/// A probe round spins for at most this many times the full budget.
const PROBE_FACTOR: u32 = 20;

/// Checks of shared memory between two reads of the clock.
const CHECKS: u32 = 32;
/// On a machine with one processor, a thread spinning for longer than this yields.
const YIELD_AFTER: Duration = Duration::from_micros(10);

/// A spinning thread off the processor for this long was preempted by a busy thread. Interrupts and
/// kernel threads take less.
const PREEMPTED: Duration = Duration::from_millis(1);
/// The first pause after a preemption, in which no thread of the process spins. A single preemption may
/// be chance, so each pause is twice as long as the one before, up to [`MAX_PAUSE`], unless [`QUIET_PERIOD`]
/// lies between them.
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// Time without a preemption after which the next pause is a short one.
const QUIET_PERIOD: Duration = Duration::from_secs(1);

/// Whether other threads want the processors used for spinning.
static CONTENTION: Contention = Contention::new(PAUSE);

/// Spinning before a sleep, for a time that adapts.
///
/// A wait ending while it spins doubles the budget, and a wait with a sleep halves it. So a connection
/// with a slow peer stops burning processors, and so does a process with more work than processors.
/// Later connections begin with the budget of earlier ones.
///
/// If both ends spin for a moment only, each misses the other's answer, although both would answer at
/// once if awake. So every now and then there is a *probe round*: the wait spins for longer than the
/// last wait with a sleep, unless that is out of proportion. If the other end is merely asleep, its
/// answer comes within the round, and both are in step again. This matters between virtual machines,
/// where a wake-up takes longer than the usual budget.
///
/// A message of a peer that sends at its own pace also comes within a probe round, and nothing is
/// won. So the wait after it is a *trial* with the full budget. Only if the trial succeeds, the
/// budget is full again. Otherwise probe rounds become rarer.
///
/// The answer of a peer that had to be woken takes a wake-up at least, and the kernel may have put the
/// woken thread behind the spinning one. So a wait after such a message spins only if it is a probe
/// round. The round pays if the peer is awake at the next message: the wait after that is a trial.
/// After an own sleep there is no trial: the kernel may have taken the processor from the peer for this
/// thread, and then a peer that does not sleep does not run either.
///
/// Budgets and probe rounds concern the other end. If another program wants the processor, spinning
/// takes time from the awaited threads, even if successful. So after a spinning thread was preempted,
/// no thread of the process spins for a while.
#[derive(Debug)]
pub(crate) struct Spin {
    max_us: u32,
    contention: &'static Contention,
    budget_us: AtomicU32,
    /// The next wait is a trial.
    trial: AtomicBool,
    /// The peer had to be woken for the last message.
    asleep: AtomicBool,
    /// The last wait has slept.
    slept: AtomicBool,
    /// Duration of the last wait with a sleep, microseconds.
    slept_us: AtomicU32,
    /// Waits of [`Spin::until_polled`] since its first check found something.
    misses: AtomicU32,
    probes: Arc<Probes>,
    parent: Option<Arc<Spin>>,
}

/// The schedule of probe rounds, shared by [`Spin`]s with the same parent.
#[derive(Debug)]
struct Probes {
    /// Waits with a reduced budget.
    waits: AtomicU32,
    /// Of this many such waits, one is a probe round: a power of two.
    every: AtomicU32,
}

/// The kind of a wait's spinning, with its limit in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    Usual(u32),
    Probe(u32),
    Trial(u32),
}

/// A spinning wait of a thread doing other things between its checks of shared memory.
#[derive(Debug)]
#[cfg(feature = "tokio")]
pub(crate) struct SpinWait {
    round: Round,
    start: Instant,
    limit: Duration,
}

#[cfg(feature = "tokio")]
impl SpinWait {
    /// Whether the thread should sleep now.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.start) >= self.limit
    }
}

#[cfg(feature = "tokio")]
impl Spin {
    /// Begins to spin, for a thread doing other things in between. `None`: the thread should sleep.
    pub(crate) fn begin(&self, now: Instant) -> Option<SpinWait> {
        if self.max_us == 0 || self.contention.is_paused(|| now) {
            return None;
        }
        let round = self.next_round(false)?;
        let (Round::Usual(limit) | Round::Probe(limit) | Round::Trial(limit)) = round;
        Some(SpinWait { round, start: now, limit: Duration::from_micros(u64::from(limit)) })
    }

    /// Ends the wait begun by [`Spin::begin`]. `found`: there was something to do.
    pub(crate) fn end(&self, SpinWait { round, .. }: SpinWait, found: bool) {
        match found {
            true if round != Round::Usual(self.max_us) => self.succeeded(round),
            true => {}
            false => self.failed(round),
        }
    }
}

impl Spin {
    /// A budget of at most `max` per wait; zero: never spin.
    pub(crate) fn new(max: Duration) -> Spin {
        let max_us = u32::try_from(max.as_micros()).unwrap_or(u32::MAX);
        let probes = Probes { waits: AtomicU32::new(0), every: AtomicU32::new(PROBE_EVERY) };
        Spin::with(max_us, max_us, Arc::new(probes), None)
    }

    /// A budget starting at the parent's, with results reported to the parent.
    pub(crate) fn of(parent: &Arc<Spin>) -> Spin {
        let budget_us = parent.budget_us.load(Ordering::Relaxed);
        Spin::with(parent.max_us, budget_us, parent.probes.clone(), Some(parent.clone()))
    }

    fn with(max_us: u32, budget_us: u32, probes: Arc<Probes>, parent: Option<Arc<Spin>>) -> Spin {
        let budget_us = AtomicU32::new(budget_us);
        let (trial, asleep, slept, slept_us, misses) = Default::default();
        let contention = parent.as_ref().map_or(&CONTENTION, |parent| parent.contention);
        Spin {
            max_us,
            contention,
            budget_us,
            trial,
            asleep,
            slept,
            slept_us,
            misses,
            probes,
            parent,
        }
    }

    /// Spins until `changed` returns `true`. `false`: the budget ran out.
    pub(crate) fn until(&self, mut changed: impl FnMut() -> bool) -> bool {
        changed() || (self.max_us != 0 && self.within(CHECKS, false, changed))
    }

    /// Like [`Spin::until`], for an answer. `found_asleep`: whether the peer had to be woken for the
    /// last message, if there was one since the wait before.
    pub(crate) fn until_answered(
        &self,
        found_asleep: impl FnOnce() -> Option<bool>,
        mut changed: impl FnMut() -> bool,
    ) -> bool {
        changed()
            || (self.max_us != 0 && {
                let asleep = self.note_peer(found_asleep());
                self.within(CHECKS, asleep, changed)
            })
    }

    /// Notes the state of the peer at the last message. `true`: the peer had to be woken.
    fn note_peer(&self, asleep: Option<bool>) -> bool {
        let slept = self.slept.load(Ordering::Relaxed);
        if slept {
            self.slept.store(false, Ordering::Relaxed);
        }
        let Some(asleep) = asleep else { return false };
        if self.asleep.load(Ordering::Relaxed) != asleep {
            self.asleep.store(asleep, Ordering::Relaxed);
            if !asleep && !slept {
                self.trial.store(true, Ordering::Relaxed);
            }
        }
        // The last probe round found an answer, and the peer has slept again all the same.
        if asleep && self.trial.load(Ordering::Relaxed) {
            self.trial.store(false, Ordering::Relaxed);
            self.probes.make_rarer();
        }
        asleep
    }

    /// Like [`Spin::until`], for checks as expensive as a system call. The very first check is useless
    /// then, so there may be none.
    pub(crate) fn until_asked(&self, changed: impl FnMut() -> bool) -> bool {
        self.max_us != 0 && self.within(1, false, changed)
    }

    /// Like [`Spin::until_asked`], where a check finds only entries of a software adapter.
    ///
    /// With a single processor, the adapter must run instead. A thread checks once more before a sleep
    /// anyway. So after some failed first checks, few waits check first.
    pub(crate) fn until_polled(&self, mut changed: impl FnMut() -> bool) -> bool {
        let misses = self.misses.load(Ordering::Relaxed);
        let checks = misses < MAX_MISSES || misses.is_multiple_of(PROBE_EVERY);
        if checks && changed() {
            self.misses.store(0, Ordering::Relaxed);
            return true;
        }
        self.misses.store(misses.wrapping_add(1), Ordering::Relaxed);
        self.spins_polled() && self.within(1, false, changed)
    }

    /// Whether [`Spin::until_polled`] checks more than once.
    pub(crate) fn spins_polled(&self) -> bool {
        self.max_us != 0 && processors() > 1
    }

    /// Spins, with this many checks between two reads of the clock.
    fn within(&self, checks: u32, asleep: bool, changed: impl FnMut() -> bool) -> bool {
        let _counted = Spinning::start();
        // One processor is left to threads with other work.
        SPINNERS.load(Ordering::Relaxed) < processors().max(2) && self.spin(checks, asleep, changed)
    }

    /// Spins, even if many threads do.
    #[inline]
    fn spin(&self, checks: u32, asleep: bool, mut changed: impl FnMut() -> bool) -> bool {
        if self.contention.is_paused(Instant::now) {
            return false;
        }
        let Some(round) = self.next_round(asleep) else { return false };
        let (Round::Usual(limit) | Round::Probe(limit) | Round::Trial(limit)) = round;
        if checks == 1 && limit <= self.least() {
            // One check takes as long as the budget, and did not pay lately.
            return false;
        }
        let limit = Duration::from_micros(u64::from(limit));
        let start = Instant::now();
        let mut before = Duration::ZERO;
        loop {
            for _ in 0..checks {
                if changed() {
                    if round != Round::Usual(self.max_us) {
                        self.succeeded(round);
                    }
                    return true;
                }
                std::hint::spin_loop();
            }
            let elapsed = start.elapsed();
            if elapsed - before >= PREEMPTED {
                self.contention.pause(start + elapsed);
            }
            before = elapsed;
            if elapsed >= limit {
                self.failed(round);
                return false;
            }
            // With one processor, the awaited threads cannot run while this one spins.
            if elapsed >= YIELD_AFTER && processors() == 1 {
                rustix::thread::sched_yield();
            }
        }
    }

    /// Whether [`Spin::note_sleep`] is of use.
    pub(crate) fn learns(&self) -> bool {
        self.max_us != 0
    }

    /// Notes the duration of a wait with a sleep.
    pub(crate) fn note_sleep(&self, wait: Duration) {
        let wait = u32::try_from(wait.as_micros()).unwrap_or(u32::MAX);
        self.slept.store(true, Ordering::Relaxed);
        self.slept_us.store(wait, Ordering::Relaxed);
    }

    /// The kind of spinning for the next wait. `asleep`: the peer had to be woken for the last message.
    fn next_round(&self, asleep: bool) -> Option<Round> {
        let budget = self.budget_us.load(Ordering::Relaxed);
        if asleep {
            self.probes.is_due().then(|| Round::Probe(self.probe_us()))
        } else if self.trial.load(Ordering::Relaxed) {
            self.trial.store(false, Ordering::Relaxed);
            Some(Round::Trial(self.max_us))
        } else if budget < self.max_us && self.probes.is_due() {
            Some(Round::Probe(self.probe_us()))
        } else {
            Some(Round::Usual(budget))
        }
    }

    /// The duration of a probe round, microseconds.
    fn probe_us(&self) -> u32 {
        let wanted = self.slept_us.load(Ordering::Relaxed).saturating_mul(3) / 2;
        let most = self.max_us.saturating_mul(PROBE_FACTOR);
        if wanted > most { self.max_us } else { wanted.max(self.max_us) }
    }

    /// The least budget. Not zero: a short check in each wait notices a peer fast again. Not more: both
    /// ends may run on one processor, where the peer runs only while this end sleeps.
    fn least(&self) -> u32 {
        self.max_us.min(1)
    }

    #[cold]
    fn succeeded(&self, round: Round) {
        match round {
            Round::Usual(_) => self.grow(),
            Round::Probe(_) => self.trial.store(true, Ordering::Relaxed),
            Round::Trial(_) => {
                self.probes.every.store(PROBE_EVERY, Ordering::Relaxed);
                self.budget_us.store(self.max_us, Ordering::Relaxed);
                if let Some(parent) = &self.parent {
                    parent.budget_us.store(parent.max_us, Ordering::Relaxed);
                }
            }
        }
    }

    #[cold]
    fn failed(&self, round: Round) {
        match round {
            Round::Usual(_) => {
                self.shrink();
                self.parent.iter().for_each(|parent| parent.shrink());
            }
            Round::Probe(_) | Round::Trial(_) => self.probes.make_rarer(),
        }
    }

    fn grow(&self) {
        let budget = self.budget_us.load(Ordering::Relaxed).saturating_mul(2);
        self.budget_us.store(budget.min(self.max_us), Ordering::Relaxed);
        self.parent.iter().for_each(|parent| parent.grow());
    }

    fn shrink(&self) {
        let budget = self.budget_us.load(Ordering::Relaxed) / 2;
        self.budget_us.store(budget.max(self.least()), Ordering::Relaxed);
    }
}

impl Probes {
    /// Counts a wait; `true`: the wait is a probe round.
    fn is_due(&self) -> bool {
        let every = self.every.load(Ordering::Relaxed);
        self.waits.fetch_add(1, Ordering::Relaxed) % every == every - 1
    }

    fn make_rarer(&self) {
        let every = self.every.load(Ordering::Relaxed).saturating_mul(2);
        self.every.store(every.min(PROBE_SELDOM), Ordering::Relaxed);
    }
}

/// A pause in which no thread spins.
#[derive(Debug)]
struct Contention {
    /// The least pause.
    least: Duration,
    /// The length of the last pause, microseconds.
    pause_us: AtomicU64,
    /// The end of the pause, as [`micros`] counts.
    until_us: AtomicU64,
}

impl Contention {
    const fn new(least: Duration) -> Contention {
        Contention { least, pause_us: AtomicU64::new(0), until_us: AtomicU64::new(0) }
    }

    /// Reads the clock only if there has been a pause.
    fn is_paused(&self, now: impl FnOnce() -> Instant) -> bool {
        let until = self.until_us.load(Ordering::Relaxed);
        until != 0 && micros(now()) < until
    }

    #[cold]
    fn pause(&self, now: Instant) {
        let (now, until) = (micros(now), self.until_us.load(Ordering::Relaxed));
        if now < until {
            // Another thread has been faster.
            return;
        }
        let last = match now - until < us(QUIET_PERIOD) {
            true => self.pause_us.load(Ordering::Relaxed),
            false => 0,
        };
        let pause = (2 * last).clamp(us(self.least), us(MAX_PAUSE).max(us(self.least)));
        self.pause_us.store(pause, Ordering::Relaxed);
        self.until_us.store(now + pause, Ordering::Relaxed);
    }
}

/// Microseconds since the first call in this process.
fn micros(now: Instant) -> u64 {
    static EPOCH: OnceBox<Instant> = OnceBox::new();
    us(now.saturating_duration_since(*EPOCH.get_or_init(|| now)))
}

const fn us(time: Duration) -> u64 {
    time.as_micros() as u64
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

/// Number of processors available to this process.
fn processors() -> u32 {
    static COUNT: OnceBox<u32> = OnceBox::new();
    *COUNT.get_or_init(|| {
        std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u32 = 48;

    /// On a loaded machine these tests are preempted, too.
    static NO_PAUSE: Contention = Contention::new(Duration::ZERO);

    fn spin() -> Spin {
        Spin { contention: &NO_PAUSE, ..Spin::new(Duration::from_micros(MAX.into())) }
    }

    fn budget(spin: &Spin) -> u32 {
        spin.budget_us.load(Ordering::Relaxed)
    }

    /// A wait whose message comes after this time, microseconds. Returns the kind of spinning.
    fn wait(spin: &Spin, comes_after: u32) -> Round {
        wait_for_answer(spin, None, comes_after).unwrap()
    }

    /// The same after a message to a peer in this state. `None`: the wait does not spin.
    fn wait_for_answer(spin: &Spin, asleep: Option<bool>, comes_after: u32) -> Option<Round> {
        let asleep = spin.note_peer(asleep);
        let round = spin.next_round(asleep);
        if let Some(round) = round {
            let (Round::Usual(limit) | Round::Probe(limit) | Round::Trial(limit)) = round;
            if comes_after < limit {
                spin.succeeded(round);
                return Some(round);
            }
            spin.failed(round);
        }
        spin.note_sleep(Duration::from_micros(comes_after.into()));
        round
    }

    fn is_usual(round: &Round) -> bool {
        matches!(round, Round::Usual(_))
    }

    #[test]
    fn a_failed_spin_halves_the_budget_and_a_good_one_doubles_it() {
        let spin = spin();
        // Other tests spin at the same time.
        assert!(!spin.spin(CHECKS, false, || false));
        assert!(!spin.spin(CHECKS, false, || false));
        assert_eq!(budget(&spin), MAX / 4);
        let mut checks = 0;
        assert!(spin.spin(CHECKS, false, || {
            checks += 1;
            checks > 3
        }));
        assert_eq!(budget(&spin), MAX / 2);
        for _ in 0..10 {
            wait(&spin, 1000);
        }
        assert_eq!(budget(&spin), 1, "the least");
        for _ in 0..6 {
            wait(&spin, 0);
        }
        assert_eq!(budget(&spin), MAX);
    }

    #[test]
    fn after_a_thread_that_spun_was_preempted_none_spins_for_a_while() {
        static PAUSES: Contention = Contention::new(Duration::from_secs(3600));
        let spin = Spin { contention: &PAUSES, ..spin() };
        let mut checks = 0;
        assert!(!spin.spin(CHECKS, false, || {
            checks += 1;
            if checks == CHECKS {
                std::thread::sleep(2 * PREEMPTED);
            }
            false
        }));
        let learnt = budget(&spin);
        let later = Spin::of(&Arc::new(spin));
        assert!(!later.spin(CHECKS, false, || panic!("it spins")));
        assert!(!later.until(|| false));
        assert!(later.until(|| true), "a first check costs nothing");
        assert_eq!(budget(&later), learnt, "a pause says nothing about the other end");
    }

    #[test]
    fn pauses_grow_while_threads_are_preempted_and_are_short_again_after_calm() {
        let contention = Contention::new(PAUSE);
        let mut now = Instant::now() + Duration::from_secs(10);
        let mut pause_after = |calm: Duration| {
            now += calm;
            contention.pause(now);
            let begin = now;
            while contention.is_paused(|| now) {
                // A second preempted thread changes nothing.
                contention.pause(now);
                now += Duration::from_millis(10);
            }
            now - begin
        };
        let millis = [100, 200, 400, 800, 1600, 2000, 2000].map(Duration::from_millis);
        assert_eq!(millis.map(|_| pause_after(Duration::from_millis(50))), millis);
        assert_eq!(pause_after(QUIET_PERIOD), PAUSE);
    }

    #[test]
    fn a_peer_that_was_merely_asleep_is_in_step_after_a_probe_round_and_a_trial() {
        let spin = spin();
        let asleep = || (0..200).map(|_| wait(&spin, 90)).find(|round| !is_usual(round));
        assert_eq!(asleep(), Some(Round::Probe(135)));
        // Now that this end does not sleep, the peer does not have to be woken.
        assert_eq!(wait(&spin, 2), Round::Trial(MAX));
        assert_eq!(budget(&spin), MAX);
        assert_eq!(wait(&spin, 2), Round::Usual(MAX));
    }

    #[test]
    fn probe_rounds_become_rare_with_a_peer_that_keeps_its_own_pace() {
        let spin = spin();
        let rounds = |waits: u32| {
            let rounds: Vec<Round> = (0..waits).map(|_| wait(&spin, 90)).collect();
            rounds.into_iter().filter(|round| !is_usual(round)).count()
        };
        // Each probe round finds something, and each trial after it finds nothing.
        assert!(rounds(500) <= 12);
        assert!(rounds(10 * PROBE_SELDOM) <= 2 * 11);
        assert_eq!(budget(&spin), 1);
    }

    #[test]
    fn the_answer_of_a_peer_that_had_to_be_woken_is_not_worth_a_spin() {
        let spin = spin();
        let rounds = |waits: u32| {
            let rounds = (0..waits).filter_map(|_| wait_for_answer(&spin, Some(true), 8));
            assert!(rounds.clone().all(|round| round == Round::Probe(MAX)));
            rounds.count()
        };
        // Each probe round finds the answer, and the peer sleeps again before the next message.
        assert!(rounds(500) <= 6);
        assert!(rounds(10 * PROBE_SELDOM) <= 11);
        assert_eq!(budget(&spin), MAX, "nothing is known about a peer that is awake");
        // Not an answer: as usual, and what the probe round promised is forgotten.
        assert_eq!(wait(&spin, 1000), Round::Usual(MAX));
    }

    #[test]
    fn a_peer_that_does_not_sleep_is_no_reason_for_a_trial_after_an_own_sleep() {
        let spin = spin();
        // The message preempted its sender, which then finds the answer without a sleep.
        let rounds: Vec<_> = [true, false]
            .repeat(100)
            .into_iter()
            .filter_map(|asleep| wait_for_answer(&spin, Some(asleep), 1000))
            .collect();
        assert!(rounds.iter().all(|round| !matches!(round, Round::Trial(_))), "{rounds:?}");
        assert_eq!(budget(&spin), 1);
    }

    #[test]
    fn both_ends_are_in_step_after_one_probe_round_of_either() {
        let ends = [spin(), spin()];
        let mut asleep = [true, true];
        let mut last = Vec::new();
        for number in 0..2 * PROBE_EVERY as usize + 4 {
            let (own, other) = (number % 2, 1 - number % 2);
            // The other end takes the message, and answers after 5 us; awake it needs no wake-up.
            let comes_after = if asleep[other] { 20 } else { 5 };
            let round = wait_for_answer(&ends[own], Some(asleep[other]), comes_after);
            asleep[own] = round.is_none();
            last.push(round);
        }
        assert!(last.iter().take(20).all(Option::is_none), "{last:?}");
        assert_eq!(last.last(), Some(&Some(Round::Usual(MAX))), "{last:?}");
        assert!(last.iter().flatten().any(|round| *round == Round::Trial(MAX)), "{last:?}");
    }

    #[test]
    fn connections_of_one_parent_share_what_they_learn_and_when_they_probe() {
        let parent = Arc::new(spin());
        let spins = [Spin::of(&parent), Spin::of(&parent)];
        let of_two = spins.iter().cycle();
        let probes = of_two.take(2 * 256).filter(|spin| !is_usual(&wait(spin, 5000)));
        assert_eq!(probes.count(), 5, "after 16, 32, 64, 128 and 256 waits");
        assert_eq!(budget(&Spin::of(&parent)), 1);
        for _ in 0..8 {
            wait(&spins[0], 0);
        }
        assert_eq!(budget(&Spin::of(&parent)), MAX);
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
        // The next wait checks and finds something, so later ones check again.
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
