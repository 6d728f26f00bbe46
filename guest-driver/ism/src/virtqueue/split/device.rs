// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device side of a virtqueue, for tests.

use std::sync::atomic::{Ordering, fence};

use super::{DmaSpan, QueueAddresses};
use ism_sys::SharedSlice;

/// The device side of a virtqueue: a test takes chains and returns them.
pub(crate) struct DeviceSide {
    pool: SharedSlice,
    // Bus address minus address in this process.
    shift: u64,
    ring: QueueAddresses,
    seen: u16,
    used: u16,
}

impl DeviceSide {
    pub(crate) fn new(pool: SharedSlice, ring: QueueAddresses) -> DeviceSide {
        DeviceSide { pool, shift: 0, ring, seen: 0, used: 0 }
    }
    /// A device on whose bus the pool starts at `gpa`.
    pub(crate) fn at_bus(pool: SharedSlice, gpa: u64, ring: QueueAddresses) -> DeviceSide {
        let shift = gpa.wrapping_sub(pool.address() as u64);
        DeviceSide { pool, shift, ring, seen: 0, used: 0 }
    }
    fn n(&self) -> u64 {
        self.ring.size.into()
    }
    fn at(&self, address: u64) -> usize {
        address.wrapping_sub(self.shift) as usize - self.pool.address()
    }
    fn u16(&self, address: u64) -> u16 {
        u16::from_le(self.pool.atomic_u16(self.at(address)).unwrap().load(Ordering::Acquire))
    }
    fn set_u16(&self, address: u64, value: u16) {
        self.pool.atomic_u16(self.at(address)).unwrap().store(value.to_le(), Ordering::Release);
    }
    /// The head of the next chain.
    pub(crate) fn next(&mut self) -> Option<u16> {
        if self.seen == self.u16(self.ring.available + 2) {
            return None;
        }
        let slot = u64::from(self.seen) % self.n();
        self.seen = self.seen.wrapping_add(1);
        Some(self.u16(self.ring.available + 4 + 2 * slot))
    }
    /// The head of the next chain. Without a chain, asks the driver to kick at the next chain.
    pub(crate) fn next_or_ask_for_kick(&mut self) -> Option<u16> {
        self.next().or_else(|| {
            self.wants_kick_after(self.seen);
            // Orders the store of the event index before the load of the available index; the
            // driver does both in reverse.
            fence(Ordering::SeqCst);
            self.next()
        })
    }
    pub(crate) fn put(&mut self, head: u32, len: u32) {
        let entry = self.ring.used + 4 + 8 * (u64::from(self.used) % self.n());
        self.pool.copy_in(self.at(entry), &head.to_le_bytes()).unwrap();
        self.pool.copy_in(self.at(entry) + 4, &len.to_le_bytes()).unwrap();
        self.used = self.used.wrapping_add(1);
        self.set_u16(self.ring.used + 2, self.used);
    }
    pub(crate) fn wants_kick_after(&self, index: u16) {
        self.set_u16(self.ring.used + 4 + 8 * self.n(), index);
    }
    /// Whether publishing the last completion interrupts the driver.
    pub(crate) fn interrupts(&self) -> bool {
        // Orders the store of the used index before the load of the event index; the driver does
        // both in reverse.
        fence(Ordering::SeqCst);
        let event = self.u16(self.ring.available + 4 + 2 * self.n());
        let (old, new) = (self.used.wrapping_sub(1), self.used);
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }
    /// The parts of a chain: readable bytes, and the writable span.
    pub(crate) fn read(&self, head: u16) -> (Vec<u8>, Option<DmaSpan>) {
        let (mut bytes, mut writable, mut next) = (Vec::new(), None, Some(head));
        while let Some(index) = next {
            let at = self.at(self.ring.descriptors) + 16 * usize::from(index);
            let mut raw = [0; 16];
            self.pool.copy_out(at, &mut raw).unwrap();
            let gpa = u64::from_le_bytes(raw[..8].try_into().unwrap());
            let len = u32::from_le_bytes(raw[8..12].try_into().unwrap());
            if raw[12] & 2 == 0 {
                let start = bytes.len();
                bytes.resize(start + len as usize, 0);
                self.pool.copy_out(self.at(gpa), &mut bytes[start..]).unwrap();
            } else {
                let address = gpa.wrapping_sub(self.shift) as usize;
                writable = Some(DmaSpan { address, gpa, len });
            }
            next = (raw[12] & 1 != 0).then(|| u16::from_le_bytes([raw[14], raw[15]]));
        }
        (bytes, writable)
    }
    /// Writes into the writable part of a chain and returns the chain.
    pub(crate) fn answer(&mut self, head: u16, reply: &[u8]) {
        let (_, writable) = self.read(head);
        let room = writable.unwrap();
        assert!(reply.len() <= room.len as usize);
        self.pool.copy_in(self.at(room.gpa), reply).unwrap();
        self.put(head.into(), reply.len() as u32);
    }
}
