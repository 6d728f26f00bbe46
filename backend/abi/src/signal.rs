//! The wake-up protocol on a signal line (docs/virtio-ism.md, "Signalling").
//!
//! A line is `{armed, pend}` in memory that owner and user share. The user sets its bit in `pend`
//! after the data, and kicks the owner only if the owner has announced that it sleeps (`armed`). The
//! owner arms, reads `pend` once more, and only then sleeps:
//!
//! ```text
//! user                                  owner
//! U1 payload                            O1 pend.swap(0): work, again
//! U2 cursor words (Release)             O2 armed.swap(1); fence(SeqCst)
//! U3 pend |= bit; fence(SeqCst)         O3 pend != 0: armed.swap(0), O1
//! U4 armed == 1 && swap(0) == 1: kick   O4 sleep until kicked, at most 1 s; O1
//! ```
//!
//! No wake-up is lost: the two fences are ordered one way or the other. If U3's comes first, O3
//! sees the bit and does not sleep. If O2's comes first, U4 sees `armed` (or a later 0: the owner
//! woke by itself, or another user disarmed and kicks). Spurious wake-ups are allowed. A
//! device that can write a line can only cause those, or stall its own connections until the
//! sleeper's timeout.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// One signal line, wherever it lies.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// 1: the owner sleeps, or is about to.
    pub armed: &'a AtomicU32,
    /// Bits of DMBs with new data.
    pub pend: &'a AtomicU64,
}

impl Line<'_> {
    /// User: announces new data of the DMB with this bit (U3, U4); `true` if the owner sleeps and
    /// this caller must kick it.
    ///
    /// Everything stored before is visible to an owner that takes the bit.
    #[inline]
    #[must_use = "true means: kick the owner"]
    pub fn raise(&self, bit: u8) -> bool {
        // Release: partner of the Acquire in `take`.
        self.pend.fetch_or(1 << (bit & 63), Ordering::Release);
        // Orders the bit before the load of `armed`; partner of the fence in `arm`.
        fence(Ordering::SeqCst);
        self.armed.load(Ordering::Relaxed) == 1 && self.armed.swap(0, Ordering::Relaxed) == 1
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

    /// Owner: announces that it is about to sleep (O2, O3); `false` if data is pending, so that it
    /// must not sleep.
    ///
    /// An owner of several lines arms them all, and sleeps only if every call returned `true`.
    #[inline]
    #[must_use = "false means: do not sleep"]
    pub fn arm(&self) -> bool {
        // A read-modify-write, as every write to `armed`: it takes its place after any disarm.
        self.armed.swap(1, Ordering::Relaxed);
        // Orders `armed` before the load of `pend`; partner of the fence in `raise`.
        fence(Ordering::SeqCst);
        self.pend.load(Ordering::Relaxed) == 0
    }

    /// Owner: whether it has armed the line, and no user has kicked it since.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        // A kick resets `armed`; only the owner sets it again.
        self.armed.load(Ordering::Relaxed) == 1 && self.pend.load(Ordering::Relaxed) == 0
    }

    /// Owner: undoes `arm`, after it woke or found data pending.
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
        assert!(!line.raise(5));
        assert_eq!(line.take(), 1 << 5);
        assert!(!line.is_quiet());
        assert!(line.arm());
        assert!(line.is_quiet());
        assert!(line.raise(5), "armed: the first signal kicks");
        assert!(!line.is_quiet());
        assert!(!line.raise(6), "disarmed by the first");
        assert!(!line.arm(), "news: do not sleep");
        line.disarm();
        assert_eq!(line.take(), 1 << 5 | 1 << 6);
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p virtio-ism-abi --release`
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::{Arc, Notify};
    use loom::thread;

    struct Shared {
        armed: AtomicU32,
        pend: AtomicU64,
        data: [AtomicU32; 2],
        kick: Notify,
    }

    fn no_wake_up_is_lost(users: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let shared = Arc::new(Shared {
                armed: AtomicU32::new(0),
                pend: AtomicU64::new(0),
                data: [AtomicU32::new(0), AtomicU32::new(0)],
                kick: Notify::new(),
            });
            let handles: std::vec::Vec<_> = (0..users)
                .map(|user| {
                    let shared = shared.clone();
                    thread::spawn(move || {
                        shared.data[user].store(7, Ordering::Relaxed);
                        let line = Line { armed: &shared.armed, pend: &shared.pend };
                        if line.raise(user as u8) {
                            shared.kick.notify();
                        }
                    })
                })
                .collect();
            let line = Line { armed: &shared.armed, pend: &shared.pend };
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
                if !line.arm() {
                    line.disarm();
                    continue;
                }
                // loom reports a deadlock here if the wake-up was lost.
                shared.kick.wait();
            }
            for handle in handles {
                handle.join().unwrap();
            }
        });
    }

    #[test]
    fn one_user() {
        no_wake_up_is_lost(1);
    }

    #[test]
    fn two_users() {
        no_wake_up_is_lost(2);
    }
}
