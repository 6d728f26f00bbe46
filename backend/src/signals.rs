//! SIGTERM and SIGINT as something to wait for.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libc::{c_int, c_void, siginfo_t};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use vmm_sys_util::signal::{block_signal, register_signal_handler, unblock_signal};

/// Signals that end the daemon.
const ENDING: [c_int; 2] = [libc::SIGTERM, libc::SIGINT];

static EVENT: OnceLock<OwnedFd> = OnceLock::new();

/// Only a load and a system call: both are safe in a signal handler.
extern "C" fn on_signal(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    if let Some(event) = EVENT.get() {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

/// Catches the ending signals. To be called before threads are started: they inherit that the
/// signals are blocked, so none of their calls is interrupted.
pub(crate) fn catch() -> io::Result<()> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let _ = EVENT.set(event);
    for signal in ENDING {
        block_signal(signal).map_err(|error| io::Error::other(format!("{error:?}")))?;
        register_signal_handler(signal, on_signal)?;
    }
    Ok(())
}

/// Waits for one of them for `limit`, on the thread that called [`catch`]. `false`: none came.
pub(crate) fn wait(limit: Option<Duration>) -> io::Result<bool> {
    let event = EVENT.get().ok_or_else(|| io::Error::other("signals are not caught"))?;
    for signal in ENDING {
        unblock_signal(signal).map_err(|error| io::Error::other(format!("{error:?}")))?;
    }
    let deadline = limit.map(|limit| Instant::now() + limit);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(event, PollFlags::IN)], left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
