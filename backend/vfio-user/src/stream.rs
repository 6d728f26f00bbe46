// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The socket of a client: whole messages with their descriptors in, answers out.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use thiserror::Error;

use crate::wire::{Fields, HEADER, Header, HeaderError, MAX_FDS, MAX_MESSAGE};

/// Bytes of a header up to the end of the command number.
const BEGIN: usize = 4;

/// Why a stream ends.
#[derive(Debug, Error)]
pub enum StreamError {
    /// The client has closed the stream.
    #[error("the client has gone")]
    Closed,
    /// The client has closed the stream within a message.
    #[error("the client has gone within a message")]
    Cut,
    /// A malformed header.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// More descriptors than a message may have.
    #[error("more than {MAX_FDS} descriptors with a message")]
    Descriptors,
    /// A system call failed.
    #[error("the client's socket: {0}")]
    Io(#[from] io::Error),
}

/// Result of a wait.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A message has come; its body is in the buffer.
    Message(Header, Vec<OwnedFd>),
    /// The other descriptor became readable or ended.
    Other,
}

/// A client's socket. A client not reading its answers makes only its own thread wait.
#[derive(Debug)]
pub(crate) struct ClientStream {
    socket: UnixStream,
    buffer: Box<[u8; MAX_MESSAGE]>,
}

impl ClientStream {
    pub(crate) fn new(socket: UnixStream) -> io::Result<ClientStream> {
        socket.set_nonblocking(false)?;
        Ok(ClientStream { socket, buffer: Box::new([0; MAX_MESSAGE]) })
    }

    /// The body of the last message.
    pub(crate) fn body(&self, header: &Header) -> &[u8] {
        self.buffer.get(HEADER..HEADER + header.body).unwrap_or_default()
    }

    /// Waits for the begin of a message, or for `other`, and reads the message.
    pub(crate) fn next(&mut self, other: Option<BorrowedFd<'_>>) -> Result<Incoming, StreamError> {
        if let Some(other) = other {
            loop {
                let mut ready = [
                    PollFd::new(&self.socket, PollFlags::IN),
                    PollFd::from_borrowed_fd(other, PollFlags::IN),
                ];
                match poll(&mut ready, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(io::Error::from(error).into()),
                }
                let [client, other] = &ready;
                if !other.revents().is_empty() {
                    return Ok(Incoming::Other);
                }
                if !client.revents().is_empty() {
                    break;
                }
            }
        }
        let (header, fds) = self.message(0, Vec::new())?;
        Ok(Incoming::Message(header, fds))
    }

    /// The command of the next message, and the descriptors with it. Reads no more, since a front end of
    /// another protocol may send no more.
    pub(crate) fn begin(&mut self) -> Result<(u16, Vec<OwnedFd>), StreamError> {
        let mut fds = Vec::new();
        self.fill(0, BEGIN, &mut fds)?;
        Ok((Fields(self.buffer.as_slice()).u16(2), fds))
    }

    /// The rest of a message that has [begun](Self::begin).
    pub(crate) fn rest(
        &mut self,
        fds: Vec<OwnedFd>,
    ) -> Result<(Header, Vec<OwnedFd>), StreamError> {
        self.message(BEGIN, fds)
    }

    /// The message after its first `from` bytes.
    fn message(
        &mut self,
        from: usize,
        mut fds: Vec<OwnedFd>,
    ) -> Result<(Header, Vec<OwnedFd>), StreamError> {
        self.fill(from, HEADER, &mut fds)?;
        let head = self.buffer.first_chunk::<HEADER>().copied().unwrap_or([0; HEADER]);
        let header = Header::parse(&head)?;
        self.fill(HEADER, HEADER + header.body, &mut fds)?;
        Ok((header, fds))
    }

    /// Reads the part `from..to` of a message.
    fn fill(
        &mut self,
        mut from: usize,
        to: usize,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(), StreamError> {
        while from < to {
            let is_first = from == 0;
            let place = self.buffer.get_mut(from..to).unwrap_or_default();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut iov = [IoSliceMut::new(place)];
            let got = match recvmsg(&self.socket, &mut iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
            {
                Ok(got) => got,
                Err(Errno::INTR) => continue,
                Err(Errno::CONNRESET) => return Err(StreamError::Closed),
                Err(error) => return Err(io::Error::from(error).into()),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
                return Err(StreamError::Descriptors);
            }
            match got.bytes {
                0 if is_first => return Err(StreamError::Closed),
                0 => return Err(StreamError::Cut),
                bytes => from += bytes,
            }
        }
        Ok(())
    }

    /// Sends an answer, and at most [`MAX_FDS`] descriptors with it.
    pub(crate) fn send(
        &self,
        head: &[u8],
        body: &[u8],
        mut fds: &[BorrowedFd<'_>],
    ) -> Result<(), StreamError> {
        let message: Vec<u8> = head.iter().chain(body).copied().collect();
        let mut rest = message.as_slice();
        while !rest.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(fds));
            }
            let iov = [IoSlice::new(rest)];
            match sendmsg(self.socket.as_fd(), &iov, &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    rest = rest.get(sent..).unwrap_or_default();
                    fds = &[];
                }
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(StreamError::Closed),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }
}
