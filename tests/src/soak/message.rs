// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of vhost-user, written by hand, so every byte can be wrong.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with,
};

/// Most descriptors of a message.
pub(super) const MAX_FDS: usize = 32;
/// Bytes of a header.
const HEADER: usize = 12;
/// Longest accepted body of a reply.
const MAX_BODY: usize = 64 << 10;
/// How long the daemon may take over one message.
pub(super) const PATIENT: Duration = Duration::from_secs(10);

/// Version 1.
pub(super) const VERSION: u32 = 1;
/// The message is a reply.
pub(super) const REPLY: u32 = 1 << 2;
/// The message is to be answered by a status.
pub(super) const NEED_REPLY: u32 = 1 << 3;

pub(super) const GET_FEATURES: u32 = 1;
pub(super) const SET_FEATURES: u32 = 2;
pub(super) const SET_OWNER: u32 = 3;
pub(super) const RESET_OWNER: u32 = 4;
pub(super) const SET_MEM_TABLE: u32 = 5;
pub(super) const SET_LOG_BASE: u32 = 6;
pub(super) const SET_LOG_FD: u32 = 7;
pub(super) const SET_VRING_NUM: u32 = 8;
pub(super) const SET_VRING_ADDR: u32 = 9;
pub(super) const SET_VRING_BASE: u32 = 10;
pub(super) const GET_VRING_BASE: u32 = 11;
pub(super) const SET_VRING_KICK: u32 = 12;
pub(super) const SET_VRING_CALL: u32 = 13;
pub(super) const SET_VRING_ERR: u32 = 14;
pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
pub(super) const GET_QUEUE_NUM: u32 = 17;
pub(super) const SET_VRING_ENABLE: u32 = 18;
pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
pub(super) const GET_CONFIG: u32 = 24;
pub(super) const SET_CONFIG: u32 = 25;
pub(super) const GET_INFLIGHT_FD: u32 = 31;
pub(super) const RESET_DEVICE: u32 = 34;
pub(super) const ADD_MEM_REG: u32 = 37;
pub(super) const REM_MEM_REG: u32 = 38;
pub(super) const GET_SHMEM_CONFIG: u32 = 44;
/// Numbers from here on are no request.
pub(super) const BEYOND: u32 = 48;

/// Requests with an answer whatever the flags.
const ANSWERED: [u32; 7] = [
    GET_FEATURES,
    GET_VRING_BASE,
    GET_PROTOCOL_FEATURES,
    GET_QUEUE_NUM,
    GET_CONFIG,
    GET_INFLIGHT_FD,
    GET_SHMEM_CONFIG,
];

/// Words of a message, little-endian.
pub(super) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A header and a body.
pub(super) fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    for word in [request, flags, body.len() as u32] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(body);
    bytes
}

/// A word of a message.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |word| u32::from_le_bytes(word.try_into().unwrap()))
}

/// A double word of a message.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |word| u64::from_le_bytes(word.try_into().unwrap()))
}

/// Sends bytes with descriptors, as far as the socket takes them at once.
pub(super) fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives the bytes present, with their first descriptor. Does not wait.
pub(super) fn receive(
    socket: &UnixStream,
    bytes: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((got.bytes, fd))
}

/// The connection of a front end.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) socket: UnixStream,
}

impl Channel {
    /// Connects to a port, or fails with `WouldBlock`: the daemon takes one front end at a time, and
    /// the backlog may hold ended connections.
    pub(super) fn connect(path: &Path) -> io::Result<Channel> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(PATIENT))?;
        socket.set_write_timeout(Some(PATIENT))?;
        Ok(Channel { socket })
    }

    /// Sends a request, and reads the reply if there is to be one.
    pub(super) fn ask(
        &mut self,
        request: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        need_reply: bool,
    ) -> io::Result<Vec<u8>> {
        let flags = VERSION | if need_reply { NEED_REPLY } else { 0 };
        send(&self.socket, &message(request, flags, body), fds)?;
        if !need_reply && !ANSWERED.contains(&request) {
            return Ok(Vec::new());
        }
        loop {
            let mut header = [0; HEADER];
            self.socket.read_exact(&mut header)?;
            let mut body = vec![0; (u32_at(&header, 8) as usize).min(MAX_BODY)];
            self.socket.read_exact(&mut body)?;
            // Earlier messages without a waiter may have replies as well.
            if u32_at(&header, 0) == request {
                return Ok(body);
            }
        }
    }

    /// Throws away the received bytes. An error: the connection has ended.
    pub(super) fn drain(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            match receive(&self.socket, &mut bytes) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
