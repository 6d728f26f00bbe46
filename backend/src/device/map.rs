//! Replies, and what the front end is asked to do: map and unmap slabs.

use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use virtio_ism_abi::Status;
use virtio_ism_abi::command::{ReplyHeader, StatsReply};
use zerocopy::IntoBytes;

use super::Device;
use super::session::DeviceSession;
use super::slab::Slab;

/// Bytes of a reply.
#[derive(Clone, Copy)]
pub struct Reply {
    bytes: [u8; Reply::MAX],
    len: usize,
}

impl Reply {
    /// Longest reply in bytes: STATS.
    pub const MAX: usize = size_of::<ReplyHeader>() + size_of::<StatsReply>();

    /// A success: header and body.
    pub(super) fn ok(tag: u32, body: &[u8]) -> Reply {
        let mut reply = Reply::refusal(tag, Status::Ok);
        if let Some(room) = reply.bytes.get_mut(reply.len..reply.len + body.len()) {
            room.copy_from_slice(body);
            reply.len += body.len();
        }
        reply
    }

    /// The header alone.
    pub(super) fn refusal(tag: u32, status: Status) -> Reply {
        let header =
            ReplyHeader { status: status.code().into(), tag: tag.into(), ..Default::default() };
        let mut reply = Reply { bytes: [0; Reply::MAX], len: size_of::<ReplyHeader>() };
        // The buffer is longer than a header.
        let _ = header.write_to_prefix(&mut reply.bytes);
        reply
    }

    /// As much of it as fits into `room` bytes.
    pub(super) fn cut(mut self, room: usize) -> Reply {
        self.len = self.len.min(room);
        self
    }

    /// The status it carries; `None` if it was cut that short.
    pub fn status(&self) -> Option<Status> {
        let code = self.first_chunk::<2>()?;
        Status::from_code(u16::from_le_bytes(*code))
    }
}

impl Deref for Reply {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl std::fmt::Debug for Reply {
    /// Without the body, which may hold a token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("status", &self.status()).field("len", &self.len).finish()
    }
}

/// What becomes of a command.
#[derive(Debug)]
pub enum Outcome {
    /// Answered.
    Reply(Reply),
    /// Answered after the front end mapped a slab: [`Device::mapped`].
    Map(MapJob),
    /// Answered after the front end unmapped a slab: [`Device::unmapped`].
    Unmap(UnmapJob),
}

/// A REGISTER or ATTACH that waits for the front end.
///
/// Jobs of one device, of both kinds, are to be done in the order in which they came. A job holds
/// no lock. A job that is dropped counts as one whose outcome nobody knows: the command fails, and
/// the range is kept aside until the front end has confirmed that nothing is mapped there.
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
    /// And the session that is to be its user.
    Register(u64, Arc<DeviceSession>),
    Attach(u64),
}

/// What to ask the front end for.
#[derive(Clone, Copy, Debug)]
pub struct MapRequest<'a> {
    /// Memory of the slab, a sealed memfd. To be mapped shared, readable and writable.
    pub fd: BorrowedFd<'a>,
    /// Offset in it, bytes.
    pub fd_offset: u64,
    /// Offset in the window, bytes.
    pub window_offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl MapJob {
    /// What to ask the front end for. `None`: an earlier job of this device asks for the same slab,
    /// so there is nothing to ask; just call [`Device::mapped`] with `true` in turn.
    pub fn request(&self) -> Option<MapRequest<'_>> {
        let JobTarget { slab, offset, .. } = &self.target;
        self.asks.then(|| MapRequest {
            fd: slab.fd(),
            fd_offset: 0,
            window_offset: *offset,
            len: slab.len(),
        })
    }

    /// The request's tag.
    pub fn tag(&self) -> u32 {
        self.target.tag
    }
}

/// A RELEASE_SLAB that waits for the front end. As [`MapJob`].
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

/// What a job is about: a slab's place in the window of one session.
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
    /// The device, if it still waits for an answer.
    fn take_unanswered(&mut self) -> Option<Arc<Device>> {
        if std::mem::replace(&mut self.answered, true) { None } else { self.device.upgrade() }
    }
}

/// A range that a past session, or a command that failed, may have left mapped. One that is dropped is offered again.
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
