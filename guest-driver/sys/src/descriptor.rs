// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers of the driver's own descriptors.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::process::{limit_of, set_limit};

/// Lowest number of the driver's descriptors; 0: the kernel's choice.
static LOWEST: AtomicI32 = AtomicI32::new(0);

/// Keeps the driver's descriptors at numbers from `lowest` on. A program unaware of the driver may count
/// on low numbers: a small table, or a certain number for the next descriptor.
pub fn set_lowest_descriptor(lowest: i32) {
    LOWEST.store(lowest, Ordering::Relaxed);
}

/// Makes a descriptor out of the program's way, if [`set_lowest_descriptor`] was called.
///
/// # Errors
/// The errors of `make`.
pub fn out_of_the_way<E>(make: impl FnOnce() -> Result<OwnedFd, E>) -> Result<OwnedFd, E> {
    let _making = making();
    make().map(move_out_of_the_way)
}

/// Moves a descriptor out of the program's way, if [`set_lowest_descriptor`] was called.
pub fn move_out_of_the_way(fd: OwnedFd) -> OwnedFd {
    match LOWEST.load(Ordering::Relaxed) {
        0 => fd,
        lowest => match rustix::io::fcntl_dupfd_cloexec(&fd, lowest) {
            Err(rustix::io::Errno::INVAL) => duplicate_beyond_limit(&fd).unwrap_or(fd),
            moved => moved.unwrap_or(fd),
        },
    }
}

/// A thread of the driver makes descriptors: a bit of [`NUMBERS`]. The rest counts the program's calls
/// under way that close or replace a number.
const MAKING: u32 = 1 << 31;

/// A new descriptor has the lowest free number for a moment, or for as long as the driver needs the
/// descriptor. A program of one thread knows which numbers are free: the program closes them, or replaces
/// them by dup2(2), and would hit the driver's descriptor. So each waits for the other.
static NUMBERS: AtomicU32 = AtomicU32::new(0);

