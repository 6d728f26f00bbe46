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
use crate::selection::circuit_breaker::CircuitBreaker;
use crate::sys::{leaked, raw};

/// A process that has lived for so long was worth a device.
const WORTHWHILE: Duration = Duration::from_millis(100);

/// The page that the processes of one server share. A process that was over soon counts as a failure.
static BREAKER: AtomicPtr<CircuitBreaker> = AtomicPtr::new(std::ptr::null_mut());
/// When this process started, of which generation: what [`record_exit`] is about.
static STARTED: AtomicU64 = AtomicU64::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);

fn breaker() -> Option<&'static CircuitBreaker> {
    leaked(BREAKER.load(Ordering::Acquire))
}

/// A server begins: its children will share what they learn.
pub(crate) fn share_with_children() {
    if breaker().is_none()
        && let Some(page) = raw::shared_page()
    {
        let new = page.cast::<CircuitBreaker>();
        let none = std::ptr::null_mut();
        // A page that another thread was faster with is small enough to be left.
        let _ = BREAKER.compare_exchange(none, new, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Whether this process should take a device for a client; asked when it has none.
pub(crate) fn is_worth_a_device() -> bool {
    // The server itself lives long.
    let Some(breaker) = breaker().filter(|_| fork::generation() > 0) else { return true };
    let now = raw::monotonic_micros();
    STARTED.store(now, Ordering::Relaxed);
    GENERATION.store(fork::generation(), Ordering::Relaxed);
    breaker.allows(now)
}

/// This process ends.
pub(crate) fn record_exit() {
    let started = STARTED.swap(0, Ordering::Relaxed);
    if started != 0
        && GENERATION.load(Ordering::Relaxed) == fork::generation()
        && let Some(breaker) = breaker()
    {
        let now = raw::monotonic_micros();
        if Duration::from_micros(now.saturating_sub(started)) < WORTHWHILE {
            breaker.failed(now);
        } else {
            breaker.succeeded();
        }
    }
}
