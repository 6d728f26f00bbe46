// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver's request, read from a private copy.
//!
//! This module makes every check possible on the bytes alone. Whether a claimed GID, token or slab exists is
//! checked by the registry. Reserved fields are ignored (docs/virtio-ism.md, "Conventions").

use virtio_ism_abi::command::{
    BACKING_GUEST, BACKING_WINDOW, HelloRequest, LeftRequest, Op, QueryGidRequest, RegisterRequest,
    ReleaseSlabRequest, ReplyHeader, RequestHeader, SgEntry, SignalEventRequest, TokenRequest,
    hello_flags,
};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::mv::{MoveHeader, Segment, move_flags};
use virtio_ism_abi::{Gid, REVISION, Status};
use zerocopy::FromBytes;

use super::Limits;

/// A well-formed command.
#[derive(Debug)]
pub(super) enum CheckedRequest {
    Hello {
        driver_max_idx: u32,
        big_endian: bool,
    },
    /// The number of the answered request to leave.
    Left(u32),
    QueryGid(Gid),
    Register(CheckedRegister),
    Unregister(u64),
    Attach(u64),
    Detach(u64),
    ReleaseSlab(u32),
    SignalEvent(CheckedSignalEvent),
    Stats,
}

#[derive(Debug)]
pub(super) struct CheckedRegister {
    pub(super) user: Gid,
    pub(super) idx: u32,
    pub(super) len: u32,
    pub(super) wait_group: u16,
    pub(super) backing: CheckedBacking,
}

#[derive(Debug)]
pub(super) enum CheckedBacking {
    Guest(Vec<CheckedSgEntry>),
    Window,
}

/// Guest-physical memory, not yet looked up.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedSgEntry {
    pub(super) gpa: u64,
    pub(super) len: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedSignalEvent {
    pub(super) to: Gid,
    pub(super) trigger: u32,
    pub(super) code: u32,
    pub(super) info: u64,
}

/// Tag of a request; 0 if the request is too short for a tag.
pub(super) fn tag(request: &[u8]) -> u32 {
    RequestHeader::read_from_prefix(request).map_or(0, |(header, _)| header.tag.get())
}

impl CheckedRequest {
    /// Reads a request of a driver with the accepted `features` and `room` bytes for the reply.
    pub(super) fn parse(
        request: &[u8],
        room: usize,
        features: Features,
        limits: &Limits,
    ) -> Result<CheckedRequest, Status> {
        let (header, body) =
            RequestHeader::read_from_prefix(request).map_err(|_| Status::Einval)?;
        let op = Op::from_code(header.op.get()).ok_or(Status::Einval)?;
        let request = match op {
            Op::Hello => hello(fixed(body)?)?,
            Op::Left if features.contains(Features::LEAVE) => {
                CheckedRequest::Left(fixed::<LeftRequest>(body)?.number.get())
            }
            Op::QueryGid => CheckedRequest::QueryGid(fixed::<QueryGidRequest>(body)?.gid),
            Op::Register => register(body, limits)?,
            Op::Unregister => CheckedRequest::Unregister(token(body)?),
            Op::Attach => CheckedRequest::Attach(token(body)?),
            Op::Detach => CheckedRequest::Detach(token(body)?),
            Op::ReleaseSlab => {
                CheckedRequest::ReleaseSlab(fixed::<ReleaseSlabRequest>(body)?.slab_id.get())
            }
            Op::SignalEvent if features.contains(Features::SW_EVENT) => signal(fixed(body)?),
            Op::Stats if features.contains(Features::STATS) && body.is_empty() => {
                CheckedRequest::Stats
            }
            Op::Left | Op::SignalEvent | Op::Stats => return Err(Status::Einval),
        };
        if room < size_of::<ReplyHeader>() + op.reply_body_len() {
            return Err(Status::E2small);
        }
        Ok(request)
    }
}

/// A body of exactly this type's size.
fn fixed<T: FromBytes>(body: &[u8]) -> Result<T, Status> {
    T::read_from_bytes(body).map_err(|_| Status::Einval)
}

fn token(body: &[u8]) -> Result<u64, Status> {
    Ok(fixed::<TokenRequest>(body)?.token.get())
}