/// Upper bounds of these waits, in case a thread was ended in the middle.
const LONGEST_MAKING: Duration = Duration::from_secs(1);
const LONGEST_CALL: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_micros(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadKind {
    /// Makes descriptors in calls of the program.
    Program,
    /// One of the driver's.
    Driver,
    /// One of the driver's, with a [`DriverDescriptorGuard`].
    Making,
}

thread_local! {
    static THREAD: Cell<ThreadKind> = const { Cell::new(ThreadKind::Program) };
}

/// Notes that the calling thread is one of the driver's.
pub(crate) fn note_own_thread() {
    THREAD.set(ThreadKind::Driver);
}

/// A time in which the calling thread is one of the driver's, until dropped.
#[derive(Debug)]
#[must_use]
pub struct DriverThreadGuard(ThreadKind);

/// Begins such a time. No signal handler of the program runs in this thread meanwhile.
pub fn as_driver_thread() -> DriverThreadGuard {
    DriverThreadGuard(THREAD.replace(ThreadKind::Driver))
}

impl Drop for DriverThreadGuard {
    fn drop(&mut self) {
        THREAD.set(self.0);
    }
}

/// Whether the calling thread is one of the driver's.
#[inline]
pub fn is_driver_thread() -> bool {
    THREAD.get() != ThreadKind::Program
}

/// A time in which the program closes and replaces no number, until dropped.
#[derive(Debug)]
#[must_use]
pub struct DriverDescriptorGuard(());

/// Begins such a time. `None`: the calling thread is not one of the driver's, or is in such a time. The
/// caller makes no call that may sleep.
pub fn making() -> Option<DriverDescriptorGuard> {
    if THREAD.get() != ThreadKind::Driver {
        return None;
    }
    let begin = Instant::now();
    while NUMBERS.compare_exchange(0, MAKING, Ordering::Acquire, Ordering::Relaxed).is_err() {
        if begin.elapsed() >= LONGEST_CALL {
            // A handler may have jumped out of a call.
            NUMBERS.store(MAKING, Ordering::Relaxed);
            break;
        }
        std::thread::sleep(PAUSE);
    }
    THREAD.set(ThreadKind::Making);
    Some(DriverDescriptorGuard(()))
}

impl Drop for DriverDescriptorGuard {
    fn drop(&mut self) {
        NUMBERS.fetch_and(!MAKING, Ordering::Release);
        note_own_thread();
    }
}

/// A call of the program that closes or replaces numbers, until dropped.
#[derive(Debug)]
#[must_use]
pub struct ProgramDescriptorGuard(());

/// Begins such a call. `None`: the calling thread makes descriptors for the driver.
pub fn numbers_change() -> Option<ProgramDescriptorGuard> {
    let mut begin = None;
    while NUMBERS.fetch_add(1, Ordering::Acquire) & MAKING != 0 {
        drop(ProgramDescriptorGuard(()));
        if THREAD.get() == ThreadKind::Making {
            return None;
        }
        if begin.get_or_insert_with(Instant::now).elapsed() >= LONGEST_MAKING {
            NUMBERS.fetch_and(!MAKING, Ordering::Relaxed);
        }
        std::thread::sleep(PAUSE);
    }
    Some(ProgramDescriptorGuard(()))
}

impl Drop for ProgramDescriptorGuard {
    fn drop(&mut self) {
        let less = |word| (word & !MAKING > 0).then(|| word - 1);
        let _ = NUMBERS.fetch_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

/// Forgets the threads of the parent, in the child of a fork.
pub fn forget_numbers() {
    NUMBERS.store(0, Ordering::Relaxed);
}

/// Copies a descriptor to a number beyond the limit of the process.
///
/// # Errors
/// EMFILE: there is no such number, see [`LimitGuard::of_descriptors`]; or another error of fcntl(2).
pub fn duplicate_beyond_limit(fd: impl AsFd) -> rustix::io::Result<OwnedFd> {
    let raised = LimitGuard::of_descriptors();
    let first = match &raised {
        Some(raised) => raised.first(),
        None if HOLDER.load(Ordering::Acquire) == std::process::id() => first_beyond(),
        None => return Err(rustix::io::Errno::MFILE),
    };
    rustix::io::fcntl_dupfd_cloexec(fd, first)
}

/// The process with a raised limit; 0: none. The child of a fork may have the number of its parent, whose
/// guard no thread of the child drops.
static HOLDER: AtomicU32 = AtomicU32::new(0);
/// The limit of the program, as long as there is a holder.
static PROGRAM: AtomicU64 = AtomicU64::new(0);

fn first_beyond() -> i32 {
    i32::try_from(PROGRAM.load(Ordering::Relaxed)).unwrap_or(i32::MAX)
}

/// How many numbers beyond the limit of the process are for the driver.
const BEYOND: u64 = 256;

/// Upper bound of the driver's lowest number: the kernel's table is as long as the highest number.
const HIGHEST: u64 = 62_000;

/// A higher limit of numbers (RLIMIT_NOFILE, soft), until dropped.
///
/// The kernel compares only new numbers with the limit. So numbers beyond the limit stay valid, and the
/// program has every number below the limit for itself. Other threads of the program see the higher limit
/// meanwhile.
#[derive(Debug)]
pub struct LimitGuard(());

impl LimitGuard {
    /// The limit with numbers for the driver. `None`: the hard limit has none, the numbers are very high, the
    /// kernel refuses, or the process has such a guard.
    pub fn of_descriptors() -> Option<LimitGuard> {
        let (me, last) = (std::process::id(), HOLDER.load(Ordering::Acquire));
        if last == me
            || HOLDER.compare_exchange(last, me, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return None;
        }
        let guard = LimitGuard(());
        if last != 0 {
            // A thread of the parent had raised the limit at the fork.
            guard.set_back();
        }
        // A guard that has raised nothing sets nothing back.
        PROGRAM.store(u64::MAX, Ordering::Relaxed);
        let limit = limit_of(libc::RLIMIT_NOFILE)?;
        let raised = limit.rlim_cur.checked_add(BEYOND)?;
        if limit.rlim_cur > HIGHEST || raised > limit.rlim_max {
            return None;
        }
        PROGRAM.store(limit.rlim_cur, Ordering::Relaxed);
        let raised = libc::rlimit { rlim_cur: raised, ..limit };
        set_limit(libc::RLIMIT_NOFILE, raised).then_some(guard)
    }

    /// The first number beyond the limit of the program.
    pub fn first(&self) -> i32 {
        first_beyond()
    }

    /// Sets the limit back, if the program has set no other one meanwhile.
    fn set_back(&self) {
        let program = PROGRAM.load(Ordering::Relaxed);
        if let Some(now) = limit_of(libc::RLIMIT_NOFILE)
            && program.checked_add(BEYOND) == Some(now.rlim_cur)
        {
            set_limit(libc::RLIMIT_NOFILE, libc::rlimit { rlim_cur: program, ..now });
        }
    }
}

impl Drop for LimitGuard {
    fn drop(&mut self) {
        self.set_back();
        HOLDER.store(0, Ordering::Release);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn numbers_beyond_the_limit_stay_valid_and_the_limit_comes_back() {
        let before = limit_of(libc::RLIMIT_NOFILE).unwrap();
        // The limit of a test may be its hard limit.
        let lower = libc::rlimit { rlim_cur: before.rlim_max.min(HIGHEST) - BEYOND, ..before };
        assert!(set_limit(libc::RLIMIT_NOFILE, lower));
        let file = std::fs::File::open("/dev/null").unwrap();
        let beyond = duplicate_beyond_limit(&file).unwrap();
        assert!(beyond.as_raw_fd() as u64 >= lower.rlim_cur);
        // Beside a guard of another thread, and after a fork beside such a guard.
        let guard = LimitGuard::of_descriptors().unwrap();
        assert!(LimitGuard::of_descriptors().is_none());
        assert!(duplicate_beyond_limit(&file).unwrap().as_raw_fd() > beyond.as_raw_fd());
        HOLDER.store(u32::MAX, Ordering::Relaxed);
        drop(LimitGuard::of_descriptors().unwrap());
        std::mem::forget(guard);
        assert_eq!(limit_of(libc::RLIMIT_NOFILE).unwrap().rlim_cur, lower.rlim_cur);
        assert!(rustix::io::fcntl_dupfd_cloexec(&file, lower.rlim_cur as i32).is_err());
        assert!(rustix::fs::fstat(&beyond).is_ok());
        assert!(set_limit(libc::RLIMIT_NOFILE, before));
    }

    #[test]
    fn the_driver_makes_descriptors_and_the_program_changes_numbers_one_after_the_other() {
        forget_numbers();
        assert!(making().is_none(), "the thread is the program's");
        note_own_thread();
        let call = numbers_change().unwrap();
        let inner = numbers_change().unwrap();
        // After its wait, as if a handler had jumped out of the calls.
        drop(making().unwrap());
        drop((call, inner));
        let alone = making().unwrap();
        assert!(making().is_none(), "the thread makes one already");
        assert!(numbers_change().is_none(), "a call of the driver");
        let begin = Instant::now();
        let waited = std::thread::spawn(|| numbers_change().is_some());
        assert!(waited.join().unwrap() && begin.elapsed() >= LONGEST_MAKING);
        drop(alone);
        drop(numbers_change().unwrap());
        drop(making().unwrap());
        THREAD.set(ThreadKind::Program);
    }

    #[test]
    fn descriptors_are_moved_only_when_asked() {
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let fd = open();
        let number = fd.as_raw_fd();
        assert_eq!(move_out_of_the_way(fd).as_raw_fd(), number);
        let moved = rustix::io::fcntl_dupfd_cloexec(open(), 200).unwrap();
        assert!(moved.as_raw_fd() >= 200);
    }
}
