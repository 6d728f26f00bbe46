// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requests of a command to the front end: to map or to unmap a slab.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use super::device::Device;
use super::doorbell::{DoorbellFd, End};
use super::reply::Reply;
use super::session::DeviceSession;
use super::slab::Slab;

/// Outcome of a command.
#[derive(Debug)]
pub enum Outcome {
    /// Answered.
    Reply(Reply),
    /// Answered after the front end mapped a slab: [`Device::mapped`].
    Map(MapJob),
    /// Answered after the front end unmapped a slab: [`Device::unmapped`].
    Unmap(UnmapJob),
}

/// A REGISTER or ATTACH waiting for the front end.
///
/// Jobs of one device, of both kinds, are to be done in the order of their creation. A job holds no lock. A
/// dropped job counts as one with an unknown outcome: the command fails, and the range is kept aside until
/// the front end has confirmed an empty range.
#[derive(Debug)]
pub struct MapJob {
    pub(super) target: JobTarget,
    /// A REGISTER or an ATTACH of this token.
    pub(super) what: PendingCommand,
    /// `false`: an earlier job asks for the same slab.
    pub(super) asks: bool,
}

impl Drop for MapJob {
    fn drop(&mut self) {
        if let Some(device) = self.target.take_unanswered() {
            device.finish_map(self, MapAnswer::Unknown);
        }
    }
}

#[derive(Debug)]
pub(super) enum PendingCommand {
    /// With the session of the DMB's user.
    Register(u64, Arc<DeviceSession>),
    Attach(u64),
}

/// The request to the front end.
#[derive(Clone, Copy, Debug)]
pub struct MapRequest<'a> {
    /// Memory of the slab, a sealed memfd. To be mapped shared, readable and writable.
    pub fd: BorrowedFd<'a>,
    /// Offset in the memory, bytes.
    pub fd_offset: u64,
    /// Offset in the window, bytes.
    pub window_offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl MapJob {
    /// The request to the front end. `None`: an earlier job of this device asks for the same slab, so no
    /// request is needed; just call [`Device::mapped`] with `true` in turn.
    pub fn request(&self) -> Option<MapRequest<'_>> {
        let JobTarget { slab, offset, .. } = &self.target;
        self.asks.then(|| MapRequest {
            fd: slab.fd(),
            fd_offset: slab.fd_offset(),
            window_offset: *offset,
            len: slab.len(),
        })
    }

    /// The doorbell of the slab, to be handed to the front end after its mapping. Call
    /// [`MapJob::doorbell_answered`] with its answer.
    pub fn doorbell(&self) -> Option<DoorbellRequest> {
        let JobTarget { slab, offset, slab_id, session, .. } = &self.target;
        if !self.asks || !session.handle.knows_doorbell() {
            return None;
        }
        let (end, doorbell) = (self.end(), slab.doorbell.as_ref()?);
        Some(DoorbellRequest {
            fd: doorbell.offer(end)?,
            slab_id: *slab_id,
            window_offset: *offset,
            len: slab.len(),
            rings: end == End::User,
        })
    }

    /// The front end has taken or refused the doorbell.
    pub fn doorbell_answered(&self, taken: bool) {
        if let Some(doorbell) = &self.target.slab.doorbell {
            doorbell.answered(self.end(), taken);
        }
    }

    fn end(&self) -> End {
        let JobTarget { slab, session, .. } = &self.target;
        if Arc::ptr_eq(&slab.owner, session) { End::Owner } else { End::User }
    }

    /// The request's tag.
    pub fn tag(&self) -> u32 {
        self.target.tag
    }
}

/// A doorbell for a front end.
#[derive(Debug)]
pub struct DoorbellRequest {
    /// The eventfd.
    pub fd: DoorbellFd,
    /// The slab, by its number on this device.
    pub slab_id: u32,
    /// Where the slab lies in the window, bytes.
    pub window_offset: u64,
    /// Length of the slab, bytes.
    pub len: u64,
    /// `true`: the driver rings the doorbell; `false`: the driver waits for the doorbell.
    pub rings: bool,
}

/// A RELEASE_SLAB waiting for the front end. Otherwise like [`MapJob`].
#[derive(Debug)]
pub struct UnmapJob {
    pub(super) target: JobTarget,
}

impl Drop for UnmapJob {
    fn drop(&mut self) {
        if let Some(device) = self.target.take_unanswered() {
            device.finish_unmap(self, MapAnswer::Unknown);
        }
    }
}

impl UnmapJob {
    /// Offset in the window, bytes.
    pub fn window_offset(&self) -> u64 {
        self.target.offset
    }

    /// Length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.target.slab.len()
    }

    /// The request's tag.
    pub fn tag(&self) -> u32 {
        self.target.tag
    }
}

/// Target of a job: a slab's place in the window of one session.
#[derive(Debug)]
pub(super) struct JobTarget {
    pub(super) device: Weak<Device>,
    pub(super) session: Arc<DeviceSession>,
    pub(super) tag: u32,
    pub(super) slab_id: u32,
    pub(super) slab: Arc<Slab>,
    pub(super) offset: u64,
    /// The front end's answer was taken.
    pub(super) answered: bool,
}

impl JobTarget {
    /// The device, if the job still needs an answer.
    fn take_unanswered(&mut self) -> Option<Arc<Device>> {
        if std::mem::replace(&mut self.answered, true) { None } else { self.device.upgrade() }
    }
}

/// A range possibly left mapped by a past session or a failed command. A dropped value is offered again.
#[derive(Debug)]
pub struct StaleMap {
    pub(super) device: Weak<Device>,
    pub(super) window_offset: u64,
    pub(super) len: u64,
    pub(super) answered: bool,
}

impl Drop for StaleMap {
    fn drop(&mut self) {
        if !self.answered
            && let Some(device) = self.device.upgrade()
        {
            device.finish_stale(self, MapAnswer::Unknown);
        }
    }
}

impl StaleMap {
    /// Offset in the window, bytes.
    pub fn window_offset(&self) -> u64 {
        self.window_offset
    }

    /// Length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// A front end's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapAnswer {
    Yes,
    No,
    /// The job was dropped.
    Unknown,
}

impl MapAnswer {
    pub(super) fn of(ok: bool) -> MapAnswer {
        if ok { MapAnswer::Yes } else { MapAnswer::No }
    }
}
