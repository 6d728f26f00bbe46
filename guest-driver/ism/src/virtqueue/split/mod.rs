// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver side of one virtqueue (split ring) in memory shared with a device.
//!
//! `virtio-drivers`' `VirtQueue` keeps descriptors and rings; this wrapper makes the queue safe to use and
//! adds:
//!
//! - Addresses: a buffer comes with both its addresses, in this process and on the bus. Sharing needs no
//!   lookup, and one process can have any number of devices.
//! - Completions: an id not in flight is an error, never a panic.
//! - Notifications: this wrapper applies the rules of EVENT_IDX (virtio 1.3, 2.7.7 and 2.7.10), with the
//!   needed fences. `VirtQueue` itself runs with the feature off and so never touches `used_event`.

use std::sync::atomic::{Ordering, fence};

use virtio_drivers::PAGE_SIZE;
use virtio_drivers::queue::VirtQueue;

use ism_sys::SharedSlice;

#[cfg(test)]
pub(crate) mod device;
mod hal;
#[cfg(test)]
mod tests;
mod types;

pub use types::{DmaSpan, QueueAddresses, SplitQueueError, UsedChain};

use hal::{AddressCatcher, SharedHal, with_ring_memory, with_translation};

#[derive(Clone, Copy)]
struct InFlight {
    readable: Option<DmaSpan>,
    writable: Option<DmaSpan>,
    cookie: u32,
}

/// The driver side of a virtqueue with `N` entries (a power of two).
pub struct SplitQueue<const N: usize> {
    queue: Box<VirtQueue<SharedHal, N>>,
    addresses: QueueAddresses,
    pool: SharedSlice,
    // Holds the rings, at the offsets below.
    memory: SharedSlice,
    available_at: usize,
    used_at: usize,
    event_idx: bool,
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
    /// Bytes of page-aligned memory needed by the ring.
    pub const MEMORY: usize = {
        let driver = 16 * N + 2 * (3 + N);
        let device = 2 * 3 + 8 * N;
        driver.next_multiple_of(PAGE_SIZE) + device.next_multiple_of(PAGE_SIZE)
    };

