// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver side of one virtqueue (split ring) in memory shared with a device.
//!
//! A buffer comes with both its addresses, in this process and on the bus, so sharing needs no lookup. The
//! device may write anything at any time: descriptors and indices of the driver are kept in private memory,
//! and an id not in flight is an error. All words are little-endian (virtio 1.3, 2.7), whatever the machine.
//!
//! Notifications follow the rules of EVENT_IDX (virtio 1.3, 2.7.7 and 2.7.10), with the needed fences.

use std::sync::atomic::{Ordering, fence};

use ism_sys::SharedSlice;

#[cfg(test)]
pub(crate) mod device;
#[cfg(test)]
mod tests;
mod types;

pub use types::{DmaSpan, QueueAddresses, SplitQueueError, UsedChain};

/// Flag of a descriptor: another one follows.
const NEXT: u16 = 1;
/// Flag of a descriptor: the device writes the buffer.
const WRITE: u16 = 2;

#[derive(Clone, Copy)]
struct InFlight {
    // The descriptor behind the head.
    second: Option<u16>,
    room: u32,
    cookie: u32,
}

/// The driver side of a virtqueue with `N` entries (a power of two).
pub struct SplitQueue<const N: usize> {
    addresses: QueueAddresses,
    pool: SharedSlice,
    // Holds the descriptors, and at the offsets below the rings.
    memory: SharedSlice,
    event_idx: bool,
    // Descriptors in no chain.
    free: Vec<u16>,
    // By the head of the chain.
    in_flight: Box<[Option<InFlight>]>,
    // Chains added (the available index) and popped (the last used index), modulo 2^16.
    added: u16,
    popped: u16,
    // The available index when `must_kick` was last asked.
    announced: u16,
    armed: bool,
    broken: Option<SplitQueueError>,
}

impl<const N: usize> SplitQueue<N> {
    /// Offset of the available ring: flags, index, `N` heads, used event.
    const AVAILABLE: usize = {
        assert!(N.is_power_of_two() && N <= 1 << 15);
        16 * N
    };

    /// Offset of the used ring: flags, index, `N` elements, available event. No cache line holds words of
    /// both sides.
    const USED: usize = (Self::AVAILABLE + 2 * (3 + N)).next_multiple_of(128);

    /// Bytes of memory needed by the ring.
    pub const MEMORY: usize = Self::USED + 2 * 3 + 8 * N;

    /// Alignment of the descriptors (virtio 1.3, 2.7), bytes.
    const ALIGN: usize = 16;

    /// Makes an empty queue for buffers in `pool`, with interrupts suppressed. Its rings lie in `memory`,
    /// contiguous on the bus from bus address `gpa`.
    ///
    /// # Errors
    /// `memory` is too small or not aligned to 16 bytes.
    pub fn new(
        pool: SharedSlice,
        memory: SharedSlice,
        gpa: u64,
        event_idx: bool,
    ) -> Result<SplitQueue<N>, SplitQueueError> {
        let refused = SplitQueueError::Memory { address: memory.address(), len: memory.len() };
        let is_aligned = (memory.address() as u64 | gpa).is_multiple_of(Self::ALIGN as u64);
        if memory.len() < Self::MEMORY || !is_aligned {
            return Err(refused);
        }
        memory.zero(0, Self::MEMORY).map_err(|_| refused)?;
        let mut ring = SplitQueue {
            addresses: QueueAddresses {
                size: N as u16,
                descriptors: gpa,
                available: gpa + Self::AVAILABLE as u64,
                used: gpa + Self::USED as u64,
            },
            pool,
            memory,
            event_idx,
            free: (0..N as u16).rev().collect(),
            in_flight: vec![None; N].into_boxed_slice(),
            added: 0,
            popped: 0,
            announced: 0,
            armed: true,
            broken: None,
        };
        ring.suppress();
        Ok(ring)
    }

    /// Where the device finds the rings.
    pub fn addresses(&self) -> QueueAddresses {
        self.addresses
    }

