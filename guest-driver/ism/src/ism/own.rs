// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An own DMB: memory for the writes of one peer.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_ism_abi::command::{
    BACKING_GUEST, BACKING_WINDOW, Op, RegisterReply, RegisterRequest, SgEntry, TokenRequest,
    register_flags,
};
use virtio_ism_abi::signal::Line;
use virtio_ism_abi::{Gid, Status, Token};
use zerocopy::{FromZeros, IntoBytes};

use super::measure::WindowSpeed;
use super::slabs::{Placed, Placement};
use super::{CONSUMER_WORD, IsmDevice, IsmError, PRODUCER_WORD, measure};
use crate::virtqueue::GuestMem;
use ism_sys::{Doorbell, OnceBox, OutOfBounds, SharedSlice, can_sleep_on_words, lock};

/// Most contiguous pieces of guest memory in a REGISTER of this driver; 32 MiB of huge pages are 16.
const MOST_PIECES: usize = 28;

#[derive(Debug)]
enum Backing {
    Window(Placed),
    Guest(GuestMem),
}

/// A DMB of this device. Unregistered when dropped, which is a control command: tens of
/// microseconds, more if the device is busy.
#[derive(Debug)]
pub struct OwnDmb {
    device: Arc<IsmDevice>,
    token: Token,
    index: u32,
    user: Gid,
    backing: Backing,
    /// Private copy, in use instead of the memory shared with the device.
    kept: OnceBox<SharedSlice>,
}

impl OwnDmb {
    /// The memory: [`CONTROL_BLOCK`](super::CONTROL_BLOCK) bytes, then the ring.
    #[inline]
    pub fn memory(&self) -> &SharedSlice {
        self.kept.get().unwrap_or_else(|| self.shared())
    }

    /// The memory shared with the user of the DMB.
    #[inline]
    fn shared(&self) -> &SharedSlice {
        match &self.backing {
            Backing::Window(placed) => &placed.memory,
            Backing::Guest(mem) => mem.slice(),
        }
    }

    /// The user's token for the ATTACH.
    pub fn token(&self) -> Token {
        self.token
    }

    /// The driver's number of the DMB, carried by DMB_SIGNAL records.
    pub fn idx(&self) -> u32 {
        self.index
    }

    /// Length in bytes, a power of two.
    pub fn len(&self) -> u32 {
        self.memory().len() as u32
    }

    /// Always `false`: a DMB has at least the bytes of its control block.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The GID with the right to write the DMB.
    pub fn user(&self) -> Gid {
        self.user
    }

    /// The slab around the DMB, carried by SLAB_WAKE records; `None` in guest memory.
    pub fn slab_id(&self) -> Option<u32> {
        self.placed().map(|placed| placed.slab_id)
    }

    /// Its signal line's number in the slab: DMBs of one slab and line share the line.
    pub fn line_index(&self) -> Option<u16> {
        self.placed().map(|placed| placed.line_index)
    }

    /// Its bit of the line, 0 to 63.
    pub fn bit(&self) -> Option<u8> {
        self.placed().map(|placed| placed.bit)
    }

