// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Event queue records (docs/virtio-ism.md, "Event queue"): 64 bytes, one per buffer.

use core::time::Duration;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::command::wire;
use crate::{Gid, Token};

/// Bytes of an event buffer and of every record.
pub const EVENT_LEN: usize = 64;

/// Types of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum EventType {
    /// Guest-memory DMBs were signalled: [`DmbSignal`].
    DmbSignal = 1,
    /// Signal lines of slabs have pending bits: [`SlabWake`].
    SlabWake = 2,
    /// A formerly attached DMB is gone: [`Notice`].
    DmbGone = 3,
    /// A related peer left the fabric: [`Notice`].
    PeerDown = 4,
    /// A peer sent a software event: [`Notice`].
    SwEvent = 5,
    /// Software events were dropped: [`Notice`], `n` of them.
    Lost = 6,
    /// The driver is to leave: [`Notice`].
    Leave = 7,
    /// The driver may stay: [`Notice`].
    Stay = 8,
}

impl EventType {
    /// The type with this code.
    pub fn from_code(code: u16) -> Option<EventType> {
        Some(match code {
            1 => EventType::DmbSignal,
            2 => EventType::SlabWake,
            3 => EventType::DmbGone,
            4 => EventType::PeerDown,
            5 => EventType::SwEvent,
            6 => EventType::Lost,
            7 => EventType::Leave,
            8 => EventType::Stay,
            _ => return None,
        })
    }
}

/// `subtype` of PEER_DOWN: the peer reset or said HELLO anew.
pub const PEER_DOWN_ORDERLY: u16 = 0;
/// `subtype` of PEER_DOWN: the peer's front end vanished or broke a rule.
pub const PEER_DOWN_FAILED: u16 = 1;

/// Reason for leaving: `subtype` of LEAVE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum LeaveReason {
    /// The device's process ends, and a successor may follow.
    Restart = 1,
    /// The device is removed.
    Removal = 2,
    /// An operator wants no connections of the driver on this device.
    Drain = 3,
    /// The machine moves to another host.
    Migration = 4,
}

impl LeaveReason {
    /// Every reason, in the order of its code.
    pub const ALL: [LeaveReason; 4] =
        [LeaveReason::Restart, LeaveReason::Removal, LeaveReason::Drain, LeaveReason::Migration];

    /// The reason with this code. A code of a later revision counts as a drain, the weakest request.
    pub fn from_code(code: u16) -> LeaveReason {
        Self::ALL.into_iter().find(|reason| *reason as u16 == code).unwrap_or(LeaveReason::Drain)
    }

    /// One word for logs.
    pub fn name(self) -> &'static str {
        match self {
            LeaveReason::Restart => "restart",
            LeaveReason::Removal => "removal",
            LeaveReason::Drain => "drain",
            LeaveReason::Migration => "migration",
        }
    }
}

/// Entries of one [`DmbSignal`].
pub const DMB_SIGNAL_MAX: usize = 7;
/// Entries of one [`SlabWake`].
pub const SLAB_WAKE_MAX: usize = 14;

wire!(
    /// DMB_GONE, PEER_DOWN, SW_EVENT, LOST, LEAVE, STAY.
    Notice, 64, {
    /// An [`EventType`] code.
    kind: U16,
    /// PEER_DOWN: orderly or failed; SW_EVENT: the sender's trigger; LEAVE: a [`LeaveReason`].
    subtype: U16,
    /// LOST: number of lost events; LEAVE: number of the request; STAY: number of the cancelled LEAVE.
    n: U32,
    /// PEER_DOWN: the peer; DMB_GONE: the owner; SW_EVENT: the sender.
    gid: Gid,
    /// DMB_GONE: token of the DMB.
    token: U64,
    /// SW_EVENT: the client's data.
    info: U64,
    /// SW_EVENT: the client's code; LEAVE: milliseconds left.
    code: U32,
    /// Zero.
    reserved0: U32,
    /// The device's monotonic clock, nanoseconds.
    time_ns: U64,
    /// Zero.
    reserved1: U64,
});

wire!(
    /// One signalled guest-memory DMB.
    DmbSignalEntry, 8, {
    /// The driver's number for the DMB.
    idx: U32,
    /// The masks of the moves, or-ed.
    mask: U16,
    /// Zero.
    reserved: U16,
});

wire!(
    /// DMB_SIGNAL.
    DmbSignal, 64, {
    /// [`EventType::DmbSignal`].
    kind: U16,
    /// Zero.
    subtype: U16,
    /// Entries in use, at most [`DMB_SIGNAL_MAX`].
    n: U32,
    /// The entries.
    entries: [DmbSignalEntry; DMB_SIGNAL_MAX],
});

wire!(
    /// SLAB_WAKE.
    SlabWake, 64, {
    /// [`EventType::SlabWake`].
    kind: U16,
    /// Zero.
    subtype: U16,
    /// Entries in use, at most [`SLAB_WAKE_MAX`].
    n: U32,
    /// Slab numbers.
    slabs: [U32; SLAB_WAKE_MAX],
});