    /// Number of free descriptors.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Makes a chain available to the device: a readable part, then a writable part (at least one
    /// of them). The caller must not access either part until the chain comes back with `cookie`.
    /// Ask [`must_kick`](Self::must_kick) afterwards.
    ///
    /// # Errors
    /// The ring is full or broken, or a buffer is not in the pool.
    pub fn add(
        &mut self,
        readable: Option<DmaSpan>,
        writable: Option<DmaSpan>,
        cookie: u32,
    ) -> Result<(), SplitQueueError> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        for span in [readable, writable].into_iter().flatten() {
            self.check(span)?;
        }
        let (first, flags) = match (readable, writable) {
            (Some(readable), _) => (readable, 0),
            (None, Some(writable)) => (writable, WRITE),
            (None, None) => return Err(SplitQueueError::Full),
        };
        let both = readable.and(writable);
        if self.free.len() < 1 + usize::from(both.is_some()) {
            return Err(SplitQueueError::Full);
        }
        let head = self.free.pop().ok_or(SplitQueueError::Full)?;
        let second = both.and_then(|span| {
            let second = self.free.pop()?;
            self.describe(second, span, WRITE, None);
            Some(second)
        });
        self.describe(head, first, flags, second);
        self.in_flight[usize::from(head)] =
            Some(InFlight { second, room: writable.map_or(0, |span| span.len), cookie });
        let slot = usize::from(self.added) % N;
        self.store_u16(Self::AVAILABLE + 4 + 2 * slot, head);
        self.added = self.added.wrapping_add(1);
        // The Release of this store is for the device's Acquire of the index: descriptors and head come first.
        self.store_u16(Self::AVAILABLE + 2, self.added);
        Ok(())
    }

    /// Whether the device wants a notification of the chains added since the last call.
    pub fn must_kick(&mut self) -> bool {
        let (old, new) = (self.announced, self.added);
        if old == new {
            return false;
        }
        self.announced = new;
        // Orders the store of the available index before the load of the device's event index. The
        // device stores its event index, fences, and loads the available index.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.load_u16(Self::USED + 4 + 8 * N);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.load_u16(Self::USED) & 1 == 0
        }
    }

    /// The next chain used by the device.
    ///
    /// # Errors
    /// The device broke the rules; the queue can no longer be used.
    pub fn pop(&mut self) -> Result<Option<UsedChain>, SplitQueueError> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        if !self.can_pop() {
            return Ok(None);
        }
        let element = Self::USED + 4 + 8 * (usize::from(self.popped) % N);
        let (id, written) = (self.load_u32(element), self.load_u32(element + 4));
        let slot = usize::try_from(id).ok().and_then(|id| self.in_flight.get_mut(id));
        let Some(chain) = slot.and_then(Option::take) else {
            let error = SplitQueueError::BadCompletion { id };
            self.broken = Some(error);
            return Err(error);
        };
        self.free.extend(chain.second);
        self.free.push(id as u16);
        self.popped = self.popped.wrapping_add(1);
        if !self.armed && self.popped.is_multiple_of(1 << 12) {
            // The event index must stay far from the used index.
            self.suppress_now();
        }
        Ok(Some(UsedChain { cookie: chain.cookie, written: written.min(chain.room) }))
    }

    /// Whether [`pop`](Self::pop) returns a chain or an error.
    pub fn can_pop(&self) -> bool {
        // The Acquire of this load makes the element and the written bytes visible.
        self.broken.is_some() || self.load_u16(Self::USED + 2) != self.popped
    }

    /// Asks for one interrupt at the next completion. `false`: there is a completion already, so do
    /// not wait for the interrupt.
    pub fn arm(&mut self) -> bool {
        self.armed = true;
        if self.event_idx {
            self.store_u16(Self::AVAILABLE + 4 + 2 * N, self.popped);
        } else {
            self.store_u16(Self::AVAILABLE, 0);
        }
        // Orders the store of the event index before the load of the used index. The device stores
        // the used index, fences, and loads the event index.
        fence(Ordering::SeqCst);
        !self.can_pop()
    }

    /// Asks for no interrupts. A pending interrupt may still come.
    pub fn suppress(&mut self) {
        if self.armed {
            self.armed = false;
            self.suppress_now();
        }
    }

    fn suppress_now(&self) {
        if self.event_idx {
            // An index just passed: 65,535 completions away.
            self.store_u16(Self::AVAILABLE + 4 + 2 * N, self.popped.wrapping_sub(1));
        } else {
            self.store_u16(Self::AVAILABLE, 1);
        }
    }

    /// Whether the pool has the whole buffer.
    fn check(&self, span: DmaSpan) -> Result<(), SplitQueueError> {
        let refused = SplitQueueError::Buffer(span);
        let offset = span.address.checked_sub(self.pool.address()).ok_or(refused)?;
        let len = span.len as usize;
        if len == 0 || offset > self.pool.len() || len > self.pool.len() - offset {
            return Err(refused);
        }
        Ok(())
    }

    /// Writes a descriptor: address, length, flags, next descriptor.
    fn describe(&self, descriptor: u16, span: DmaSpan, flags: u16, next: Option<u16>) {
        let (flags, next) = next.map_or((flags, 0), |next| (flags | NEXT, next));
        let rest = u64::from(span.len) | u64::from(flags) << 32 | u64::from(next) << 48;
        let at = 16 * usize::from(descriptor);
        for (at, word) in [(at, span.gpa), (at + 8, rest)] {
            if let Ok(place) = self.memory.atomic_u64(at) {
                place.store(word.to_le(), Ordering::Relaxed);
            }
        }
    }

    // The offsets of words are the ring's own: in bounds and aligned.

    fn load_u16(&self, offset: usize) -> u16 {
        let word = self.memory.atomic_u16(offset);
        word.map_or(0, |word| u16::from_le(word.load(Ordering::Acquire)))
    }

    fn load_u32(&self, offset: usize) -> u32 {
        let word = self.memory.atomic_u32(offset);
        word.map_or(0, |word| u32::from_le(word.load(Ordering::Relaxed)))
    }

    fn store_u16(&self, offset: usize, value: u16) {
        if let Ok(word) = self.memory.atomic_u16(offset) {
            word.store(value.to_le(), Ordering::Release);
        }
    }
}
