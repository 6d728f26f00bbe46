//! Work requests, and how a batch of them becomes the chain that the library wants.

use std::io;
use std::mem::MaybeUninit;

use smc_core::wire::ids::Rkey;
use thiserror::Error;

use super::ffi;
use super::memory::Sge;

/// Requests that are posted with one doorbell; a longer batch rings once per as many.
pub const MAX_BATCH: usize = 16;

/// The bytes of a request.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Copied when the request is posted; up to what [`Qp::max_inline`] says.
    ///
    /// [`Qp::max_inline`]: super::Qp::max_inline
    Inline(&'a [u8]),
    /// Read by the device some time before the request completes.
    Registered(Sge),
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Payload::Inline(bytes) => bytes.len(),
            Payload::Registered(sge) => sge.len(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Write { address: u64, rkey: Rkey },
    Send { solicited: bool },
}

/// A request to write a peer's memory, or to send to its receive queue.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    id: u64,
    kind: Kind,
    payload: Payload<'a>,
    signaled: bool,
}

impl<'a> Work<'a> {
    /// RDMA WRITE to `address` of the memory that the peer calls `rkey`.
    #[inline]
    pub fn write(id: u64, payload: Payload<'a>, address: u64, rkey: Rkey) -> Work<'a> {
        Work { id, kind: Kind::Write { address, rkey }, payload, signaled: false }
    }

    /// SEND, solicited: it wakes a peer that armed for such.
    #[inline]
    pub fn send(id: u64, payload: Payload<'a>) -> Work<'a> {
        Work { id, kind: Kind::Send { solicited: true }, payload, signaled: false }
    }

    /// Asks for a completion. A request without one completes silently, unless it fails, and its
    /// place in the queue is free when a later one with completion has completed.
    #[inline]
    pub fn signaled(self) -> Work<'a> {
        Work { signaled: true, ..self }
    }

    /// A SEND that does not wake the peer.
    #[inline]
    pub fn unsolicited(mut self) -> Work<'a> {
        if let Kind::Send { solicited } = &mut self.kind {
            *solicited = false;
        }
        self
    }
}

/// A buffer for one message that comes.
#[derive(Clone, Copy, Debug)]
pub struct Recv {
    /// Number of the request, for its completion.
    pub id: u64,
    /// Where the message goes.
    pub buffer: Sge,
}

/// Why a batch was not posted, or not all of it.
#[derive(Debug, Error)]
pub enum PostError {
    /// Nothing was posted: a payload is longer than the queue pair takes inline.
    #[error("{len} bytes do not fit the {room} that go inline")]
    InlineTooLong {
        /// Bytes of the payload.
        len: usize,
        /// Bytes that go inline.
        room: usize,
    },
    /// The queue is full after the first `posted` of the batch.
    #[error("the queue is full after {posted} requests")]
    Full {
        /// Requests posted.
        posted: usize,
    },
    /// The device refuses the request after the first `posted` of the batch.
    #[error("refused after {posted} requests: {source}")]
    Refused {
        /// Requests posted.
        posted: usize,
        /// What the library said.
        source: io::Error,
    },
}

impl PostError {
    fn new(posted: usize, source: io::Error) -> PostError {
        match source.kind() {
            io::ErrorKind::OutOfMemory => PostError::Full { posted },
            _ => PostError::Refused { posted, source },
        }
    }
}

