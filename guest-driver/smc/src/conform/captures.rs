// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A file of packets for each case.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::SystemTime;

use smc_conform::{CaseResult, Passed, Sender};

use crate::capture::packets::{self, FIN_ACK, PUSH_ACK, packet, send};

/// Flags of TCP.
const SYN: u8 = 2;
const SYN_ACK: u8 = 0x12;
const ACK: u8 = 0x10;
const RST_ACK: u8 = 0x14;
/// Queue pairs of the suite and of the target. The numbers 0 and 1 have a meaning for readers.
const SUITE_PAIR: u32 = 0x101;
const TARGET_PAIR: u32 = 0x102;

/// Writes the connections of each played case to `ID.pcapng` in a directory, which is made. The ends have
/// addresses for documentation: the suite 192.0.2.1, the target 192.0.2.2. Messages on links of SMC-R are packets
/// of RoCE v2, between two queue pairs with numbers of their own.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write(
    directory: &Path,
    cases: &[CaseResult],
    is_server: bool,
    began: SystemTime,
) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let began = began.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let began = u64::try_from(began.as_nanos()).unwrap_or_default();
    for one in cases.iter().filter(|one| !one.passed.is_empty()) {
        let mut file = Vec::new();
        packets::begin(&mut file)?;
        packets::interface(&mut file, &one.case.id)?;
        for (number, passed) in (0_u16..).zip(&one.passed) {
            for (time, packet) in connection(number, passed, is_server) {
                packets::write(&mut file, 0, began.saturating_add(time), &packet)?;
            }
        }
        // Cases of a user have ids of the user's.
        let name = one.case.id.replace('/', "-");
        std::fs::write(directory.join(format!("{name}.pcapng")), file)?;
    }
    Ok(())
}

/// The packets of a connection, with their times in nanoseconds.
fn connection(number: u16, passed: &[Passed], is_server: bool) -> Vec<(u64, Vec<u8>)> {
    let port = 49152_u16.saturating_add(number);
    let (suite_port, target_port) = if is_server { (port, 5000) } else { (5000, port) };
    let suite = SocketAddr::from(([192, 0, 2, 1], suite_port));
    let target = SocketAddr::from(([192, 0, 2, 2], target_port));
    let (client, server) = if is_server { (suite, target) } else { (target, suite) };
    let begin = [
        packet((client, server), (0, 0), SYN, &[]),
        packet((server, client), (0, 1), SYN_ACK, &[]),
        packet((client, server), (1, 1), ACK, &[]),
    ];
    let mut all: Vec<(u64, Vec<u8>)> =
        begin.into_iter().flatten().map(|packet| (0, packet)).collect();
    // The next sequence numbers of suite and target.
    let (mut own, mut theirs) = (1_u32, 1_u32);
    for (number, one) in (0_u32..).zip(passed) {
        if one.path == smc_conform::Path::Link {
            let (ends, to) = match one.from {
                Sender::Suite => ((suite.ip(), target.ip()), TARGET_PAIR),
                Sender::Target => ((target.ip(), suite.ip()), SUITE_PAIR),
            };
            let message = Some(one.bytes.as_slice()).filter(|bytes| !bytes.is_empty());
            let packet = message.and_then(|bytes| send(ends, to, number, bytes));
            all.extend(packet.map(|packet| (one.at * 1_000_000, packet)));
            continue;
        }
        let flags = match one.event.as_str() {
            "FIN" => FIN_ACK,
            "RST" => RST_ACK,
            _ if one.bytes.is_empty() => continue,
            _ => PUSH_ACK,
        };
        let (ends, mine, other) = match one.from {
            Sender::Suite => ((suite, target), &mut own, theirs),
            Sender::Target => ((target, suite), &mut theirs, own),
        };
        for part in parts(&one.bytes) {
            let numbers = (*mine, other);
            all.extend(
                packet(ends, numbers, flags, part).map(|packet| (one.at * 1_000_000, packet)),
            );
            *mine = mine.wrapping_add(part.len() as u32 + u32::from(flags == FIN_ACK));
        }
    }
    all
}

/// Bytes as payloads of packets, at least one.
fn parts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let empty = bytes.is_empty().then_some(bytes);
    bytes.chunks(16 << 10).chain(empty)
}
