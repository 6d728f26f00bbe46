// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sleeping on words shared with other processes, and waking their sleepers.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex::{Flags, Wait, WaitFlags, WaitPtr, wake};
use rustix::time::ClockId;

use super::OnceBox;
use super::filters::is_fatal;
use super::interrupt::{sleep_call, sleep_in_kernel};
use super::{read_clock, timespec};

/// Reason for the end of a sleep on words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordWait {
    /// A wake-up on this shared word, by its index in the list.
    Woken(usize),
    /// One of the words had another value: the thread has not slept.
    NotAsleep,
    /// The sleepers of the private word were woken, or the time is over.
    Ended,
    /// A signal was handled.
    Interrupted,
    /// The kernel does not let this thread sleep on this word.
    Refused,
}

/// Wakes at most `most` threads, of any process, asleep on the word. Never blocks.
pub fn wake_sleepers(word: &AtomicU32, most: u32) {
    // An error means a word without sleepers.
    let _ = wake(word, Flags::empty(), most);
}

static CAN: OnceBox<bool> = OnceBox::new();

/// Forbids this process to sleep on shared words, as in a virtual machine. Called before any query.
#[cfg(any(test, feature = "testing"))]
pub fn sleep_on_no_words() {
    CAN.get_or_init(|| false);
}

/// Whether this process can sleep on a private and a shared word at a time: since Linux 5.16, unless
/// a sandbox forbids it.
pub fn can_sleep_on_words() -> bool {
    *CAN.get_or_init(|| {
        if is_fatal(libc::SYS_futex_waitv) {
            return false;
        }
        let word = AtomicU32::new(0);
        // The values differ, so the call returns at once.
        sleep_on_words((&word, 1), &[(&word, 1)], None) == WordWait::NotAsleep
    })
}

/// Maximum number of shared words of one sleep.
pub const MAX_WORDS: usize = 16;

/// Sleeps while a private word and shared words have these values, for at most `timeout`. Does not sleep
/// with more than [`MAX_WORDS`] words.
///
/// A process with write access to a shared word can suppress wake-ups by this word, but not by another. A
/// signal with a restarting handler (SA_RESTART) does not end the sleep.
pub fn sleep_on_words(
    private: (&AtomicU32, u32),
    shared: &[(&AtomicU32, u32)],
    timeout: Option<Duration>,
) -> WordWait {
    let entry = |(word, value): (&AtomicU32, u32), flags| {
        let mut entry = Wait::new();
        entry.val = value.into();
        entry.uaddr = WaitPtr::new(word.as_ptr().cast());
        entry.flags = WaitFlags::SIZE_U32 | flags;
        entry
    };
    let mut words = [Wait::new(); MAX_WORDS + 1];
    let Some(words) = words.get_mut(..=shared.len()) else { return WordWait::Refused };
    for (at, word) in words.iter_mut().enumerate() {
        *word = match at.checked_sub(1).and_then(|at| shared.get(at)) {
            Some(shared) => entry(*shared, WaitFlags::empty()),
            None => entry(private, WaitFlags::PRIVATE),
        };
    }
    // The kernel wants the end of the sleep, not the duration.
    let end = timeout.and_then(|timeout| {
        let now = read_clock(ClockId::Monotonic);
        now.checked_add(timespec(timeout))
    });
    let at = end.as_ref().map_or(0, |end| std::ptr::from_ref(end) as usize);
    let arguments =
        [words.as_ptr() as usize, words.len(), 0, at, libc::CLOCK_MONOTONIC as usize, 0];
    // SAFETY: words and end are valid until the call returns; a 64-bit kernel has this layout.
    let slept = unsafe { sleep_call(libc::SYS_futex_waitv, &arguments) };
    match usize::try_from(slept).map_err(|_| Errno::from_raw_os_error(-slept as i32)) {
        // If several words were woken, the kernel names the last one.
        Ok(at @ 1..) => WordWait::Woken(at - 1),
        Ok(0) | Err(Errno::TIMEDOUT) => WordWait::Ended,
        Err(Errno::AGAIN) => WordWait::NotAsleep,
        Err(Errno::INTR) => WordWait::Interrupted,
        Err(_) => WordWait::Refused,
    }
}

/// Sleeps while a word of this process alone has this value, for at most `timeout`.
///
/// # Errors
/// The errors of futex(2): `Interrupted`, after the time `TimedOut`, `WouldBlock` at another value.
pub fn sleep_on_private(
    (word, value): (&AtomicU32, u32),
    timeout: Option<Duration>,
) -> std::io::Result<()> {
    let time = timeout.map(timespec);
    let at = time.as_ref().map_or(0, |time| std::ptr::from_ref(time) as usize);
    let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
    let arguments = [word.as_ptr() as usize, operation, value as usize, at, 0, 0];
    // SAFETY: word and time are valid until the call returns.
    unsafe { sleep_in_kernel(libc::SYS_futex, &arguments) }.map(|_| ())
}
