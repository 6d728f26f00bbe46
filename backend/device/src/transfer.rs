// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! MOVE chains: the device copies.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_ism_abi::Status;
use virtio_ism_abi::mv::ATOMIC_SEGMENT_MAX;
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryMmap, ReadVolatile,
    VolatileMemoryError, VolatileSlice,
};

use super::copy_watch::is_owners_doing;
use super::dmb::{Backing, Dmb, GuestRange, resolve};
use super::request::CheckedMove;
use super::session::DeviceSession;
use super::slab::SlabRange;
use super::sync::read;
use super::{Delivery, Device};
use crate::shm::PageWaits;

/// Smallest page of a guest, bytes.
const PAGE: usize = 4096;

/// Result of a MOVE chain.
#[derive(Debug)]
#[must_use = "publish the status, then deliver the wake"]
pub struct Moved {
    /// To be written as le32 into the chain's writable part.
    pub status: Status,
    /// To be delivered after publishing the used element.
    pub wake: Option<Wake>,
}

/// An undelivered wake of another device. Another thread delivers a dropped wake.
#[derive(Debug)]
#[must_use = "deliver it after the used element was published"]
pub struct Wake {
    user: Arc<DeviceSession>,
    dmb: Arc<Dmb>,
    mask: u16,
    delivered: bool,
}

impl Wake {
    /// Wakes the owner. `delivery` tells whether the calling thread may deliver the event itself.
    ///
    /// To be called after publishing the chain's used element. A driver with an outstanding kick skips the
    /// next kick, so an owner woken earlier could find nothing and sleep through the next signal.
    pub fn deliver(mut self, delivery: Delivery) {
        self.wake_owner(delivery);
    }

    fn wake_owner(&mut self, delivery: Delivery) {
        self.delivered = true;
        // Orders the used element before the load of the pending mark.
        fence(Ordering::SeqCst);
        let owner = &self.dmb.owner;
        match &self.dmb.backing {
            Backing::Window(place) => owner.wake_slab(&place.slab.wake, &self.user, delivery),
            Backing::Guest { signal, .. } => {
                owner.signal_dmb(signal, self.mask, &self.user, delivery);
            }
        }
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        if !self.delivered {
            self.wake_owner(Delivery::Deferred);
        }
    }
}

impl Device {
    /// Carries out one MOVE chain. `head` is a private copy of header and segments: the first `24 + 8 * nseg`
    /// bytes, or fewer in a shorter chain. `payload` reads the other `payload_len` readable bytes of the
    /// chain.
    ///
    /// `payload` must not fail: its memory was looked up before. See [`SliceReader`].
    pub fn transfer<R: ReadVolatile>(
        &self,
        head: &[u8],
        payload: &mut R,
        payload_len: u64,
    ) -> Moved {
        let moved = self.try_transfer(head, payload, payload_len);
        let counters = &self.handle.counters;
        match moved {
            Ok((bytes, wake)) => {
                counters.moves.add(1);
                counters.move_bytes.add(bytes);
                Moved { status: Status::Ok, wake }
            }
            Err(status) => {
                counters.move_refusals.add(status);
                Moved { status, wake: None }
            }
        }
    }

    fn try_transfer<R: ReadVolatile>(
        &self,
        head: &[u8],
        payload: &mut R,
        payload_len: u64,
    ) -> Result<(u64, Option<Wake>), Status> {
        // Held over the copy: the end of this session waits for the lock.
        let _moving = read(&self.moving);
        let user = read(&self.current).clone().ok_or(Status::Estate)?;
        let request = CheckedMove::parse(head, payload_len, self.handle.features(), &self.limits)?;
        let dmb = self.fabric.tokens.find(request.token, &user).ok_or(Status::Enoent)?;
        if !request.fits(dmb.len) {
            return Err(Status::Einval);
        }
        let gate = dmb.enter().ok_or(Status::Enoent)?;
        let copied = match &dmb.backing {
            Backing::Guest { ranges, .. } => {
                let owner = &dmb.owner.handle;
                let start = owner.clock.coarse_ns();
                if owner.copies.is_watched(start) {
                    touch_targets(&dmb, ranges, &request);
                }
                let copied = copy_to_guest(&dmb, ranges, &request, payload);
                owner.copies.copied(start, owner.clock.coarse_ns());
                copied
            }
            Backing::Window(place) => copy_to_window(place, &request, payload),
        };
        drop(gate);
        if copied == Err(Failure::Vanished) {
            // The owner's memory is gone: end the DMB.
            dmb.close(&self.fabric.tokens, true);
        }
        copied.map_err(Failure::status)?;
        let wakes = request.signal && self.signal(&dmb, &request);
        let wake = wakes.then(|| Wake { user, dmb, mask: request.mask, delivered: false });
        Ok((u64::from(request.total), wake))
    }

