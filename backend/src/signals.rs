//! Signals as something to wait for: SIGTERM and SIGINT end the daemon, SIGHUP has it read its
//! configuration again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, siginfo_t};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use vmm_sys_util::signal::{block_signal, register_signal_handler, unblock_signal};

/// Signals that are caught.
const CAUGHT: [c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

static EVENT: OnceLock<OwnedFd> = OnceLock::new();
static END: AtomicBool = AtomicBool::new(false);
static HANGUP: AtomicBool = AtomicBool::new(false);

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// The daemon ends.
    End,
    /// The terminal is gone, or the configuration is to be read again.
    Hangup,
}

/// Only stores, a load and a system call: all are safe in a signal handler.
extern "C" fn on_signal(signal: c_int, _: *mut siginfo_t, _: *mut c_void) {
    // Release: partner of the swaps in `wait`. The write to the descriptor orders them anyway.
    match signal {
        libc::SIGHUP => HANGUP.store(true, Ordering::Release),
        _ => END.store(true, Ordering::Release),
    }
    if let Some(event) = EVENT.get() {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

/// Catches the signals. To be called before threads are started: they inherit that the
/// signals are blocked, so none of their calls is interrupted.
pub(crate) fn catch() -> io::Result<()> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let _ = EVENT.set(event);
    for signal in CAUGHT {
        block_signal(signal).map_err(|error| io::Error::other(format!("{error:?}")))?;
        register_signal_handler(signal, on_signal)?;
    }
    Ok(())
}

/// Waits for one of them for `limit`, on the thread that called [`catch`]. `None`: none came.
pub(crate) fn wait(limit: Option<Duration>) -> io::Result<Option<Signal>> {
    let event = EVENT.get().ok_or_else(|| io::Error::other("signals are not caught"))?;
    for signal in CAUGHT {
        unblock_signal(signal).map_err(|error| io::Error::other(format!("{error:?}")))?;
    }
    let deadline = limit.map(|limit| Instant::now() + limit);
    loop {
        // Acquire: partner of the stores in `on_signal`. An end comes before all else.
        if END.swap(false, Ordering::Acquire) {
            return Ok(Some(Signal::End));
        }
        if HANGUP.swap(false, Ordering::Acquire) {
            return Ok(Some(Signal::Hangup));
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(event, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return Ok(None),
            // What the flags said when it was written, they say still.
            Ok(_) => drop(rustix::io::read(event, &mut [0u8; 8])),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
