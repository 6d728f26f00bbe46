//! The end of a thread.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What has become of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    Ended,
    Panicked,
    /// It did not end in time, and runs on by itself.
    Runs,
}

/// Waits for the end of a thread that was told to end, no longer than `limit`. A thread that waits for
/// descriptors cannot be told if the program has closed them.
pub(crate) fn join_within(thread: JoinHandle<()>, limit: Duration) -> Joined {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_micros(20);
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return Joined::Runs;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    if thread.join().is_ok() { Joined::Ended } else { Joined::Panicked }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_that_does_not_end_is_left() {
        let (end, ended) = mpsc::channel::<()>();
        let runs = thread::spawn(move || drop(ended.recv()));
        assert_eq!(join_within(runs, Duration::from_millis(50)), Joined::Runs);
        drop(end);
        let long = Duration::from_secs(20);
        assert_eq!(join_within(thread::spawn(|| ()), long), Joined::Ended);
        let panics = thread::spawn(|| std::panic::resume_unwind(Box::new(())));
        assert_eq!(join_within(panics, long), Joined::Panicked);
    }
}
