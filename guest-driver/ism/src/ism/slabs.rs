// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Slabs: the parts of the window mapped by the device, with their DMBs.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use virtio_ism_abi::command::{Op, ReleaseSlabRequest};
use virtio_ism_abi::slab::{CONTROL_LEN, line_offset};
use virtio_ism_abi::{Gid, Status};
use zerocopy::IntoBytes;

use super::own_lines::SlabLineMemory;
use super::{IsmDevice, IsmError};
use crate::transport::SlabMark;
use ism_sys::{Doorbell, ForkLocks, SharedSlice, is_free, lock};

/// Time limit for the nonce to appear: some front ends acknowledge a mapping too early.
const NONCE_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 1000 });

/// Where a reply places a DMB.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placement {
    pub(super) op: Op,
    pub(super) slab_id: u32,
    pub(super) slab_off: u64,
    pub(super) slab_len: u32,
    pub(super) dmb_off: u64,
    pub(super) dmb_len: u32,
    pub(super) line: u16,
    pub(super) bit: u8,
    pub(super) nonce: u64,
    pub(super) futex: bool,
    pub(super) in_slab: bool,
}

/// A DMB in the window.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) slab_id: u32,
    pub(super) line_index: u16,
    pub(super) bit: u8,
    pub(super) memory: SharedSlice,
    /// Owner and user run on one kernel, and both support threads asleep on the armed word.
    pub(super) futex: bool,
    /// Rung by the user instead of kicking the device.
    pub(super) doorbell: Option<Arc<Doorbell>>,
    /// The line of the slab, if known to owner and user.
    pub(super) slab_line: Option<SlabLineMemory>,
    // Bytes of the signal line.
    line: SharedSlice,
    pub(super) mark: SlabMark,
}

impl Placement {
    /// Checks the places of DMB, signal line and nonce, and waits until the slab is mapped.
    pub(super) fn resolve(&self, device: &IsmDevice) -> Result<Placed, IsmError> {
        let bad = |what, value: u64| Err(IsmError::Placement { op: self.op, what, value });
        let Some(data) = u64::from(self.slab_len).checked_sub(CONTROL_LEN as u64) else {
            return bad("slab_len", self.slab_len.into());
        };
        let len = u64::from(self.slab_len);
        let Some(slab) = device.running().window_slice(self.slab_off, len) else {
            return bad("slab_off", self.slab_off);
        };
        let at = match self.dmb_off.checked_sub(self.slab_off) {
            Some(at) if at <= data && u64::from(self.dmb_len) <= data - at => at as usize,
            _ => return bad("dmb_off", self.dmb_off),
        };
        if !at.is_multiple_of(64) {
            return bad("dmb_off", self.dmb_off);
        }
        let Some(line_at) = line_offset(self.line) else { return bad("line", self.line.into()) };
        if self.bit > 63 {
            return bad("bit", self.bit.into());
        }
        let tail = slab.slice(data as usize, CONTROL_LEN)?;
        // A front end in this process maps before the acknowledgement. So no wait is needed, and a peer
        // overwriting the nonce must not cause a wait.
        let mapped = device.running().window.is_cached();
        let mark = SlabMark { at: tail.slice(0, size_of::<u64>())?, nonce: self.nonce };
        await_nonce(&mark, if mapped { Duration::ZERO } else { NONCE_TIMEOUT })?;
        device.running().window.note_mark(self.slab_off, mark.clone());
        Ok(Placed {
            slab_id: self.slab_id,
            line_index: self.line,
            bit: self.bit,
            memory: slab.slice(at, self.dmb_len as usize)?,
            futex: self.futex,
            doorbell: device.running().window.doorbells().and_then(|all| all.get(self.slab_off)),
            slab_line: self.in_slab.then(|| SlabLineMemory::new(&tail)).transpose()?,
            line: tail.slice(line_at, virtio_ism_abi::slab::LINE_LEN)?,
            mark,
        })
    }
}

fn await_nonce(mark: &SlabMark, timeout: Duration) -> Result<(), IsmError> {
    let start = Instant::now();
    loop {
        let found = mark.found();
        if found == Some(mark.nonce) {
            return Ok(());
        }
        let after = start.elapsed();
        if after > timeout {
            let found = found.unwrap_or_default();
            return Err(IsmError::Nonce { expected: mark.nonce, found, after });
        }
        thread::sleep(Duration::from_micros(200));
    }
}

impl Placed {
    #[inline]
    pub(super) fn line(&self) -> Option<virtio_ism_abi::signal::Line<'_>> {
        // In bounds and aligned by construction.
        let armed = self.line.atomic_u32(virtio_ism_abi::slab::LINE_ARMED).ok()?;
        let pend = self.line.atomic_u64(virtio_ism_abi::slab::LINE_PEND).ok()?;
        Some(virtio_ism_abi::signal::Line { armed, pend })
    }
}

