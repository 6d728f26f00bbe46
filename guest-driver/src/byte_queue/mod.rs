// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queues of a connection: bytes written and not yet sent, records for TCP, unread bytes. Their memory is
//! limited for the process; the queue here has chunks of memory.

pub(crate) mod record_queue;
pub(crate) mod send_queue;
pub(crate) mod unread_bytes;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a chunk.
const CHUNK_LEN: usize = 64 << 10;
/// The most chunks of a process's queues: 128 MiB.
const MAX_CHUNKS: usize = 2048;

/// Number of chunks of the queues of this process. Relaxed: no other memory depends on the number.
static CHUNKS: AtomicUsize = AtomicUsize::new(0);

/// Called by the child of a fork: the chunks are its parent's.
pub(crate) fn forget_chunks() {
    CHUNKS.store(0, Ordering::Relaxed);
}

/// A piece of memory, counted.
#[derive(Debug)]
struct Chunk(Vec<u8>);

impl Chunk {
    /// `None`: the queues of this process have reached their limit of memory.
    fn new() -> Option<Chunk> {
        let one_more = |chunks| (chunks < MAX_CHUNKS).then_some(chunks + 1);
        CHUNKS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Chunk(Vec::with_capacity(CHUNK_LEN)))
    }

    fn room(&self) -> usize {
        CHUNK_LEN - self.0.len()
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let one_less = |chunks: usize| chunks.checked_sub(1);
        let _ = CHUNKS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }
}

/// Bytes written by a program and not yet sent. The last byte of a write may be urgent (MSG_OOB). The
/// queues of a process together have 128 MiB at most.
#[derive(Debug, Default)]
pub struct ByteQueue {
    chunks: VecDeque<Chunk>,
    /// Bytes of the first chunk already sent.
    start: usize,
    len: usize,
    /// Position of the urgent byte.
    urgent: Option<usize>,
}

/// The next bytes to send.
#[derive(Debug, PartialEq, Eq)]
pub enum BytePiece<'a> {
    /// Ordinary bytes, at least one.
    Ordinary(&'a [u8]),
    /// The urgent byte.
    Urgent(u8),
    /// Nothing.
    None,
}

impl ByteQueue {
    /// Whether the queue has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether one of the bytes is urgent.
    pub fn has_urgent(&self) -> bool {
        self.urgent.is_some()
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is memory for another byte.
    pub fn may_grow(&self) -> bool {
        CHUNKS.load(Ordering::Relaxed) < MAX_CHUNKS
            || self.chunks.back().is_some_and(|chunk| chunk.room() > 0)
    }

    /// Appends bytes, up to `limit` bytes in the queue or the memory limit of the process. Returns the
    /// number appended.
    pub fn append(&mut self, bytes: &[u8], limit: usize) -> usize {
        let mut rest =
            bytes.get(..bytes.len().min(limit.saturating_sub(self.len))).unwrap_or(bytes);
        let before = self.len;
        while !rest.is_empty() {
            if self.chunks.back().is_none_or(|chunk| chunk.room() == 0) {
                let Some(chunk) = Chunk::new() else { break };
                self.chunks.push_back(chunk);
            }
            let Some(Chunk(last)) = self.chunks.back_mut() else { break };
            let (now, later) = rest.split_at(rest.len().min(CHUNK_LEN - last.len()));
            last.extend_from_slice(now);
            self.len += now.len();
            rest = later;
        }
        self.len - before
    }

    /// Marks the last byte as urgent. An earlier urgent byte becomes an ordinary byte, as on TCP.
    pub fn mark_last_urgent(&mut self) {
        self.urgent = self.len.checked_sub(1);
    }

    /// The next bytes to send, as far as contiguous.
    pub fn next(&self) -> BytePiece<'_> {
        let Some(Chunk(first)) = self.chunks.front() else { return BytePiece::None };
        let bytes = first.get(self.start..).unwrap_or_default();
        match (self.urgent, bytes) {
            (Some(0), [byte, ..]) => BytePiece::Urgent(*byte),
            (_, []) => BytePiece::None,
            (Some(at), bytes) => BytePiece::Ordinary(bytes.get(..at).unwrap_or(bytes)),
            (None, bytes) => BytePiece::Ordinary(bytes),
        }
    }

    /// The first `n` bytes of [`ByteQueue::next`] are sent.
    pub fn remove(&mut self, n: usize) {
        let Some(first) = self.chunks.front() else { return };
        let n = n.min(first.0.len() - self.start);
        self.start += n;
        self.len -= n;
        self.urgent = self.urgent.and_then(|at| at.checked_sub(n));
        if self.start == first.0.len() {
            self.chunks.pop_front();
            self.start = 0;
        }
    }

