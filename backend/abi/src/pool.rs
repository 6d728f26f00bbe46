// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Answers of a device pool's socket.
//!
//! A pool is a packet socket (SOCK_SEQPACKET) for getting devices from the daemon. A process connects and
//! reads one packet, a [`PoolAnswer`]. With a granted device, a descriptor comes with the packet
//! (SCM_RIGHTS): a connected stream socket, with vhost-user at the other end.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of an answer.
pub const POOL_MAGIC: [u8; 4] = *b"ISMP";

/// The answer, one packet.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PoolAnswer {
    /// [`POOL_MAGIC`].
    pub magic: [u8; 4],
    /// A [`PoolStatus`].
    pub status: U32,
}

impl PoolAnswer {
    /// The answer with this status.
    pub const fn new(status: PoolStatus) -> PoolAnswer {
        PoolAnswer { magic: POOL_MAGIC, status: U32::new(status as u32) }
    }

    /// The status; `None`: not an answer, or an answer of a later revision.
    pub fn status(&self) -> Option<PoolStatus> {
        let known = PoolStatus::ALL.into_iter().find(|known| *known as u32 == self.status.get());
        known.filter(|_| self.magic == POOL_MAGIC)
    }
}

/// Result of a request for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum PoolStatus {
    /// A descriptor comes with the answer.
    Granted = 0,
    /// Every device is in use.
    AllInUse = 1,
    /// The requester's network namespace has its share: as many devices as are left for others.
    ShareInUse = 2,
    /// The pool is not for the requester's user or group.
    NotPermitted = 3,
    /// The daemon cannot make a device now.
    Failed = 4,
}

impl PoolStatus {
    /// Every status.
    pub const ALL: [PoolStatus; 5] = [
        PoolStatus::Granted,
        PoolStatus::AllInUse,
        PoolStatus::ShareInUse,
        PoolStatus::NotPermitted,
        PoolStatus::Failed,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_what_it_was_made_of_and_other_bytes_say_nothing() {
        for status in PoolStatus::ALL {
            let answer = PoolAnswer::new(status);
            let read = PoolAnswer::read_from_bytes(answer.as_bytes()).unwrap();
            assert_eq!(read.status(), Some(status));
            assert_eq!(PoolAnswer { magic: *b"ISMX", ..answer }.status(), None);
        }
        let later = PoolAnswer { magic: POOL_MAGIC, status: U32::new(5) };
        assert_eq!(later.status(), None);
    }
}
