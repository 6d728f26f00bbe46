// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The wake-up protocol on a signal line (docs/virtio-ism.md, "Signalling").
//!
//! A line is `{armed, pend}` in memory shared by owner and user. The user sets its bit in `pend` after the
//! data, and wakes the owner only if the owner has announced its sleep (`armed`). The owner arms, reads
//! `pend` once more, and only then sleeps:
//!
//! ```text
//! user                                  owner
//! U1 payload                            O1 pend.swap(0): work, again
//! U2 cursor words (Release)             O2 armed |= how; fence(SeqCst)
//! U3 pend |= bit; fence(SeqCst)         O3 pend != 0: work, O1
//! U4 armed != 0, w = armed.swap(0):     O4 sleep, at most 1 s; O1
//!    w & KICK: ring, or kick the device    KICK: until rung, or the device has a record
//!    w & FUTEX: FUTEX_WAKE(armed)          FUTEX: FUTEX_WAIT(armed, what O2 wrote)
//! ```
//!
//! No wake-up is lost: the two fences are ordered one way or the other. If U3's comes first, O3 sees the bit
//! and does not sleep. If O2's comes first, U4 sees `armed` (or a later 0: another user has taken the word,
//! and wakes). Between O2 and O4 the kernel decides: a taken word differs from the word expected by
//! FUTEX_WAIT, and FUTEX_WAKE wakes every sleeper present.
//!
//! A slab has a line of its own ([`SlabLine`]), with a bit for each line. The slab's line lets an owner of
//! many DMBs find the ones with new data, and arm for all, without checking each. The protocol is the same:
//! U3 sets the line's bit, U4 takes the slab's armed word. Only users of lines with KICK or SLAB set raise
//! the slab's line.
//!
//! The words are little-endian, as all of the device's.
//!
//! Spurious wake-ups are allowed. A device able to write a line can only cause spurious wake-ups, or stall
//! its own connections until the sleeper's timeout.

use bitflags::bitflags;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

bitflags! {
    /// Ways to wake the sleepers of a line: the bits of its armed word. Bits without a name are kicks.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Sleepers: u32 {
        /// By the doorbell of the slab, if the user has the doorbell; else by a kick of the device.
        const KICK = 1;
        /// By FUTEX_WAKE on the armed word; also by a kick, for a user without FUTEX_WAKE.
        const FUTEX = 2;
        /// No sleeper is woken by the line itself: the user also raises the slab's line. The bit stays until
        /// the owner clears the bit.
        const SLAB = 4;
    }
}

/// Most threads woken by a user with one FUTEX_WAKE. An owner lets no more threads sleep on a word, so a
/// hostile owner cannot make the call last.
pub const MAX_FUTEX_SLEEPERS: u32 = 64;

/// The armed word in memory, for FUTEX_WAIT: its earlier bits, and those of the thread about to sleep.
#[inline]
pub fn sleeper_word(before: u32, how: Sleepers) -> u32 {
    (before | how.bits()).to_le()
}

/// One signal line, at any place.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// [`Sleepers`] of the owner, asleep or about to sleep.
    pub armed: &'a AtomicU32,
    /// Bits of DMBs with new data.
    pub pend: &'a AtomicU64,
}