    /// Raises the line like a user; `true`: the owner needs a wake.
    fn signal(&self, dmb: &Dmb, request: &CheckedMove<'_>) -> bool {
        self.handle.counters.signals.add(1);
        let Backing::Window(place) = &dmb.backing else { return true };
        let kick = request.is_pure_signal();
        // A user with a mapped slab has set its bit and found the owner armed. On loopback another member may
        // have mapped the slab.
        let mapped = dmb.mapped_users.load(Ordering::Relaxed) > 0;
        if kick && mapped && self.fabric.shared_gid.is_none() {
            return true;
        }
        // A record wakes the owner, whatever the owner sleeps on.
        let armed = place.raise(self.can_raise_slab(&dmb.owner)).is_ok_and(|woken| woken);
        if !armed && !kick {
            self.handle.counters.kicks_saved.add(1);
        }
        armed || kick
    }
}

/// Why nothing, or not everything, was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The owner's guest memory does not resolve.
    Vanished,
    /// The daemon cannot reach the slab, or the payload ended early.
    Io,
}

impl Failure {
    fn status(self) -> Status {
        match self {
            Failure::Vanished | Failure::Io => Status::Eio,
        }
    }
}

fn copy_to_window<R: ReadVolatile>(
    place: &SlabRange,
    request: &CheckedMove<'_>,
    payload: &mut R,
) -> Result<(), Failure> {
    for (offset, len) in request.segments().filter(|(_, len)| *len > 0) {
        let target = place.bytes(offset, len).map_err(|_| Failure::Io)?;
        if is_atomic(offset, len) {
            let words = read_words(payload, len)?;
            store_words(&target, words.get(..len as usize).unwrap_or_default())?;
        } else {
            read_into(payload, target)?;
        }
    }
    Ok(())
}

fn copy_to_guest<R: ReadVolatile>(
    dmb: &Dmb,
    ranges: &[GuestRange],
    request: &CheckedMove<'_>,
    payload: &mut R,
) -> Result<(), Failure> {
    let memory = dmb.owner.handle.memory().ok_or(Failure::Vanished)?;
    // One snapshot of the owner's table for the check and for the copy.
    let memory = memory.memory();
    let memory = &*memory;
    for (offset, len) in request.segments() {
        for (gpa, len) in resolve(ranges, offset, len) {
            slice(memory, gpa, len)?;
        }
    }
    for (offset, len) in request.segments().filter(|(_, len)| *len > 0) {
        let targets = resolve(ranges, offset, len);
        if is_atomic(offset, len) {
            let words = read_words(payload, len)?;
            let mut rest = words.get(..len as usize).unwrap_or_default();
            for (gpa, len) in targets {
                // Pieces are cut at multiples of a page, never within a word.
                let (part, after) = rest.split_at_checked(len as usize).ok_or(Failure::Io)?;
                store_words(&slice(memory, gpa, len)?, part)?;
                rest = after;
            }
        } else {
            for (gpa, len) in targets {
                read_into(payload, slice(memory, gpa, len)?)?;
            }
        }
    }
    Ok(())
}

