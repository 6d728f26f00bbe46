// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals as a subscriber of the event loop: SIGTERM and SIGINT end the daemon, SIGHUP makes the daemon read
//! its configuration again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use libc::{c_int, c_void, siginfo_t};
use rustix::event::{EventfdFlags, eventfd};
use vmm_sys_util::signal::{block_signal, register_signal_handler, unblock_signal};

use crate::vhost::waker::watch;

/// Caught signals.
const CAUGHT: [c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

static EVENT: OnceLock<OwnedFd> = OnceLock::new();
static END: AtomicBool = AtomicBool::new(false);
static HANGUP: AtomicBool = AtomicBool::new(false);

/// The request of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// The daemon ends.
    End,
    /// The terminal is gone, or the configuration is to be read again.
    Hangup,
}

/// Only stores, a load and a system call: all are safe in a signal handler.
extern "C" fn on_signal(signal: c_int, _: *mut siginfo_t, _: *mut c_void) {
    // Release: partner of the swaps in `process`. The write to the descriptor orders the stores anyway.
    match signal {
        libc::SIGHUP => HANGUP.store(true, Ordering::Release),
        _ => END.store(true, Ordering::Release),
    }
    if let Some(event) = EVENT.get() {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

/// Catches the signals. To be called before threads are started: threads inherit the blocked signals, so no
/// call of theirs is interrupted.
pub(crate) fn catch() -> io::Result<()> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let _ = EVENT.set(event);
    for signal in CAUGHT {
        block_signal(signal).map_err(|error| io::Error::other(format!("{error:?}")))?;
        register_signal_handler(signal, on_signal)?;
    }
    Ok(())
}

/// Lets the signals interrupt the calling thread, the one of [`catch`], without other work from now on.
pub(crate) fn unblock() -> io::Result<()> {
    for signal in CAUGHT {
        unblock_signal(signal).map_err(|error| io::Error::other(format!("{error:?}")))?;
    }
    Ok(())
}

/// Calls `F` with each caught signal.
pub(crate) struct OnSignal<F>(pub(crate) F);

impl<F: FnMut(Signal)> MutEventSubscriber for OnSignal<F> {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Some(event) = EVENT.get() {
            watch(event, EventSet::IN, ops);
        }
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        if let Some(event) = EVENT.get() {
            let _ = rustix::io::read(event, &mut [0; 8]);
        }
        // Acquire: partner of the stores in `on_signal`. An end comes first.
        if END.swap(false, Ordering::Acquire) {
            (self.0)(Signal::End);
        }
        if HANGUP.swap(false, Ordering::Acquire) {
            (self.0)(Signal::Hangup);
        }
    }
}