    /// The signal line of the DMB, which the owner takes, arms and disarms. `None` in guest memory: the
    /// device signals such a DMB by DMB_SIGNAL records.
    #[inline]
    pub fn line(&self) -> Option<Line<'_>> {
        self.placed()?.line()
    }

    /// The signal line, if threads may sleep on its armed word: the user wakes threads by the word, and the
    /// kernel of this process allows the sleep.
    #[inline]
    pub fn futex_line(&self) -> Option<Line<'_>> {
        self.placed().filter(|placed| placed.futex && can_sleep_on_words())?.line()
    }

    /// The signal line, if its user raises the slab's line, too, after
    /// [`Line::set_in_slab`]: [`IsmDevice::poll_lines`] then tells of news.
    pub fn line_in_slab(&self) -> Option<Line<'_>> {
        self.placed().filter(|placed| placed.slab_line.is_some())?.line()
    }

    /// The doorbell rung by the user instead of a kick, if the device has handed the doorbell over.
    pub fn doorbell(&self) -> Option<&Doorbell> {
        self.placed()?.doorbell.as_deref()
    }

    /// The producer word and the consumer-and-flags word, as last stored by the user, in the byte order of
    /// memory.
    ///
    /// The user stores the producer word first, so this method loads the producer word last. The producer
    /// word is therefore at least as new as the flags, and the announced bytes are present.
    #[inline]
    pub fn words(&self) -> [u64; 2] {
        let memory = self.memory();
        let load = |offset: u32| {
            // Acquire: partner of the Release stores of `PeerDmb::deliver`. A DMB is never shorter
            // than its control block.
            memory.atomic_u64(offset as usize).map_or(0, |word| word.load(Ordering::Acquire))
        };
        let consumer = load(CONSUMER_WORD);
        [load(PRODUCER_WORD), consumer]
    }

    /// Whether the device is gone or failed.
    pub fn is_device_gone(&self) -> bool {
        self.device.is_gone()
    }

    /// Whether earlier reads of this DMB have read its bytes; see [`IsmDevice::has_memory`].
    #[inline]
    pub fn has_memory(&self) -> bool {
        self.device.has_memory() || self.is_kept()
    }

    /// Whether the memory stays as long as the DMB, whatever becomes of the device.
    pub fn memory_stays(&self) -> bool {
        self.is_kept() || self.device.memory_stays()
    }

    /// Whether [`keep`](Self::keep) was called.
    pub fn is_kept(&self) -> bool {
        self.kept.get().is_some()
    }

    /// Copies the current bytes to private memory, in place of the memory shared with the device. Later
    /// stores of the user and the device are lost. The caller keeps other threads from reading the DMB
    /// meanwhile.
    ///
    /// # Errors
    /// The device has gone with the memory, or mmap(2) failed.
    pub fn keep(&self) -> io::Result<()> {
        if self.is_kept() {
            return Ok(());
        }
        // The words first: the copy then contains the bytes announced by the words.
        let words = self.words();
        let copy = self.shared().private_copy()?;
        for (at, word) in [PRODUCER_WORD, CONSUMER_WORD].into_iter().zip(words) {
            let place = copy.atomic_u64(at as usize).map_err(io::Error::other)?;
            place.store(word, Ordering::Relaxed);
        }
        if !self.device.has_memory() {
            return Err(io::Error::other("the memory went with the device"));
        }
        let _ = self.kept.set(copy);
        Ok(())
    }

    /// Zeroes the whole DMB, control block included, for another use.
    ///
    /// # Errors
    /// Never in practice: the range is the DMB's own.
    pub fn clear(&self) -> Result<(), OutOfBounds> {
        self.memory().zero(0, self.memory().len())
    }

    fn placed(&self) -> Option<&Placed> {
        match &self.backing {
            Backing::Window(placed) => Some(placed),
            Backing::Guest(_) => None,
        }
    }
}

impl Drop for OwnDmb {
    fn drop(&mut self) {
        let unregistered = unregister(&self.device, self.token);
        match &mut self.backing {
            Backing::Window(placed) => self.device.slabs.release(&self.device, placed.slab_id),
            // Without the device's confirmation, the device may still write this memory.
            Backing::Guest(mem) if !unregistered => mem.leak(),
            Backing::Guest(_) => {}
        }
        if unregistered {
            lock(&self.device.indices).release(self.index);
        }
    }
}

/// Unregisters a DMB. `true`: the device no longer has it.
fn unregister(device: &IsmDevice, token: Token) -> bool {
    let request = TokenRequest { token: token.0.into() };
    match device.command(Op::Unregister, request.as_bytes(), &mut []) {
        // ENOENT: the device had already removed the DMB.
        Ok(()) | Err(IsmError::Refused { status: Status::Enoent, .. }) => true,
        Err(error) => {
            tracing::debug!(%error, "a DMB was not unregistered");
            false
        }
    }
}

pub(super) fn register(
    device: &Arc<IsmDevice>,
    user: Gid,
    len: u32,
    wait_group: u16,
) -> Result<OwnDmb, IsmError> {
    let (min, max) = (device.config().dmb_min.get(), device.config().dmb_max.get());
    if !len.is_power_of_two() || !(min..=max).contains(&len) {
        return Err(IsmError::DmbLength { len, min, max });
    }
    if device.wants_window() {
        match in_window(device, user, len, wait_group) {
            Ok(dmb) if device.must_measure() => {
                let rate = *device
                    .window_rate
                    .get_or_init(|| measure::speed(dmb.memory()).map_or(0, |speed| speed.rate()));
                let gigabytes = rate as f64 / 1e9;
                if device.wants_window() {
                    tracing::info!("data path: window, measured at {gigabytes:.2} GB/s");
                    return Ok(dmb);
                }
                let least = measure::SLOWEST_WINDOW as f64 / 1e9;
                tracing::info!(
                    "data path: moves, since the window is slow: {gigabytes:.3} GB/s of {least:.2}"
                );
            }
            Ok(dmb) => return Ok(dmb),
            // One of the two sides cannot map, or can no longer map.
            Err(IsmError::Refused {
                status: Status::Enotsup | Status::Enospc | Status::Enomem | Status::Eio,
                ..
            }) => {}
            Err(error) => return Err(error),
        }
    }
    in_guest_memory(device, user, len, wait_group)
}

