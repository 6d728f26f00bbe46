// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The channel of the daemon's map requests to a front end, with good and bad answers.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate};
use rustix::io::pwrite;

use super::message::{REPLY, VERSION, message, receive, send, u32_at, u64_at, words};
use crate::bytes::Rng;

/// Bytes of a request of the daemon: a header and an SHMEM_MAP.
const REQUEST: usize = 12 + 40;
/// Slabs kept at most.
const SLABS: usize = 16;

/// How requests are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answers {
    /// Properly.
    Done,
    /// By a refusal.
    Refused,
    /// Never.
    Never,
    /// Twice.
    Twice,
    /// Now in one way, now in another.
    Any,
}

impl Answers {
    pub(super) fn any(rng: &mut Rng) -> Answers {
        match rng.below(16) {
            0 => Answers::Refused,
            1 => Answers::Never,
            2 => Answers::Twice,
            3 => Answers::Any,
            _ => Answers::Done,
        }
    }
}

/// The front end's end of the channel, and the slabs received.
#[derive(Debug)]
pub(super) struct Window {
    socket: UnixStream,
    answers: Answers,
    pending: Vec<u8>,
    fd: Option<OwnedFd>,
    slabs: Vec<(OwnedFd, u64)>,
}

impl Window {
    pub(super) fn new(answers: Answers) -> Option<(Window, UnixStream)> {
        let (socket, theirs) = UnixStream::pair().ok()?;
        let window = Window { socket, answers, pending: Vec::new(), fd: None, slabs: Vec::new() };
        Some((window, theirs))
    }

    /// Answers the received requests.
    pub(super) fn serve(&mut self, rng: &mut Rng) {
        let mut bytes = [0; REQUEST];
        while let Ok((n @ 1.., fd)) = receive(&self.socket, &mut bytes) {
            self.pending.extend_from_slice(&bytes[..n]);
            self.fd = fd.or(self.fd.take());
            while self.pending.len() >= REQUEST {
                let request: Vec<u8> = self.pending.drain(..REQUEST).collect();
                self.answer(&request, rng);
            }
        }
    }

    fn answer(&mut self, request: &[u8], rng: &mut Rng) {
        if let Some(fd) = self.fd.take() {
            let slab = (fd, u64_at(request, 36));
            if self.slabs.len() < SLABS {
                self.slabs.push(slab);
            } else {
                self.slabs[rng.below(SLABS as u32) as usize] = slab;
            }
        }
        let how = match self.answers {
            Answers::Any => match rng.below(5) {
                0 => Answers::Refused,
                1 => Answers::Twice,
                2 => return self.send(&message(rng.bits() as u32, REPLY, &[0; 8])),
                3 => return self.send(&rng.bits().to_le_bytes()),
                _ => Answers::Done,
            },
            how => how,
        };
        let number = u32_at(request, 0);
        let reply = |refused: u64| message(number, VERSION | REPLY, &words(&[refused]));
        match how {
            Answers::Never => {}
            Answers::Refused => self.send(&reply(1)),
            Answers::Twice => self.send(&[reply(0), reply(0)].concat()),
            Answers::Done | Answers::Any => self.send(&reply(0)),
        }
    }

    fn send(&self, bytes: &[u8]) {
        let _ = send(&self.socket, bytes, &[]);
    }

    /// Damages a slab by its descriptor.
    pub(super) fn damage(&self, rng: &mut Rng) {
        if self.slabs.is_empty() {
            return;
        }
        let (fd, len) = &self.slabs[rng.below(self.slabs.len() as u32) as usize];
        let fd = fd.as_fd();
        match rng.below(8) {
            0 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(fd, flags, 0, *len);
            }
            1 => {
                let _ = ftruncate(fd, u64::from(rng.below(1 << 20)));
            }
            2 => {
                let _ = fcntl_add_seals(fd, SealFlags::WRITE | SealFlags::SHRINK);
            }
            // The control tail is at the end.
            3..6 => {
                let at = len.saturating_sub(u64::from(rng.below(64 << 10)));
                let _ = pwrite(fd, &rng.bits().to_le_bytes(), at);
            }
            _ => {
                let at = u64::from(rng.below((*len).min(1 << 30) as u32));
                let _ = pwrite(fd, &rng.bits().to_le_bytes(), at);
            }
        }
    }
}
