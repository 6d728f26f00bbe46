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
use crate::selection::circuit_breaker::Tally;
use crate::sys::{leaked, raw};

/// A process that has lived for so long was worth a device.
const LONG: Duration = Duration::from_millis(100);

/// What processes of one server know of each other: those that were over soon are the failures.
type Board = Tally;

static BOARD: AtomicPtr<Board> = AtomicPtr::new(std::ptr::null_mut());
/// When this process decided, of which generation: what [`end`] is about.
static DECIDED: AtomicU64 = AtomicU64::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);

fn board() -> Option<&'static Board> {
    leaked(BOARD.load(Ordering::Acquire))
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
        if Duration::from_micros(now.saturating_sub(decided)) < LONG {
            board.failed(now);
        } else {
            board.succeeded();
        }
    }
}
