// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bases of the suite as dissected by Wireshark, field by field. Without `tshark` the test
//! prints a note and ends.

use std::process::Command;

use toml::Table;

use crate::case::{Cases, placeholders};
use crate::message::Message;
use crate::value::to_hex;

/// A field of the dissection.
#[derive(Debug)]
struct Dissected {
    name: String,
    at: usize,
    len: usize,
    value: String,
    is_part: bool,
}

/// Bytes before a message: Ethernet, IPv4 and TCP headers.
const HEADERS: usize = 14 + 20 + 20;

/// A capture with a separate connection for each message.
fn capture(messages: &[Message]) -> Vec<u8> {
    let mut file = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0];
    file.extend([0; 8]);
    file.extend(65535u32.to_le_bytes());
    file.extend(1u32.to_le_bytes());
    for (i, message) in messages.iter().enumerate() {
        let len = u16::try_from(message.bytes.len()).unwrap();
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        frame.extend([0x45, 0]);
        frame.extend((40 + len).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
        frame.extend(u16::try_from(40_000 + i).unwrap().to_be_bytes());
        frame.extend([0x13, 0x88, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!(frame.len(), HEADERS);
        frame.extend(&message.bytes);
        let len = u32::try_from(frame.len()).unwrap().to_le_bytes();
        file.extend([[0; 4], [0; 4], len, len].concat());
        file.extend(frame);
    }
    file
}

/// The value of an attribute of a tag.
fn attribute<'a>(tag: &'a str, name: &str) -> &'a str {
    let start = format!(" {name}=\"");
    let rest = tag.split_once(start.as_str()).map_or("", |(_, rest)| rest);
    rest.split_once('"').map_or("", |(value, _)| value)
}

/// The fields of SMC in each packet of a dissection in PDML.
fn dissected(pdml: &str) -> Vec<Vec<Dissected>> {
    let mut packets = Vec::new();
    for packet in pdml.split("<packet>").skip(1) {
        let smc = packet.split_once("<proto name=\"smc\"").map_or("", |(_, rest)| rest);
        let smc = smc.split_once("</proto>").map_or("", |(smc, _)| smc);
        let fields = smc.split("<field ").skip(1).map(|tag| {
            let tag = format!(" {}", tag.split_once('>').map_or(tag, |(tag, _)| tag));
            let number = |name| attribute(&tag, name).parse::<usize>().unwrap_or(0);
            Dissected {
                name: attribute(&tag, "name").to_owned(),
                at: number("pos").saturating_sub(HEADERS),
                len: number("size"),
                value: attribute(&tag, "value").to_owned(),
                is_part: !attribute(&tag, "unmaskedvalue").is_empty(),
            }
        });
        packets.push(fields.collect());
    }
    packets
}

/// The dissector's names and the suite's. Fields with other names are compared by place only.
const NAMES: &[(&str, &str)] = &[
    ("smc.clc_msg", "type"),
    ("smc.length", "length"),
    ("smc.proposal.smc.version", "version"),
    ("smc.proposal.smcv2.type", "v2_types"),
    ("smc.proposal.smc.type", "v1_types"),
    ("smc.proposal.smcv2_ext_offset", "v2_offset"),
    ("smc.proposal.smcdv2_ext_offset", "smcd_offset"),
    ("smc.proposal.eid.count", "eid_count"),
    ("smc.proposal.ismv2_gid_count", "entry_count"),
    ("smc.proposal.smc.version.relnum", "release"),
    ("smc.proposal.smc.seid", "seid_flag"),
    ("smc.proposal.system.eid", "seid"),
    ("smc.accept.first.contact", "first_contact"),
    ("smc.accept.smc.type", "smc_type"),
    ("smc.accept.dmb.token", "token"),
    ("smc.accept.dmbe.conn.index", "index"),
    ("smc.accept.dmbe.buffer.size", "size"),
    ("smc.accept.server.linkid", "link_id"),
    ("smc.accept.smc.chid", "chid"),
    ("smc.accept.eid", "eid"),
    ("smc.confirm.dmb.token", "token"),
    ("smc.confirm.smc.chid", "chid"),
    ("smc.decline.peer.diag.info", "diagnosis"),
];

