// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control queue: requests and replies (docs/virtio-ism.md, "Control queue").
//!
//! A chain holds a device-readable request (`RequestHeader` and a body of exactly the op's size) and a
//! device-writable part at least as large as the op's reply. The used length is the length of the reply. A
//! reply with a status other than OK consists of the header alone.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Gid;

/// Operation codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Op {
    /// Starts a device life: drops all earlier state, draws a GID.
    Hello = 1,
    /// Answers LEAVE: the device may leave.
    Left = 2,
    /// Asks whether a GID is reachable.
    QueryGid = 16,
    /// Makes a DMB.
    Register = 32,
    /// Ends a DMB.
    Unregister = 33,
    /// Starts using a peer's DMB.
    Attach = 34,
    /// Stops using a peer's DMB.
    Detach = 35,
    /// Unmaps a slab without owned or attached DMBs.
    ReleaseSlab = 36,
    /// Sends a software event to a peer.
    SignalEvent = 48,
    /// Reads the device's counters.
    Stats = 64,
}

impl Op {
    /// Every operation.
    pub const ALL: [Op; 10] = [
        Op::Hello,
        Op::Left,
        Op::QueryGid,
        Op::Register,
        Op::Unregister,
        Op::Attach,
        Op::Detach,
        Op::ReleaseSlab,
        Op::SignalEvent,
        Op::Stats,
    ];

    /// The operation with this code.
    pub fn from_code(code: u16) -> Option<Op> {
        Self::ALL.into_iter().find(|op| *op as u16 == code)
    }

    /// Length in bytes of the body of a successful reply (the header comes on top). The reply
    /// buffer must hold header and body even when the command fails.
    pub const fn reply_body_len(self) -> usize {
        match self {
            Op::Hello => size_of::<HelloReply>(),
            Op::QueryGid => size_of::<QueryGidReply>(),
            Op::Register => size_of::<RegisterReply>(),
            Op::Attach => size_of::<AttachReply>(),
            Op::Stats => size_of::<StatsReply>(),
            Op::Left | Op::Unregister | Op::Detach | Op::ReleaseSlab | Op::SignalEvent => 0,
        }
    }
}

