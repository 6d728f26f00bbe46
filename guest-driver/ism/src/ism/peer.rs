// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer's DMB: the path of every message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use virtio_ism_abi::command::{AttachReply, Op, TokenRequest, attach_flags};
use virtio_ism_abi::signal::{Line, MAX_FUTEX_SLEEPERS, Sleepers};
use virtio_ism_abi::{Gid, Token};
use zerocopy::{FromZeros, IntoBytes};

use super::slabs::{Placed, Placement};
use super::{CONSUMER_WORD, DeliverError, IsmDevice, IsmError, PRODUCER_WORD, Prefer};
use crate::virtqueue::{MAX_PIECES, MovePath, QueueError};
use ism_sys::{Doorbell, SharedSlice, wake_sleepers};

/// The right to write a DMB of a peer. Dropping a `PeerDmb` detaches the DMB by a control command. The slab
/// around the DMB stays mapped (see [`IsmDevice`](crate::IsmDevice)).
///
/// Any thread may deliver to a DMB, but the order of the control words of two concurrent deliveries is
/// undefined. Callers serialize the deliveries of a connection.
#[derive(Debug)]
pub struct PeerDmb {
    device: Arc<IsmDevice>,
    path: Arc<MovePath>,
    owner: Gid,
    len: u32,
    // The mapping, present even if `stores` is off.
    pub(super) placed: Option<Placed>,
    // Deliveries are stores into the window; else moves by the device.
    stores: bool,
    // End of the part whose pages are mapped, bytes from the start of the DMB.
    mapped: AtomicU32,
    // [`FOUND_AWAKE`] or [`FOUND_ASLEEP`] since a delivery of bytes, until the caller has asked.
    found: AtomicU8,
}

const FOUND_UNKNOWN: u8 = 0;
const FOUND_AWAKE: u8 = 1;
const FOUND_ASLEEP: u8 = 2;

/// Bytes of a DMB mapped at a time. The kernel maps as much around a page read by the owner, if the pages
/// exist.
const MAPPED_AT_ONCE: u32 = 64 << 10;

/// The part of a DMB left to page faults: most short connections need no more.
const FIRST_PAGE: u32 = 4096;

impl PeerDmb {
    /// The token given to ATTACH.
    pub fn token(&self) -> Token {
        self.path.token()
    }

    /// The owner of the DMB according to the device.
    pub fn owner(&self) -> Gid {
        self.owner
    }

    /// Length in bytes, a power of two.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Always `false`: a DMB has at least the bytes of its control block.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether deliveries are stores into the window rather than moves by the device.
    pub fn is_window(&self) -> bool {
        self.stores
    }

    /// Whether the DMB can no longer be written: the DMB or its owner is gone, or the device refused a move.
    #[inline]
    pub fn is_failed(&self) -> bool {
        self.path.is_failed()
    }

    /// Fails the DMB: all later deliveries fail.
    pub fn fail(&self) {
        self.path.fail();
    }

    /// Offsets and bytes of deliveries without confirmation, in their order, control words included: moves
    /// not completed, or refused by the device. Empty in the window, where deliveries are stores. Moves of a
    /// gone device are included.
    ///
    /// `None`: the device refused a delivery and carried out a later delivery, so the DMB lacks bytes in the
    /// middle.
    pub fn unconfirmed(&self) -> Option<Vec<(u32, Vec<u8>)>> {
        if self.stores {
            return Some(Vec::new());
        }
        self.device.running().queues.of(&self.path).ok()?.unconfirmed(&self.path)
    }

    /// Copies bytes stored by this end out of the window. `false`: the DMB is no longer there.
    ///
    /// The slab may vanish in the middle of a delivery, and other memory in its place then receives the rest.
    /// So the slab's own nonce has to be there, before and after the copy. Loads from a function off its bus
    /// return neither stored bytes nor the nonce.
    pub fn copy_stored(&self, offset: u32, into: &mut [u8]) -> bool {
        let Some(placed) = self.placed.as_ref().filter(|_| self.stores) else { return false };
        let is_there = || self.device.has_memory() && placed.mark.is_there();
        is_there() && placed.memory.copy_out(offset as usize, into).is_ok() && is_there()
    }

    /// The 8 bytes at an offset of the DMB, for reading and writing by both ends. `None`: deliveries are no
    /// stores into the window, or the DMB has no such word.
    pub fn shared_word(&self, offset: u32) -> Option<&AtomicU64> {
        let placed = self.placed.as_ref().filter(|_| self.stores)?;
        placed.memory.atomic_u64(offset as usize).ok()
    }