/// Messages read beyond the end by version 4.0 of the dissector: the extension of release 2.0 in an
/// Accept of SMC-D is 16 bytes shorter than assumed there, and the Proposal of RFC 7609 has 40
/// bytes, with the subnet in place of the 80 bytes of version 2. Linux takes and sends both forms.
const BEYOND: [&str; 2] = ["accept-20", "proposal-r1"];

/// The dissector's disagreements with a message.
fn differences(base: &str, message: &Message, fields: &[Dissected]) -> Vec<String> {
    let mut faults = Vec::new();
    if fields.is_empty() {
        return vec![format!("{base}: no message of SMC")];
    }
    for field in fields {
        // The dissector calls the fields of release 2.1 reserved.
        if field.name.contains("reserved") || field.len == 0 {
            continue;
        }
        let here = message.spans.iter().filter(|span| (span.at, span.len) == (field.at, field.len));
        let named = NAMES.iter().find(|(name, _)| *name == field.name).map(|(_, own)| *own);
        let equal = here.clone().any(|span| {
            let own = span.read(&message.bytes).unwrap_or_default();
            let own = match (field.is_part, span.bits) {
                (true, Some(_)) => own.iter().map(|byte| format!("{byte:X}")).collect(),
                (false, None) => to_hex(&own),
                _ => return false,
            };
            own == field.value && named.is_none_or(|name| name == span.name)
        });
        // The byte around its parts, or several fields of the suite.
        let whole = message.bytes.get(field.at..field.at + field.len).map(to_hex);
        let is_whole = named.is_none() && whole.as_deref() == Some(&field.value);
        if !equal && !is_whole {
            let own: Vec<&str> = here.map(|span| span.name.as_str()).collect();
            faults.push(format!("{base}: {field:?} is {own:?}"));
        }
    }
    faults
}

#[test]
fn wireshark_reads_what_the_suite_sends() {
    if Command::new("tshark").arg("--version").output().is_err() {
        println!("not tried: there is no tshark");
        return;
    }
    let cases = Cases::load(None).unwrap();
    let mut scope = placeholders();
    scope.set("size", [3]);
    scope.set("chid", [0xff, 1]);
    let encode = |base: &String| cases.message(base, &Table::new(), &scope).unwrap();
    // The dissector has no layouts for SMC-D of version 1. Messages of LLC do not go over TCP.
    let bases: Vec<&String> = cases
        .bases
        .keys()
        .filter(|base| !base.ends_with("t-d1") && !base.ends_with("m-d1"))
        .filter(|base| !base.starts_with("llc-"))
        .collect();
    let messages: Vec<Message> = bases.iter().map(|base| encode(base)).collect();
    let own = smc_test_support::TestDir::new();
    let path = own.path("messages.pcap");
    std::fs::write(&path, capture(&messages)).unwrap();
    let output = Command::new("tshark").arg("-r").arg(&path).args(["-T", "pdml"]).output().unwrap();
    let pdml = String::from_utf8_lossy(&output.stdout);
    let bad = pdml.split("<packet>").skip(1).zip(&bases);
    let bad = bad.filter(|(packet, _)| packet.contains("_ws.malformed")).map(|(_, base)| *base);
    let malformed: Vec<&String> = bad.collect();
    let is_known = |base: &&&String| BEYOND.contains(&base.as_str());
    assert!(malformed.iter().all(|base| is_known(&base)), "malformed: {malformed:?}");
    let packets = dissected(&pdml);
    assert_eq!(packets.len(), messages.len());
    let mut faults = Vec::new();
    let mut compared = 0;
    for ((base, message), fields) in bases.iter().zip(&messages).zip(&packets) {
        faults.extend(differences(base, message, fields));
        compared += fields.len();
    }
    println!("{} messages, {compared} fields", messages.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(compared > 300, "{compared} fields");
}
