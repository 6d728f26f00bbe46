// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One descriptor chain as a stream of bytes: the split into descriptors has no meaning.

use thiserror::Error;
use virtio_ism_abi::command::SgEntry;
use virtio_ism_abi::config::Config;
use virtio_ism_abi::mv::{MoveHeader, Segment};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, ReadVolatile, VolatileMemoryError,
    VolatileSlice, bitmap::BitmapSlice,
};

/// Most descriptors in a chain: the size of the largest queue this device accepts.
pub(super) const MAX_DESCRIPTORS: usize = 1024;

/// Why a queue is unusable.
#[derive(Debug, Error)]
pub(super) enum ChainError {
    /// Ring memory is out of reach, or the avail index runs ahead.
    #[error("ring: {0}")]
    Ring(#[from] virtio_queue::Error),
    /// A loop, an index out of range, an unreadable descriptor, or a nested indirect table.
    #[error("chain {head} does not end properly")]
    Malformed {
        /// Head of the chain.
        head: u16,
    },
    /// The chain has more than [`MAX_DESCRIPTORS`] descriptors.
    #[error("chain {head} has too many descriptors")]
    TooLong {
        /// Head of the chain.
        head: u16,
    },
    /// The driver announced a chain, but the avail ring is unreadable.
    #[error("the avail ring cannot be read")]
    Avail,
    /// A required part of a chain is not accessible.
    #[error("chain {head} points outside of guest memory")]
    Unreachable {
        /// Head of the chain.
        head: u16,
    },
}

/// A piece of a chain, guest-physical.
#[derive(Clone, Copy, Debug)]
struct DescriptorBuffer {
    addr: GuestAddress,
    len: u32,
}

/// A chain taken from a queue. The buffers are reused for the next chain.
#[derive(Debug, Default)]
pub(super) struct Chain {
    head: u16,
    readable: Vec<DescriptorBuffer>,
    writable: Vec<DescriptorBuffer>,
    readable_len: u64,
    writable_len: u64,
}

/// Where the reply to a waiting command goes.
#[derive(Debug)]
pub(super) struct PendingReply {
    /// Head of the chain.
    pub(super) head: u16,
    /// The ring's generation when the chain was taken.
    pub(super) generation: u32,
    writable: Vec<DescriptorBuffer>,
}

impl Chain {
    /// Takes the next chain. `false`: the queue is empty.
    pub(super) fn pop(
        &mut self,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
    ) -> Result<bool, ChainError> {
        self.readable.clear();
        self.writable.clear();
        (self.readable_len, self.writable_len) = (0, 0);
        let Some(mut chain) = queue.iter(memory)?.next() else { return Ok(false) };
        self.head = chain.head_index();
        let head = self.head;
        let mut last: Option<Descriptor> = None;
        for descriptor in chain.by_ref() {
            if self.readable.len() + self.writable.len() == MAX_DESCRIPTORS {
                return Err(ChainError::TooLong { head });
            }
            let piece = DescriptorBuffer { addr: descriptor.addr(), len: descriptor.len() };
            if descriptor.is_write_only() {
                self.writable.push(piece);
                self.writable_len += u64::from(piece.len);
            } else {
                self.readable.push(piece);
                self.readable_len += u64::from(piece.len);
            }
            last = Some(descriptor);
        }
        // The iterator ends the same way after the last descriptor and at a broken one.
        match last {
            Some(last) if !last.has_next() => Ok(true),
            _ => Err(ChainError::Malformed { head }),
        }
    }

    /// Index of the chain's first descriptor.
    pub(super) fn head(&self) -> u16 {
        self.head
    }

    /// Bytes the device may read.
    pub(super) fn readable_len(&self) -> u64 {
        self.readable_len
    }

    /// Bytes the device may write.
    pub(super) fn writable_len(&self) -> u64 {
        self.writable_len
    }

    /// Reads from the start of the readable part.
    pub(super) fn reader<'a>(&'a self, memory: &'a GuestMemoryMmap) -> Reader<'a> {
        Reader { memory, buffers: &self.readable, head: self.head, done: 0 }
    }

