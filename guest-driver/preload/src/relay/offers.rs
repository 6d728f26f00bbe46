// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections offered to children of forks, until a child asks for one.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::socket::pair::SocketPair;
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::sys::borrowed;
use crate::sys::fork_lock::ForkMutex;

/// The pair of a connection, shared by all children forked before one of them asks. `None`: a child has
/// asked.
#[derive(Clone)]
pub(super) struct SharedPair(pub(super) Arc<ForkMutex<Option<SocketPair>>>);

impl SharedPair {
    /// The pair of earlier children, or a new one.
    pub(super) fn of(descriptor: &DescriptorRef, fd: c_int) -> Option<SharedPair> {
        let known = OUTSTANDING.lock().iter().flat_map(|offers| &offers.list).find_map(|offer| {
            (offer.descriptor.is(descriptor) && offer.pair.0.lock().is_some())
                .then(|| offer.pair.clone())
        });
        known.or_else(|| Some(SharedPair(Arc::new(ForkMutex::new(Some(SocketPair::new(fd)?))))))
    }
}

/// A connection offered to a child.
pub(super) struct RelayOffer {
    pub(super) descriptor: DescriptorRef,
    /// The program's descriptors of the connection.
    pub(super) fds: Vec<c_int>,
    pub(super) pair: SharedPair,
    /// Whether the kernel closes all the descriptors when the child executes a program.
    pub(super) cloexec: bool,
    /// TCP socket of a connection with a handshake under way.
    pub(super) tcp: Option<OwnedFd>,
}

impl RelayOffer {
    /// Whether a descriptor is one of the connection's.
    pub(super) fn has(&self, fd: c_int) -> bool {
        let cookie = |fd: BorrowedFd<'_>| rustix::net::sockopt::socket_cookie(fd).ok();
        match (DESCRIPTORS.get(fd), &self.tcp) {
            (Some(now), _) => now.is(&self.descriptor),
            // The handshake has ended with TCP, so the table has no entry any more.
            (None, Some(tcp)) => {
                let theirs = cookie(borrowed(fd));
                theirs.is_some() && theirs == cookie(tcp.as_fd())
            }
            (None, None) => false,
        }
    }
}

/// Offers still open to a child.
pub(super) struct Outstanding {
    pub(super) id: u64,
    pub(super) list: Vec<RelayOffer>,
    pub(super) lifetime: OwnedFd,
    /// The number of the socket where the owner's thread waits.
    pub(super) request: c_int,
}

impl Outstanding {
    fn descriptors(&self) -> Vec<c_int> {
        let mut all = vec![self.lifetime.as_raw_fd(), self.request];
        for offer in &self.list {
            all.extend(offer.tcp.as_ref().map(AsRawFd::as_raw_fd));
            let pair = offer.pair.0.lock();
            let ends = pair.iter().flat_map(|pair| [&pair.owner_end, &pair.program_end]);
            all.extend(ends.map(AsRawFd::as_raw_fd));
        }
        all
    }
}

/// The offers to all children. Changes of the list need [`NUMBERS`].
pub(super) static OUTSTANDING: ForkMutex<Vec<Outstanding>> = ForkMutex::new(Vec::new());

/// The descriptors for requests and ends of the children.
pub(crate) fn descriptors() -> Vec<c_int> {
    OUTSTANDING.lock().iter().flat_map(Outstanding::descriptors).collect()
}

/// The offers' references to a connection.
pub(super) fn offers_of(descriptor: &DescriptorRef) -> usize {
    let all = OUTSTANDING.lock();
    all.iter().flat_map(|offers| &offers.list).filter(|o| o.descriptor.is(descriptor)).count()
}

/// Takes the offers of a fork, unless another thread has taken them.
pub(super) fn take(id: u64) -> Option<Outstanding> {
    let mut all = OUTSTANDING.lock();
    let at = all.iter().position(|offers| offers.id == id);
    at.map(|at| all.swap_remove(at))
}
