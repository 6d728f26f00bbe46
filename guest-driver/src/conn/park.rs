// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting, for callers that try without blocking first.

use std::io;
use std::time::Instant;

use ism_sys::interrupt::listening;
use smc_core::stream::reader_view;

use super::Conn;
use crate::reactor::wait::{clear_interrupted, was_interrupted};

impl Conn {
    /// Waits until the words differ from `seen`, in the part relevant to a reader, or with `write` to a
    /// writer.
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
        // The kernel restarts a sleep on a word after a handler with SA_RESTART, as in calls without a
        // time limit.
        let (end, on_word) = (deadline.into(), deadline.is_none());
        let look = self.look();
        listening(|| match write {
            true => self.await_room(&end, on_word, seen[1], was_interrupted),
            false => self.await_bytes(&end, on_word, || {
                let read_shut = || self.end.is_read_shut();
                reader_view(look.words()) != reader_view(seen)
                    || look.is_over()
                    || read_shut()
                    || was_interrupted()
            }),
        })?;
        if was_interrupted() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}
