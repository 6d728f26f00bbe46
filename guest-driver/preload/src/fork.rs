//! Processes that fork.
//!
//! The generation counts the forks that lie between the program's start and this process. What was
//! made in an earlier one (sessions, SMC connections) belongs to an ancestor: it is neither used nor
//! closed here.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::sys::raw;

static GENERATION: AtomicU32 = AtomicU32::new(0);
static PID: AtomicI32 = AtomicI32::new(0);

/// Forks since the program's start.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Takes note of the process at the program's start.
pub(crate) fn init() {
    PID.store(raw::getpid(), Ordering::Relaxed);
}

/// Runs in the child of a fork.
pub(crate) fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    PID.store(raw::getpid(), Ordering::Relaxed);
}

/// Whether this process shares its memory with the one that the entries are about: a child of vfork
/// must leave them alone.
pub(crate) fn shares_memory() -> bool {
    let known: c_int = PID.load(Ordering::Relaxed);
    known != 0 && known != raw::getpid()
}