    /// Whether the first `len` writable bytes lie in guest memory.
    pub(super) fn can_write(&self, memory: &GuestMemoryMmap, len: usize) -> bool {
        let mut left = len;
        for piece in &self.writable {
            let take = left.min(piece.len as usize);
            if take != 0 && !GuestMemoryBackend::check_range(memory, piece.addr, take) {
                return false;
            }
            left -= take;
        }
        left == 0
    }

    /// Writes from the start of the writable part; truncates bytes beyond the end.
    pub(super) fn write(&self, memory: &GuestMemoryMmap, bytes: &[u8]) -> Result<u32, ChainError> {
        write(memory, &self.writable, bytes, self.head)
    }

    /// Keeps the head and the writable buffers for a later reply.
    pub(super) fn suspend(&mut self, generation: u32) -> PendingReply {
        PendingReply { head: self.head, generation, writable: std::mem::take(&mut self.writable) }
    }
}

impl PendingReply {
    /// Like [`Chain::write`].
    pub(super) fn write(&self, memory: &GuestMemoryMmap, bytes: &[u8]) -> Result<u32, ChainError> {
        write(memory, &self.writable, bytes, self.head)
    }
}

fn write(
    memory: &GuestMemoryMmap,
    buffers: &[DescriptorBuffer],
    bytes: &[u8],
    head: u16,
) -> Result<u32, ChainError> {
    let mut rest = bytes;
    for piece in buffers {
        let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
        memory.write_slice(now, piece.addr).map_err(|_| ChainError::Unreachable { head })?;
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    Ok(u32::try_from(bytes.len() - rest.len()).unwrap_or(u32::MAX))
}

/// Reads the readable part of a chain as one stream of bytes.
pub(super) struct Reader<'a> {
    memory: &'a GuestMemoryMmap,
    buffers: &'a [DescriptorBuffer],
    head: u16,
    /// Bytes already read from the first piece.
    done: u32,
}

impl Reader<'_> {
    /// Copies into a private buffer. The count is short only at the end of the chain.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ChainError> {
        let mut filled = 0;
        while let Some(space) = buffer.get_mut(filled..).filter(|space| !space.is_empty()) {
            let Some((addr, left)) = self.next_piece() else { break };
            let take = space.len().min(left as usize);
            let Some(target) = space.get_mut(..take) else { break };
            self.memory
                .read_slice(target, addr)
                .map_err(|_| ChainError::Unreachable { head: self.head })?;
            self.advance(take);
            filled += take;
        }
        Ok(filled)
    }

    /// Whether the whole rest lies in guest memory.
    pub(super) fn rest_is_reachable(&self) -> bool {
        let mut rest = Reader { ..*self };
        while let Some((addr, len)) = rest.next_piece() {
            if !GuestMemoryBackend::check_range(rest.memory, addr, len as usize) {
                return false;
            }
            rest.advance(len as usize);
        }
        rest.buffers.is_empty()
    }

    /// Address and length of the next piece; skips empty buffers.
    fn next_piece(&mut self) -> Option<(GuestAddress, u32)> {
        while let Some((piece, rest)) = self.buffers.split_first() {
            if self.done < piece.len {
                let addr = piece.addr.0.checked_add(u64::from(self.done))?;
                return Some((GuestAddress(addr), piece.len - self.done));
            }
            self.buffers = rest;
            self.done = 0;
        }
        None
    }

    fn advance(&mut self, bytes: usize) {
        // Never more than the rest of the piece, a u32.
        self.done += bytes as u32;
    }
}

impl ReadVolatile for Reader<'_> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buf: &mut VolatileSlice<B>,
    ) -> Result<usize, VolatileMemoryError> {
        let Some((addr, left)) = self.next_piece() else { return Ok(0) };
        let want = buf.len().min(left as usize);
        // A piece may span regions: the first contiguous part is enough for one call.
        let source = match GuestMemoryBackend::get_slices(self.memory, addr, want).next() {
            Some(Ok(slice)) => slice,
            Some(Err(_)) => return Err(VolatileMemoryError::OutOfBounds { addr: addr.0 as usize }),
            None => return Ok(0),
        };
        let take = source.len();
        source.copy_to_volatile_slice(buf.subslice(0, take)?);
        self.advance(take);
        Ok(take)
    }
}