impl Line<'_> {
    /// User: announces new data of the DMB with this bit (U3, U4). Returns the sleepers the caller must wake.
    ///
    /// All earlier stores are visible to an owner taking the bit.
    #[inline]
    #[must_use = "not empty means: wake the owner"]
    pub fn raise(&self, bit: u8) -> Sleepers {
        // Release: partner of the Acquire in `take`.
        self.pend.fetch_or((1u64 << (bit & 63)).to_le(), Ordering::Release);
        // Orders the bit before the load of `armed`; partner of the fence in `arm_as`.
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) == 0 {
            return Sleepers::empty();
        }
        Sleepers::from_bits_retain(u32::from_le(self.armed.swap(0, Ordering::Relaxed)))
    }

    /// User: like [`raise`](Self::raise), if owner and user support slab lines. `slab` is the slab's line for
    /// the line `number`.
    #[inline]
    #[must_use = "not empty means: wake the owner"]
    pub fn raise_in(&self, bit: u8, number: u16, slab: SlabLine<'_>) -> Sleepers {
        // Both as in `raise`. The fence also orders payload and cursors before the load of the slab's pending
        // bits in `SlabLine::raise`.
        self.pend.fetch_or((1u64 << (bit & 63)).to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        let armed = Sleepers::from_bits_retain(u32::from_le(self.armed.load(Ordering::Relaxed)));
        if armed.is_empty() {
            return armed;
        }
        let mut sleepers = Sleepers::empty();
        if armed != Sleepers::SLAB {
            let before = self.armed.fetch_and(Sleepers::SLAB.bits().to_le(), Ordering::Relaxed);
            sleepers = Sleepers::from_bits_retain(u32::from_le(before)) - Sleepers::SLAB;
        }
        // An owner kicked for the line finds the line by the slab's bit.
        if (armed | sleepers) - Sleepers::FUTEX != Sleepers::empty() && slab.raise(number) {
            sleepers |= Sleepers::KICK;
        }
        sleepers
    }

    /// Owner: starts or stops users' raising of the slab's line.
    ///
    /// An owner turning this on reads the control words afterwards.
    pub fn set_in_slab(&self, on: bool) {
        match on {
            true => self.armed.fetch_or(Sleepers::SLAB.bits().to_le(), Ordering::Relaxed),
            false => self.armed.fetch_and(!Sleepers::SLAB.bits().to_le(), Ordering::Relaxed),
        };
        // Orders the bit before the read of the control words; partner of the fence in `raise_in`.
        fence(Ordering::SeqCst);
    }

    /// Owner: takes the pending bits (O1).
    #[inline]
    pub fn take(&self) -> u64 {
        // The plain load keeps the cache line shared while there is nothing to take.
        if self.pend.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        u64::from_le(self.pend.swap(0, Ordering::Acquire))
    }

    /// Owner: announces a sleep until a kick (O2, O3); `false` if data is pending, so the owner must not
    /// sleep.
    ///
    /// An owner of several lines arms them all, and sleeps only if every call returned `true`.
    #[inline]
    #[must_use = "false means: do not sleep"]
    pub fn arm(&self) -> bool {
        self.arm_as(Sleepers::KICK).1
    }

    /// Owner: like [`arm`](Self::arm), for a thread woken in this way. Also returns the previous word.
    ///
    /// A thread sleeping on the word expects [`sleeper_word`] of the previous word and its own bit. If
    /// [`FUTEX`](Sleepers::FUTEX) was not set before, a user has taken the word since another thread of the
    /// owner armed the line. The other thread may be about to sleep, and now finds its expected word,
    /// although no user will wake it. So the caller wakes the other threads, whether or not the caller
    /// sleeps.
    #[inline]
    #[must_use = "false means: do not sleep"]
    pub fn arm_as(&self, how: Sleepers) -> (u32, bool) {
        // A read-modify-write, like every write to `armed`: ordered after any disarm.
        let before = u32::from_le(self.armed.fetch_or(how.bits().to_le(), Ordering::Relaxed));
        // Orders `armed` before the load of `pend`; partner of the fence in `raise`.
        fence(Ordering::SeqCst);
        (before, self.pend.load(Ordering::Relaxed) == 0)
    }

    /// Owner: whether the line is still armed, with no bit pending.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        // A waking user resets `armed`; only the owner sets `armed` again.
        self.armed.load(Ordering::Relaxed) != 0 && self.pend.load(Ordering::Relaxed) == 0
    }

    /// Owner: whether a user has taken the word since this thread armed the line, or the owner has disarmed
    /// the line.
    #[inline]
    pub fn is_taken(&self, how: Sleepers) -> bool {
        self.armed.load(Ordering::Relaxed) & how.bits().to_le() == 0
    }

    /// Owner: undoes [`arm_as`](Self::arm_as), after the last thread with this way of waking woke.
    #[inline]
    pub fn disarm_as(&self, how: Sleepers) {
        self.armed.fetch_and(!how.bits().to_le(), Ordering::Relaxed);
    }

    /// Owner: undoes `arm`, after its last thread woke.
    #[inline]
    pub fn disarm(&self) {
        self.armed.swap(0, Ordering::Relaxed);
    }
}