fn hello(body: HelloRequest) -> Result<CheckedRequest, Status> {
    let flags = body.flags.get();
    if u32::from(body.abi.get()) != REVISION || flags & !hello_flags::BIG_ENDIAN != 0 {
        return Err(Status::Einval);
    }
    let big_endian = flags & hello_flags::BIG_ENDIAN != 0;
    Ok(CheckedRequest::Hello { driver_max_idx: body.driver_max_idx.get(), big_endian })
}

fn signal(body: SignalEventRequest) -> CheckedRequest {
    CheckedRequest::SignalEvent(CheckedSignalEvent {
        to: body.gid,
        trigger: body.trigger.get(),
        code: body.code.get(),
        info: body.info.get(),
    })
}

fn register(body: &[u8], limits: &Limits) -> Result<CheckedRequest, Status> {
    let (fields, entries) = RegisterRequest::read_from_prefix(body).map_err(|_| Status::Einval)?;
    let len = fields.len.get();
    if !len.is_power_of_two()
        || !(limits.dmb_min..=limits.dmb_max).contains(&len)
        || fields.user_gid == Gid::NONE
    {
        return Err(Status::Einval);
    }
    let backing = match fields.backing.get() {
        BACKING_WINDOW if fields.nsg.get() == 0 && entries.is_empty() => CheckedBacking::Window,
        BACKING_GUEST => CheckedBacking::Guest(ranges(entries, fields.nsg.get(), len, limits)?),
        _ => return Err(Status::Einval),
    };
    Ok(CheckedRequest::Register(CheckedRegister {
        user: fields.user_gid,
        idx: fields.idx.get(),
        len,
        wait_group: fields.wait_group.get(),
        backing,
    }))
}

/// `nsg` entries, aligned, without wrap, with a sum of `len`.
fn ranges(
    entries: &[u8],
    nsg: u32,
    len: u32,
    limits: &Limits,
) -> Result<Vec<CheckedSgEntry>, Status> {
    let exact = u64::from(nsg) * size_of::<SgEntry>() as u64;
    if nsg == 0 || nsg > u32::from(limits.max_sg) || entries.len() as u64 != exact {
        return Err(Status::Einval);
    }
    let mut ranges = Vec::with_capacity(nsg as usize);
    let mut sum = 0;
    for entry in entries.chunks_exact(size_of::<SgEntry>()) {
        let entry: SgEntry = fixed(entry)?;
        let (gpa, piece_len) = (entry.gpa.get(), entry.len.get());
        let aligned = gpa.is_multiple_of(u64::from(limits.dmb_align))
            && piece_len.is_multiple_of(limits.dmb_align);
        if !aligned || piece_len == 0 || gpa.checked_add(u64::from(piece_len)).is_none() {
            return Err(Status::Einval);
        }
        sum += u64::from(piece_len);
        ranges.push(CheckedSgEntry { gpa, len: piece_len });
    }
    if sum != u64::from(len) {
        return Err(Status::Einval);
    }
    Ok(ranges)
}

/// A MOVE with a consistent header, segments and payload. The bounds of the DMB are checked later.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedMove<'a> {
    pub(super) token: u64,
    pub(super) signal: bool,
    pub(super) mask: u16,
    pub(super) total: u32,
    segments: &'a [u8],
}