    /// The doorbell to wake the owner instead of a kick, if handed over by the device.
    pub fn doorbell(&self) -> Option<&Doorbell> {
        self.placed.as_ref()?.doorbell.as_deref()
    }

    /// Copies the pieces (offset in the DMB, bytes) into the DMB, then stores the producer word and the
    /// consumer-and-flags word (in the byte order of memory), in this order. With `signal`,
    /// also signals the owner.
    ///
    /// In the window this takes copies, two stores and an atomic or; a system call only if the owner sleeps.
    /// Otherwise this takes one MOVE, or several for pieces beyond the limit of one MOVE. After a refused
    /// MOVE, [`is_failed`](Self::is_failed) turns true later.
    ///
    /// # Errors
    /// A piece does not lie in the DMB, the DMB failed, or the device is gone.
    #[inline]
    pub fn deliver(
        &self,
        pieces: &[(u32, &[u8])],
        words: [u64; 2],
        signal: bool,
    ) -> Result<(), DeliverError> {
        if self.is_failed() {
            return Err(DeliverError::Failed);
        }
        for (offset, bytes) in pieces {
            if u64::from(*offset) + bytes.len() as u64 > u64::from(self.len) {
                let (offset, len, dmb_len) = (*offset, bytes.len(), self.len);
                return Err(DeliverError::Range { offset, len, dmb_len });
            }
        }
        match &self.placed {
            Some(placed) if self.stores => self.store(placed, pieces, words, signal),
            _ => self.move_all(pieces, words, signal),
        }
    }

    /// Wakes the owner without a change of the DMB.
    ///
    /// # Errors
    /// The DMB failed, or the device is gone.
    pub fn signal(&self) -> Result<(), DeliverError> {
        if self.is_failed() {
            return Err(DeliverError::Failed);
        }
        match &self.placed {
            Some(placed) => self.raise(placed).map(|_| ()),
            None => self.kick(),
        }
    }

    #[inline]
    fn store(
        &self,
        placed: &Placed,
        pieces: &[(u32, &[u8])],
        [producer, consumer]: [u64; 2],
        signal: bool,
    ) -> Result<(), DeliverError> {
        let memory = &placed.memory;
        for (offset, bytes) in pieces {
            let end = offset + bytes.len() as u32;
            if end > self.mapped.load(Ordering::Relaxed) {
                self.map_up_to(end, memory);
            }
            memory.copy_in(*offset as usize, bytes).map_err(QueueError::from)?;
        }
        let word = |at: u32| memory.atomic_u64(at as usize).map_err(QueueError::from);
        // Release, both: partners of the Acquire loads of `OwnDmb::words`. An owner loading a word also sees
        // the announced bytes, and an owner loading the second word also sees the first.
        word(PRODUCER_WORD)?.store(producer, Ordering::Release);
        word(CONSUMER_WORD)?.store(consumer, Ordering::Release);
        if signal {
            let found = if self.raise(placed)? { FOUND_ASLEEP } else { FOUND_AWAKE };
            if !pieces.is_empty() && self.found.load(Ordering::Relaxed) != found {
                self.found.store(found, Ordering::Relaxed);
            }
        }
        // Stores into memory of a gone device are lost.
        if self.device.has_memory() { Ok(()) } else { Err(QueueError::Gone.into()) }
    }

    /// Has the kernel map the pages up to the end of this piece, and some more. Otherwise the first bytes in
    /// each page cost a fault of the writer and a fault of the owner: the slowest messages of a connection.
    #[cold]
    fn map_up_to(&self, end: u32, memory: &SharedSlice) {
        let from = self.mapped.load(Ordering::Relaxed);
        let to = end.next_multiple_of(MAPPED_AT_ONCE).min(self.len);
        let mapped = memory.populate(from as usize, to.saturating_sub(from) as usize);
        // An old kernel cannot map ahead, and a window in a device's memory has no pages of its own.
        self.mapped.store(if mapped.is_ok() { to } else { u32::MAX }, Ordering::Relaxed);
    }

    /// Whether the owner slept and had to be woken, at the last delivery of bytes through the window.
    /// `None`: there was no such delivery since the last call.
    pub fn found_asleep(&self) -> Option<bool> {
        let found = self.found.load(Ordering::Relaxed);
        if found == FOUND_UNKNOWN {
            return None;
        }
        self.found.store(FOUND_UNKNOWN, Ordering::Relaxed);
        Some(found == FOUND_ASLEEP)
    }

