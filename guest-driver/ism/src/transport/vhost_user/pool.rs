// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device of a pool: the daemon hands the connection out.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use virtio_ism_abi::{PoolAnswer, PoolStatus};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::transport::TransportError;
use ism_sys::{PollInterest, connect_unix_packets, move_out_of_the_way, wait};

/// Pauses between requests while all devices are in use: the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// Least time limit for the daemon's answer to a request. An answer comes at once, unless the machine is
/// busy.
const ANSWER: Duration = Duration::from_millis(500);

/// Requests a free device, for `timeout` at most. Returns the socket of the device, with its owner. `wanted`:
/// the only owner besides root.
///
/// # Errors
/// Every device stays in use, or the share of this network namespace does, this user may have none, or
/// another user's daemon has the pool.
pub(super) fn request(
    socket: &Path,
    wanted: Option<u32>,
    timeout: Duration,
) -> Result<(OwnedFd, u32), TransportError> {
    let deadline = Instant::now() + timeout;
    let mut pause = PAUSES.0;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let error = match request_once(socket, wanted, left) {
            Ok(device) => return Ok(device),
            Err(error @ (TransportError::AllInUse | TransportError::ShareInUse)) => error,
            Err(error) => return Err(error),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(error);
        }
        std::thread::sleep(pause.min(left));
        pause = (2 * pause).min(PAUSES.1);
    }
}

fn request_once(
    socket: &Path,
    wanted: Option<u32>,
    timeout: Duration,
) -> Result<(OwnedFd, u32), TransportError> {
    let pool = connect_unix_packets(socket, timeout).map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock => TransportError::AllInUse,
        _ => super::connect_error(socket, source),
    })?;
    let owner = super::owner(socket, &pool, wanted)?;
    let (status, device) = read_answer(&pool, timeout.max(ANSWER)).map_err(|source| {
        TransportError::System { what: "the answer of the device pool", source }
    })?;
    match (status, device) {
        (Some(PoolStatus::Granted), Some(device)) => Ok((device, owner)),
        (Some(PoolStatus::AllInUse), _) => Err(TransportError::AllInUse),
        (Some(PoolStatus::ShareInUse), _) => Err(TransportError::ShareInUse),
        (Some(PoolStatus::NotPermitted), _) => Err(TransportError::NotPermitted),
        (Some(PoolStatus::Failed), _) => Err(TransportError::Pool("cannot make a device now")),
        (Some(PoolStatus::Granted), None) => {
            Err(TransportError::Pool("grants a device without a descriptor"))
        }
        (None, _) => Err(TransportError::Pool("gives an answer that this driver does not know")),
    }
}

/// The answer, and the descriptor beside it.
fn read_answer(
    pool: &OwnedFd,
    timeout: Duration,
) -> io::Result<(Option<PoolStatus>, Option<OwnedFd>)> {
    use std::os::fd::AsFd;
    let [ready] = wait([(pool.as_fd(), PollInterest::Read)], Some(timeout))?;
    if !ready.readable && !ready.hang_up {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut answer = PoolAnswer::new_zeroed();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    // Never waits, whatever the other end is: the descriptor was readable.
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let bytes = answer.as_mut_bytes();
    let length = bytes.len();
    let _making = ism_sys::making();
    let received = recvmsg(pool, &mut [io::IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let device = rights.flatten().next().map(move_out_of_the_way);
    let whole = received.bytes == length && !received.flags.contains(ReturnFlags::TRUNC);
    let answer = PoolAnswer::read_from_bytes(answer.as_bytes()).ok().filter(|_| whole);
    Ok((answer.and_then(|answer| answer.status()), device))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
        SocketType, sendmsg, socketpair,
    };
    use std::os::fd::AsFd;

    fn answered(bytes: &[u8], fds: usize) -> (Option<PoolStatus>, bool) {
        let (daemon, pool) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let all = vec![daemon.as_fd(); fds];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if fds > 0 {
            ancillary.push(SendAncillaryMessage::ScmRights(&all));
        }
        let bytes = [io::IoSlice::new(bytes)];
        sendmsg(&daemon, &bytes, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        let (status, device) = read_answer(&pool, smc_test_support::TIMEOUT).unwrap();
        (status, device.is_some())
    }

    #[test]
    fn reads_an_answer_and_no_other_bytes() {
        let granted = PoolAnswer::new(PoolStatus::Granted);
        let granted = granted.as_bytes();
        assert_eq!(answered(granted, 1), (Some(PoolStatus::Granted), true));
        assert_eq!(answered(granted, 0), (Some(PoolStatus::Granted), false));
        assert_eq!(answered(granted, 3).0, Some(PoolStatus::Granted));
        let share = PoolAnswer::new(PoolStatus::ShareInUse);
        assert_eq!(answered(share.as_bytes(), 0), (Some(PoolStatus::ShareInUse), false));
        assert_eq!(answered(&granted[..7], 1).0, None);
        assert_eq!(answered(&[granted, b"x"].concat(), 1).0, None);
        assert_eq!(answered(b"XSMP\0\0\0\0", 1).0, None);
        assert_eq!(answered(b"ISMP\xff\0\0\0", 1).0, None);
    }

    #[test]
    fn a_pool_that_says_nothing_is_not_waited_for() {
        let (daemon, pool) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let silent = read_answer(&pool, Duration::from_millis(10)).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        drop(daemon);
        assert_eq!(read_answer(&pool, smc_test_support::TIMEOUT).unwrap().0, None);
    }
}