impl<'a> CheckedMove<'a> {
    /// Reads header and segments of a driver with the accepted `features`, followed by `payload_len` bytes.
    pub(super) fn parse(
        head: &'a [u8],
        payload_len: u64,
        features: Features,
        limits: &Limits,
    ) -> Result<CheckedMove<'a>, Status> {
        let (header, segments) = MoveHeader::read_from_prefix(head).map_err(|_| Status::Einval)?;
        let nseg = header.nseg.get();
        let exact = usize::from(nseg) * size_of::<Segment>();
        let flags = header.flags.get();
        if segments.len() != exact
            || nseg > limits.max_segs
            || flags & !move_flags::SIGNAL != 0
            || (nseg > 0 && !features.contains(Features::MOVE))
        {
            return Err(Status::Einval);
        }
        let request = CheckedMove {
            token: header.token.get(),
            signal: flags & move_flags::SIGNAL != 0,
            mask: header.mask.get(),
            total: header.total.get(),
            segments,
        };
        let sum: u64 = request.segments().map(|(_, len)| u64::from(len)).sum();
        let total = u64::from(request.total);
        if sum != total || payload_len != total || request.total > limits.max_move {
            return Err(Status::Einval);
        }
        Ok(request)
    }

    /// Offset and length of each segment, bytes.
    pub(super) fn segments(&self) -> impl Iterator<Item = (u32, u32)> + use<'a> {
        self.segments
            .chunks_exact(size_of::<Segment>())
            .filter_map(|bytes| Segment::read_from_bytes(bytes).ok())
            .map(|segment| (segment.offset.get(), segment.len.get()))
    }

    /// Whether there is no segment, only the signal.
    pub(super) fn is_pure_signal(&self) -> bool {
        self.segments.is_empty()
    }

    /// Whether every segment lies in a DMB of `dmb_len` bytes.
    pub(super) fn fits(&self, dmb_len: u32) -> bool {
        self.segments()
            .all(|(offset, len)| u64::from(offset) + u64::from(len) <= u64::from(dmb_len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    /// Length of the DMB, bytes.
    const DMB: u32 = 16 << 10;
    /// Most bytes of a move in these tests.
    const MAX: u32 = 64 << 10;

    /// Offsets and lengths at bounds or wraps.
    const EDGES: [u32; 12] =
        [0, 1, 8, 64, 65, DMB - 1, DMB, DMB + 1, MAX, MAX + 1, 1 << 31, u32::MAX];

    /// Checks a move with these segments, for each total and length of the payload. Returns the number of
    /// accepted moves.
    fn judge(segments: &[(u32, u32)], features: Features, flags: u16) -> u32 {
        let limits = Limits { max_segs: 2, max_move: MAX, ..Limits::default() };
        let sum: u64 = segments.iter().map(|(_, len)| u64::from(*len)).sum();
        let fits = segments.iter().all(|(at, len)| u64::from(*at) + u64::from(*len) <= DMB.into());
        let mut accepted = 0;
        for total in [sum as u32, (sum as u32).wrapping_add(1), 0, u32::MAX] {
            for payload in [sum, sum + 1, total.into(), 0, u64::MAX] {
                let header = MoveHeader {
                    nseg: (segments.len() as u16).into(),
                    flags: flags.into(),
                    total: total.into(),
                    ..MoveHeader::default()
                };
                let mut head = header.as_bytes().to_vec();
                for (offset, len) in segments {
                    let segment = Segment { offset: (*offset).into(), len: (*len).into() };
                    head.extend_from_slice(segment.as_bytes());
                }
                let legal = u64::from(total) == sum
                    && payload == sum
                    && total <= MAX
                    && segments.len() <= 2
                    && flags <= move_flags::SIGNAL
                    && (segments.is_empty() || features.contains(Features::MOVE));
                match CheckedMove::parse(&head, payload, features, &limits) {
                    Ok(checked) => {
                        assert!(legal, "{segments:x?} {total:#x} {payload:#x}");
                        assert_eq!(checked.segments().collect::<Vec<_>>(), segments);
                        assert_eq!(checked.fits(DMB), fits, "{segments:x?}");
                        accepted += 1;
                    }
                    Err(status) => {
                        assert!(!legal, "{status:?} of {segments:x?} {total:#x} {payload:#x}");
                    }
                }
                // A head cut short or longer than its segments.
                for wrong in [head.get(..head.len() - 1).unwrap(), &[&head[..], &[0]].concat()] {
                    assert!(CheckedMove::parse(wrong, payload, features, &limits).is_err());
                }
            }
        }
        accepted
    }

    #[test]
    fn every_move_of_up_to_two_segments_at_a_border_is_judged_right() {
        let segments: Vec<(u32, u32)> =
            EDGES.iter().flat_map(|offset| EDGES.map(|len| (*offset, len))).collect();
        let mut accepted = 0;
        for features in [Features::all(), Features::all() - Features::MOVE] {
            for flags in [0, move_flags::SIGNAL, 2, u16::MAX] {
                accepted += judge(&[], features, flags);
                for first in &segments {
                    accepted += judge(&[*first], features, flags);
                }
            }
        }
        for first in &segments {
            for second in &segments {
                accepted += judge(&[*first, *second], Features::all(), move_flags::SIGNAL);
            }
        }
        accepted += judge(&[(0, 0); 3], Features::all(), 0);
        assert!(accepted > 1_000, "{accepted}");
    }
}