/// The driver's record of a slab.
#[derive(Debug)]
pub(super) struct Slab {
    peer: Gid,
    // The peer has left the fabric: no new DMB will come into this slab.
    orphan: bool,
    /// Own and peer DMBs in the slab.
    pub(super) users: u32,
}

impl Slab {
    /// Whether no DMB uses the slab, now or later.
    fn is_done(&self) -> bool {
        self.users == 0 && self.orphan
    }
}

/// Most remembered departed peers: more than the threads waiting for a REGISTER.
const MAX_LEFT: usize = 64;

/// The mapped slabs, by number.
#[derive(Debug, Default)]
pub(super) struct SlabTable(Mutex<Slabs>);

#[derive(Debug, Default)]
struct Slabs {
    by_id: HashMap<u32, Slab>,
    /// Departed peers, the latest last.
    left: VecDeque<Gid>,
}

impl ForkLocks for SlabTable {
    fn is_unlocked(&self) -> bool {
        is_free(&self.0)
    }
}

impl SlabTable {
    /// Counts a DMB in the slab. Also returns idle slabs of departed peers to the device.
    pub(super) fn acquire(&self, device: &IsmDevice, id: u32, peer: Gid) {
        let any_idle = {
            let mut slabs = lock(&self.0);
            // The peer may have left before this thread came here with the answer.
            let orphan = slabs.left.contains(&peer);
            slabs.by_id.entry(id).or_insert(Slab { peer, orphan, users: 0 }).users += 1;
            slabs.by_id.values().any(Slab::is_done)
        };
        if any_idle {
            self.release_done(device);
        }
    }

    /// Returns the slabs of departed peers to the device, except slabs with DMBs.
    pub(super) fn release_done(&self, device: &IsmDevice) {
        if let Err(error) = self.unmap(device, Slab::is_done) {
            tracing::debug!(%error, "the slab of a peer that has left stays mapped");
        }
    }

    /// Releases a DMB's use of the slab. Returns the slab to the device if this was the last use
    /// and the peer has left.
    pub(super) fn release(&self, device: &IsmDevice, id: u32) {
        let done = {
            let mut slabs = lock(&self.0);
            let Some(slab) = slabs.by_id.get_mut(&id) else { return };
            slab.users = slab.users.saturating_sub(1);
            slab.is_done()
        };
        if done {
            self.release_done(device);
        }
    }

    /// Notes the departure of the peer: its slabs get no new DMB.
    pub(super) fn peer_is_gone(&self, peer: Gid) {
        let mut slabs = lock(&self.0);
        for slab in slabs.by_id.values_mut().filter(|slab| slab.peer == peer) {
            slab.orphan = true;
        }
        if slabs.left.len() >= MAX_LEFT {
            slabs.left.pop_front();
        }
        slabs.left.push_back(peer);
    }

    /// Whether the peer is among the last departed peers. A GID is never used again.
    pub(super) fn has_left(&self, peer: Gid) -> bool {
        lock(&self.0).left.contains(&peer)
    }

    /// Returns the chosen slabs to the device for unmapping. Returns their number.
    ///
    /// The table stays locked meanwhile: the device may use the number of a released slab for the next
    /// REGISTER, whose entry must not be mistaken for the old one.
    pub(super) fn unmap(
        &self,
        device: &IsmDevice,
        chosen: impl Fn(&Slab) -> bool,
    ) -> Result<usize, IsmError> {
        let slabs = &mut lock(&self.0).by_id;
        let ids: Vec<u32> =
            slabs.iter().filter(|(_, slab)| chosen(slab)).map(|(id, _)| *id).collect();
        let mut released = 0;
        for id in ids {
            let request = ReleaseSlabRequest { slab_id: id.into(), reserved: 0.into() };
            // No thread reads the slab's line any more when the device unmaps the slab.
            let line = device.lines.remove(id);
            match device.command(Op::ReleaseSlab, request.as_bytes(), &mut []) {
                Ok(()) => {
                    slabs.remove(&id);
                    released += 1;
                }
                // The slab has a new DMB, whose reply another thread is about to receive.
                Err(IsmError::Refused { status: Status::Ebusy, .. }) => {
                    line.into_iter().for_each(|line| device.lines.add(id, &line));
                }
                // The device has released the slab by itself.
                Err(IsmError::Refused { status: Status::Enoent, .. }) => {
                    slabs.remove(&id);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(released)
    }
}
