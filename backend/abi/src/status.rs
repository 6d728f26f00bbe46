// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Status codes of control replies and move chains.

use core::fmt;

/// The device's answer to a command or a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// A field has an illegal value.
    Einval = 1,
    /// No such token, **or** a token of another user: one answer for both.
    Enoent = 2,
    /// A count is used up (DMBs, peers, slots, lines).
    Enospc = 3,
    /// A byte quota is used up.
    Enomem = 4,
    /// The object is in use.
    Ebusy = 5,
    /// No device with this GID on this fabric.
    Enodev = 6,
    /// No window here: use move.
    Enotsup = 7,
    /// The front end refused a mapping, or memory does not resolve.
    Eio = 8,
    /// Too fast, or the peer's event queue is full: try again.
    Eagain = 9,
    /// No HELLO yet, or the device is leaving and takes on nothing new.
    Estate = 10,
    /// The reply buffer is too small; the command had no effect.
    E2small = 11,
    /// The peer's driver has control words of the other byte order.
    Eorder = 12,
}

impl Status {
    /// Every status, in the order of its code.
    pub const ALL: [Status; 13] = [
        Status::Ok,
        Status::Einval,
        Status::Enoent,
        Status::Enospc,
        Status::Enomem,
        Status::Ebusy,
        Status::Enodev,
        Status::Enotsup,
        Status::Eio,
        Status::Eagain,
        Status::Estate,
        Status::E2small,
        Status::Eorder,
    ];

    /// The code on the ring.
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// The status with this code; `None` for a code of a later revision.
    pub fn from_code(code: u16) -> Option<Status> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Short name, for counters and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Einval => "einval",
            Status::Enoent => "enoent",
            Status::Enospc => "enospc",
            Status::Enomem => "enomem",
            Status::Ebusy => "ebusy",
            Status::Enodev => "enodev",
            Status::Enotsup => "enotsup",
            Status::Eio => "eio",
            Status::Eagain => "eagain",
            Status::Estate => "estate",
            Status::E2small => "e2small",
            Status::Eorder => "eorder",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Status::Ok => "ok",
            Status::Einval => "illegal value in the request",
            Status::Enoent => "no such token, or not ours",
            Status::Enospc => "count used up",
            Status::Enomem => "byte quota used up",
            Status::Ebusy => "in use",
            Status::Enodev => "no device with that GID on this fabric",
            Status::Enotsup => "no window on this front end, use move",
            Status::Eio => "mapping refused or memory does not resolve",
            Status::Eagain => "too fast or queue full, try again",
            Status::Estate => "HELLO has not been said",
            Status::E2small => "reply buffer too small",
            Status::Eorder => "the peer's byte order is the other one",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_dense_and_round_trip() {
        for (code, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(status.code()), code);
            assert_eq!(Status::from_code(code as u16), Some(status));
        }
        assert_eq!(Status::from_code(13), None);
    }
}
