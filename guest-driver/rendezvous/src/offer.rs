// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The descriptors of a rendezvous in the queue of a socket, for any number of processes with the socket.
//!
//! A process that needs the rendezvous asks by a byte. The other end then opens the rendezvous, puts one
//! message into the queue and closes. The processes look at the message and leave the message in the queue
//! (MSG_PEEK): the kernel gives each of them copies of the descriptors, and keeps its own until the last
//! process with the socket has ended.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send,
    sendmsg, socketpair,
};

/// Descriptors in a message at most.
pub(super) const MOST: usize = 7;
/// Bytes of a text at most.
const TEXT: usize = 512;
/// How long a process waits for the other end. Loading the programs takes a millisecond.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The end of the programs, and the end of the process with the rights to open a rendezvous.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

/// Answers all processes with the other end.
pub(super) fn give(end: BorrowedFd<'_>, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let text = text.as_bytes().get(..TEXT.min(text.len())).unwrap_or_default();
    sendmsg(end, &[IoSlice::new(text)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for the answer of the other end, asking if there is none yet.
///
/// # Errors
/// `NotFound`: the other end has closed. `TimedOut`: no answer. Others: errors of the system calls.
pub(super) fn take(end: BorrowedFd<'_>) -> io::Result<(String, Vec<OwnedFd>)> {
    let begin = Instant::now();
    let mut has_asked = false;
    loop {
        match look(end) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            found => return found,
        }
        if !has_asked {
            has_asked = true;
            // The other end may have answered another process, and have closed.
            let _ = send(end, b"?", SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            continue;
        }
        let left = TIMEOUT.saturating_sub(begin.elapsed());
        let limit = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(end, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return Err(ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The message in the queue.
fn look(end: BorrowedFd<'_>) -> io::Result<(String, Vec<OwnedFd>)> {
    let mut bytes = [0; TEXT];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let found = recvmsg(end, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)?;
    if found.bytes == 0 {
        return Err(ErrorKind::NotFound.into());
    }
    let fds = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    let fds: Vec<OwnedFd> = fds.collect();
    if found.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE.into());
    }
    let text = String::from_utf8_lossy(bytes.get(..found.bytes).unwrap_or_default());
    Ok((text.into_owned(), fds))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn any_number_of_processes_take_one_answer_and_only_if_there_is_none_they_ask() {
        let (programs, own) = pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        std::thread::scope(|scope| {
            let takers = [(); 3].map(|()| scope.spawn(|| take(programs.as_fd()).unwrap()));
            assert_eq!(rustix::io::read(&own, &mut [0]), Ok(1));
            give(own.as_fd(), "0,1", &[file.as_fd(), file.as_fd()]).unwrap();
            for taker in takers {
                let (text, fds) = taker.join().unwrap();
                assert_eq!((&*text, fds.len()), ("0,1", 2));
            }
        });
        // Questions left unread are no error for later processes.
        drop(own);
        for _ in 0..2 {
            let (text, fds) = take(programs.as_fd()).unwrap();
            assert_eq!((&*text, fds.len()), ("0,1", 2));
            let is_file = |fd: &OwnedFd| rustix::fs::fstat(fd).is_ok();
            assert!(fds.iter().all(is_file));
        }
    }

    #[test]
    fn an_end_that_closes_or_says_too_much_gives_no_descriptors() {
        let (programs, own) = pair().unwrap();
        drop(own);
        assert_eq!(take(programs.as_fd()).unwrap_err().kind(), ErrorKind::NotFound);
        let (programs, own) = pair().unwrap();
        give(own.as_fd(), &"!".repeat(TEXT + 1), &[]).unwrap();
        assert_eq!(take(programs.as_fd()).unwrap().0.len(), TEXT);
        // Not a socket.
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(take(file.as_fd()).is_err());
    }
}
