//! The wake-up protocol on a signal line (docs/virtio-ism.md, "Signalling").
//!
//! A line is `{armed, pend}` in memory that owner and user share. The user sets its bit in `pend`
//! after the data, and wakes the owner only if the owner has announced that it sleeps (`armed`). The
//! owner arms, reads `pend` once more, and only then sleeps:
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
//! No wake-up is lost: the two fences are ordered one way or the other. If U3's comes first, O3
//! sees the bit and does not sleep. If O2's comes first, U4 sees `armed` (or a later 0: another user
//! has taken the word, and wakes). Between O2 and O4 the kernel decides: a word that was taken is not
//! the word that FUTEX_WAIT expects, and what FUTEX_WAKE finds asleep it wakes.
//!
//! Spurious wake-ups are allowed. A device that can write a line can only cause those, or stall its
//! own connections until the sleeper's timeout.

use bitflags::bitflags;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

bitflags! {
    /// How the sleepers of a line are woken: the bits of its armed word. Bits without a name are
    /// kicks.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Sleepers: u32 {
        /// By the doorbell of the slab, if the user has it; else by a kick of the device.
        const KICK = 1;
        /// By FUTEX_WAKE on the armed word; by a kick as well, if the user cannot do that.
        const FUTEX = 2;
    }
}

/// Threads that a user wakes by one FUTEX_WAKE. An owner lets no more sleep on a word, so that an
/// owner with bad intentions cannot make that call last.
pub const MAX_FUTEX_SLEEPERS: u32 = 64;

/// One signal line, wherever it lies.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// [`Sleepers`] of the owner that sleep, or are about to.
    pub armed: &'a AtomicU32,
    /// Bits of DMBs with new data.
    pub pend: &'a AtomicU64,
}

impl Line<'_> {
    /// User: announces new data of the DMB with this bit (U3, U4). Returns whom this caller must
    /// wake.
    ///
    /// Everything stored before is visible to an owner that takes the bit.
    #[inline]
    #[must_use = "not empty means: wake the owner"]
    pub fn raise(&self, bit: u8) -> Sleepers {
        // Release: partner of the Acquire in `take`.
        self.pend.fetch_or(1 << (bit & 63), Ordering::Release);
        // Orders the bit before the load of `armed`; partner of the fence in `arm_as`.
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) == 0 {
            return Sleepers::empty();
        }
        Sleepers::from_bits_retain(self.armed.swap(0, Ordering::Relaxed))
    }

    /// Owner: takes the pending bits (O1).
    #[inline]
    pub fn take(&self) -> u64 {
        // The plain load keeps the cache line shared while there is nothing to take.
        if self.pend.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.pend.swap(0, Ordering::Acquire)
    }

    /// Owner: announces that it is about to sleep until it is kicked (O2, O3); `false` if data is
    /// pending, so that it must not sleep.
    ///
    /// An owner of several lines arms them all, and sleeps only if every call returned `true`.
    #[inline]
    #[must_use = "false means: do not sleep"]
    pub fn arm(&self) -> bool {
        self.arm_as(Sleepers::KICK).1
    }

    /// Owner: as [`arm`](Self::arm), for a thread that is woken in this way. Also returns the word
    /// as it was before.
    ///
    /// A thread that sleeps on the word expects what was there before with its own bit set. If
    /// [`FUTEX`](Sleepers::FUTEX) was not set before, a user has taken the word since another thread
    /// of the owner armed it. That thread may be about to sleep, and now finds the word as it expects
    /// it, although nobody will wake it. So the caller wakes the others, whether it sleeps or not.
    #[inline]
    #[must_use = "false means: do not sleep"]
    pub fn arm_as(&self, how: Sleepers) -> (u32, bool) {
        // A read-modify-write, as every write to `armed`: it takes its place after any disarm.
        let before = self.armed.fetch_or(how.bits(), Ordering::Relaxed);
        // Orders `armed` before the load of `pend`; partner of the fence in `raise`.
        fence(Ordering::SeqCst);
        (before, self.pend.load(Ordering::Relaxed) == 0)
    }

    /// Owner: whether it has armed the line, and no user has taken the word since.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        // A user that wakes resets `armed`; only the owner sets it again.
        self.armed.load(Ordering::Relaxed) != 0 && self.pend.load(Ordering::Relaxed) == 0
    }

    /// Owner: whether a user has taken the word since this thread armed it, or the owner has
    /// disarmed it.
    #[inline]
    pub fn is_taken(&self, how: Sleepers) -> bool {
        self.armed.load(Ordering::Relaxed) & how.bits() == 0
    }

    /// Owner: undoes [`arm_as`](Self::arm_as), after the last thread woke that is woken in this way.
    #[inline]
    pub fn disarm_as(&self, how: Sleepers) {
        self.armed.fetch_and(!how.bits(), Ordering::Relaxed);
    }

    /// Owner: undoes `arm`, after its last thread woke.
    #[inline]
    pub fn disarm(&self) {
        self.armed.swap(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
        assert_eq!(line.raise(0), Sleepers::all(), "a signal wakes both");
        assert!(line.is_taken(Sleepers::FUTEX));
        assert_eq!(line.take(), 1);
        assert_eq!(line.arm_as(Sleepers::all()), (0, true));
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

    /// What the kernel promises of FUTEX_WAIT and FUTEX_WAKE: a word is compared and its thread
    /// queued in one step, as seen by those who wake.
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

        /// FUTEX_WAKE. It wakes the sleepers of other words, too, which adds spurious wake-ups.
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
                        shared.kernel.wait(&[(&shared.armed, before | how.bits())]);
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

    /// Sleeps, as a thread of the owner does that is not the only one, until this data is there.
    /// `counts` are the private words of the threads.
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
            let word = (&shared.armed, before | Sleepers::FUTEX.bits());
            shared.kernel.wait(&[word, (&counts[me], count)]);
        }
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