/// The buffers of a worker, made once.
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) chain: Chain,
    /// Private copy of a request, or of a move's header and segments.
    pub(super) bytes: Vec<u8>,
    /// Most segments of a move.
    pub(super) max_segs: usize,
}

impl Scratch {
    /// Buffers for the requests of a device with this configuration.
    pub(super) fn new(config: &Config) -> Scratch {
        let max_segs = usize::from(config.max_segs.get());
        let head = size_of::<MoveHeader>() + max_segs * size_of::<Segment>();
        let request = 8 + 40 + usize::from(config.max_sg.get()) * size_of::<SgEntry>();
        // One byte more than the longest request, to detect a longer request.
        Scratch { chain: Chain::default(), bytes: vec![0; head.max(request + 1)], max_segs }
    }
}

#[cfg(test)]
mod exhaustive;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use virtio_bindings::bindings::virtio_ring::{
        VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    };
    use virtio_queue::QueueT;

    pub(super) const NEXT: u16 = VRING_DESC_F_NEXT as u16;
    pub(super) const WRITE: u16 = VRING_DESC_F_WRITE as u16;
    pub(super) const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;
    pub(super) const TABLE: u64 = 0x1000;
    pub(super) const AVAIL: u64 = 0x2000;
    const SIZE: u16 = 8;

    pub(super) struct Ring {
        pub(super) memory: GuestMemoryMmap,
        pub(super) queue: Queue,
    }

    impl Ring {
        fn new() -> Ring {
            Ring::with_size(SIZE)
        }

        pub(super) fn with_size(size: u16) -> Ring {
            // Two regions that touch, so that a piece can span them.
            let ranges = [(GuestAddress(0), 0x8000), (GuestAddress(0x8000), 0x8000)];
            let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
            let mut queue = Queue::new(size).unwrap();
            queue.try_set_desc_table_address(GuestAddress(TABLE)).unwrap();
            queue.try_set_avail_ring_address(GuestAddress(AVAIL)).unwrap();
            queue.try_set_used_ring_address(GuestAddress(0x3000)).unwrap();
            queue.set_ready(true);
            Ring { memory, queue }
        }

        pub(super) fn descriptor(&self, at: u64, addr: u64, len: u32, flags: u16, next: u16) {
            let at = GuestAddress(at);
            self.memory.write_obj(Descriptor::new(addr, len, flags, next), at).unwrap();
        }

        pub(super) fn offer(&self, head: u16) {
            self.memory.write_obj(head.to_le(), GuestAddress(AVAIL + 4)).unwrap();
            self.memory.write_obj(1u16.to_le(), GuestAddress(AVAIL + 2)).unwrap();
        }

        pub(super) fn pop(&mut self) -> Result<Chain, ChainError> {
            let mut chain = Chain::default();
            assert!(chain.pop(&mut self.queue, &self.memory)?);
            Ok(chain)
        }
    }

    #[test]
    fn an_empty_ring_gives_nothing() {
        let mut ring = Ring::new();
        assert!(!Chain::default().pop(&mut ring.queue, &ring.memory).unwrap());
    }

    #[test]
    fn a_loop_is_malformed() {
        let mut ring = Ring::new();
        ring.descriptor(TABLE, 0x4000, 4, NEXT, 1);
        ring.descriptor(TABLE + 16, 0x4000, 4, NEXT, 0);
        ring.offer(0);
        assert!(matches!(ring.pop(), Err(ChainError::Malformed { head: 0 })));
    }

    #[test]
    fn an_index_beyond_the_table_is_malformed() {
        let mut ring = Ring::new();
        ring.descriptor(TABLE, 0x4000, 4, NEXT, SIZE);
        ring.offer(0);
        assert!(matches!(ring.pop(), Err(ChainError::Malformed { head: 0 })));
        let mut ring = Ring::new();
        ring.offer(SIZE);
        assert!(matches!(ring.pop(), Err(ChainError::Malformed { head: SIZE })));
    }

    #[test]
    fn an_indirect_table_in_an_indirect_table_is_malformed() {
        let mut ring = Ring::new();
        ring.descriptor(TABLE, 0x5000, 32, INDIRECT, 0);
        ring.descriptor(0x5000, 0x4000, 4, NEXT, 1);
        ring.descriptor(0x5010, 0x5000, 32, INDIRECT, 0);
        ring.offer(0);
        assert!(matches!(ring.pop(), Err(ChainError::Malformed { .. })));
    }

    #[test]
    fn a_loop_in_a_huge_indirect_table_is_cut() {
        let mut ring = Ring::new();
        ring.descriptor(TABLE, 0x5000, 16 * 2000, INDIRECT, 0);
        ring.descriptor(0x5000, 0x4000, 4, NEXT, 0);
        ring.offer(0);
        assert!(matches!(ring.pop(), Err(ChainError::TooLong { .. })));
    }

    #[test]
    fn an_avail_index_that_runs_ahead_is_an_error() {
        let mut ring = Ring::new();
        ring.memory.write_obj((SIZE + 1).to_le(), GuestAddress(AVAIL + 2)).unwrap();
        assert!(matches!(ring.pop(), Err(ChainError::Ring(_))));
    }

    #[test]
    fn a_chain_outside_of_memory_is_found_when_used() {
        let mut ring = Ring::new();
        ring.descriptor(TABLE, 0xfffe, 4, NEXT, 1);
        ring.descriptor(TABLE + 16, u64::MAX - 1, 4, WRITE, 0);
        ring.offer(0);
        let chain = ring.pop().unwrap();
        let mut buffer = [0; 4];
        let read = chain.reader(&ring.memory).read(&mut buffer);
        assert!(matches!(read, Err(ChainError::Unreachable { .. })));
        assert!(!chain.reader(&ring.memory).rest_is_reachable());
        assert!(!chain.can_write(&ring.memory, 4));
        assert!(chain.write(&ring.memory, &[1; 4]).is_err());
    }

    proptest! {
        /// Any split of the same bytes reads and writes the same.
        #[test]
        fn framing_means_nothing(
            cuts in prop::collection::vec(0u32..40, 1..7),
            first in 0usize..50,
        ) {
            let mut ring = Ring::new();
            let total: u32 = cuts.iter().sum();
            let bytes: Vec<u8> = (0..total as u8).collect();
            let mut addr = 0x8000 - u64::from(total / 2); // across the border of the regions
            ring.memory.write_slice(&bytes, GuestAddress(addr)).unwrap();
            let mut writable = 0x9000;
            for (i, len) in cuts.iter().enumerate() {
                ring.descriptor(TABLE + 16 * i as u64, addr, *len, NEXT, i as u16 + 1);
                addr += u64::from(*len);
            }
            let n = cuts.len() as u64;
            ring.descriptor(TABLE + 16 * n, writable, 3, WRITE, 0);
            writable += 3;
            ring.offer(0);
            let chain = ring.pop().unwrap();
            prop_assert_eq!(chain.readable_len(), u64::from(total));
            prop_assert_eq!(chain.writable_len(), 3);

            // A private part first, the rest through volatile slices.
            let mut reader = chain.reader(&ring.memory);
            let mut head = vec![0; first];
            let n = reader.read(&mut head).unwrap();
            prop_assert_eq!(n, first.min(bytes.len()));
            prop_assert_eq!(&head[..n], &bytes[..n]);
            prop_assert!(reader.rest_is_reachable());
            let mut rest = vec![0; bytes.len() - n];
            reader.read_exact_volatile(&mut VolatileSlice::from(rest.as_mut_slice())).unwrap();
            prop_assert_eq!(&rest[..], &bytes[n..]);

            prop_assert_eq!(chain.write(&ring.memory, &[7, 8, 9, 10]).unwrap(), 3);
            let mut back = [0; 3];
            ring.memory.read_slice(&mut back, GuestAddress(writable - 3)).unwrap();
            prop_assert_eq!(back, [7, 8, 9]);
        }
    }
}
