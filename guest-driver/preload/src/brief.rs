//! Processes that are over soon.
//!
//! A process needs a device for SMC, and opening one takes longer than many a process lives that a
//! server forks for a single client. So the processes of one server tell each other how long they lived
//! after they had taken a device, in a page of memory that forked processes share. When several in a row were
//! over at once, the next ones decline SMC and are on TCP, but for one now and then that tries; when one
//! lives on, or none came for a while, they take devices again.
//!
//! All of it is a guess about what is worthwhile. Nothing depends on it being right, so the words of the
//! page are independent of each other, and processes that are killed may be missing in them.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::fork;
use crate::sys::{self, raw};

/// A process that has lived for so long was worth a device.
const LONG: Duration = Duration::from_millis(100);
/// So many in a row, and the next ones do without.
const IN_A_ROW: u64 = 4;
/// Of so many that would do without, one takes a device.
const TRIAL: u64 = 64;
/// What was learned holds for so long.
const MEMORY: Duration = Duration::from_secs(1);

/// What processes of one server know of each other.
#[derive(Debug, Default)]
pub(crate) struct Board {
    /// Processes in a row that were over soon.
    brief: AtomicU64,
    /// Those that did without, or would have.
    spared: AtomicU64,
    /// When the last one ended that was over soon, microseconds of the system's clock.
    last: AtomicU64,
}

static BOARD: AtomicPtr<Board> = AtomicPtr::new(std::ptr::null_mut());
/// When this process decided, of which generation: what [`end`] is about.
static DECIDED: AtomicU64 = AtomicU64::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);

fn board() -> Option<&'static Board> {
    sys::leaked(BOARD.load(Ordering::Acquire))
}

/// A server begins: its children will share what they learn.
pub(crate) fn share() {
    if board().is_none()
        && let Some(page) = raw::shared_page()
    {
        let new = page.cast::<Board>();
        let none = std::ptr::null_mut();
        // A page that another thread was faster with is small enough to be left.
        let _ = BOARD.compare_exchange(none, new, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Whether this process should take a device for a client; asked when it has none.
pub(crate) fn is_worth_a_device() -> bool {
    // The server itself lives long.
    let Some(board) = board().filter(|_| fork::generation() > 0) else { return true };
    let now = raw::micros();
    DECIDED.store(now, Ordering::Relaxed);
    GENERATION.store(fork::generation(), Ordering::Relaxed);
    board.allows(now)
}

/// This process ends.
pub(crate) fn end() {
    let decided = DECIDED.swap(0, Ordering::Relaxed);
    if decided != 0
        && GENERATION.load(Ordering::Relaxed) == fork::generation()
        && let Some(board) = board()
    {
        let now = raw::micros();
        board.ended(now, Duration::from_micros(now.saturating_sub(decided)));
    }
}

impl Board {
    fn allows(&self, now: u64) -> bool {
        if self.brief.load(Ordering::Relaxed) < IN_A_ROW {
            return true;
        }
        let age = now.saturating_sub(self.last.load(Ordering::Relaxed));
        if Duration::from_micros(age) > MEMORY {
            self.brief.store(0, Ordering::Relaxed);
            return true;
        }
        self.spared.fetch_add(1, Ordering::Relaxed) % TRIAL == TRIAL - 1
    }

    fn ended(&self, now: u64, lived: Duration) {
        if lived < LONG {
            self.brief.fetch_add(1, Ordering::Relaxed);
            self.last.store(now, Ordering::Relaxed);
        } else {
            self.brief.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(5);

    fn after_brief_ones() -> Board {
        let board = Board::default();
        for n in 0..IN_A_ROW {
            assert!(board.allows(n));
            board.ended(n, SOON);
        }
        board
    }

    #[test]
    fn after_several_that_were_over_soon_the_next_do_without_but_for_trials() {
        let board = after_brief_ones();
        let allowed = (0..2 * TRIAL).filter(|_| board.allows(10)).count();
        assert_eq!(allowed, 2);
    }

    #[test]
    fn one_that_lives_on_or_a_pause_ends_that() {
        let board = after_brief_ones();
        assert!(!board.allows(10));
        board.ended(10, LONG);
        assert!(board.allows(10));
        let board = after_brief_ones();
        assert!(board.allows(10 + MEMORY.as_micros() as u64 * 2));
    }

    #[test]
    fn single_ones_in_between_change_nothing() {
        let board = Board::default();
        for n in 0..100 {
            assert!(board.allows(n));
            board.ended(n, if n % 3 == 0 { LONG } else { SOON });
        }
    }
}