/// Touches the target pages of the next copy, and notifies the owner's device of a delay by the owner.
fn touch_targets(dmb: &Dmb, ranges: &[GuestRange], request: &CheckedMove<'_>) {
    let owner = &dmb.owner.handle;
    let Some(memory) = owner.memory() else { return };
    let memory = memory.memory();
    let (start, before) = (owner.clock.coarse_ns(), PageWaits::now());
    for (offset, len) in request.segments() {
        for (gpa, len) in resolve(ranges, offset, len) {
            let Ok(target) = slice(&memory, gpa, len) else { continue };
            for offset in (0..target.len()).step_by(PAGE) {
                let _ = target.read_obj::<u8>(offset);
            }
        }
    }
    let took = owner.clock.coarse_ns().saturating_sub(start);
    if is_owners_doing(took, before, PageWaits::now()) {
        owner.notifier.memory_was_slow();
    }
}

fn slice(memory: &GuestMemoryMmap, gpa: u64, len: u32) -> Result<VolatileSlice<'_>, Failure> {
    memory.get_slice(GuestAddress(gpa), len as usize).map_err(|_| Failure::Vanished)
}

/// Whether a reader must see whole words of this segment.
fn is_atomic(offset: u32, len: u32) -> bool {
    offset.is_multiple_of(8) && len.is_multiple_of(8) && len <= ATOMIC_SEGMENT_MAX
}

fn read_into<R: ReadVolatile>(
    payload: &mut R,
    mut target: VolatileSlice<'_>,
) -> Result<(), Failure> {
    payload.read_exact_volatile(&mut target).map_err(|_| Failure::Io)
}

/// Reads the payload of a small segment as a whole before the first word is written, since payload and target
/// may overlap.
fn read_words<R: ReadVolatile>(
    payload: &mut R,
    len: u32,
) -> Result<[u8; ATOMIC_SEGMENT_MAX as usize], Failure> {
    let mut words = [0; ATOMIC_SEGMENT_MAX as usize];
    let part = words.get_mut(..len as usize).ok_or(Failure::Io)?;
    read_into(payload, VolatileSlice::from(part))?;
    Ok(words)
}

/// Ascending 8-byte stores, each with release semantics: a thread reading a word with acquire sees all
/// earlier segments and words.
fn store_words(target: &VolatileSlice<'_>, bytes: &[u8]) -> Result<(), Failure> {
    let (words, _) = bytes.as_chunks::<8>();
    for (i, word) in words.iter().enumerate() {
        let stored = target.store(u64::from_ne_bytes(*word), i * 8, Ordering::Release);
        match stored {
            Ok(()) => {}
            // A front end may map its memory at odd addresses, where words have no meaning.
            Err(VolatileMemoryError::Misaligned { .. }) => {
                target.write_slice(word, i * 8).map_err(|_| Failure::Io)?;
            }
            Err(_) => return Err(Failure::Io),
        }
    }
    Ok(())
}

/// Reads the payload of a chain from the slices its descriptors resolve to. Overlaps with the
/// target behave like memmove, slice by slice.
#[derive(Debug)]
pub struct SliceReader<'a, I, B = ()> {
    slices: I,
    current: Option<VolatileSlice<'a, B>>,
}

impl<'a, B: BitmapSlice, I: Iterator<Item = VolatileSlice<'a, B>>> SliceReader<'a, I, B> {
    /// Reads these slices one after the other.
    pub fn new(slices: I) -> Self {
        SliceReader { slices, current: None }
    }
}

impl<'a, B: BitmapSlice, I: Iterator<Item = VolatileSlice<'a, B>>> ReadVolatile
    for SliceReader<'a, I, B>
{
    fn read_volatile<T: BitmapSlice>(
        &mut self,
        buf: &mut VolatileSlice<'_, T>,
    ) -> Result<usize, VolatileMemoryError> {
        let source = loop {
            match self.current.take().or_else(|| self.slices.next()) {
                Some(slice) if slice.is_empty() => {}
                Some(slice) => break slice,
                None => return Ok(0),
            }
        };
        let n = source.len().min(buf.len());
        source.copy_to_volatile_slice(buf.subslice(0, n)?);
        self.current = Some(source.offset(n)?);
        Ok(n)
    }
}
