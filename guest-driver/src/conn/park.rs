//! Waiting from outside: for callers that try without blocking and wait by themselves.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Conn, lock, reader_view};
use crate::reactor::wait::{Waiter, clear_interrupted, was_interrupted};

impl Conn {
    /// Adds a thread that is woken at every change.
    pub(crate) fn add_sleeper(&self, waiter: &Arc<Waiter>) {
        lock(&self.sleepers).push(waiter.clone());
        self.waiters.fetch_add(1, Ordering::SeqCst);
    }

    /// Takes [`Conn::add_sleeper`] back.
    pub(crate) fn remove_sleeper(&self, waiter: &Arc<Waiter>) {
        let mut sleepers = lock(&self.sleepers);
        let Some(at) = sleepers.iter().position(|other| Arc::ptr_eq(other, waiter)) else { return };
        sleepers.swap_remove(at);
        drop(sleepers);
        if self.waiters.fetch_sub(1, Ordering::SeqCst) == 1
            && let Some(line) = self.carrier.line()
        {
            line.disarm();
        }
    }

    /// Waits until the words are not those seen any more, as far as they concern a reader or a
    /// writer.
    pub(crate) fn wait_for_change(
        &self,
        seen: [u64; 2],
        write: bool,
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        clear_interrupted();
        self.wait(&deadline.into(), || {
            let now = self.words();
            let moved = match write {
                true => now[1] != seen[1] || self.write_shut.load(Ordering::Acquire),
                false => {
                    reader_view(now) != reader_view(seen) || self.read_shut.load(Ordering::Acquire)
                }
            };
            moved || was_interrupted()
        })?;
        if was_interrupted() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}
