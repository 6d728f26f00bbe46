// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Identity of a process among the forks of a program.
//!
//! The generation counts the forks between the program's start and this process. Sessions and SMC
//! connections of an earlier generation belong to an ancestor. This process neither uses nor closes
//! them.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use crate::sys::{fork_lock, leaked, raw};
use ism_sys::OnceBox;

static GENERATION: AtomicU32 = AtomicU32::new(FIRST);
static PID: AtomicI32 = AtomicI32::new(0);
/// The generation in a page cleared by the kernel in each child with a copy of the memory. So the
/// generation is 0 in a child made without a call of this library, until the child notices.
static IN_PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
/// Called by such a child on noticing its state.
static UNTOLD: OnceBox<fn()> = OnceBox::new();

/// The generation of the program's first process.
const FIRST: u32 = 1;

/// Number of forks between the program's start and this process, from [`FIRST`] on.
#[inline]
pub(crate) fn generation() -> u32 {
    match leaked(IN_PAGE.load(Ordering::Relaxed)) {
        Some(word) => word.load(Ordering::Relaxed),
        None => GENERATION.load(Ordering::Relaxed),
    }
}

/// Whether this process is a child of the program's first process.
pub(crate) fn is_child() -> bool {
    generation() != FIRST
}

/// One process among its parents and children (pid plus fork generation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessIdentity {
    generation: u32,
    pid: c_int,
}

/// The identity of this process, without a system call.
pub(crate) fn identity() -> ProcessIdentity {
    ProcessIdentity { generation: generation(), pid: PID.load(Ordering::Relaxed) }
}

