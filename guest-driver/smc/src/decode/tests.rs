// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The whole way: text or a capture in, words or JSON out.

use super::packet::build;
use super::*;

const DECLINE: &str = "e2d4c3d9 04002c20 0000000000000000 03030008 20000000 \
                       00000000000000000000000000000000 e2d4c3d9";
const CDC: &str = "fe2c0001 00000001 0000 0000 00007530 0000 0000 00000000 80 40 \
                   000000000000000000000000000000000000";
const TEST_LINK: &str = "07 2c 00 00 00000000000000000000000000000000 \
                         000000000000000000000000000000000000000000000000";

fn args(input: &[&str], json: bool) -> DecodeArgs {
    let input = input.iter().map(ToString::to_string).collect();
    DecodeArgs { input, kind: Kind::Auto, json }
}

fn decode(args: DecodeArgs, stdin: &[u8]) -> (String, Result<u64, DecodeError>) {
    let mut out = Vec::new();
    let result = run_to(args, stdin, &mut out);
    (String::from_utf8(out).unwrap(), result)
}

fn text(input: &str) -> String {
    let (text, result) = decode(args(&[input], false), b"");
    result.unwrap();
    text
}

fn json(stdin: &[u8]) -> Vec<serde_json::Value> {
    let (text, result) = decode(args(&[], true), stdin);
    result.unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    hex::parse(hex).unwrap()
}

#[test]
fn words_of_a_good_message_hold_no_complaint() {
    let text = text(DECLINE);
    assert!(text.starts_with("CLC Decline, version 2\n"), "{text}");
    assert!(text.contains("03030008"), "{text}");
    assert!(!text.contains('!') && !text.contains("refused"), "{text}");
}

#[test]
fn a_wrong_message_says_what_and_where() {
    let wrong = DECLINE.replace("e2d4c3d9 04002c20", "e2d4c3d9 04002d20");
    let text = text(&wrong);
    assert!(text.contains("  !") || text.contains("refused: "), "{text}");
    assert!(text.contains("refused: "), "{text}");
}

#[test]
fn messages_one_behind_the_other_are_separated() {
    let text = text(&format!("{DECLINE} {CDC} {TEST_LINK} {}", "fe".to_owned() + &"00".repeat(31)));
    for (at, title) in
        [(0, "CLC Decline"), (44, "SMC-R CDC"), (88, "LLC Test Link"), (132, "SMC-D")]
    {
        let line = format!("byte {at}\n");
        let start = text.find(&line).unwrap_or_else(|| panic!("no {line} in {text}"));
        assert!(text[start + line.len()..].starts_with(title), "{at}: {text}");
    }
}

#[test]
fn the_byte_order_of_linux_is_understood() {
    let linux = "272c0000".to_owned() + &"00".repeat(40);
    for hex in [linux, "27002c00".to_owned() + &"00".repeat(40)] {
        let text = text(&hex);
        assert!(text.starts_with("LLC Test Link") && !text.contains("refused"), "{text}");
    }
}

#[test]
fn noise_is_explained_and_not_an_error() {
    for hex in ["00", "e2", "e2d4c3d9", "fe", "ff00ff", "01", "21", "fe2c"] {
        assert!(text(hex).contains("refused: "), "{hex}");
    }
}

#[test]
fn raw_bytes_and_hex_come_from_standard_input() {
    let raw = json(&bytes(DECLINE));
    assert_eq!(raw, json(DECLINE.as_bytes()));
    assert_eq!(raw[0]["message"], "CLC Decline, version 2");
    assert_eq!(raw[0]["length"], 44);
    assert_eq!(raw[0]["hex"].as_str().map(str::len), Some(88));
    let covered: u64 =
        raw[0]["fields"].as_array().unwrap().iter().map(|f| f["length"].as_u64().unwrap()).sum();
    assert!(covered >= 44);
    assert_eq!(raw[1]["summary"]["messages"], 1);
}

