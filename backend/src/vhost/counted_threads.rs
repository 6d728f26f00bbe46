// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counted threads: the daemon knows the number of running threads.

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ism_device::sync::lock;

/// Stack of the daemon's own threads, bytes. None of them recurses or keeps large arrays.
const STACK: usize = 256 << 10;

/// Counts the threads of a device socket a front end can keep from ending. A thread still running without a
/// connected front end hangs.
#[derive(Clone, Debug, Default)]
pub(crate) struct CountedThreads {
    inner: Arc<(Mutex<usize>, Condvar)>,
}

struct Alive(CountedThreads);

impl Drop for Alive {
    fn drop(&mut self) {
        let (count, changed) = &*self.0.inner;
        *lock(count) -= 1;
        changed.notify_all();
    }
}

impl CountedThreads {
    /// Starts a detached thread, counted until its end.
    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        *lock(&self.inner.0) += 1;
        let alive = Alive(self.clone());
        thread::Builder::new().name(name.into()).stack_size(STACK).spawn(move || {
            let _alive = alive;
            work();
        })?;
        Ok(())
    }

    /// Number of running threads.
    pub(crate) fn alive(&self) -> usize {
        *lock(&self.inner.0)
    }

    /// Waits until at most `count` threads run; `false` after `limit`.
    pub(crate) fn wait_for(&self, count: usize, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let (alive, changed) = &*self.inner;
        let mut alive = lock(alive);
        while *alive > count {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            alive = match changed.wait_timeout(alive, left) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn counts_threads_until_they_end() {
        let threads = CountedThreads::default();
        let (go, wait) = mpsc::channel::<()>();
        threads
            .spawn("test", move || {
                let _ = wait.recv();
            })
            .unwrap();
        assert_eq!(threads.alive(), 1);
        assert!(!threads.wait_for(0, Duration::from_millis(10)));
        drop(go);
        assert!(threads.wait_for(0, smc_test_support::TIMEOUT));
        assert_eq!(threads.alive(), 0);
    }
}