/// The line of a slab: its armed word, and the pending word with a line's bit.
#[derive(Clone, Copy, Debug)]
pub struct SlabLine<'a> {
    /// Not 0: the owner sleeps until a kick for the slab, or is about to.
    pub armed: &'a AtomicU32,
    /// Bits of lines with new data; line `n` has bit `n % 64`.
    pub pend: &'a AtomicU64,
}

impl SlabLine<'_> {
    /// User: sets the bit of a line. `true`: this caller must wake the owner.
    ///
    /// The caller must make a full fence after storing the announced data, like [`Line::raise_in`]. A user
    /// kicking for a thread asleep on a word also calls this function.
    #[inline]
    pub fn raise(&self, number: u16) -> bool {
        let bit = (1u64 << (number & 63)).to_le();
        // A bit still set is untaken, and the owner taking it checks for data afterwards.
        if self.pend.load(Ordering::Relaxed) & bit == 0 {
            // Release: partner of the Acquire in `take`.
            self.pend.fetch_or(bit, Ordering::Release);
            // Orders the bit before the load of `armed`; partner of the fence in `arm`.
            fence(Ordering::SeqCst);
        }
        self.armed.load(Ordering::Relaxed) != 0 && self.armed.swap(0, Ordering::Relaxed) != 0
    }

    /// Owner: takes the bits of this word. The owner then reads the control words of the DMBs.
    #[inline]
    pub fn take(&self) -> u64 {
        // The plain load keeps the cache line shared while there is nothing to take.
        if self.pend.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let bits = u64::from_le(self.pend.swap(0, Ordering::Acquire));
        // Orders the empty word before the read of control words; partner of the first fence in
        // `Line::raise_in`. A user that found its bit set has stored before.
        fence(Ordering::SeqCst);
        bits
    }

    /// Owner: announces a sleep until a kick. The owner sleeps only if no word of the slab [is
    /// pending](Self::is_pending) afterwards.
    #[inline]
    pub fn arm(&self) {
        self.armed.fetch_or(Sleepers::KICK.bits().to_le(), Ordering::Relaxed);
        // Orders `armed` before the loads of `pend`; partner of the second fence in `raise`.
        fence(Ordering::SeqCst);
    }

    /// Owner: whether this word has bits to take.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pend.load(Ordering::Relaxed) != 0
    }

    /// Owner: whether a user has taken the armed word since [`arm`](Self::arm).
    #[inline]
    pub fn is_taken(&self) -> bool {
        self.armed.load(Ordering::Relaxed) == 0
    }

    /// Owner: undoes [`arm`](Self::arm).
    #[inline]
    pub fn disarm(&self) {
        self.armed.swap(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_slab_is_woken_once_for_all_its_lines_and_says_which_have_news() {
        let lines = [(); 2].map(|()| (AtomicU32::new(0), AtomicU64::new(0)));
        let line = |n: usize| Line { armed: &lines[n].0, pend: &lines[n].1 };
        let (armed, pend) = (AtomicU32::new(0), AtomicU64::new(0));
        let slab = SlabLine { armed: &armed, pend: &pend };
        let raise = |n: usize| line(n).raise_in(3, n as u16 + 64, slab);
        slab.arm();
        assert!(raise(0).is_empty(), "a line that the owner does not look for");
        assert!(!slab.is_pending() && !slab.is_taken());
        (0..2).for_each(|n| line(n).set_in_slab(true));
        assert_eq!(raise(1), Sleepers::KICK, "armed: the first signal kicks");
        assert!(raise(0).is_empty() && raise(0).is_empty(), "the first has taken the word");
        assert!(slab.is_taken());
        assert_eq!((slab.take(), slab.take()), (0b11, 0));
        assert!(raise(1).is_empty(), "awake");
        slab.arm();
        assert!(slab.is_pending(), "news: do not sleep");
        slab.disarm();
        assert_eq!(slab.take(), 0b10);
        line(0).set_in_slab(false);
        assert!(raise(0).is_empty() && !slab.is_pending());
    }

    #[test]
    fn who_is_kicked_for_a_line_finds_it_by_the_bit_of_the_slab() {
        let (armed, pend) = (AtomicU32::new(0), AtomicU64::new(0));
        let line = Line { armed: &armed, pend: &pend };
        let (slab_armed, slab_pend) = (AtomicU32::new(0), AtomicU64::new(0));
        let slab = SlabLine { armed: &slab_armed, pend: &slab_pend };
        assert!(line.arm());
        assert_eq!(line.raise_in(0, 7, slab), Sleepers::KICK);
        assert_eq!((slab.take(), line.take()), (1 << 7, 1));
        assert_eq!(line.arm_as(Sleepers::FUTEX), (0, true));
        assert_eq!(line.raise_in(0, 7, slab), Sleepers::FUTEX);
        assert_eq!((slab.take(), line.take()), (0, 1), "the word is enough");
        line.set_in_slab(true);
        assert_eq!(line.arm_as(Sleepers::FUTEX), (4, true));
        assert_eq!(line.raise_in(0, 7, slab), Sleepers::FUTEX);
        assert_eq!(u32::from_le(armed.load(Ordering::Relaxed)), 4, "the bit stays");
        assert_eq!(slab.take(), 1 << 7);
    }

    #[test]
    fn the_bytes_of_both_words_are_the_same_on_every_machine() {
        let (armed, pend) = (AtomicU32::new(0), AtomicU64::new(0));
        let line = Line { armed: &armed, pend: &pend };
        let (before, quiet) = line.arm_as(Sleepers::FUTEX);
        assert!(quiet);
        let word = armed.load(Ordering::Relaxed);
        assert_eq!(
            (word.to_ne_bytes(), word),
            ([2, 0, 0, 0], sleeper_word(before, Sleepers::FUTEX))
        );
        assert_eq!(line.raise(8), Sleepers::FUTEX);
        assert_eq!(pend.load(Ordering::Relaxed).to_ne_bytes(), [0, 1, 0, 0, 0, 0, 0, 0]);
        let slab = SlabLine { armed: &armed, pend: &pend };
        slab.arm();
        assert_eq!(armed.load(Ordering::Relaxed).to_ne_bytes(), [1, 0, 0, 0]);
        assert!(slab.raise(66));
        assert_eq!(pend.load(Ordering::Relaxed).to_ne_bytes(), [4, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(slab.take(), 0x104);
    }

    #[test]
    fn a_kick_is_needed_only_while_the_owner_is_armed() {
        let (armed, pend) = (AtomicU32::new(0), AtomicU64::new(0));
        let line = Line { armed: &armed, pend: &pend };
        assert!(line.raise(5).is_empty());
        assert_eq!(line.take(), 1 << 5);
        assert!(!line.is_quiet());
        assert!(line.arm());
        assert!(line.is_quiet());
        assert_eq!(line.raise(5), Sleepers::KICK, "armed: the first signal kicks");
        assert!(!line.is_quiet());
        assert!(line.raise(6).is_empty(), "the first has taken the word");
        assert!(!line.arm(), "news: do not sleep");
        line.disarm();
        assert_eq!(line.take(), 1 << 5 | 1 << 6);
    }

    #[test]
    fn each_kind_of_sleeper_has_a_bit_of_its_own() {
        let (armed, pend) = (AtomicU32::new(0), AtomicU64::new(0));
        let line = Line { armed: &armed, pend: &pend };
        assert_eq!(line.arm_as(Sleepers::FUTEX), (0, true));
        assert!(!line.is_taken(Sleepers::FUTEX) && line.is_taken(Sleepers::KICK));
        assert_eq!(line.arm_as(Sleepers::KICK), (2, true), "beside the other");
        assert_eq!(line.arm_as(Sleepers::FUTEX), (3, true));
        let both = Sleepers::KICK | Sleepers::FUTEX;
        assert_eq!(line.raise(0), both, "a signal wakes both");
        assert!(line.is_taken(Sleepers::FUTEX));
        assert_eq!(line.take(), 1);
        assert_eq!(line.arm_as(both), (0, true));
        line.disarm_as(Sleepers::KICK);
        assert_eq!(line.raise(0), Sleepers::FUTEX);
        assert_eq!(line.arm_as(Sleepers::FUTEX), (0, false), "news: do not sleep");
        assert_eq!(line.take(), 1);
        armed.store(0x8000_0000, Ordering::Relaxed);
        assert!(!line.raise(0).is_empty(), "a word of nobody's");
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p virtio-ism-abi --release`
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex, Notify};
    use loom::thread;

    /// The kernel's promise for FUTEX_WAIT and FUTEX_WAKE: to wakers, comparing a word and queueing its
    /// thread is one step.
    struct Kernel {
        lock: Mutex<()>,
        queue: Condvar,
    }

    impl Kernel {
        fn new() -> Kernel {
            Kernel { lock: Mutex::new(()), queue: Condvar::new() }
        }

        /// FUTEX_WAITV: sleeps while all words have these values.
        fn wait(&self, words: &[(&AtomicU32, u32)]) {
            let guard = self.lock.lock().unwrap();
            if words.iter().all(|(word, value)| word.load(Ordering::Relaxed) == *value) {
                drop(self.queue.wait(guard).unwrap());
            }
        }

        /// FUTEX_WAKE. Also wakes the sleepers of other words, adding spurious wake-ups.
        fn wake(&self) {
            let _guard = self.lock.lock().unwrap();
            self.queue.notify_all();
        }
    }

    struct Shared {
        armed: AtomicU32,
        pend: AtomicU64,
        data: [AtomicU32; 2],
        kick: Notify,
        kernel: Kernel,
    }

    impl Shared {
        fn new() -> Arc<Shared> {
            Arc::new(Shared {
                armed: AtomicU32::new(0),
                pend: AtomicU64::new(0),
                data: [AtomicU32::new(0), AtomicU32::new(0)],
                kick: Notify::new(),
                kernel: Kernel::new(),
            })
        }

        fn line(&self) -> Line<'_> {
            Line { armed: &self.armed, pend: &self.pend }
        }

        fn signal(&self, bit: usize) {
            let sleepers = self.line().raise(bit as u8);
            if sleepers.contains(Sleepers::KICK) {
                self.kick.notify();
            }
            if sleepers.contains(Sleepers::FUTEX) {
                self.kernel.wake();
            }
        }
    }

    fn no_wake_up_is_lost(users: usize, how: Sleepers) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let shared = Shared::new();
            let handles: std::vec::Vec<_> = (0..users)
                .map(|user| {
                    let shared = shared.clone();
                    thread::spawn(move || {
                        shared.data[user].store(7, Ordering::Relaxed);
                        shared.signal(user);
                    })
                })
                .collect();
            let line = shared.line();
            let mut seen = 0;
            while seen != (1u64 << users) - 1 {
                let news = line.take();
                for user in 0..users {
                    if news & 1 << user != 0 {
                        assert_eq!(
                            shared.data[user].load(Ordering::Relaxed),
                            7,
                            "signal before data"
                        );
                    }
                }
                seen |= news;
                if news != 0 {
                    continue;
                }
                let (before, quiet) = line.arm_as(how);
                if !quiet {
                    continue;
                }
                // loom reports a deadlock here if the wake-up was lost.
                match how {
                    Sleepers::FUTEX => {
                        shared.kernel.wait(&[(&shared.armed, sleeper_word(before, how))]);
                    }
                    _ => shared.kick.wait(),
                }
            }
            for handle in handles {
                handle.join().unwrap();
            }
        });
    }

    #[test]
    fn one_user() {
        no_wake_up_is_lost(1, Sleepers::KICK);
    }

    #[test]
    fn two_users() {
        no_wake_up_is_lost(2, Sleepers::KICK);
    }

    #[test]
    fn one_user_and_a_sleeper_on_the_word() {
        no_wake_up_is_lost(1, Sleepers::FUTEX);
    }

    #[test]
    fn two_users_and_a_sleeper_on_the_word() {
        no_wake_up_is_lost(2, Sleepers::FUTEX);
    }

    /// Sleeps until this data has come, as one of several threads of the owner. `counts` are the private
    /// words of the threads.
    fn sleep_for_data(shared: &Shared, counts: &[AtomicU32; 2], me: usize) {
        let there = || shared.data[me].load(Ordering::Acquire) == 7;
        loop {
            let count = counts[me].load(Ordering::Acquire);
            shared.line().take();
            let (before, quiet) = shared.line().arm_as(Sleepers::FUTEX);
            if before & Sleepers::FUTEX.bits() == 0 {
                counts[1 - me].fetch_add(1, Ordering::SeqCst);
                shared.kernel.wake();
            }
            if there() {
                return;
            }
            if !quiet {
                continue;
            }
            let word = (&shared.armed, sleeper_word(before, Sleepers::FUTEX));
            shared.kernel.wait(&[word, (&counts[me], count)]);
        }
    }

    /// An owner waiting for two lines by the line of their slab, and users sending twice each.
    fn no_wake_up_is_lost_by_the_slab(users: usize, messages: u32) {
        struct Slab {
            lines: [(AtomicU32, AtomicU64); 2],
            armed: AtomicU32,
            pend: AtomicU64,
            data: [AtomicU32; 2],
            kick: Notify,
        }
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let line = || (AtomicU32::new(Sleepers::SLAB.bits().to_le()), AtomicU64::new(0));
            let slab = Arc::new(Slab {
                lines: [line(), line()],
                armed: AtomicU32::new(0),
                pend: AtomicU64::new(0),
                data: [AtomicU32::new(0), AtomicU32::new(0)],
                kick: Notify::new(),
            });
            let handles: std::vec::Vec<_> = (0..users)
                .map(|user| {
                    let slab = slab.clone();
                    thread::spawn(move || {
                        for message in 1..=messages {
                            slab.data[user].store(message, Ordering::Relaxed);
                            let (armed, pend) = &slab.lines[user];
                            let of_slab = SlabLine { armed: &slab.armed, pend: &slab.pend };
                            let line = Line { armed, pend };
                            if line.raise_in(0, user as u16, of_slab).contains(Sleepers::KICK) {
                                slab.kick.notify();
                            }
                        }
                    })
                })
                .collect();
            let of_slab = SlabLine { armed: &slab.armed, pend: &slab.pend };
            let mut seen = [0; 2];
            while seen.iter().take(users).any(|seen| *seen < messages) {
                let bits = of_slab.take();
                for user in (0..users).filter(|user| bits & 1 << user != 0) {
                    seen[user] = slab.data[user].load(Ordering::Relaxed);
                    assert!(seen[user] > 0, "signal before data");
                }
                if bits != 0 {
                    continue;
                }
                of_slab.arm();
                if !of_slab.is_pending() {
                    // loom reports a deadlock here if the wake-up was lost.
                    slab.kick.wait();
                }
            }
            for handle in handles {
                handle.join().unwrap();
            }
        });
    }

    #[test]
    fn one_user_and_a_sleeper_for_the_slab() {
        no_wake_up_is_lost_by_the_slab(1, 2);
    }

    #[test]
    fn two_users_and_a_sleeper_for_the_slab() {
        no_wake_up_is_lost_by_the_slab(2, 1);
    }

    #[test]
    fn two_threads_sleep_on_one_word() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let shared = Shared::new();
            let counts = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
            let other = {
                let (shared, counts) = (shared.clone(), counts.clone());
                thread::spawn(move || sleep_for_data(&shared, &counts, 1))
            };
            let user = {
                let shared = shared.clone();
                thread::spawn(move || {
                    for data in [1, 0] {
                        shared.data[data].store(7, Ordering::Release);
                        shared.signal(0);
                    }
                })
            };
            sleep_for_data(&shared, &counts, 0);
            other.join().unwrap();
            user.join().unwrap();
        });
    }
}
