// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vfio-user client for tests, with an encoder of its own.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Commands.
pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const GET_INFO: u16 = 4;
pub(crate) const GET_REGION_INFO: u16 = 5;
pub(crate) const GET_IRQ_INFO: u16 = 7;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
pub(crate) const RESET: u16 = 13;

/// An error reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused(pub(crate) i32);

/// The client.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    next: u16,
}

/// Numbers in a message's byte order.
pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// 64-bit numbers in a message's byte order.
pub(crate) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

/// Number at an offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}

impl Client {
    pub(crate) fn new(stream: UnixStream) -> Client {
        Client { stream, next: 0 }
    }

    /// Sends a request with `size` and `flags` in its header.
    pub(crate) fn send_raw(
        &mut self,
        [command, id]: [u16; 2],
        [size, flags]: [u32; 2],
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut message = Vec::new();
        message.extend(id.to_ne_bytes());
        message.extend(command.to_ne_bytes());
        message.extend(words(&[size, flags, 0]));
        message.extend(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let iov = [IoSlice::new(&message)];
        let sent = sendmsg(&self.stream, &iov, &mut ancillary, SendFlags::NOSIGNAL)?;
        self.stream.write_all(&message[sent..])
    }

    /// Sends a request without a reply.
    pub(crate) fn post(&mut self, command: u16, body: &[u8]) {
        self.send_raw([command, 0xffff], [16 + body.len() as u32, 0x10], body, &[]).unwrap();
    }

    /// Sends a request and waits for its reply. A stream error comes from the server's end.
    pub(crate) fn try_request(
        &mut self,
        command: u16,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<Result<Vec<u8>, Refused>> {
        self.next += 1;
        let id = self.next;
        self.send_raw([command, id], [16 + body.len() as u32, 0], body, fds)?;
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        assert_eq!(word(&head, 0), u32::from(id) | u32::from(command) << 16, "another's reply");
        let mut reply = vec![0; word(&head, 4) as usize - 16];
        self.stream.read_exact(&mut reply)?;
        match word(&head, 8) {
            1 => Ok(Ok(reply)),
            0x21 => Ok(Err(Refused(word(&head, 12) as i32))),
            flags => panic!("flags {flags:#x} in a reply"),
        }
    }

    /// Like [`try_request`](Self::try_request), with a running server.
    pub(crate) fn request(
        &mut self,
        command: u16,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, Refused> {
        self.try_request(command, body, fds).unwrap()
    }

    /// Agrees on the version. Returns the server's capabilities.
    pub(crate) fn version(&mut self) -> String {
        self.version_as("{\"capabilities\":{}}")
    }

    /// Agrees on the version, as a client of these capabilities.
    pub(crate) fn version_as(&mut self, capabilities: &str) -> String {
        let body = [&[0; 4], capabilities.as_bytes(), &[0]].concat();
        let reply = self.request(VERSION, &body, &[]).unwrap();
        assert_eq!(reply[..4], [0; 4]);
        assert_eq!(reply.last(), Some(&0));
        String::from_utf8(reply[4..reply.len() - 1].to_vec()).unwrap()
    }

    /// The information on a region, of at most `argsz` bytes, and the files that come with it.
    pub(crate) fn region_info(&mut self, region: u32, argsz: u32) -> (Vec<u8>, Vec<OwnedFd>) {
        self.next += 1;
        let body = words(&[argsz, 0, region, 0, 0, 0, 0, 0]);
        self.send_raw([GET_REGION_INFO, self.next], [16 + 32, 0], &body, &[]).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut head = [0; 16];
        let mut iov = [IoSliceMut::new(&mut head)];
        recvmsg(&self.stream, &mut iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
        let mut files = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                files.extend(more);
            }
        }
        assert_eq!(word(&head, 8), 1, "a reply without an error");
        let mut reply = vec![0; word(&head, 4) as usize - 16];
        self.stream.read_exact(&mut reply).unwrap();
        (reply, files)
    }

    /// Maps a part of a file, or memory without one.
    pub(crate) fn map(
        &mut self,
        address: u64,
        size: u64,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), Refused> {
        let mut body = words(&[32, 3]);
        body.extend(longs(&[file.map_or(0, |(_, offset)| offset), address, size]));
        let fds = file.map(|(file, _)| file);
        self.request(DMA_MAP, &body, fds.as_slice()).map(drop)
    }

    /// Unmaps.
    pub(crate) fn unmap(&mut self, address: u64, size: u64) -> Result<(), Refused> {
        let mut body = words(&[24, 0]);
        body.extend(longs(&[address, size]));
        self.request(DMA_UNMAP, &body, &[]).map(drop)
    }

    /// Reads a region.
    pub(crate) fn read(&mut self, region: u32, offset: u64, len: u32) -> Result<Vec<u8>, Refused> {
        let mut body = longs(&[offset]);
        body.extend(words(&[region, len]));
        let mut reply = self.request(REGION_READ, &body, &[])?;
        assert_eq!(reply[..16], body);
        Ok(reply.split_off(16))
    }

    /// Writes a region.
    pub(crate) fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Refused> {
        let mut body = longs(&[offset]);
        body.extend(words(&[region, data.len() as u32]));
        body.extend(data);
        self.request(REGION_WRITE, &body, &[]).map(drop)
    }

    /// Gives eventfds to vectors.
    pub(crate) fn set_irqs(&mut self, start: u32, fds: &[impl AsFd]) -> Result<(), Refused> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let body = words(&[20, 0x24, 2, start, fds.len() as u32]);
        self.request(SET_IRQS, &body, &fds).map(drop)
    }
}