#[test]
fn no_bytes_and_no_hex_are_errors() {
    assert!(matches!(decode(args(&[], false), b"").1, Err(DecodeError::Empty)));
    let (_, result) = decode(args(&["hello"], false), b"");
    let Err(DecodeError::Neither { argument, why }) = result else { panic!("{result:?}") };
    assert_eq!(argument, "hello");
    assert!(matches!(*why, DecodeError::HexDigit { found: 'h', .. }));
    let (_, result) = decode(args(&["e2", "hello"], false), b"");
    assert!(matches!(result, Err(DecodeError::HexDigit { .. })));
}

const CLIENT: (u8, u16) = (1, 40000);
const SERVER: (u8, u16) = (2, 5000);
const OPTION: [u8; 6] = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
const SYN: u8 = 2;
const ACK: u8 = 0x10;

/// A handshake ending in fallback, LLC and CDC of another one, and packets without SMC.
fn capture() -> Vec<u8> {
    let proposal_start = bytes("e2d4c3d9 0100e02e");
    let frames = [
        build::tcp(CLIENT, SERVER, 99, SYN, &OPTION, b""),
        build::tcp(SERVER, CLIENT, 499, SYN | ACK, &OPTION, b""),
        build::tcp(SERVER, CLIENT, 500, ACK, &[], &bytes(DECLINE)[..20]),
        build::tcp(SERVER, CLIENT, 520, ACK, &[], &[&bytes(DECLINE)[20..], b"data"].concat()),
        build::roce(1, 2, 4, 1, &bytes(TEST_LINK)),
        build::roce(1, 2, 4, 2, &bytes(CDC)),
        build::roce(1, 2, 4, 3, b"another user of RDMA"),
        build::tcp((3, 1), (4, 2), 5, ACK, &[], b"GET / HTTP/1.0"),
        build::tcp(CLIENT, SERVER, 100, ACK, &[], &proposal_start),
    ];
    build::pcap(frames.map(|frame| build::ethernet(&frame)))
}

#[test]
fn a_capture_gives_announcements_messages_and_what_is_missing() {
    let lines = json(&capture());
    let what = |line: &serde_json::Value| {
        let text = line.get("message").or(line.get("note")).and_then(|t| t.as_str());
        (line["frame"].as_u64().unwrap_or(0), text.unwrap_or("").to_owned())
    };
    let found: Vec<_> = lines.iter().map(what).collect();
    let expected = [
        (1, "TCP option 254: the client announces SMC"),
        (2, "TCP option 254: the server announces SMC"),
        (4, "CLC Decline, version 2"),
        (5, "LLC Test Link, version 1"),
        (6, "SMC-R CDC"),
        (9, "CLC Proposal, version 2"),
        (0, ""),
    ];
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for ((frame, text), (expected_frame, start)) in found.iter().zip(expected) {
        assert_eq!(*frame, expected_frame, "{found:?}");
        assert!(text.starts_with(start), "{found:?}");
    }
    assert_eq!(lines[2]["from"], "10.9.0.2:5000");
    assert_eq!(lines[3]["qpn"], 0x11);
    assert!(lines[5]["refused"].is_string(), "{}", lines[5]);
    let summary = serde_json::json!({
        "frames": 9, "messages": 4, "refused": 1, "dropped_directions": 0, "dropped_segments": 0
    });
    assert_eq!(lines[6]["summary"], summary);
}

#[test]
fn a_capture_file_is_taken_by_name_and_a_cut_one_is_printed_as_far_as_it_goes() {
    let own = smc_test_support::TestDir::new();
    let path = own.path("cut.pcap");
    let file = capture();
    std::fs::write(&path, &file[..file.len() - 1]).unwrap();
    let (text, result) = decode(args(&[path.to_str().unwrap()], false), b"");
    assert!(matches!(result, Err(DecodeError::Capture(_))), "{result:?}");
    assert!(text.contains("frame 4, 10.9.0.2:5000 > 10.9.0.1:40000\nCLC Decline"), "{text}");
    assert!(text.ends_with("8 frames, 3 messages, 0 refused\n"), "{text}");
}

#[test]
fn damaged_captures_are_harmless() {
    let good = capture();
    for at in 0..good.len() {
        let mut file = good.clone();
        file[at] = if at % 2 == 0 { 0xff } else { good[at] ^ 1 };
        let _ = decode(args(&[], true), &file);
        if at % 8 == 0 {
            let _ = decode(args(&[], false), &good[..at]);
        }
    }
}