/// A record for a driver, checked for known types and counts.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// Guest-memory DMBs were signalled.
    DmbSignal(DmbSignal),
    /// Slabs have pending lines.
    SlabWake(SlabWake),
    /// An attached DMB is gone.
    DmbGone {
        /// Token of the DMB.
        token: Token,
        /// The former owner.
        owner: Gid,
    },
    /// A related peer left.
    PeerDown {
        /// GID of the peer.
        gid: Gid,
        /// Whether the peer vanished instead of leaving.
        failed: bool,
    },
    /// A software event.
    SwEvent {
        /// The sender.
        gid: Gid,
        /// The client's code.
        code: u32,
        /// The client's data.
        info: u64,
    },
    /// Software events were dropped.
    Lost {
        /// Number of lost events.
        n: u32,
    },
    /// The device will leave.
    Leave {
        /// Number of the request, for LEFT.
        number: u32,
        /// The reason.
        reason: LeaveReason,
        /// Time left when the record was written.
        within: Duration,
    },
    /// The device stays, and takes on new DMBs again.
    Stay {
        /// Number of the latest request to leave.
        number: u32,
    },
}

impl Event {
    /// Reads a record; `None` if its type is unknown or a count exceeds the record.
    pub fn parse(record: &[u8; EVENT_LEN]) -> Option<Event> {
        let notice = Notice::read_from_bytes(record).ok()?;
        Some(match EventType::from_code(notice.kind.get())? {
            EventType::DmbSignal => {
                let event = DmbSignal::read_from_bytes(record).ok()?;
                if event.n.get() as usize > DMB_SIGNAL_MAX {
                    return None;
                }
                Event::DmbSignal(event)
            }
            EventType::SlabWake => {
                let event = SlabWake::read_from_bytes(record).ok()?;
                if event.n.get() as usize > SLAB_WAKE_MAX {
                    return None;
                }
                Event::SlabWake(event)
            }
            EventType::DmbGone => {
                Event::DmbGone { token: Token(notice.token.get()), owner: notice.gid }
            }
            EventType::PeerDown => Event::PeerDown {
                gid: notice.gid,
                failed: notice.subtype.get() != PEER_DOWN_ORDERLY,
            },
            EventType::SwEvent => {
                Event::SwEvent { gid: notice.gid, code: notice.code.get(), info: notice.info.get() }
            }
            EventType::Lost => Event::Lost { n: notice.n.get() },
            EventType::Leave => Event::Leave {
                number: notice.n.get(),
                reason: LeaveReason::from_code(notice.subtype.get()),
                within: Duration::from_millis(notice.code.get().into()),
            },
            EventType::Stay => Event::Stay { number: notice.n.get() },
        })
    }
}

impl SlabWake {
    /// A record with these slabs (at most the first [`SLAB_WAKE_MAX`]).
    pub fn new(slabs: &[u32]) -> SlabWake {
        let mut record = SlabWake::new_zeroed();
        record.kind = (EventType::SlabWake as u16).into();
        let n = slabs.len().min(SLAB_WAKE_MAX);
        record.n = (n as u32).into();
        for (entry, slab) in record.slabs.iter_mut().zip(slabs) {
            *entry = (*slab).into();
        }
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_beyond_the_record_is_refused() {
        let mut bytes = [0u8; EVENT_LEN];
        let good = SlabWake::new(&[3, 4]);
        bytes.copy_from_slice(good.as_bytes());
        assert!(matches!(Event::parse(&bytes), Some(Event::SlabWake(e)) if e.n.get() == 2));
        bytes[4] = 15;
        assert!(Event::parse(&bytes).is_none());
        bytes[0] = 9;
        assert!(Event::parse(&bytes).is_none());
    }

    #[test]
    fn a_request_that_is_taken_back_is_named() {
        let kind = (EventType::Stay as u16).into();
        let stay = Notice { kind, n: 7.into(), ..Notice::default() };
        let event = Event::parse(stay.as_bytes().try_into().unwrap());
        assert!(matches!(event, Some(Event::Stay { number: 7 })), "{event:?}");
    }

    #[test]
    fn a_request_to_leave_has_a_reason_a_number_and_a_time() {
        let leave = |subtype: u16| Notice {
            kind: (EventType::Leave as u16).into(),
            subtype: subtype.into(),
            n: 9.into(),
            code: 1500.into(),
            ..Notice::default()
        };
        let parse = |subtype| Event::parse(leave(subtype).as_bytes().try_into().unwrap());
        for reason in LeaveReason::ALL {
            let event = parse(reason as u16);
            let expected = Duration::from_millis(1500);
            assert!(
                matches!(event, Some(Event::Leave { number: 9, reason: r, within })
                    if r == reason && within == expected),
                "{event:?}"
            );
        }
        for code in [0, 5, u16::MAX] {
            let event = parse(code);
            assert!(matches!(event, Some(Event::Leave { reason: LeaveReason::Drain, .. })));
        }
    }
}