macro_rules! wire {
    ($(#[$meta:meta])* $name:ident, $size:literal, { $($(#[$fmeta:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}
pub(crate) use wire;

wire!(
    /// Start of every request.
    RequestHeader, 8, {
    /// An [`Op`] code.
    op: U16,
    /// Zero.
    reserved: U16,
    /// Chosen by the driver, returned in the reply: replies may come out of order.
    tag: U32,
});

wire!(
    /// Start of every reply.
    ReplyHeader, 8, {
    /// A [`Status`](crate::Status) code.
    status: U16,
    /// Zero.
    reserved: U16,
    /// The request's tag.
    tag: U32,
});

wire!(
    /// Body of HELLO.
    HelloRequest, 8, {
    /// Revision the driver speaks, 1.
    abi: U16,
    /// See [`hello_flags`].
    flags: U16,
    /// The driver's own bound on `idx`.
    driver_max_idx: U32,
});

/// Bits of [`HelloRequest::flags`].
pub mod hello_flags {
    /// The control words in the DMBs of this driver are big-endian.
    pub const BIG_ENDIAN: u16 = 1;
    /// The flags of a driver on this machine.
    pub const NATIVE: u16 = if cfg!(target_endian = "big") { BIG_ENDIAN } else { 0 };
}

wire!(
    /// Reply to HELLO.
    HelloReply, 24, {
    /// GID of this device life.
    gid: Gid,
    /// Number of this life on the socket, from 1.
    session: U32,
    /// Zero.
    reserved: U32,
});

wire!(
    /// Body of LEFT.
    LeftRequest, 8, {
    /// Number of the answered LEAVE.
    number: U32,
    /// Zero.
    reserved: U32,
});

wire!(
    /// Body of QUERY_GID.
    QueryGidRequest, 24, {
    /// The peer asked for.
    gid: Gid,
    /// Ignored.
    vid_valid: U32,
    /// Ignored.
    vid: U32,
});

wire!(
    /// Reply to QUERY_GID.
    QueryGidReply, 8, {
    /// See [`peer_flags`].
    flags: U32,
    /// Zero.
    reserved: U32,
});

/// Bits of [`QueryGidReply::flags`].
pub mod peer_flags {
    /// The peer is on this fabric.
    pub const REACHABLE: u32 = 1;
    /// Both front ends can map: a window is possible in both directions.
    pub const WINDOW: u32 = 2;
}

/// `backing` of REGISTER: the DMB is guest memory of its owner.
pub const BACKING_GUEST: u16 = 1;
/// `backing` of REGISTER: the DMB lies in a slab of the window.
pub const BACKING_WINDOW: u16 = 2;

wire!(
    /// Body of REGISTER; `nsg` [`SgEntry`] follow.
    RegisterRequest, 40, {
    /// The one GID with the right to write this DMB.
    user_gid: Gid,
    /// The driver's number for the DMB, unique among its DMBs.
    idx: U32,
    /// Length in bytes, a power of two between `dmb_min` and `dmb_max`.
    len: U32,
    /// [`BACKING_GUEST`] or [`BACKING_WINDOW`].
    backing: U16,
    /// DMBs of different groups never share a signal line.
    wait_group: U16,
    /// Number of scatter-gather entries; 0 for a window DMB.
    nsg: U32,
    /// Zero.
    reserved: U64,
});

wire!(
    /// A piece of guest memory.
    SgEntry, 16, {
    /// Guest-physical address.
    gpa: U64,
    /// Length in bytes.
    len: U32,
    /// Zero.
    reserved: U32,
});

wire!(
    /// Reply to REGISTER. Zero from `dmb_off` on for guest memory.
    RegisterReply, 48, {
    /// The right to write the DMB. The owner passes the token on to the user.
    token: U64,
    /// Offset of the DMB from the start of the window, bytes.
    dmb_off: U64,
    /// Offset of the slab from the start of the window, bytes.
    slab_off: U64,
    /// Length of the slab (data and control tail), bytes.
    slab_len: U32,
    /// The slab's number on this device.
    slab_id: U32,
    /// Signal line of the DMB, an index into the slab's control tail.
    line: U16,
    /// Bit of the line, 0 to 63.
    bit: u8,
    /// See [`register_flags`].
    flags: u8,
    /// Zero.
    reserved: U32,
    /// Expected nonce of the slab's control tail, for the driver's check.
    nonce: U64,
});

/// Bits of [`RegisterReply::flags`].
pub mod register_flags {
    /// The user wakes threads sleeping on the armed word of the line.
    pub const FUTEX: u8 = 1;
    /// The user raises the slab's line.
    pub const SLAB_LINE: u8 = 2;
}

wire!(
    /// Body of UNREGISTER, ATTACH and DETACH.
    TokenRequest, 8, {
    /// The DMB.
    token: U64,
});

wire!(
    /// Reply to ATTACH.
    AttachReply, 64, {
    /// Offset of the DMB from the start of the window, bytes.
    dmb_off: U64,
    /// Offset of the slab from the start of the window, bytes.
    slab_off: U64,
    /// Length of the slab (data and control tail), bytes.
    slab_len: U32,
    /// The slab's number on this device.
    slab_id: U32,
    /// Length of the DMB, bytes.
    dmb_len: U32,
    /// Signal line of the DMB.
    line: U16,
    /// Bit of the line.
    bit: u8,
    /// See [`attach_flags`].
    flags: u8,
    /// Expected nonce of the slab's control tail, for the driver's check.
    nonce: U64,
    /// GID of the DMB's owner.
    owner_gid: Gid,
    /// Zero.
    reserved: U64,
});

/// Bits of [`AttachReply::flags`].
pub mod attach_flags {
    /// The DMB is guest memory of its owner: no mapping, only moves. `dmb_off` to `slab_id`,
    /// `line`, `bit` and `nonce` are zero.
    pub const MOVE_ONLY: u8 = 1;
    /// Threads of the owner may sleep on the armed word of the line.
    pub const FUTEX: u8 = 2;
    /// The owner supports slab lines.
    pub const SLAB_LINE: u8 = 4;
}

wire!(
    /// Body of RELEASE_SLAB.
    ReleaseSlabRequest, 8, {
    /// The slab.
    slab_id: U32,
    /// Zero.
    reserved: U32,
});

wire!(
    /// Body of SIGNAL_EVENT.
    SignalEventRequest, 40, {
    /// GID of the receiver.
    gid: Gid,
    /// 1: interrupt at once.
    trigger: U32,
    /// The client's event code.
    code: U32,
    /// The client's data.
    info: U64,
    /// Zero.
    reserved: U64,
});

wire!(
    /// Reply to STATS.
    StatsReply, 128, {
    /// Indexed by the constants of [`stat`].
    counters: [U64; 16],
});

/// Indices of [`StatsReply::counters`].
pub mod stat {
    /// DMBs now registered.
    pub const DMBS: usize = 0;
    /// Bytes of DMBs now registered.
    pub const DMB_BYTES: usize = 1;
    /// DMBs now attached.
    pub const ATTACHED: usize = 2;
    /// Slabs now mapped.
    pub const SLABS: usize = 3;
    /// Bytes of slabs owned, each counted whole.
    pub const SLAB_BYTES: usize = 4;
    /// Peers now related.
    pub const PEERS: usize = 5;
    /// Control commands done.
    pub const COMMANDS: usize = 6;
    /// Control commands refused.
    pub const REFUSALS: usize = 7;
    /// Moves done.
    pub const MOVES: usize = 8;
    /// Payload bytes moved.
    pub const MOVE_BYTES: usize = 9;
    /// Moves refused.
    pub const MOVE_REFUSALS: usize = 10;
    /// Requested signals (moves with the SIGNAL flag).
    pub const SIGNALS: usize = 11;
    /// Wake records posted to this device.
    pub const WAKES: usize = 12;
    /// Signals merged into a pending record.
    pub const COALESCED: usize = 13;
    /// Software events delivered to this device.
    pub const SW_EVENTS: usize = 14;
    /// Software events lost by this device.
    pub const SW_EVENTS_LOST: usize = 15;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_round_trip_and_unknown_codes_are_none() {
        for op in Op::ALL {
            assert_eq!(Op::from_code(op as u16), Some(op));
        }
        assert_eq!(Op::from_code(0), None);
        assert_eq!(Op::from_code(65), None);
    }

    #[test]
    fn register_request_has_the_bytes_of_the_chapter() {
        let request = RegisterRequest {
            user_gid: Gid([0xaa; 16]),
            idx: 7.into(),
            len: 0x1_0000.into(),
            backing: BACKING_WINDOW.into(),
            wait_group: 3.into(),
            ..Default::default()
        };
        let bytes = request.as_bytes();
        assert_eq!(bytes[..16], [0xaa; 16]);
        assert_eq!(bytes[16..28], [7, 0, 0, 0, 0, 0, 1, 0, 2, 0, 3, 0]);
        assert_eq!(bytes[28..], [0; 12]);
    }
}
