//! What the front end is asked to do: map and unmap slabs.

use std::ops::Deref;
use std::os::fd::BorrowedFd;

/// Bytes of a reply, at most header and largest body.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    pub(super) bytes: [u8; Reply::MAX],
    pub(super) len: u8,
}

impl Reply {
    /// Longest reply in bytes: STATS.
    pub const MAX: usize = 8 + 128;
}

impl Deref for Reply {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// What becomes of a command.
#[derive(Debug)]
pub enum Outcome {
    /// Answered.
    Reply(Reply),
    /// Answered after the front end mapped a slab: [`Device::mapped`](super::Device::mapped).
    Map(MapJob),
    /// Answered after the front end unmapped a slab:
    /// [`Device::unmapped`](super::Device::unmapped).
    Unmap(UnmapJob),
}

/// A REGISTER or ATTACH that waits for the front end. Jobs of one device must be done in the order
/// in which they came.
#[derive(Debug)]
pub struct MapJob {}

/// What to ask the front end for.
#[derive(Clone, Copy, Debug)]
pub struct MapRequest<'a> {
    /// Memory of the slab, a sealed memfd.
    pub fd: BorrowedFd<'a>,
    /// Offset in it, bytes.
    pub fd_offset: u64,
    /// Offset in the window, bytes.
    pub window_offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl MapJob {
    /// What to ask the front end for; `None`: an earlier job of this device asks for the same slab,
    /// so there is nothing to ask, just call `mapped(job, true)` in turn.
    pub fn request(&self) -> Option<MapRequest<'_>> {
        None
    }
}

/// A RELEASE_SLAB that waits for the front end.
#[derive(Debug)]
pub struct UnmapJob {}

impl UnmapJob {
    /// Offset in the window, bytes.
    pub fn window_offset(&self) -> u64 {
        0
    }
    /// Length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        0
    }
}

/// A range that a past life may have left mapped.
#[derive(Debug)]
pub struct StaleMap {
    /// Offset in the window, bytes.
    pub window_offset: u64,
    /// Length, bytes.
    pub len: u64,
}
