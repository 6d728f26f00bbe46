// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A circuit breaker for short-lived processes.
//!
//! A process needs a device for SMC. If a server forks for a single client, opening the device
//! often takes longer than the child lives. So each child records its time between opening a device
//! and its exit, in a page of memory shared by forked processes. When several children in a row
//! exited at once, the next ones decline SMC and stay on TCP; now and then one tries. When a child
//! lives on, or none came for a while, children open devices again.
//!
//! The page only guesses whether a device is worthwhile, and nothing depends on a right guess. So
//! the words of the page are independent of each other, and a killed process may be missing.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::fork;
use crate::selection::circuit_breaker::CircuitBreaker;
use crate::sys::{leaked, raw};

/// A process living so long is worth a device.
const WORTHWHILE: Duration = Duration::from_millis(100);

/// The page shared by the processes of one server. An early exit counts as a failure.
static BREAKER: AtomicPtr<CircuitBreaker> = AtomicPtr::new(std::ptr::null_mut());
/// When this process asked for a device (microseconds), and its generation; for [`record_exit`].
static STARTED: AtomicU64 = AtomicU64::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);

fn breaker() -> Option<&'static CircuitBreaker> {
    leaked(BREAKER.load(Ordering::Acquire))
}

/// Makes the shared page, when a server listens. Its children inherit the page.
pub(crate) fn share_with_children() {
    if breaker().is_none()
        && let Some(page) = raw::shared_page()
    {
        let new = page.cast::<CircuitBreaker>();
        let none = std::ptr::null_mut();
        // If another thread was faster, this page stays unused. One page is small enough.
        let _ = BREAKER.compare_exchange(none, new, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Whether this process without a device should open one for a client.
pub(crate) fn is_worth_a_device() -> bool {
    // The server itself lives long, so the breaker is for its children.
    let Some(breaker) = breaker().filter(|_| fork::is_child()) else { return true };
    let now = raw::monotonic_micros();
    STARTED.store(now, Ordering::Relaxed);
    GENERATION.store(fork::generation(), Ordering::Relaxed);
    breaker.allows(now)
}

/// Records the lifetime of this process, at its exit.
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
