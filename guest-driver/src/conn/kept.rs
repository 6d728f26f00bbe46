// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unread bytes of a ring that a new one replaces, or that is full while the awaited record is behind
//! other records. These bytes are read first.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Conn, Rx};

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
pub(super) struct UnreadBytes {
    bytes: VecDeque<u8>,
    /// This connection's part of [`ALL`].
    counted: usize,
}

impl UnreadBytes {
    fn add(&mut self, bytes: &[u8]) {
        // By default, a queue grows by doubling.
        let wanted = (self.bytes.len() + bytes.len()).next_multiple_of(STEP);
        self.bytes.reserve_exact(wanted - self.bytes.len());
        self.bytes.extend(bytes);
        self.count();
    }

    /// Removes the first bytes. Memory not needed any more is freed in steps.
    fn remove(&mut self, number: usize) {
        self.bytes.drain(..number);
        let needed = self.bytes.len().next_multiple_of(STEP);
        if self.bytes.capacity() / 2 > needed {
            self.bytes.shrink_to(needed);
        }
        self.count();
    }

    fn count(&mut self) {
        let now = self.bytes.capacity();
        // Relaxed: a limit, possibly off by concurrent changes of other threads.
        match now.checked_sub(self.counted) {
            Some(more) => ALL.fetch_add(more, Ordering::Relaxed),
            None => ALL.fetch_sub(self.counted - now, Ordering::Relaxed),
        };
        self.counted = now;
    }

    /// Whether there is room for bytes waiting for a record, in this queue and in the process.
    fn has_room(&self, bytes: usize) -> bool {
        let more = (self.bytes.len() + bytes).next_multiple_of(STEP).saturating_sub(self.counted);
        self.bytes.len() < MOST && ALL.load(Ordering::Relaxed) + more <= MOST_OF_ALL
    }
}

impl Drop for UnreadBytes {
    fn drop(&mut self) {
        ALL.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

impl Rx {
    fn kept(&self) -> usize {
        self.kept.as_ref().map_or(0, |kept| kept.bytes.len())
    }

    /// Whether a new ring may begin, with this many unread bytes of the last one at most. Otherwise a
    /// peer leaving ring after ring, each full of unread bytes, would fill this process. Without kept
    /// bytes the answer does not depend on other connections.
    pub(super) fn may_begin_ring(&self, bytes: usize) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.has_room(bytes))
    }

    /// Bytes returned by reads before a wait, or up to an urgent mark.
    pub(super) fn readable(&self) -> usize {
        self.kept() + self.half.receiver.readable() as usize
    }
}

impl Conn {
    /// Reads kept bytes (at least one), and behind them bytes of the ring. With `peek` the bytes stay.
    /// Fewer bytes than room mean no more bytes, as on TCP: programs wait then, or check again only
    /// after new arrivals.
    #[cold]
    pub(super) fn recv_kept(
        &self,
        rx: &mut Rx,
        bufs: &mut [IoSliceMut<'_>],
        peek: bool,
    ) -> io::Result<usize> {
        let Some(kept) = &mut rx.kept else { return Ok(0) };
        let (mut done, mut rest) = (0, Vec::new());
        for buf in bufs {
            let end = kept.bytes.len().min(done + buf.len());
            let (now, later) = buf.split_at_mut(end - done);
            now.iter_mut().zip(kept.bytes.range(done..end)).for_each(|(to, from)| *to = *from);
            done = end;
            if !later.is_empty() {
                rest.push(IoSliceMut::new(later));
            }
        }
        if !peek {
            kept.remove(done);
            if kept.bytes.is_empty() {
                rx.kept = None;
            }
        }
        // A failure shows at the next read, and so does the end.
        if !rest.is_empty() && self.refresh_rx(rx).is_ok() && !rx.half.receiver.at_mark() {
            let n = self.copy_out(rx, &mut rest)?;
            done += n as usize;
            if !peek && n > 0 {
                self.consume(rx, n)?;
            }
        }
        if !peek {
            if self.end.reads_tcp() {
                // There may be room for more bytes of TCP.
                self.serve_tcp(rx);
            } else if rx.kept.is_none() {
                self.note_unread(rx, &mut self.tx());
            }
            if rx.readable() == 0 {
                self.note_empty(rx);
            }
        }
        Ok(done)
    }

    /// Takes unread bytes out of the ring, and keeps them. Returns their number.
    pub(super) fn keep_unread(&self, rx: &mut Rx) -> io::Result<usize> {
        self.refresh_rx(rx)?;
        let mut bytes = vec![0; rx.half.receiver.readable() as usize];
        let n = self.copy_out(rx, &mut [IoSliceMut::new(&mut bytes)])?;
        if n > 0 {
            self.consume(rx, n)?;
            bytes.truncate(n as usize);
            rx.kept.get_or_insert_default().add(&bytes);
        }
        Ok(n as usize)
    }

    /// Makes room in a ring for more bytes of TCP, because the awaited record is behind them. `false`:
    /// there is no room, and the program has to read.
    pub(super) fn make_room(&self, rx: &mut Rx) -> bool {
        if self.refresh_rx(rx).is_err() {
            return false;
        }
        let more = rx.half.receiver.readable() as usize;
        let has_room = match &rx.kept {
            Some(kept) => kept.has_room(more),
            None => UnreadBytes::default().has_room(more),
        };
        has_room && self.keep_unread(rx).is_ok_and(|n| n > 0)
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
