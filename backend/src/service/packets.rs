// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages between the processes of the daemon, over sockets of packets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

/// Descriptors beside a message, at most.
const MAX_FDS: usize = 2;
/// Longest message, bytes: a path of a socket has 108 bytes at most.
const MAX_MESSAGE: usize = 4096;

/// Sends a message, with descriptors.
///
/// # Errors
/// The message is too long, or the other end is closed.
pub(crate) fn send(channel: &OwnedFd, message: &impl Serialize, fds: &[OwnedFd]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_MESSAGE {
        return Err(Errno::NAMETOOLONG.into());
    }
    let fds: Vec<_> = fds.iter().map(OwnedFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let flags = SendFlags::NOSIGNAL;
    retry_on_intr(|| sendmsg(channel, &[IoSlice::new(&bytes)], &mut ancillary, flags))?;
    Ok(())
}

/// The next message with its descriptors; `None`: the other end is closed.
///
/// # Errors
/// The message is malformed, or none came within the time limit of the socket.
pub(crate) fn receive<T: for<'de> Deserialize<'de>>(
    channel: &OwnedFd,
) -> io::Result<(Option<T>, Vec<OwnedFd>)> {
    let mut bytes = [0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        recvmsg(
            channel,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = rights.flatten().collect();
    match bytes.get(..received.bytes) {
        Some(message) if !message.is_empty() => Ok((Some(serde_json::from_slice(message)?), fds)),
        _ => Ok((None, fds)),
    }
}
