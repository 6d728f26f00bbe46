//! Which process of a program that forks this one is.
//!
//! The generation counts the forks between the program's start and this process. Sessions and SMC
//! connections of an earlier generation belong to an ancestor. This process neither uses nor closes
//! them.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::sys::{fork_lock, raw};

static GENERATION: AtomicU32 = AtomicU32::new(0);
static PID: AtomicI32 = AtomicI32::new(0);

/// Number of forks between the program's start and this process.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Number of child processes that may have inherited this process's descriptors.
static CHILDREN: AtomicU32 = AtomicU32::new(0);

/// Counts a child that inherits this process's descriptors.
pub(crate) fn note_child() {
    CHILDREN.fetch_add(1, Ordering::SeqCst);
}

/// What [`note_child`] has counted. A descriptor that is older than the last child may be open in
/// another process.
pub(crate) fn children() -> u32 {
    CHILDREN.load(Ordering::SeqCst)
}

/// Stores the process id at the program's start.
pub(crate) fn init() {
    PID.store(raw::getpid(), Ordering::Relaxed);
}

/// Begins a new generation; runs in the child of a fork.
pub(crate) fn in_child() {
    fork_lock::in_child();
    GENERATION.fetch_add(1, Ordering::Relaxed);
    PID.store(raw::getpid(), Ordering::Relaxed);
}

/// This process goes on with the connections of the process that has made it, as if it was that one.
pub(crate) fn as_keeper() {
    PID.store(raw::getpid(), Ordering::Relaxed);
}

/// The library does nothing more in this process: a keeper has its session.
pub(crate) fn retire() {
    PID.store(RETIRED, Ordering::Relaxed);
}

/// Whether [`retire`] was called.
pub(crate) fn is_retired() -> bool {
    PID.load(Ordering::Relaxed) == RETIRED
}

/// In the place of a process id.
const RETIRED: c_int = -1;

/// Whether this process is a child of vfork, which shares the memory of its parent. It must not
/// change the table, whose entries are about the parent's descriptors.
pub(crate) fn shares_memory() -> bool {
    let known: c_int = PID.load(Ordering::Relaxed);
    known != 0 && known != raw::getpid()
}