    /// Makes an empty queue for buffers in `pool`, with interrupts suppressed. Its rings lie in `memory`,
    /// contiguous on the bus from bus address `gpa`.
    ///
    /// # Errors
    /// `memory` is too small or not page-aligned.
    pub fn new(
        pool: SharedSlice,
        memory: SharedSlice,
        gpa: u64,
        event_idx: bool,
    ) -> Result<SplitQueue<N>, SplitQueueError> {
        let refused = SplitQueueError::Memory { address: memory.address(), len: memory.len() };
        if memory.len() < Self::MEMORY || !memory.address().is_multiple_of(PAGE_SIZE) {
            return Err(refused);
        }
        memory.zero(0, Self::MEMORY).map_err(|_| refused)?;
        let mut catcher = AddressCatcher { size: N as u32, caught: None };
        let queue =
            with_ring_memory(&memory, gpa, || VirtQueue::new(&mut catcher, 0, false, false))
                .map(Box::new)
                .map_err(|_| refused)?;
        let addresses = catcher.caught.ok_or(refused)?;
        let mut ring = SplitQueue {
            queue,
            available_at: (addresses.available - gpa) as usize,
            used_at: (addresses.used - gpa) as usize,
            addresses,
            pool,
            memory,
            event_idx,
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
        self.queue.available_desc()
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
        let readable_at = readable.map(|span| self.locate(span)).transpose()?;
        let writable_at = writable.map(|span| self.locate(span)).transpose()?;
        let head = self
            .with_buffers(readable_at, writable_at, |queue, inputs, outputs| {
                // SAFETY: the buffers lie in the pool, which `self` keeps mapped; by the contract of this
                // method the buffers are left alone until popped, and only their addresses are used.
                with_translation(readable, writable, || unsafe { queue.add(inputs, outputs) })
            })
            .map_err(|_| SplitQueueError::Full)?;
        self.added = self.added.wrapping_add(1);
        if let Some(slot) = self.in_flight.get_mut(usize::from(head)) {
            *slot = Some(InFlight { readable, writable, cookie });
        }
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
            let event = self.load_u16(self.used_at + 4 + 8 * N);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.load_u16(self.used_at) & 1 == 0
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
        let Some(id) = self.queue.peek_used() else { return Ok(None) };
        match self.pop_known(id) {
            Some(done) => Ok(Some(done)),
            None => {
                let error = SplitQueueError::BadCompletion { id };
                self.broken = Some(error);
                Err(error)
            }
        }
    }

    fn pop_known(&mut self, id: u16) -> Option<UsedChain> {
        let chain = self.in_flight.get_mut(usize::from(id))?.take()?;
        let readable_at = chain.readable.map(|span| self.locate(span)).transpose().ok()?;
        let writable_at = chain.writable.map(|span| self.locate(span)).transpose().ok()?;
        let written = self
            .with_buffers(readable_at, writable_at, |queue, inputs, outputs| {
                // SAFETY: these are the buffers added under this id (`in_flight`).
                unsafe { queue.pop_used(id, inputs, outputs) }
            })
            .ok()?;
        self.popped = self.popped.wrapping_add(1);
        if !self.armed && self.popped.is_multiple_of(1 << 12) {
            // The event index must stay far from the used index.
            self.suppress_now();
        }
        let room = chain.writable.map_or(0, |span| span.len);
        Some(UsedChain { cookie: chain.cookie, written: written.min(room) })
    }

    /// Whether [`pop`](Self::pop) returns a chain or an error.
    pub fn can_pop(&self) -> bool {
        self.broken.is_some() || self.queue.can_pop()
    }

    /// Asks for one interrupt at the next completion. `false`: there is a completion already, so do
    /// not wait for the interrupt.
    pub fn arm(&mut self) -> bool {
        self.armed = true;
        if self.event_idx {
            self.store_u16(self.available_at + 4 + 2 * N, self.popped);
        } else {
            self.store_u16(self.available_at, 0);
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
            self.store_u16(self.available_at + 4 + 2 * N, self.popped.wrapping_sub(1));
        } else {
            self.store_u16(self.available_at, 1);
        }
    }

    /// The pool offset of a buffer.
    fn locate(&self, span: DmaSpan) -> Result<(usize, usize), SplitQueueError> {
        let refused = SplitQueueError::Buffer(span);
        let offset = span.address.checked_sub(self.pool.address()).ok_or(refused)?;
        let len = span.len as usize;
        if len == 0 || offset > self.pool.len() || len > self.pool.len() - offset {
            return Err(refused);
        }
        Ok((offset, len))
    }

    /// Calls `f` with the buffers in the form of `VirtQueue`.
    fn with_buffers<R>(
        &mut self,
        readable: Option<(usize, usize)>,
        writable: Option<(usize, usize)>,
        f: impl for<'a> FnOnce(
            &mut VirtQueue<SharedHal, N>,
            &'a [&'a [u8]],
            &'a mut [&'a mut [u8]],
        ) -> R,
    ) -> R {
        let base = self.pool.start().as_ptr();
        let mut input: [&[u8]; 1] = [&[]];
        let mut output: [&mut [u8]; 1] = [&mut []];
        let inputs = match readable {
            Some((offset, len)) => {
                // SAFETY: `locate` checked the range against the mapped pool. The reference lives for the
                // call below only, which uses its address and length and never the bytes (`SharedHal` neither
                // reads nor copies).
                input = [unsafe { std::slice::from_raw_parts(base.add(offset), len) }];
                &input[..]
            }
            None => &input[..0],
        };
        let outputs = match writable {
            Some((offset, len)) => {
                // SAFETY: as above.
                output = [unsafe { std::slice::from_raw_parts_mut(base.add(offset), len) }];
                &mut output[..]
            }
            None => &mut output[..0],
        };
        f(&mut self.queue, inputs, outputs)
    }

    fn load_u16(&self, offset: usize) -> u16 {
        // The offsets are the ring's own: in bounds and even.
        self.memory.atomic_u16(offset).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store_u16(&self, offset: usize, value: u16) {
        if let Ok(word) = self.memory.atomic_u16(offset) {
            word.store(value, Ordering::Release);
        }
    }
}
