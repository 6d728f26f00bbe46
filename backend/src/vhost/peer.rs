// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The peer of an accepted Unix socket connection, by the kernel's credentials.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::config::id_map;

/// SO_NETNS_COOKIE, with the same value on all architectures with Linux's generic socket options.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The connecting process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    /// Process id; 0 if the process has none in this process's namespace.
    pub(super) pid: i32,
    /// User; `None`: not mapped in this process's user namespace.
    pub(super) uid: Option<u32>,
    /// Group; `None`: as above.
    pub(super) gid: Option<u32>,
    /// Cookie of the network namespace the process created its socket in, unique per namespace. 0: the kernel
    /// is older than 5.14.
    ///
    /// An accepted Unix socket belongs to the connecting process's namespace, not to the listener's.
    pub(super) network_namespace: u64,
}

impl Peer {
    /// # Errors
    /// This is no socket.
    pub(super) fn of(accepted: impl AsFd) -> io::Result<Peer> {
        let fd = accepted.as_fd().as_raw_fd();
        // Not by rustix: its process ids cannot be 0.
        let mut who = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        // SAFETY: the kernel writes at most `len` bytes, the size of the variable, and the fields may have
        // any value.
        let result =
            unsafe { libc::getsockopt(fd, level, name, (&raw mut who).cast(), &raw mut len) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut cookie = 0u64;
        let mut len = size_of::<u64>() as libc::socklen_t;
        // SAFETY: as above.
        let result = unsafe {
            libc::getsockopt(fd, level, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut len)
        };
        let network_namespace = if result == 0 { cookie } else { 0 };
        let uid = Some(who.uid).filter(|uid| id_map::users().has(*uid));
        let gid = Some(who.gid).filter(|gid| id_map::groups().has(*gid));
        Ok(Peer { pid: who.pid, uid, gid, network_namespace })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_end_of_an_own_connection_is_this_process() {
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer::of(&a).unwrap();
        assert_eq!(peer, Peer::of(&b).unwrap());
        assert_eq!(peer.pid.cast_unsigned(), std::process::id());
        assert_eq!(peer.uid, Some(rustix::process::geteuid().as_raw()));
        assert_ne!(peer.network_namespace, 0);
        assert!(Peer::of(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