fn store_in_page() {
    if let Some(word) = leaked(IN_PAGE.load(Ordering::Relaxed)) {
        word.store(GENERATION.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Number of child processes that may have inherited this process's descriptors. SeqCst: counted before a
/// child is made and read before a look at other processes, in one order with both.
static CHILDREN: AtomicU32 = AtomicU32::new(0);

/// Counts a child that inherits this process's descriptors.
pub(crate) fn note_child() {
    CHILDREN.fetch_add(1, Ordering::SeqCst);
}

/// The count of [`note_child`]. A descriptor older than the last child may be open in another process.
pub(crate) fn children() -> u32 {
    CHILDREN.load(Ordering::SeqCst)
}

/// Stores the process id at the program's start, and the function of a child made without a call of
/// this library.
pub(crate) fn init(untold: fn()) {
    PID.store(raw::getpid(), Ordering::Relaxed);
    let _ = UNTOLD.set(untold);
    if let Some(page) = raw::page_cleared_in_children() {
        IN_PAGE.store(page.cast(), Ordering::Relaxed);
        store_in_page();
    }
}

/// Begins a new generation; runs in the child of a fork.
pub(crate) fn in_child() {
    fork_lock::in_child();
    ism_sys::forget_numbers();
    ism_sys::forget_unnamed_threads();
    forget_unprepared();
    forget_maker();
    GENERATION.fetch_add(1, Ordering::Relaxed);
    store_in_page();
    PID.store(raw::getpid(), Ordering::Relaxed);
}

/// The threads in an unprepared fork, by their `pthread_self`: the value is the same in the child.
static UNPREPARED: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// Notes that the calling thread forks without a prepared library.
pub(crate) fn begin_unprepared() {
    let this = raw::this_thread();
    let is_free = |slot: &AtomicUsize| {
        slot.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    // A slot comes free when another thread has forked.
    while !UNPREPARED.iter().any(is_free) {
        std::thread::yield_now();
    }
}

/// Called after the fork, in the parent or the child. `false`: the library was prepared for the fork.
pub(crate) fn end_unprepared() -> bool {
    let this = raw::this_thread();
    let is_ours = |slot: &AtomicUsize| {
        slot.compare_exchange(this, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    UNPREPARED.iter().any(is_ours)
}

/// Forgets other threads in a fork: the child has none of them.
fn forget_unprepared() {
    UNPREPARED.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
}

/// Lets this process continue the connections of its maker, with the maker's generation. The numbers of
/// the table were the maker's.
pub(crate) fn as_keeper() {
    ism_sys::forget_numbers();
    MAY_SHARE_MEMORY.store(true, Ordering::Relaxed);
    let _ = MAKER.try_with(|maker| maker.set(RETIRED));
    store_in_page();
    PID.store(raw::getpid(), Ordering::Relaxed);
}

/// Ends the library's work in this process: a keeper has its session.
pub(crate) fn retire() {
    PID.store(RETIRED, Ordering::Relaxed);
}

/// Whether [`retire`] was called.
pub(crate) fn is_retired() -> bool {
    PID.load(Ordering::Relaxed) == RETIRED
}

/// Value in the place of a process id.
const RETIRED: c_int = -1;

/// Whether the program may have a child with shared memory. The call that makes the child orders the word.
static MAY_SHARE_MEMORY: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The process in which this thread has made a child with shared memory; 0: the thread has made none
    /// since its last look. The child of vfork runs with the variables of the thread. [`RETIRED`] in a
    /// keeper.
    static MAKER: Cell<c_int> = const { Cell::new(0) };
}

/// Called before the program makes a child with shared memory.
pub(crate) fn note_sharing_child() {
    MAY_SHARE_MEMORY.store(true, Ordering::Release);
    let _ = MAKER.try_with(|maker| maker.set(raw::getpid()));
}

/// Whether the calling thread is a child of vfork, or a keeper: the numbers of the table are another
/// process's, and other files here. A load, if the program has made no child of vfork; one system call
/// per child of the thread.
#[inline]
pub(crate) fn is_without_table() -> bool {
    MAY_SHARE_MEMORY.load(Ordering::Relaxed) && is_other_than_maker()
}

#[cold]
fn is_other_than_maker() -> bool {
    let is_other = |maker: &Cell<c_int>| {
        if maker.get() == 0 {
            return false;
        }
        if maker.get() != raw::getpid() {
            return has_own_page();
        }
        // The thread goes on when the child has executed a program or has ended.
        maker.set(0);
        false
    };
    MAKER.try_with(is_other).unwrap_or(false)
}

/// Lets this process use the table of its maker.
fn forget_maker() {
    let _ = MAKER.try_with(|maker| maker.set(0));
}

/// Whether the program may have a child with shared descriptors, and separate memory. The call that makes
/// the child orders the word.
static MAY_SHARE_DESCRIPTORS: AtomicBool = AtomicBool::new(false);

/// Called before the program makes a child with shared descriptors, and separate memory.
pub(crate) fn note_sharing_descriptors() {
    MAY_SHARE_DESCRIPTORS.store(true, Ordering::Release);
}

/// Whether this process still has the memory with its stored identity.
fn has_own_page() -> bool {
    leaked(IN_PAGE.load(Ordering::Relaxed)).is_some_and(|word| word.load(Ordering::Relaxed) != 0)
}

/// Whether this process is a child of vfork, with the memory of its parent. Such a child must not
/// change the table: the entries are about the parent's descriptors.
pub(crate) fn shares_memory() -> bool {
    let known: c_int = PID.load(Ordering::Relaxed);
    if known == 0 {
        return false;
    }
    // Nearly always this spares the system call.
    let is_first = !MAY_SHARE_MEMORY.load(Ordering::Relaxed) && has_own_page();
    if known != RETIRED && is_first || known == raw::getpid() {
        return false;
    }
    if known != RETIRED
        && generation() == 0
        && let Some(untold) = UNTOLD.get()
    {
        // The child has its own memory, made without a call of this library.
        if raw::shares_descriptors_with(known)
            .unwrap_or_else(|_| MAY_SHARE_DESCRIPTORS.load(Ordering::Relaxed))
        {
            // Closing descriptors here would close the parent's.
            retire();
            return true;
        }
        untold();
        return false;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_waits_for_no_fork_of_a_thread_that_it_does_not_have() {
        for _ in 0..UNPREPARED.len() {
            std::thread::spawn(begin_unprepared).join().unwrap();
        }
        // The state in the child of one of the threads.
        forget_unprepared();
        begin_unprepared();
        assert!(end_unprepared());
    }
}
