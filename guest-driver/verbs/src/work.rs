// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work requests, and the library's chain for a batch of requests.

use std::io;
use std::mem::MaybeUninit;

use smc_core::wire::ids::Rkey;
use thiserror::Error;

use super::ffi;
use super::memory::Sge;

/// Requests per doorbell. A longer batch takes one doorbell for each so many requests.
pub const MAX_BATCH: usize = 16;

/// The bytes of a request.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// The post copies these bytes, at most [`Qp::max_inline`].
    ///
    /// [`Qp::max_inline`]: super::Qp::max_inline
    Inline(&'a [u8]),
    /// The device reads this memory at some time before the request completes.
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
    Send,
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
    /// RDMA WRITE to `address` of the peer's memory with the key `rkey`. The peer gets no notice of
    /// the write (RMB-28).
    #[inline]
    pub fn write(id: u64, payload: Payload<'a>, address: u64, rkey: Rkey) -> Work<'a> {
        Work { id, kind: Kind::Write { address, rkey }, payload, signaled: false }
    }

    /// Solicited SEND: wakes a peer with a queue armed for solicited messages.
    #[inline]
    pub fn send(id: u64, payload: Payload<'a>) -> Work<'a> {
        Work { id, kind: Kind::Send, payload, signaled: false }
    }

    /// Asks for a completion. An unsignaled request causes a completion only on failure. Its place
    /// in the queue becomes free when a later signaled request has completed.
    #[inline]
    pub fn signaled(self) -> Work<'a> {
        Work { signaled: true, ..self }
    }
}

/// A receive request: a buffer for one message.
#[derive(Clone, Copy, Debug)]
pub struct Recv {
    /// Number of the request, for its completion.
    pub id: u64,
    /// The buffer for the message.
    pub buffer: Sge,
}

/// Why not all of a batch was posted.
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
        /// The error of the library.
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

/// Refuses a batch with an over-long inline payload, before any request is posted.
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

/// Posts sends through `post`. `post` gets the first request of a chain. Like the library's
/// function, `post` returns an error number and the first unposted request.
#[inline]
pub(super) fn post_sends(
    batch: &[Work<'_>],
    mut post: impl FnMut(*mut ffi::SendWr, *mut *mut ffi::SendWr) -> i32,
) -> Result<(), PostError> {
    let mut posted = 0;
    for part in batch.chunks(MAX_BATCH) {
        // The loop writes as many elements of both arrays as the batch needs; no others are read.
        let mut sges = [const { MaybeUninit::<ffi::Sge>::uninit() }; MAX_BATCH];
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
                Kind::Send => {
                    wr.opcode = ffi::WR_SEND;
                    wr.send_flags |= ffi::SEND_SOLICITED;
                }
            }
            wr.send_flags |= if work.signaled { ffi::SEND_SIGNALED } else { 0 };
            match work.payload {
                Payload::Inline(bytes) => {
                    wr.send_flags |= ffi::SEND_INLINE;
                    sge.write(ffi::Sge {
                        addr: bytes.as_ptr().expose_provenance() as u64,
                        // `check_inline` has compared the length with a much smaller limit.
                        length: bytes.len() as u32,
                        lkey: 0,
                    });
                }
                Payload::Registered(Sge(piece)) => {
                    sge.write(piece);
                }
            }
            wr.sg_list = sge.as_mut_ptr();
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

/// The index of `bad` among `len` elements; 0 if `bad` is none of them.
fn index_of<T>(first: *const T, bad: *const T, len: usize) -> usize {
    let distance = bad.addr().saturating_sub(first.addr()) / size_of::<T>();
    if distance < len { distance } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(addr: u64, length: u32) -> Sge {
        Sge(ffi::Sge { addr, length, lkey: 9 })
    }

    /// The fields of each request of a chain, read by a device.
    fn seen(first: *const ffi::SendWr) -> Vec<(u64, u32, u32, u64, u32, Option<ffi::Sge>)> {
        let mut list = Vec::new();
        let mut next = first;
        // SAFETY: the chain under test, of which each request is good until the call returns.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: as above; the list has `num_sge` entries.
            let sge = (wr.num_sge == 1).then(|| unsafe { *wr.sg_list });
            list.push((wr.wr_id, wr.opcode, wr.send_flags, wr.remote_addr, wr.rkey, sge));
            next = wr.next;
        }
        list
    }

    // Shows: RMB-28, CDC-2.
    #[test]
    fn a_write_and_a_send_are_one_chain() {
        let message = [7; 44];
        let batch = [
            Work::write(1, Payload::Registered(sge(0x1000, 5)), 0x2000, Rkey(77)),
            Work::send(2, Payload::Inline(&message)).signaled(),
            Work::send(3, Payload::Registered(sge(0, 0))),
        ];
        let mut calls = 0;
        post_sends(&batch, |first, _| {
            calls += 1;
            let inline = ffi::Sge { addr: message.as_ptr() as u64, length: 44, lkey: 0 };
            let piece = ffi::Sge { addr: 0x1000, length: 5, lkey: 9 };
            let want = [
                (1, ffi::WR_RDMA_WRITE, 0, 0x2000, 77, Some(piece)),
                (
                    2,
                    ffi::WR_SEND,
                    ffi::SEND_INLINE | ffi::SEND_SIGNALED | ffi::SEND_SOLICITED,
                    0,
                    0,
                    Some(inline),
                ),
                (3, ffi::WR_SEND, ffi::SEND_SOLICITED, 0, 0, None),
            ];
            assert_eq!(seen(first), want);
            0
        })
        .unwrap();
        assert_eq!(calls, 1, "one doorbell");
        post_sends(&[], |_, _| unreachable!()).unwrap();
    }

    #[test]
    fn a_long_batch_rings_once_per_part_and_counts_across_parts() {
        let batch: Vec<_> = (0..40).map(|id| Work::send(id, Payload::Inline(b"x"))).collect();
        let mut parts = Vec::new();
        post_sends(&batch, |first, _| {
            parts.push(seen(first).len());
            0
        })
        .unwrap();
        assert_eq!(parts, [16, 16, 8]);

        for (refused, code) in [(0, libc::ENOMEM), (5, libc::ENOMEM), (21, libc::EINVAL)] {
            let mut before = 0;
            let result = post_sends(&batch, |first, bad| {
                let here = seen(first).len();
                if refused >= before + here {
                    before += here;
                    return 0;
                }
                // SAFETY: both pointers are the call's, and the request is one of the chain.
                unsafe { *bad = first.add(refused - before) };
                code
            });
            match result.unwrap_err() {
                PostError::Full { posted } => assert_eq!((posted, code), (refused, libc::ENOMEM)),
                PostError::Refused { posted, source } => {
                    assert_eq!(posted, refused);
                    assert_eq!(source.raw_os_error(), Some(libc::EINVAL));
                }
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_library_that_does_not_say_which_request_it_refused_took_none() {
        let batch = [Work::send(1, Payload::Inline(b"x")); 3];
        let error = post_sends(&batch, |_, _| libc::EIO).unwrap_err();
        assert!(matches!(error, PostError::Refused { posted: 0, .. }), "{error}");
        let recvs = [Recv { id: 1, buffer: sge(0, 64) }; 3];
        let error = post_receives(&recvs, |first, bad| {
            // SAFETY: the pointer is the call's.
            unsafe { *bad = first.wrapping_add(99) };
            libc::ENOMEM
        });
        assert!(matches!(error, Err(PostError::Full { posted: 0 })));
    }

    #[test]
    fn receives_are_one_chain() {
        let recvs: Vec<_> = (0..20).map(|id| Recv { id, buffer: sge(id * 64, 64) }).collect();
        let mut ids = Vec::new();
        post_receives(&recvs, |first, _| {
            let mut next = first;
            // SAFETY: the chain under test.
            while let Some(wr) = unsafe { next.as_ref() } {
                assert_eq!(wr.num_sge, 1);
                // SAFETY: as above.
                ids.push((wr.wr_id, unsafe { (*wr.sg_list).addr }));
                next = wr.next;
            }
            0
        })
        .unwrap();
        assert_eq!(ids, (0..20).map(|id| (id, id * 64)).collect::<Vec<_>>());
    }

    #[test]
    fn nothing_is_posted_if_one_payload_is_too_long() {
        let batch =
            [Work::send(1, Payload::Inline(b"ok")), Work::send(2, Payload::Inline(&[0; 45]))];
        let error = check_inline(&batch, 44).unwrap_err();
        assert!(matches!(error, PostError::InlineTooLong { len: 45, room: 44 }), "{error}");
        check_inline(&batch, 45).unwrap();
        check_inline(&[Work::send(1, Payload::Registered(sge(0, 4096)))], 0).unwrap();
    }
}