    /// The queue's bytes in contiguous pieces, the urgent byte like the others.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let start = |at: usize| if at == 0 { self.start } else { 0 };
        let chunks = self.chunks.iter().enumerate();
        chunks.map(move |(at, chunk)| chunk.0.get(start(at)..).unwrap_or_default())
    }

    /// The queue's bytes, the urgent byte like the others.
    pub fn into_bytes(self) -> Vec<u8> {
        let parts = self.chunks.iter().map(|chunk| chunk.0.as_slice());
        let mut all: Vec<u8> = parts.collect::<Vec<_>>().concat();
        all.drain(..self.start);
        all
    }

    /// Moves the bytes of another queue behind the bytes of this one, regardless of the limits.
    pub fn append_queue(&mut self, mut other: ByteQueue) {
        if self.is_empty() {
            *self = other;
            return;
        }
        let at = other.urgent.map(|at| self.len + at);
        self.urgent = at.or(self.urgent);
        self.len += other.len;
        if let Some(first) = other.chunks.front_mut() {
            first.0.drain(..other.start);
        }
        // A chunk in the middle may be partly filled.
        self.chunks.append(&mut other.chunks);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Append { len: usize, limit: usize, urgent: bool },
        Remove(usize),
        Join { len: usize, removed: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        let len = prop_oneof![0usize..20, 0usize..200_000];
        prop_oneof![
            (len.clone(), 0usize..1_000_000, proptest::bool::weighted(0.2))
                .prop_map(|(len, limit, urgent)| Step::Append { len, limit, urgent }),
            len.clone().prop_map(Step::Remove),
            (len, 0usize..100).prop_map(|(len, removed)| Step::Join { len, removed }),
        ]
    }

    /// The bytes, and the position of the urgent one.
    #[derive(Default)]
    struct Model(Vec<u8>, Option<usize>);

    impl Model {
        fn remove(&mut self, n: usize) {
            self.0.drain(..n);
            self.1 = self.1.and_then(|at| at.checked_sub(n));
        }
    }

    /// Compares the next bytes, and takes up to `n` of them.
    fn take(queue: &mut ByteQueue, model: &mut Model, n: usize) -> usize {
        let taken = match queue.next() {
            BytePiece::None => {
                assert!(model.0.is_empty());
                return 0;
            }
            BytePiece::Urgent(byte) => {
                assert_eq!((model.1, model.0[0]), (Some(0), byte));
                1
            }
            BytePiece::Ordinary(bytes) => {
                assert!(!bytes.is_empty() && model.0.starts_with(bytes));
                assert!(model.1.is_none_or(|at| at >= bytes.len()));
                bytes.len().min(n)
            }
        };
        queue.remove(taken);
        model.remove(taken);
        taken
    }

    proptest! {
        #[test]
        fn it_is_a_queue(steps in proptest::collection::vec(step(), 1..40)) {
            let (mut queue, mut model) = (ByteQueue::default(), Model::default());
            let mut counter = 0u8;
            let mut bytes = |len: usize| -> Vec<u8> {
                counter = counter.wrapping_add(1);
                (0..len).map(|at| counter ^ (at % 251) as u8).collect()
            };
            for step in steps {
                match step {
                    Step::Append { len, limit, urgent } => {
                        let bytes = bytes(len);
                        let n = queue.append(&bytes, limit);
                        prop_assert_eq!(n, len.min(limit.saturating_sub(model.0.len())));
                        model.0.extend_from_slice(&bytes[..n]);
                        if urgent {
                            queue.mark_last_urgent();
                            model.1 = model.0.len().checked_sub(1);
                        }
                    }
                    Step::Remove(n) => {
                        let mut left = n.min(model.0.len());
                        while left > 0 {
                            left -= take(&mut queue, &mut model, left);
                        }
                    }
                    Step::Join { len, removed } => {
                        let mut other = ByteQueue::default();
                        let bytes = bytes(len);
                        other.append(&bytes, usize::MAX);
                        other.remove(removed);
                        let removed = removed.min(len);
                        queue.append_queue(other);
                        model.0.extend_from_slice(&bytes[removed..]);
                    }
                }
                prop_assert_eq!(queue.len(), model.0.len());
                prop_assert_eq!(queue.is_empty(), model.0.is_empty());
            }
            let mut copy = ByteQueue::default();
            copy.append(&model.0, usize::MAX);
            prop_assert_eq!(&copy.into_bytes(), &model.0);
            while take(&mut queue, &mut model, usize::MAX) > 0 {}
            prop_assert!(model.0.is_empty() && queue.chunks.is_empty());
        }
    }
}