/// Refuses what would be too long inline, before anything is posted.
#[inline]
pub(super) fn check_inline(batch: &[Work<'_>], room: usize) -> Result<(), PostError> {
    for work in batch {
        if let Payload::Inline(bytes) = work.payload
            && bytes.len() > room
        {
            return Err(PostError::InlineTooLong { len: bytes.len(), room });
        }
    }
    Ok(())
}

/// Posts sends through `post`, which gets the first of a chain, and says (as the library does) an
/// error number and the first request that was not posted.
#[inline]
pub(super) fn post_sends(
    batch: &[Work<'_>],
    mut post: impl FnMut(*mut ffi::SendWr, *mut *mut ffi::SendWr) -> i32,
) -> Result<(), PostError> {
    let mut posted = 0;
    for part in batch.chunks(MAX_BATCH) {
        let mut sges = [ffi::Sge::default(); MAX_BATCH];
        let mut chain = [const { MaybeUninit::<ffi::SendWr>::uninit() }; MAX_BATCH];
        let first: *mut ffi::SendWr = chain.as_mut_ptr().cast();
        for (i, (work, sge)) in part.iter().zip(&mut sges).enumerate() {
            let mut wr = ffi::SendWr { wr_id: work.id, ..ffi::SendWr::EMPTY };
            match work.kind {
                Kind::Write { address, rkey } => {
                    wr.opcode = ffi::WR_RDMA_WRITE;
                    wr.remote_addr = address;
                    wr.rkey = rkey.0;
                }
                Kind::Send { solicited } => {
                    wr.opcode = ffi::WR_SEND;
                    wr.send_flags |= if solicited { ffi::SEND_SOLICITED } else { 0 };
                }
            }
            wr.send_flags |= if work.signaled { ffi::SEND_SIGNALED } else { 0 };
            match work.payload {
                Payload::Inline(bytes) => {
                    wr.send_flags |= ffi::SEND_INLINE;
                    // The length was compared with a limit that is much smaller.
                    sge.length = bytes.len() as u32;
                    sge.addr = bytes.as_ptr().expose_provenance() as u64;
                }
                Payload::Registered(Sge(piece)) => *sge = piece,
            }
            wr.sg_list = sge;
            wr.num_sge = i32::from(work.payload.len() != 0);
            if i + 1 < part.len() {
                // SAFETY: a chunk is no longer than the array.
                wr.next = unsafe { first.add(i + 1) };
            }
            // SAFETY: as above.
            unsafe { first.add(i).write(wr) };
        }
        let mut bad = std::ptr::null_mut();
        match post(first, &raw mut bad) {
            0 => posted += part.len(),
            code => {
                let done = index_of(first, bad, part.len());
                return Err(PostError::new(posted + done, super::library::error_of(code)));
            }
        }
    }
    Ok(())
}

/// Like [`post_sends`], for receives.
pub(super) fn post_receives(
    batch: &[Recv],
    mut post: impl FnMut(*mut ffi::RecvWr, *mut *mut ffi::RecvWr) -> i32,
) -> Result<(), PostError> {
    let mut posted = 0;
    for part in batch.chunks(MAX_BATCH) {
        let mut sges = [ffi::Sge::default(); MAX_BATCH];
        let mut chain = [const { MaybeUninit::<ffi::RecvWr>::uninit() }; MAX_BATCH];
        let first: *mut ffi::RecvWr = chain.as_mut_ptr().cast();
        for (i, (recv, sge)) in part.iter().zip(&mut sges).enumerate() {
            *sge = recv.buffer.0;
            let next = if i + 1 < part.len() {
                // SAFETY: a chunk is no longer than the array.
                unsafe { first.add(i + 1) }
            } else {
                std::ptr::null_mut()
            };
            let wr = ffi::RecvWr { wr_id: recv.id, next, sg_list: sge, num_sge: 1 };
            // SAFETY: as above.
            unsafe { first.add(i).write(wr) };
        }
        let mut bad = std::ptr::null_mut();
        match post(first, &raw mut bad) {
            0 => posted += part.len(),
            code => {
                let done = index_of(first, bad, part.len());
                return Err(PostError::new(posted + done, super::library::error_of(code)));
            }
        }
    }
    Ok(())
}

/// Which of `len` elements `bad` is; the first if it is none of them.
fn index_of<T>(first: *const T, bad: *const T, len: usize) -> usize {
    let distance = bad.addr().saturating_sub(first.addr()) / size_of::<T>();
    if distance < len { distance } else { 0 }
}
