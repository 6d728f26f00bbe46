// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP_INFO of a connection on SMC: the kernel's answer for the TCP connection underneath, with SMC's
//! numbers for bytes, messages and time.
//!
//! A message stands for a TCP segment: each write into the peer's ring, and each discovery of new bytes
//! in the own ring.

use std::ffi::c_int;
use std::ops::Range;
use std::time::Duration;

use guest_driver::MovedCounts;

use crate::io::control;
use crate::selection::Wait;
use crate::selection::resolve::resolve;
use crate::socket::stream::{SocketRole, SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;

/// Size of `struct tcp_info` of Linux 7.2, with some room to spare.
pub(crate) const MOST: usize = 512;

/// Offsets in `struct tcp_info`, fixed by the ABI.
mod place {
    pub(super) const STATE: usize = 0;
    pub(super) const UNACKED: usize = 24;
    pub(super) const LAST_DATA_SENT: usize = 44;
    pub(super) const LAST_DATA_RECV: usize = 52;
    pub(super) const LAST_ACK_RECV: usize = 56;
    pub(super) const RCV_SPACE: usize = 96;
    pub(super) const BYTES_ACKED: usize = 120;
    pub(super) const BYTES_RECEIVED: usize = 128;
    pub(super) const SEGS_OUT: usize = 136;
    pub(super) const SEGS_IN: usize = 140;
    pub(super) const NOTSENT_BYTES: usize = 144;
    pub(super) const DATA_SEGS_IN: usize = 152;
    pub(super) const DATA_SEGS_OUT: usize = 156;
    pub(super) const DELIVERED: usize = 192;
    pub(super) const BYTES_SENT: usize = 200;
    pub(super) const SND_WND: usize = 228;
    pub(super) const RCV_WND: usize = 232;
}

/// `tcpi_delivery_rate`, `tcpi_busy_time`, `tcpi_rwnd_limited` and `tcpi_sndbuf_limited`: not measured
/// on SMC.
const UNMEASURED: Range<usize> = 160..192;

/// Fields about lost, repeated, reordered and marked packets: `tcpi_ca_state` to `tcpi_backoff`,
/// `tcpi_sacked` to `tcpi_fackets`, `tcpi_total_retrans`, `tcpi_delivered_ce`, `tcpi_bytes_retrans` to
/// `tcpi_rcv_ooopack`, `tcpi_rehash` to `tcpi_received_ce_bytes`. In a ring there are none.
const OF_PACKETS: [Range<usize>; 6] = [1..5, 28..44, 100..104, 196..200, 208..228, 236..276];

/// Stores a field, as far as the program's buffer reaches.
fn set<const N: usize>(info: &mut [u8], place: usize, value: [u8; N]) {
    let room = info.get_mut(place..).unwrap_or_default();
    room.iter_mut().zip(value).for_each(|(to, from)| *to = from);
}

/// A number with wrap-around at 2^32, like the kernel's.
fn set_u32(info: &mut [u8], place: usize, value: u64) {
    set(info, place, (value as u32).to_ne_bytes());
}

fn set_u64(info: &mut [u8], place: usize, value: u64) {
    set(info, place, value.to_ne_bytes());
}

fn clear(info: &mut [u8], range: Range<usize>) {
    let fields = info.iter_mut().take(range.end).skip(range.start);
    fields.for_each(|byte| *byte = 0);
}

/// Corrects the kernel's answer for the TCP socket of a descriptor. `info` is as long as the program's
/// buffer, or as this kernel's structure.
pub(crate) fn correct(descriptor: &DescriptorRef, fd: c_int, info: &mut [u8]) {
    let Some(socket) = descriptor.stream() else { return };
    let has_bytes = || {
        info.get(place::BYTES_RECEIVED..).is_some_and(|rest| rest.iter().take(8).any(|b| *b > 0))
    };
    if socket.state() == SocketState::Undecided
        && socket.role() == SocketRole::Server
        && has_bytes()
    {
        // The bytes may be a Proposal.
        let _ = resolve(descriptor, fd, Wait::Short);
    }
    if let Some(state) = control::tcp_state(descriptor) {
        set(info, place::STATE, [state]);
    }
    let stream = match socket.state() {
        SocketState::Relayed if !socket.owner.is_inherited() => socket.stream(),
        SocketState::Deciding => return show_handshake(socket, info),
        _ => socket.smc(),
    };
    if let Some(counts) = stream.and_then(|stream| stream.moved_counts()) {
        show_counts(socket, &counts, info);
    }
}

/// Leaves the bytes of the handshake out. Shows the numbers of a connection without bytes.
fn show_handshake(socket: &StreamSocket, info: &mut [u8]) {
    let unsent = socket.undecided.early().len() as u64;
    show_bytes(socket, &MovedCounts { unsent, ..MovedCounts::default() }, info);
}

/// Bytes and messages. As on TCP, the SYN of a client and the end of data count as one byte in the
/// acknowledged and received bytes, and a SYN of each end counts as a segment.
fn show_bytes(socket: &StreamSocket, counts: &MovedCounts, info: &mut [u8]) {
    let syn = u64::from(socket.role() == SocketRole::Client);
    set_u64(info, place::BYTES_ACKED, counts.acknowledged + syn + u64::from(counts.ended));
    set_u64(info, place::BYTES_RECEIVED, counts.received + u64::from(counts.ended_by_peer));
    set_u64(info, place::BYTES_SENT, counts.sent);
    set_u32(info, place::NOTSENT_BYTES, counts.unsent.min(u32::MAX.into()));
    set_u32(info, place::DATA_SEGS_OUT, counts.deliveries);
    set_u32(info, place::DATA_SEGS_IN, counts.arrivals);
    set_u32(info, place::SEGS_OUT, counts.deliveries + 1);
    set_u32(info, place::SEGS_IN, counts.arrivals + 1);
    set_u32(info, place::DELIVERED, counts.deliveries + 1);
    clear(info, UNMEASURED);
    if counts.carrier_changes == 0 {
        OF_PACKETS.into_iter().for_each(|range| clear(info, range));
        set_u32(info, place::UNACKED, 0);
    }
}

fn show_counts(socket: &StreamSocket, counts: &MovedCounts, info: &mut [u8]) {
    show_bytes(socket, counts, info);
    let (Some(sent), Some(received)) = (counts.since_sent, counts.since_received) else {
        // The kernel knows the times and windows of bytes on TCP.
        return;
    };
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    set_u32(info, place::LAST_DATA_SENT, millis(sent));
    set_u32(info, place::LAST_DATA_RECV, millis(received));
    // Sent bytes are in the peer's memory at once, and received bytes acknowledge as well.
    set_u32(info, place::LAST_ACK_RECV, millis(sent.min(received)));
    set_u32(info, place::RCV_SPACE, counts.receive_buffer.into());
    set_u32(info, place::SND_WND, counts.send_window.into());
    set_u32(info, place::RCV_WND, counts.receive_window.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_cut_at_the_end_of_the_room() {
        let mut info = [9u8; 6];
        set_u32(&mut info, 4, 0x0403_0201);
        assert_eq!(info, [9, 9, 9, 9, 1, 2]);
        set_u64(&mut info, 8, 1);
        clear(&mut info, 5..9);
        assert_eq!(info, [9, 9, 9, 9, 1, 0]);
    }
}
