// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a thread.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What has become of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinOutcome {
    /// It has ended.
    Ended,
    /// It has panicked.
    Panicked,
    /// It did not end in time, and runs on by itself.
    Runs,
}

/// Waits for the end of a thread that was told to end, no longer than `limit`. A thread that waits for
/// descriptors cannot be told if the program has closed them.
pub fn join_within(thread: JoinHandle<()>, limit: Duration) -> JoinOutcome {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_micros(20);
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return JoinOutcome::Runs;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    if thread.join().is_ok() { JoinOutcome::Ended } else { JoinOutcome::Panicked }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_that_does_not_end_is_left() {
        let (end, ended) = mpsc::channel::<()>();
        let runs = thread::spawn(move || ended.recv().unwrap_or_default());
        assert_eq!(join_within(runs, Duration::from_millis(50)), JoinOutcome::Runs);
        drop(end);
        let long = Duration::from_secs(20);
        assert_eq!(join_within(thread::spawn(|| ()), long), JoinOutcome::Ended);
        let panics = thread::spawn(|| std::panic::resume_unwind(Box::new(())));
        assert_eq!(join_within(panics, long), JoinOutcome::Panicked);
    }
}
