//! Waiting for callers that try without blocking first.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Conn, reader_view};
use crate::reactor::wait::{Waiter, clear_interrupted, was_interrupted};
use crate::sys::lock;

impl Conn {
    /// Adds a thread that is woken at every change.
    pub(crate) fn add_sleeper(&self, waiter: &Arc<Waiter>) {
        lock(&self.sleepers).push(waiter.clone());
        self.waiters.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`Conn::add_sleeper`].
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

    /// Waits until the words differ from `seen`, as far as that concerns a reader, or with `write`
    /// a writer.
    ///
    /// # Errors
    /// `WouldBlock` at the deadline; `Interrupted`: a signal was handled meanwhile.
    pub(crate) fn wait_for_change(
        &self,
        seen: [u64; 2],
        write: bool,
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        clear_interrupted();
        self.wait(&deadline.into(), || {
            let now = self.words();
            let changed = match write {
                true => now[1] != seen[1] || self.write_shut.load(Ordering::Acquire),
                false => {
                    reader_view(now) != reader_view(seen) || self.read_shut.load(Ordering::Acquire)
                }
            };
            changed || was_interrupted()
        })?;
        if was_interrupted() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}
