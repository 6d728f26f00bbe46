// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The event queue: the device has every buffer, except while the driver copies a record out.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use virtio_ism_abi::event::EVENT_LEN;

use super::{DmaSpan, GuestMem, GuestPool, QueueAddresses, QueueError, SplitQueue, Wiring};
use ism_sys::{ForkLocks, LockGuardList, lock, try_hold};

const ENTRIES: usize = 256;

pub(crate) struct EventQueue {
    ring: Mutex<SplitQueue<ENTRIES>>,
    buffers: GuestMem,
    wiring: Wiring,
}

impl ForkLocks for EventQueue {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        try_hold(&self.ring, held)
    }

    fn is_unlocked(&self) -> bool {
        true
    }
}

impl EventQueue {
    /// Makes the queue, without buffers for the device until [`start`](Self::start).
    pub(crate) fn new(pool: &Arc<GuestPool>, wiring: Wiring) -> Result<EventQueue, QueueError> {
        let (rings, gpa) = pool.permanent(SplitQueue::<ENTRIES>::MEMORY)?;
        let ring = SplitQueue::new(pool.whole().clone(), rings, gpa, wiring.event_idx)?;
        let buffers = pool.alloc(ENTRIES * EVENT_LEN)?;
        Ok(EventQueue { ring: Mutex::new(ring), buffers, wiring })
    }

    fn buffer(&self, i: u32) -> Result<DmaSpan, QueueError> {
        Ok(self.buffers.span(i as usize * EVENT_LEN, EVENT_LEN)?)
    }

    pub(crate) fn addresses(&self) -> QueueAddresses {
        lock(&self.ring).addresses()
    }

    /// Gives the device all buffers, once the device is running.
    ///
    /// Not before: cloud-hypervisor has the device begin at the queue's index at DRIVER_OK, so the device
    /// never sees earlier buffers.
    ///
    /// # Errors
    /// The memory has no place for a buffer.
    pub(crate) fn start(&self) -> Result<(), QueueError> {
        let mut ring = lock(&self.ring);
        for i in 0..ENTRIES as u32 {
            ring.add(None, Some(self.buffer(i)?), i)?;
        }
        if ring.must_kick() {
            self.wiring.kick.notify();
        }
        Ok(())
    }

    /// Takes the next event record and gives its buffer back to the device.
    ///
    /// # Errors
    /// The device is gone (after the last record was taken) or broke a rule.
    pub(crate) fn take(&self) -> Result<Option<[u8; EVENT_LEN]>, QueueError> {
        let mut ring = lock(&self.ring);
        let done = match ring.pop() {
            Ok(Some(done)) => done,
            Ok(None) if self.wiring.health.is_gone() => return Err(QueueError::Gone),
            Ok(None) => return Ok(None),
            Err(error) => {
                self.wiring.health.fail(&error.to_string());
                return Err(error.into());
            }
        };
        let mut record = [0; EVENT_LEN];
        // Behind a shorter record, the buffer has bytes of an earlier record, not to be read.
        let written = (done.written as usize).min(EVENT_LEN);
        let (head, _) = record.split_at_mut(written);
        self.buffers.slice().copy_out(done.cookie as usize * EVENT_LEN, head)?;
        ring.add(None, Some(self.buffer(done.cookie)?), done.cookie)?;
        if ring.must_kick() {
            self.wiring.kick.notify();
        }
        Ok(Some(record))
    }

    /// Becomes readable when a record arrives after [`arm`](Self::arm), or when the device is gone.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wiring.call.as_fd()
    }

    /// Makes [`fd`](Self::fd) unreadable, unless the device is gone.
    pub(crate) fn clear_fd(&self) {
        self.wiring.health.clear(&self.wiring.call);
    }

    /// Asks for one interrupt when the next record arrives. `false`: a record is there already (or
    /// the device is gone), do not wait.
    pub(crate) fn arm(&self) -> bool {
        lock(&self.ring).arm() && !self.wiring.health.is_gone()
    }

    /// Asks for no interrupts: the caller polls. A pending interrupt may still come.
    pub(crate) fn suppress(&self) {
        lock(&self.ring).suppress();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtqueue::{DeviceSide, Health};
    use ism_sys::EventFd;

    #[test]
    fn records_come_in_order_and_buffers_go_round() {
        let (pool, _) = GuestPool::new(4 << 20).unwrap();
        let health = Health::new();
        let (kick, call) = (Arc::new(EventFd::new().unwrap()), Arc::new(EventFd::new().unwrap()));
        health.wake_with(&call);
        let wiring = Wiring {
            kick: Box::new(kick.clone()),
            call: call.clone(),
            health: health.clone(),
            event_idx: true,
        };
        let queue = EventQueue::new(&pool, wiring).unwrap();
        let mut device = DeviceSide::new(pool.whole().clone(), queue.addresses());
        assert!(device.next().is_none(), "no buffer before the device runs");
        queue.start().unwrap();
        assert!(kick.clear(), "the device is told of the buffers");
        assert!(queue.take().unwrap().is_none());
        for i in 0..2000u32 {
            let head = device.next().unwrap();
            device.answer(head, &[i as u8; EVENT_LEN]);
            assert_eq!(queue.take().unwrap(), Some([i as u8; EVENT_LEN]));
        }
        let head = device.next().unwrap();
        device.answer(head, &[5; 8]);
        assert!(!queue.arm(), "a record is there");
        health.fail("test");
        let mut short = [0; EVENT_LEN];
        short[..8].fill(5);
        assert_eq!(queue.take().unwrap(), Some(short), "no leftovers of an older record");
        assert!(matches!(queue.take(), Err(QueueError::Gone)));
        assert!(!queue.arm());
    }
}
