// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The relays of a process, and the sleeper of their thread.
//!
//! The thread holds [`RELAYS`] while moving bytes, and does not wait meanwhile. So a process with the
//! lock finds each byte either in a socket or in the list, and can give the list to a child (see
//! `keeper`).

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use guest_driver::SmcStream;
use rustix::thread::futex;

use super::flow::{Relay, RelayCarrier};
use crate::fork;
use crate::socket::sleeper::Sleeper;
use crate::sys::fork_lock::{ForkMutex, ForkMutexGuard};
use crate::sys::{leaked, raw};

/// The relays of a process.
#[derive(Default)]
pub(super) struct Relays {
    pub(super) list: Vec<Relay>,
    /// The generation of the process (see `fork`) with the running thread.
    pub(super) runs: Option<u32>,
}

static RELAYS: ForkMutex<Relays> = ForkMutex::new(Relays { list: Vec::new(), runs: None });
/// The thread's sleeper, and the generation of its process.
static SLEEPER: AtomicPtr<(Sleeper, u32)> = AtomicPtr::new(std::ptr::null_mut());
/// Changes when a relay has forwarded bytes, or has ended. A futex: the kernel compares the value read
/// before the look at the list.
static PROGRESS: AtomicU32 = AtomicU32::new(0);

/// The relays, locked: no byte moves meanwhile.
pub(super) fn lock() -> ForkMutexGuard<'static, Relays> {
    RELAYS.lock()
}

/// Whether send queues have bytes that a keeper can send.
pub(super) fn has_unsent_bytes() -> bool {
    SmcStream::any_has_unsent_bytes()[0]
}

/// A counter, changed when a relay has forwarded bytes, or has ended.
pub(super) fn progress() -> u32 {
    PROGRESS.load(Ordering::Acquire)
}

/// Notes that a relay has forwarded bytes, or has ended.
pub(super) fn note_progress() {
    PROGRESS.fetch_add(1, Ordering::Release);
    let _ = futex::wake(&PROGRESS, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Wakes the thread for another check of the list.
pub(super) fn wake() {
    if let Some((sleeper, _)) = leaked(SLEEPER.load(Ordering::Acquire)) {
        sleeper.watch.wake();
    }
}

/// The sleeper of this process's thread; made on first use. `None`: no descriptors are left.
pub(super) fn own_sleeper() -> Option<&'static Sleeper> {
    let known = leaked(SLEEPER.load(Ordering::Acquire));
    if let Some((sleeper, _)) = known.filter(|(_, generation)| *generation == fork::generation()) {
        return Some(sleeper);
    }
    let new = Box::leak(Box::new((Sleeper::new().ok()?, fork::generation())));
    SLEEPER.store(std::ptr::from_mut(new), Ordering::Release);
    Some(&new.0)
}

/// A sleeper for the child of a fork: the eventfds of the old one are shared with the parent.
pub(super) fn forget_sleeper() {
    SLEEPER.store(std::ptr::null_mut(), Ordering::Release);
}

/// Has the sleeper watch a relay no more, for a relay off the list, in use without the thread.
pub(super) fn leave(relay: &Relay) {
    if let Some((sleeper, _)) = leaked(SLEEPER.load(Ordering::Acquire)) {
        sleeper.remove(relay.owner_end.as_raw_fd());
        if let Some(stream) = relay.stream() {
            stream.unwatch(&sleeper.watch);
        }
    }
}

/// The descriptors of the relays of this process.
pub(crate) fn descriptors() -> Vec<c_int> {
    let mut all: Vec<c_int> = lock().list.iter().flat_map(Relay::descriptors).collect();
    if let Some((sleeper, generation)) = leaked(SLEEPER.load(Ordering::Acquire))
        && *generation == fork::generation()
    {
        all.extend(sleeper.descriptors());
    }
    all
}

/// Whether a fork can take the lock of the relays within `limit`.
pub(crate) fn comes_free(limit: Duration) -> bool {
    RELAYS.comes_free(limit)
}

/// Takes the lock of the relays, before a fork.
pub(crate) fn before_fork() {
    RELAYS.acquire_before_fork();
}

/// Undoes [`before_fork`], in the parent.
pub(crate) fn in_parent() {
    RELAYS.release_after_fork();
}

/// Undoes [`before_fork`], in the child.
pub(crate) fn in_child() {
    RELAYS.release_after_fork();
    close_in_child();
}

/// Closes the owner's ends of the parent's relays, in the child: holders of the other ends must see the
/// end of the relay although this process lives on.
pub(crate) fn close_in_child() {
    let relays = std::mem::take(&mut *lock());
    for relay in relays.list {
        let _ = raw::close(relay.owner_end.as_raw_fd());
        if let RelayCarrier::Tcp(tcp) | RelayCarrier::Undecided(tcp) = &relay.carrier {
            let _ = raw::close(tcp.as_raw_fd());
        }
        // The numbers are closed, and the connections are the parent's.
        std::mem::forget(relay);
    }
    if let Some((sleeper, _)) = leaked(SLEEPER.swap(std::ptr::null_mut(), Ordering::AcqRel)) {
        let _ = raw::close(sleeper.outer.as_raw_fd());
        let _ = raw::close(sleeper.watch.notifier().as_raw_fd());
    }
}

/// Waits at the end of the process until the peers have taken the program's bytes, for at most `limit`.
/// Does not wait for a relay with its other end in another process.
pub(crate) fn finish(limit: Duration) {
    let until = Instant::now() + limit;
    loop {
        let before = PROGRESS.load(Ordering::Acquire);
        if !lock().list.iter().any(Relay::is_closed) {
            return;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        let timeout = futex::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let _ = futex::wait(&PROGRESS, futex::Flags::PRIVATE, before, Some(&timeout));
    }
}
