// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SEND payloads out of RoCEv2 packets: LLC and CDC messages of SMC-R.
//!
//! Long LLC messages of version 2 span packets (first, middle, last). Packets are reassembled per
//! receiver queue pair as long as packet sequence numbers are consecutive.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Longest LLC message, bytes (LLC version 2).
const MAX_MESSAGE: usize = 8192;
/// Limit of the messages in reassembly at a time.
const MAX_PARTIAL: usize = 1024;
/// Base transport header.
const BTH: usize = 12;
/// Invariant checksum at the end.
const ICRC: usize = 4;

/// Operations of reliable connections with a SEND.
mod opcode {
    pub(super) const FIRST: u8 = 0x00;
    pub(super) const MIDDLE: u8 = 0x01;
    pub(super) const LAST: u8 = 0x02;
    pub(super) const LAST_WITH_IMMEDIATE: u8 = 0x03;
    pub(super) const ONLY: u8 = 0x04;
    pub(super) const ONLY_WITH_IMMEDIATE: u8 = 0x05;
    pub(super) const LAST_WITH_INVALIDATE: u8 = 0x16;
    pub(super) const ONLY_WITH_INVALIDATE: u8 = 0x17;
}

type Key = (IpAddr, IpAddr, u32);

struct Partial {
    next_psn: u32,
    bytes: Vec<u8>,
}

/// A whole SEND.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Send {
    /// Receiving queue pair.
    pub(super) qpn: u32,
    /// Payload of the SEND.
    pub(super) bytes: Vec<u8>,
}

/// Messages of a capture in reassembly.
#[derive(Default)]
pub(super) struct Sends {
    partial: BTreeMap<Key, Partial>,
}

impl Sends {
    /// Takes a packet, and returns a completed SEND.
    pub(super) fn packet(&mut self, from: IpAddr, to: IpAddr, data: &[u8]) -> Option<Send> {
        let (header, rest) = data.split_first_chunk::<BTH>()?;
        let [operation, flags, _, _, _, q0, q1, q2, _, p0, p1, p2] = *header;
        let qpn = u32::from_be_bytes([0, q0, q1, q2]);
        let psn = u32::from_be_bytes([0, p0, p1, p2]);
        let pad = usize::from(flags >> 4 & 3);
        // An immediate value or a key to invalidate comes before the payload.
        let extension = match operation {
            opcode::LAST_WITH_IMMEDIATE
            | opcode::ONLY_WITH_IMMEDIATE
            | opcode::LAST_WITH_INVALIDATE
            | opcode::ONLY_WITH_INVALIDATE => 4,
            _ => 0,
        };
        let payload = rest.get(extension..rest.len().checked_sub(ICRC + pad)?)?;
        let key = (from, to, qpn);
        match operation {
            opcode::ONLY | opcode::ONLY_WITH_IMMEDIATE | opcode::ONLY_WITH_INVALIDATE => {
                let bytes = payload.get(..payload.len().min(MAX_MESSAGE))?.to_vec();
                Some(Send { qpn, bytes })
            }
            opcode::FIRST => {
                if self.partial.len() >= MAX_PARTIAL {
                    self.partial.clear();
                }
                if payload.len() <= MAX_MESSAGE {
                    let partial = Partial { next_psn: next(psn), bytes: payload.to_vec() };
                    self.partial.insert(key, partial);
                }
                None
            }
            opcode::MIDDLE
            | opcode::LAST
            | opcode::LAST_WITH_IMMEDIATE
            | opcode::LAST_WITH_INVALIDATE => {
                let mut partial = self.partial.remove(&key)?;
                if psn != partial.next_psn || partial.bytes.len() + payload.len() > MAX_MESSAGE {
                    return None;
                }
                partial.bytes.extend_from_slice(payload);
                if operation != opcode::MIDDLE {
                    return Some(Send { qpn, bytes: partial.bytes });
                }
                partial.next_psn = next(psn);
                self.partial.insert(key, partial);
                None
            }
            _ => None,
        }
    }
}

fn next(psn: u32) -> u32 {
    psn.wrapping_add(1) & 0xff_ffff
}

#[cfg(test)]
mod tests {
    use super::super::packet::{Packet, build, dissect};
    use super::*;

    fn packet(sends: &mut Sends, opcode: u8, psn: u32, payload: &[u8]) -> Option<Send> {
        let frame = build::roce(1, 2, opcode, psn, payload);
        let Some(Packet::Roce { from, to, data }) = dissect(101, &frame) else { panic!() };
        sends.packet(from, to, data)
    }

    #[test]
    fn a_send_in_one_packet_loses_padding_and_checksum() {
        let send = packet(&mut Sends::default(), opcode::ONLY, 5, &[7; 43]).unwrap();
        assert_eq!(send, Send { qpn: 0x11, bytes: vec![7; 43] });
    }

    #[test]
    fn a_long_send_is_put_together_across_the_wrap_of_sequence_numbers() {
        let mut sends = Sends::default();
        assert_eq!(packet(&mut sends, opcode::FIRST, 0xff_fffe, &[1; 1024]), None);
        assert_eq!(packet(&mut sends, opcode::MIDDLE, 0xff_ffff, &[2; 1024]), None);
        let send = packet(&mut sends, opcode::LAST, 0, &[3; 100]).unwrap();
        assert_eq!(send.bytes.len(), 2148);
        assert!(sends.partial.is_empty());
    }

    #[test]
    fn a_gap_or_too_much_drops_the_message() {
        let mut sends = Sends::default();
        packet(&mut sends, opcode::FIRST, 1, &[1; 64]);
        assert_eq!(packet(&mut sends, opcode::LAST, 3, &[1; 64]), None);
        packet(&mut sends, opcode::FIRST, 1, &[1; 4096]);
        packet(&mut sends, opcode::MIDDLE, 2, &[1; 4096]);
        assert_eq!(packet(&mut sends, opcode::LAST, 3, &[1; 4]), None);
        assert!(sends.partial.is_empty());
    }

    #[test]
    fn writes_and_acknowledgements_are_nothing() {
        for operation in [0x06, 0x0a, 0x11] {
            assert_eq!(packet(&mut Sends::default(), operation, 1, &[1; 64]), None);
        }
    }
}
