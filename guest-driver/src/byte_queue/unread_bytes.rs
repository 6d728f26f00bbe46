// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unread bytes of a ring that a new one replaces, or that is full while the awaited record is behind
//! other records. These bytes are read first.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicUsize, Ordering};

/// With this many bytes kept, no more are added: more than the initial size of TCP's buffers of both
/// ends.
const MOST: usize = 8 << 20;
/// The most bytes kept by the connections of the process together while they wait for a record. Their
/// peers decide on the end of the wait, so beyond this limit connections leave bytes in TCP, and the
/// kernel holds the peers back.
const MOST_OF_ALL: usize = 64 << 20;
/// The step by which the memory of a connection grows.
const STEP: usize = 512 << 10;

/// Memory of the [`UnreadBytes`] of the process. The child of a fork inherits its parent's.
static ALL: AtomicUsize = AtomicUsize::new(0);

/// The kept bytes of a connection.
#[derive(Debug, Default)]
pub(crate) struct UnreadBytes {
    pub(crate) bytes: VecDeque<u8>,
    /// This connection's part of [`ALL`].
    counted: usize,
}

impl UnreadBytes {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        // By default, a queue grows by doubling.
        let wanted = (self.bytes.len() + bytes.len()).next_multiple_of(STEP);
        self.bytes.reserve_exact(wanted - self.bytes.len());
        self.bytes.extend(bytes);
        self.count();
    }

    /// Removes the first bytes. Memory not needed any more is freed in steps.
    pub(crate) fn remove(&mut self, number: usize) {
        self.bytes.drain(..number);
        let needed = self.bytes.len().next_multiple_of(STEP);
        if self.bytes.capacity() / 2 > needed {
            self.bytes.shrink_to(needed);
        }
        self.count();
    }

    pub(crate) fn count(&mut self) {
        let now = self.bytes.capacity();
        // Relaxed: a limit, possibly off by concurrent changes of other threads.
        match now.checked_sub(self.counted) {
            Some(more) => ALL.fetch_add(more, Ordering::Relaxed),
            None => ALL.fetch_sub(self.counted - now, Ordering::Relaxed),
        };
        self.counted = now;
    }

    /// Copies the first bytes into the slices. Returns their number, and the slices not filled.
    pub(crate) fn copy_out<'a>(
        &self,
        bufs: &'a mut [IoSliceMut<'_>],
    ) -> (usize, Vec<IoSliceMut<'a>>) {
        let (mut done, mut rest) = (0, Vec::new());
        for buf in bufs {
            let end = self.bytes.len().min(done + buf.len());
            let (now, later) = buf.split_at_mut(end - done);
            now.iter_mut().zip(self.bytes.range(done..end)).for_each(|(to, from)| *to = *from);
            done = end;
            if !later.is_empty() {
                rest.push(IoSliceMut::new(later));
            }
        }
        (done, rest)
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is room for bytes waiting for a record, in this queue and in the process.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        let more = (self.bytes.len() + bytes).next_multiple_of(STEP).saturating_sub(self.counted);
        self.bytes.len() < MOST && ALL.load(Ordering::Relaxed) + more <= MOST_OF_ALL
    }
}

impl Drop for UnreadBytes {
    fn drop(&mut self) {
        ALL.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_connections_keep_a_limited_sum_and_give_it_back() {
        let ring = vec![7; 256 << 10];
        let mut all = Vec::new();
        // More connections than the total limit allows. Other tests keep nothing.
        for _ in 0..100 {
            let mut kept = UnreadBytes::default();
            while kept.has_room(ring.len()) {
                kept.add(&ring);
            }
            all.push(kept);
        }
        let held: usize = all.iter().map(|kept| kept.bytes.capacity()).sum();
        assert!(held <= MOST_OF_ALL && held > MOST_OF_ALL - (1 << 20), "{held}");
        assert!(all.iter().all(|kept| kept.bytes.capacity() <= MOST + STEP));
        assert_eq!(ALL.load(Ordering::Relaxed), held);
        // A reading program lets its connection continue.
        let first = all.first_mut().unwrap();
        let len = first.bytes.len();
        first.remove(len - 10);
        assert!(first.bytes.iter().eq(&[7; 10]) && first.bytes.capacity() <= STEP);
        assert!(all.last().unwrap().has_room(ring.len()));
        drop(all);
        assert_eq!(ALL.load(Ordering::Relaxed), 0);
    }
}
