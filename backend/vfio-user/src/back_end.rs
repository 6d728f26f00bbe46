// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vhost-user front end: the function's requests to its back end.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};
use thiserror::Error;

use crate::dma::{MAX_REGIONS, MemoryRegion, PAGE};
use crate::wire::{Fields, put};

/// A queue in its driver's layout. Addresses are the guest's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLayout {
    /// Entries.
    pub size: u16,
    /// The descriptors.
    pub descriptors: u64,
    /// The ring of available buffers.
    pub available: u64,
    /// The ring of used buffers.
    pub used: u64,
}

/// Why the back end no longer serves.
#[derive(Debug, Error)]
pub enum BackEndError {
    /// The back end has closed the connection, or sending failed.
    #[error("the vhost-user back end: {0}")]
    Io(#[from] io::Error),
    /// The back end refuses a request.
    #[error("the vhost-user back end refuses request {request}: {code}")]
    Refused {
        /// Number of the request.
        request: u32,
        /// The back end's answer.
        code: u64,
    },
    /// An answer does not match the request.
    #[error("the vhost-user back end answers request {request} with {len} bytes to {answered}")]
    Answer {
        /// Number of the request.
        request: u32,
        /// Number in the answer.
        answered: u32,
        /// Bytes of the answer.
        len: u32,
    },
    /// The back end lacks something the function needs.
    #[error("the vhost-user back end has no {0}")]
    Missing(&'static str),
}

/// A vhost-user back end, or its replacement in a test.
pub trait BackEnd {
    /// A descriptor readable at the end of the back end, if any.
    fn link(&self) -> Option<BorrowedFd<'_>>;
    /// Features offered by the back end.
    ///
    /// # Errors
    /// The back end has ended, or refuses; the same holds for all methods.
    fn features(&mut self) -> Result<u64, BackEndError>;
    /// Accepts features, at the begin of a session.
    fn set_features(&mut self, features: u64) -> Result<(), BackEndError>;
    /// The first `len` bytes of the device's configuration.
    fn config(&mut self, len: u16) -> Result<Vec<u8>, BackEndError>;
    /// Gives the back end the guest's memory, or none. On return the back end no longer uses memory missing
    /// from `regions`.
    fn set_memory(&mut self, regions: &[MemoryRegion<'_>]) -> Result<(), BackEndError>;
    /// Starts a queue.
    fn start_queue(
        &mut self,
        queue: u16,
        layout: &QueueLayout,
        kick: BorrowedFd<'_>,
        call: Option<BorrowedFd<'_>>,
    ) -> Result<(), BackEndError>;
    /// Serves a kicked queue on the calling thread. `false`: not served; the caller has to signal the kick
    /// eventfd.
    fn kick(&mut self, _queue: u16) -> bool {
        false
    }
    /// Replaces the interrupt eventfd of a queue. On return the old eventfd is no longer used.
    fn set_call(&mut self, queue: u16, call: Option<BorrowedFd<'_>>) -> Result<(), BackEndError>;
    /// Stops a queue. On return its memory is no longer used.
    fn stop_queue(&mut self, queue: u16) -> Result<(), BackEndError>;
    /// Resets the device, after its queues were stopped.
    fn reset(&mut self) -> Result<(), BackEndError>;
}

// Requests.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;
const RESET_DEVICE: u32 = 34;

/// Feature: protocol features are negotiated. Not for the driver.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Feature of vhost: dirty pages are logged. Not for the driver.
const LOG_ALL: u64 = 1 << 26;
// Protocol features.
const MQ: u64 = 1 << 0;
const REPLY_ACK: u64 = 1 << 3;
const CONFIG: u64 = 1 << 9;
const RESET: u64 = 1 << 13;

/// Flags of a message: the version, a reply, a wanted reply.
const VERSION: u32 = 1;
const IS_REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In place of a descriptor: no descriptor.
const NO_FD: u64 = 1 << 8;

const HEADER: usize = 12;
/// Bytes of the longest accepted answer: a configuration.
const MAX_ANSWER: usize = 12 + 256;

/// Serves a kicked queue, or returns `false`.
type ServeKick = Box<dyn Fn(u16) -> bool>;

/// A back end at the other end of a connection. Each request waits for its answer.
pub struct VhostUser {
    stream: UnixStream,
    offered: u64,
    can_reset: bool,
    /// The back end has memory of the guest.
    has_memory: bool,
    serve_kick: Option<ServeKick>,
}

impl std::fmt::Debug for VhostUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VhostUser").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl VhostUser {
    /// Becomes the front end of a connection with at least `queues` queues.
    ///
    /// # Errors
    /// The back end ends, refuses, or lacks CONFIG, MQ, REPLY_ACK or queues.
    pub fn new(stream: UnixStream, queues: u16) -> Result<VhostUser, BackEndError> {
        let mut this =
            VhostUser { stream, offered: 0, can_reset: false, has_memory: false, serve_kick: None };
        this.send(SET_OWNER, 0, &[], &[])?;
        this.offered = this.get_u64(GET_FEATURES)?;
        if this.offered & PROTOCOL_FEATURES == 0 {
            return Err(BackEndError::Missing("protocol features"));
        }
        let offered = this.get_u64(GET_PROTOCOL_FEATURES)?;
        for (bit, name) in [(MQ, "MQ"), (REPLY_ACK, "REPLY_ACK"), (CONFIG, "CONFIG")] {
            if offered & bit == 0 {
                return Err(BackEndError::Missing(name));
            }
        }
        this.can_reset = offered & RESET != 0;
        let accepted = offered & (MQ | REPLY_ACK | CONFIG | RESET);
        this.send(SET_PROTOCOL_FEATURES, 0, &accepted.to_ne_bytes(), &[])?;
        if this.get_u64(GET_QUEUE_NUM)? < queues.into() {
            return Err(BackEndError::Missing("as many queues"));
        }
        Ok(this)
    }

    /// Makes `serve` handle kicks, on the thread of the function, as in [`BackEnd::kick`]. For a back end in
    /// the same process.
    pub fn serve_kicks_by(&mut self, serve: impl Fn(u16) -> bool + 'static) {
        self.serve_kick = Some(Box::new(serve));
    }

    fn set_table(&self, regions: &[MemoryRegion<'_>]) -> Result<(), BackEndError> {
        let mut body = pair(regions.len() as u32, 0).to_vec();
        for region in regions {
            // The front end's addresses equal the guest's.
            for value in [region.address, region.size, region.address, region.offset] {
                body.extend(value.to_ne_bytes());
            }
        }
        let fds: Vec<_> = regions.iter().map(|region| region.file).collect();
        self.set(SET_MEM_TABLE, &body, &fds)
    }

    /// Sends a request.
    fn send(
        &self,
        request: u32,
        flags: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), BackEndError> {
        let mut head = [0; HEADER];
        put(&mut head, 0, &request.to_ne_bytes());
        put(&mut head, 4, &(VERSION | flags).to_ne_bytes());
        put(&mut head, 8, &(body.len() as u32).to_ne_bytes());
        let message: Vec<u8> = head.iter().chain(body).copied().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_REGIONS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        // A socket of this process, read by the other end as long as it lives: the send may block.
        let iov = [IoSlice::new(&message)];
        let sent = sendmsg(&self.stream, &iov, &mut ancillary, SendFlags::NOSIGNAL)
            .map_err(io::Error::from)?;
        let mut rest = message.get(sent..).unwrap_or_default();
        while !rest.is_empty() {
            let sent = rustix::net::send(&self.stream, rest, SendFlags::NOSIGNAL)
                .map_err(io::Error::from)?;
            rest = rest.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    fn read(&self, mut place: &mut [u8]) -> Result<(), BackEndError> {
        while !place.is_empty() {
            let mut none = RecvAncillaryBuffer::default();
            let got = recvmsg(
                &self.stream,
                &mut [IoSliceMut::new(place)],
                &mut none,
                RecvFlags::CMSG_CLOEXEC,
            );
            match got {
                Ok(got) if got.bytes == 0 => {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                }
                Ok(got) => place = place.get_mut(got.bytes..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    /// The answer to a request.
    fn answer(&self, request: u32) -> Result<Vec<u8>, BackEndError> {
        let mut head = [0; HEADER];
        self.read(&mut head)?;
        let fields = Fields(&head);
        let (answered, flags, len) = (fields.u32(0), fields.u32(4), fields.u32(8));
        if answered != request || flags & IS_REPLY == 0 || len as usize > MAX_ANSWER {
            return Err(BackEndError::Answer { request, answered, len });
        }
        let mut body = vec![0; len as usize];
        self.read(&mut body)?;
        Ok(body)
    }

    fn get_u64(&self, request: u32) -> Result<u64, BackEndError> {
        self.send(request, 0, &[], &[])?;
        number(request, &self.answer(request)?)
    }

    /// A request without an answer of its own, acknowledged by the back end.
    fn set(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), BackEndError> {
        self.send(request, NEED_REPLY, body, fds)?;
        match number(request, &self.answer(request)?)? {
            0 => Ok(()),
            code => Err(BackEndError::Refused { request, code }),
        }
    }

    fn set_ring(&self, request: u32, queue: u16, value: u32) -> Result<(), BackEndError> {
        self.set(request, &pair(queue.into(), value), &[])
    }

    fn set_eventfd(
        &self,
        request: u32,
        queue: u16,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), BackEndError> {
        let value = u64::from(queue) | fd.map_or(NO_FD, |_| 0);
        self.set(request, &value.to_ne_bytes(), fd.as_slice())
    }
}

/// A page of no guest. vhost-user has no table without memory, so a back end without memory gets this page.
fn page_of_nobody() -> rustix::io::Result<OwnedFd> {
    let page = memfd_create("no-memory", MemfdFlags::CLOEXEC)?;
    ftruncate(&page, PAGE)?;
    Ok(page)
}

fn number(request: u32, body: &[u8]) -> Result<u64, BackEndError> {
    let len = body.len() as u32;
    let bytes = body.try_into();
    let bytes = bytes.map_err(|_| BackEndError::Answer { request, answered: request, len })?;
    Ok(u64::from_ne_bytes(bytes))
}

fn pair(first: u32, second: u32) -> [u8; 8] {
    let mut body = [0; 8];
    put(&mut body, 0, &first.to_ne_bytes());
    put(&mut body, 4, &second.to_ne_bytes());
    body
}

impl BackEnd for VhostUser {
    fn link(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.as_fd())
    }

    fn features(&mut self) -> Result<u64, BackEndError> {
        Ok(self.offered & !(PROTOCOL_FEATURES | LOG_ALL))
    }

    fn set_features(&mut self, features: u64) -> Result<(), BackEndError> {
        self.set(SET_FEATURES, &(features | PROTOCOL_FEATURES).to_ne_bytes(), &[])
    }

    fn config(&mut self, len: u16) -> Result<Vec<u8>, BackEndError> {
        const HEAD: usize = 12;
        let mut body = vec![0; HEAD + usize::from(len)];
        put(&mut body, 4, &u32::from(len).to_ne_bytes());
        self.send(GET_CONFIG, 0, &body, &[])?;
        let answer = self.answer(GET_CONFIG)?;
        match answer.get(HEAD..) {
            Some(config) if config.len() == usize::from(len) => Ok(config.to_vec()),
            _ => Err(BackEndError::Answer {
                request: GET_CONFIG,
                answered: GET_CONFIG,
                len: answer.len() as u32,
            }),
        }
    }

    fn set_memory(&mut self, regions: &[MemoryRegion<'_>]) -> Result<(), BackEndError> {
        if regions.is_empty() && self.has_memory {
            let page = page_of_nobody().map_err(io::Error::from)?;
            let file = page.as_fd();
            self.set_table(&[MemoryRegion { address: 0, size: PAGE, file, offset: 0 }])?;
        } else if !regions.is_empty() {
            self.set_table(regions)?;
        }
        self.has_memory = !regions.is_empty();
        Ok(())
    }

    fn start_queue(
        &mut self,
        queue: u16,
        layout: &QueueLayout,
        kick: BorrowedFd<'_>,
        call: Option<BorrowedFd<'_>>,
    ) -> Result<(), BackEndError> {
        self.set_ring(SET_VRING_NUM, queue, layout.size.into())?;
        self.set_ring(SET_VRING_BASE, queue, 0)?;
        let mut body = pair(queue.into(), 0).to_vec();
        for address in [layout.descriptors, layout.used, layout.available, 0] {
            body.extend(address.to_ne_bytes());
        }
        self.set(SET_VRING_ADDR, &body, &[])?;
        self.set_eventfd(SET_VRING_CALL, queue, call)?;
        self.set_eventfd(SET_VRING_KICK, queue, Some(kick))?;
        self.set_ring(SET_VRING_ENABLE, queue, 1)
    }

    fn kick(&mut self, queue: u16) -> bool {
        self.serve_kick.as_ref().is_some_and(|serve| serve(queue))
    }

    fn set_call(&mut self, queue: u16, call: Option<BorrowedFd<'_>>) -> Result<(), BackEndError> {
        self.set_eventfd(SET_VRING_CALL, queue, call)
    }

    fn stop_queue(&mut self, queue: u16) -> Result<(), BackEndError> {
        self.send(GET_VRING_BASE, 0, &pair(queue.into(), 0), &[])?;
        self.answer(GET_VRING_BASE).map(drop)
    }

    fn reset(&mut self) -> Result<(), BackEndError> {
        if self.can_reset { self.set(RESET_DEVICE, &[], &[]) } else { Ok(()) }
    }
}