    /// Signals the owner. `true`: the owner slept.
    #[inline]
    fn raise(&self, placed: &Placed) -> Result<bool, DeliverError> {
        let Some(line) = placed.line() else { return Ok(false) };
        let slab = placed.slab_line.as_ref().and_then(|slab| slab.of_line(placed.line_index));
        let sleepers = match slab {
            Some(slab) => line.raise_in(placed.bit, placed.line_index, slab),
            None => line.raise(placed.bit),
        };
        if sleepers.is_empty() {
            return Ok(false);
        }
        self.wake(placed, line, sleepers).map(|()| true)
    }

    /// Wakes the owner, by its announced way of sleeping.
    #[cold]
    fn wake(
        &self,
        placed: &Placed,
        line: Line<'_>,
        sleepers: Sleepers,
    ) -> Result<(), DeliverError> {
        let mut kicked = sleepers;
        if placed.futex && sleepers.contains(Sleepers::FUTEX) {
            wake_sleepers(line.armed, MAX_FUTEX_SLEEPERS);
            kicked.remove(Sleepers::FUTEX);
        } else if let Some(slab) = &placed.slab_line {
            // The owner learns from the slab for whom the kick is.
            if let Some(slab) = slab.of_line(placed.line_index) {
                slab.raise(placed.line_index);
            }
        }
        if kicked.is_empty() || self.doorbell().is_some_and(Doorbell::ring) {
            return Ok(());
        }
        self.kick()
    }

