// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of every message: emit and parse agree, and no bytes at all make a parser panic or
//! yield a value that `emit` cannot send.

mod values;

use proptest::prelude::*;

use super::WireError;
use super::cdc::{Cdc, ConsumerWord, ProducerWord};
use super::clc::{Kind, Message, Peek, peek_header};
use super::llc::{Dialect, Llc};
use super::record::{HEADER_LEN, Parser, Piece, Record};
use super::view::{self, View};

/// A valid message with some bytes changed, some cut off or some added.
fn bent(valid: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let bends = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let resize = prop_oneof![4 => Just(0_i32), 1 => -40..40_i32];
    (valid, bends, resize, any::<bool>()).prop_map(|(mut bytes, bends, resize, fix_length)| {
        for (at, value) in bends {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let length = bytes.len().saturating_add_signed(resize as isize);
        bytes.resize(length, 0);
        if fix_length && length > 7 {
            bytes[5..7].copy_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
        }
        bytes
    })
}

fn check_view(view: &View, bytes: &[u8]) {
    let covered: usize = view.fields.iter().filter(|f| !f.is_area).map(|f| f.len).sum();
    assert_eq!(covered, bytes.len(), "{view}");
}

fn check_clc(bytes: &[u8]) {
    check_view(&view::clc(bytes), bytes);
    let Ok(message) = Message::parse(bytes) else { return };
    let kind = message.kind();
    assert_eq!(peek_header(bytes), Peek::Message { kind, length: bytes.len() });
    let again = Message::parse(&message.emit());
    // A version 1 Decline of 44 bytes is sent as one of 28, without its details.
    match kind {
        Kind::Decline => assert!(again.is_ok()),
        _ => assert_eq!(again, Ok(message)),
    }
}

fn check_llc(bytes: &[u8]) {
    for dialect in [Dialect::SPEC, Dialect::LINUX, Dialect::TO_LINUX] {
        check_view(&view::llc(bytes, &dialect), bytes);
        if let Ok(llc) = Llc::parse(bytes, &dialect) {
            assert_eq!(Llc::parse(&llc.emit(&dialect), &dialect), Ok(llc));
        }
    }
}

proptest! {
    #[test]
    fn clc_messages_come_back(message in values::clc()) {
        let bytes = message.emit();
        prop_assert_eq!(Message::parse(&bytes), Ok(message));
        check_view(&view::clc(&bytes), &bytes);
    }

    #[test]
    fn bent_clc_messages_are_refused_or_good(
        bytes in bent(values::clc().prop_map(|message| message.emit())),
    ) {
        check_clc(&bytes);
    }

    #[test]
    fn cut_clc_messages_are_refused(message in values::clc(), at in any::<prop::sample::Index>()) {
        let bytes = message.emit();
        let cut = &bytes[..at.index(bytes.len())];
        let error = Message::parse(cut).unwrap_err();
        let truncated = matches!(error, WireError::Truncated { .. });
        prop_assert!(truncated);
    }

    #[test]
    fn random_bytes_are_no_clc_message_or_a_good_one(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        kind in 1..5_u8,
        byte7 in any::<u8>(),
    ) {
        check_clc(&bytes);
        let mut dressed = bytes;
        dressed.splice(0..0, [0xe2, 0xd4, 0xc3, if byte7 & 1 == 0 { 0xd9 } else { 0xc4 }]);
        let trailer = [0xe2, 0xd4, 0xc3, dressed[3]];
        dressed.splice(4..4, [kind, 0, 0, byte7]);
        dressed.extend(trailer);
        let length = u16::try_from(dressed.len()).unwrap();
        dressed[5..7].copy_from_slice(&length.to_be_bytes());
        check_clc(&dressed);
    }

    // Shows: LLC-3.
    #[test]
    fn llc_messages_come_back(llc in values::llc()) {
        for dialect in [Dialect::SPEC, Dialect::LINUX, Dialect::TO_LINUX] {
            let bytes = llc.emit(&dialect);
            prop_assert_eq!(Llc::parse(&bytes, &dialect), Ok(llc.clone()));
        }
    }

    #[test]
    fn bent_llc_messages_are_refused_or_good(
        bytes in bent(values::llc().prop_map(|llc| llc.emit(&Dialect::SPEC))),
    ) {
        check_llc(&bytes);
    }

    #[test]
    fn random_bytes_are_no_llc_message_or_a_good_one(
        mut bytes in prop::collection::vec(any::<u8>(), 4..200),
        kind in any::<u8>(),
    ) {
        check_llc(&bytes);
        bytes[0] = kind & 0x2f;
        let length = u16::try_from(bytes.len()).unwrap();
        bytes[1..3].copy_from_slice(&length.to_be_bytes());
        check_llc(&bytes);
        bytes.resize(44, 0);
        bytes[1] = 44;
        check_llc(&bytes);
    }

    // Shows: CDC-38.
    #[test]
    fn cdc_messages_come_back(cdc in values::cdc(), bytes in prop::collection::vec(any::<u8>(), 44)) {
        prop_assert_eq!(Cdc::parse(&cdc.emit()), Ok(cdc));
        let mut bytes = bytes;
        bytes[..2].copy_from_slice(&[0xfe, 44]);
        let parsed = Cdc::parse(&bytes).unwrap();
        prop_assert_eq!(Cdc::parse(&parsed.emit()), Ok(parsed));
        check_view(&view::cdc(&bytes), &bytes);
    }

    #[test]
    fn records_come_back(record in values::record()) {
        prop_assert_eq!(Record::parse(&record.header()), Ok(record));
    }

    #[test]
    fn any_16_bytes_are_a_record_or_refused(header in any::<[u8; HEADER_LEN]>(), kind in 0xd1..=0xd7_u8) {
        let mut header = header;
        for dressed in [false, true] {
            if dressed {
                (header[0], header[2], header[3]) = (kind, 0, 0);
            }
            if let Ok(record) = Record::parse(&header) {
                prop_assert_eq!(record.header(), header);
            }
        }
    }

    #[test]
    fn a_stream_of_records_may_be_cut_anywhere(
        records in prop::collection::vec(values::record(), 1..6),
        sizes in prop::collection::vec(1..40_usize, 1..20),
    ) {
        let mut stream = Vec::new();
        for record in &records {
            stream.extend(record.header());
            stream.extend((0..record.body_len()).map(|n| n as u8));
        }
        let (mut parser, mut found, mut sizes) = (Parser::new(), Vec::new(), sizes.iter().cycle());
        let (mut passed, mut rest) = (0_u32, &stream[..]);
        while !rest.is_empty() {
            let size = sizes.next().map_or(1, |size| *size).min(rest.len());
            let (taken, part) = parser.feed(&rest[..size]).unwrap();
            prop_assert!(taken > 0);
            rest = &rest[taken..];
            match part {
                Some(Piece::Record(record)) => {
                    found.push(record);
                    passed = 0;
                }
                Some(Piece::Bytes(bytes)) => {
                    prop_assert!(bytes.iter().enumerate().all(|(n, b)| *b == (passed + n as u32) as u8));
                    passed += bytes.len() as u32;
                }
                Some(Piece::Clc(message)) => {
                    prop_assert_eq!(message.len() as u32, found.last().unwrap().body_len());
                }
                None => {}
            }
        }
        prop_assert_eq!(found, records);
        prop_assert!(parser.is_between_records());
    }

    // Shows: CDC-38.
    #[test]
    fn any_64_bits_are_a_control_word(word in any::<u64>()) {
        let producer = ProducerWord::from_u64(word);
        prop_assert_eq!(ProducerWord::from_u64(producer.to_u64()), producer);
        let consumer = ConsumerWord::from_u64(word);
        prop_assert_eq!(ConsumerWord::from_u64(consumer.to_u64()), consumer);
    }
}