/// Measures a window DMB of the device's own.
pub(super) fn measure_window(device: &Arc<IsmDevice>) -> Result<WindowSpeed, IsmError> {
    let (min, max) = (device.config().dmb_min.get(), device.config().dmb_max.get());
    let dmb = in_window(device, device.gid(), max.min(1 << 20).max(min), 0)?;
    let speed = measure::long_speed(dmb.memory());
    // No connection uses this slab again.
    drop(dmb);
    if let Err(error) = device.release_idle_slabs() {
        tracing::debug!(%error, "the measured slab stays mapped");
    }
    Ok(speed?)
}

fn in_window(
    device: &Arc<IsmDevice>,
    user: Gid,
    len: u32,
    wait_group: u16,
) -> Result<OwnDmb, IsmError> {
    let request = RegisterRequest {
        user_gid: user,
        len: len.into(),
        backing: BACKING_WINDOW.into(),
        wait_group: wait_group.into(),
        ..RegisterRequest::new_zeroed()
    };
    let (index, reply) = with_index(device, request, &[])?;
    let token = Token(reply.token.get());
    let placement = Placement {
        op: Op::Register,
        slab_id: reply.slab_id.get(),
        slab_off: reply.slab_off.get(),
        slab_len: reply.slab_len.get(),
        dmb_off: reply.dmb_off.get(),
        dmb_len: len,
        line: reply.line.get(),
        bit: reply.bit,
        nonce: reply.nonce.get(),
        futex: reply.flags & register_flags::FUTEX != 0 && device.knows_futex(),
        in_slab: reply.flags & register_flags::SLAB_LINE != 0 && device.knows_slab_line(),
    };
    // Before any check can fail: the device has mapped the slab, even if the DMB turns out
    // unusable.
    device.slabs.acquire(device, placement.slab_id, user);
    match placement.resolve(device) {
        Ok(placed) => {
            if let Some(line) = &placed.slab_line {
                device.lines.add(placed.slab_id, line);
            }
            let device = Arc::clone(device);
            let (backing, kept) = (Backing::Window(placed), OnceBox::new());
            Ok(OwnDmb { device, token, index, user, backing, kept })
        }
        Err(error) => {
            if unregister(device, token) {
                lock(&device.indices).release(index);
            }
            device.slabs.release(device, placement.slab_id);
            Err(error)
        }
    }
}

fn in_guest_memory(
    device: &Arc<IsmDevice>,
    user: Gid,
    len: u32,
    wait_group: u16,
) -> Result<OwnDmb, IsmError> {
    let mem = device.running().pool.alloc(len as usize)?;
    let align = u64::from(device.config().dmb_align.get());
    if align != 0 && !mem.gpa().is_multiple_of(align) {
        return Err(super::config_error("dmb_align", align));
    }
    let pieces = mem.pieces();
    let max = usize::from(device.config().max_sg.get()).clamp(1, MOST_PIECES);
    if pieces.len() > max {
        return Err(IsmError::Pieces { len, pieces: pieces.len(), max });
    }
    let entries: Vec<u8> = pieces
        .iter()
        .map(|(gpa, len)| SgEntry { gpa: (*gpa).into(), len: (*len).into(), reserved: 0.into() })
        .flat_map(|entry| entry.as_bytes().to_vec())
        .collect();
    let request = RegisterRequest {
        user_gid: user,
        len: len.into(),
        backing: BACKING_GUEST.into(),
        wait_group: wait_group.into(),
        nsg: (pieces.len() as u32).into(),
        ..RegisterRequest::new_zeroed()
    };
    let (index, reply) = with_index(device, request, &entries)?;
    Ok(OwnDmb {
        device: Arc::clone(device),
        token: Token(reply.token.get()),
        index,
        user,
        backing: Backing::Guest(mem),
        kept: OnceBox::new(),
    })
}

/// Registers a DMB under a free number.
fn with_index(
    device: &IsmDevice,
    mut request: RegisterRequest,
    entries: &[u8],
) -> Result<(u32, RegisterReply), IsmError> {
    let index = {
        let mut indices = lock(&device.indices);
        indices.take().ok_or(IsmError::NoIndex { max: indices.max() })?
    };
    request.idx = index.into();
    let body = [request.as_bytes(), entries].concat();
    let mut reply = RegisterReply::new_zeroed();
    match device.command(Op::Register, &body, reply.as_mut_bytes()) {
        Ok(()) => Ok((index, reply)),
        Err(error) => {
            // A device without an answer may still use the number, but such a device is gone.
            lock(&device.indices).release(index);
            Err(error)
        }
    }
}