    #[cold]
    fn kick(&self) -> Result<(), DeliverError> {
        match self.device.running().queues.of(&self.path).and_then(|queue| queue.kick(&self.path)) {
            Ok(()) => Ok(()),
            // The data is in the DMB, and the owner rechecks by itself within a second.
            Err(QueueError::Busy) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Posts the pieces in as few moves as possible, the words last.
    fn move_all(
        &self,
        pieces: &[(u32, &[u8])],
        [producer, consumer]: [u64; 2],
        signal: bool,
    ) -> Result<(), DeliverError> {
        let mut words = [0u8; 16];
        let (first, second) = words.split_at_mut(8);
        first.copy_from_slice(&producer.to_ne_bytes());
        second.copy_from_slice(&consumer.to_ne_bytes());

        let mut batch = Batch::new(self);
        for (offset, bytes) in pieces {
            batch.add(*offset, bytes)?;
        }
        // The device writes an aligned segment this small by ascending 8-byte Release stores.
        batch.keep_room(words.len())?;
        batch.add(PRODUCER_WORD, &words)?;
        batch.post(signal, true)
    }
}

/// The pieces of the next MOVE.
struct Batch<'a, 'b> {
    dmb: &'a PeerDmb,
    pieces: [(u32, &'b [u8]); MAX_PIECES],
    n: usize,
    bytes: usize,
    max: usize,
    max_pieces: usize,
}

impl<'a, 'b> Batch<'a, 'b> {
    fn new(dmb: &'a PeerDmb) -> Self {
        let running = dmb.device.running();
        let max_pieces = usize::from(running.config().max_segs.get()).clamp(1, MAX_PIECES);
        let max = running.queues.max_payload();
        Batch { dmb, pieces: [(0, &[]); MAX_PIECES], n: 0, bytes: 0, max, max_pieces }
    }

    /// Adds a piece, and posts a MOVE whenever no more bytes or pieces fit.
    fn add(&mut self, mut offset: u32, mut bytes: &'b [u8]) -> Result<(), DeliverError> {
        while !bytes.is_empty() {
            if self.n == self.max_pieces || self.bytes >= self.max {
                self.post(false, false)?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(self.max - self.bytes));
            if let Some(piece) = self.pieces.get_mut(self.n) {
                *piece = (offset, now);
            }
            self.n += 1;
            self.bytes += now.len();
            offset += now.len() as u32;
            bytes = later;
        }
        Ok(())
    }

    /// Posts a MOVE unless `len` more bytes fit as one piece.
    fn keep_room(&mut self, len: usize) -> Result<(), DeliverError> {
        if self.bytes + len > self.max { self.post(false, false) } else { Ok(()) }
    }

    fn post(&mut self, signal: bool, is_last: bool) -> Result<(), DeliverError> {
        let pieces = self.pieces.get(..self.n).unwrap_or(&self.pieces);
        let path = &self.dmb.path;
        self.dmb.device.running().queues.of(path)?.post(path, pieces, signal, is_last)?;
        (self.n, self.bytes) = (0, 0);
        Ok(())
    }
}

#[cfg(test)]
impl PeerDmb {
    /// Numbers of the DMB's pages mapped by this process.
    pub(super) fn pages_there(&self) -> Vec<usize> {
        self.placed.as_ref().map(|placed| placed.memory.pages_there()).unwrap_or_default()
    }
}

impl Drop for PeerDmb {
    fn drop(&mut self) {
        self.device.attached.remove(self.token(), &self.path);
        self.device.running().queues.close_path(&self.path);
        detach(&self.device, self.token());
        if let Some(placed) = &self.placed {
            self.device.slabs.release(&self.device, placed.slab_id);
        }
    }
}

fn detach(device: &IsmDevice, token: Token) {
    let request = TokenRequest { token: token.0.into() };
    // A refusal means: the DMB is gone already.
    if let Err(error) = device.command(Op::Detach, request.as_bytes(), &mut []) {
        tracing::trace!(%error, "detach");
    }
}

pub(super) fn attach(
    device: &Arc<IsmDevice>,
    token: Token,
    expected_len: u32,
) -> Result<PeerDmb, IsmError> {
    let request = TokenRequest { token: token.0.into() };
    let mut reply = AttachReply::new_zeroed();
    device.command(Op::Attach, request.as_bytes(), reply.as_mut_bytes())?;
    let slab = (reply.flags & attach_flags::MOVE_ONLY == 0).then(|| reply.slab_id.get());
    // Before any check can fail: the device has mapped the slab, even if the DMB turns out
    // unusable.
    if let Some(id) = slab {
        device.slabs.acquire(device, id, reply.owner_gid);
    }
    let result = accept(device, token, expected_len, &reply);
    if result.is_err() {
        detach(device, token);
        if let Some(id) = slab {
            device.slabs.release(device, id);
        }
    }
    result
}

/// A DMB whose owner left the fabric before the ATTACH: all deliveries fail.
pub(super) fn gone(
    device: &Arc<IsmDevice>,
    token: Token,
    len: u32,
    owner: Gid,
) -> Result<PeerDmb, IsmError> {
    let path = device.running().queues.open_path(token)?;
    path.fail();
    let (placed, stores, mapped) = (None, false, AtomicU32::new(u32::MAX));
    let found = AtomicU8::new(FOUND_UNKNOWN);
    Ok(PeerDmb { device: Arc::clone(device), path, owner, len, placed, stores, mapped, found })
}

fn accept(
    device: &Arc<IsmDevice>,
    token: Token,
    expected: u32,
    reply: &AttachReply,
) -> Result<PeerDmb, IsmError> {
    let len = reply.dmb_len.get();
    if len != expected {
        return Err(IsmError::PeerLength { got: len, expected });
    }
    let (min, max) = (device.config().dmb_min.get(), device.config().dmb_max.get());
    if !(min..=max).contains(&len) {
        return Err(IsmError::DmbLength { len, min, max });
    }
    let placed = if reply.flags & attach_flags::MOVE_ONLY != 0 {
        None
    } else {
        let placement = Placement {
            op: Op::Attach,
            slab_id: reply.slab_id.get(),
            slab_off: reply.slab_off.get(),
            slab_len: reply.slab_len.get(),
            dmb_off: reply.dmb_off.get(),
            dmb_len: len,
            line: reply.line.get(),
            bit: reply.bit,
            nonce: reply.nonce.get(),
            futex: reply.flags & attach_flags::FUTEX != 0 && device.knows_futex(),
            in_slab: reply.flags & attach_flags::SLAB_LINE != 0 && device.knows_slab_line(),
        };
        Some(placement.resolve(device)?)
    };
    let path = device.running().queues.open_path(token)?;
    device.attached.add(token, reply.owner_gid, &path);
    if device.slabs.has_left(reply.owner_gid) {
        path.fail();
    }
    let stores = placed.is_some() && device.prefer != Prefer::Move;
    let (device, mapped) = (Arc::clone(device), AtomicU32::new(FIRST_PAGE));
    let (owner, found) = (reply.owner_gid, AtomicU8::new(FOUND_UNKNOWN));
    Ok(PeerDmb { device, path, owner, len, placed, stores, mapped, found })
}
