// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::*;

const DONE: StateFlags = StateFlags::SENDING_DONE;
const CLOSED: StateFlags = StateFlags::CLOSED;

/// Each record with the bytes of its header.
fn golden() -> Vec<(Record, [u8; HEADER_LEN])> {
    let header = |head: [u8; 8], at: u64| {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&head);
        bytes[8..].copy_from_slice(&at.to_be_bytes());
        bytes
    };
    let at = 0x0102_0304_0506_0708;
    vec![
        (
            Record::Leave { at, reason: Reason::DeviceLeaves, more: false },
            [0xd1, 0x01, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        ),
        (
            Record::Leave { at: 0, reason: Reason::Answer, more: true },
            header([0xd1, 0x80, 0, 0, 0, 0, 0, 0], 0),
        ),
        (Record::Received { at }, header([0xd2, 0, 0, 0, 0, 0, 0, 0], at)),
        (Record::Change { at }, header([0xd3, 0, 0, 0, 0, 0, 0, 0], at)),
        (
            Record::Data { at, len: 0x0001_0000, more: false },
            header([0xd4, 0, 0, 0, 0, 1, 0, 0], at),
        ),
        (Record::Data { at: 9, len: 1, more: true }, header([0xd4, 0x80, 0, 0, 0, 0, 0, 1], 9)),
        (Record::End { at, flags: DONE }, header([0xd5, 0x80, 0, 0, 0, 0, 0, 0], at)),
        (Record::End { at, flags: DONE | CLOSED }, header([0xd5, 0xc0, 0, 0, 0, 0, 0, 0], at)),
        (Record::Urgent { at }, header([0xd6, 0, 0, 0, 0, 0, 0, 0], at)),
        (Record::Clc { len: 78 }, header([0xd7, 0, 0, 0, 0, 0, 0, 78], 0)),
    ]
}

#[test]
fn headers_are_written_and_read_byte_for_byte() {
    for (record, bytes) in golden() {
        assert_eq!(record.header(), bytes, "{record:?}");
        assert_eq!(Record::parse(&bytes), Ok(record));
    }
}

#[test]
fn each_way_of_being_wrong_has_its_error() {
    let bent = |record: usize, changes: &[(usize, u8)]| {
        let (_, mut bytes) = golden()[record];
        changes.iter().for_each(|(at, value)| bytes[*at] = *value);
        Record::parse(&bytes).unwrap_err()
    };
    let kind = Kind::Received;
    assert_eq!(bent(2, &[(0, 0xe2)]), RecordError::UnknownType(0xe2));
    let flags = RecordError::UnknownFlags { kind, got: 0x80, known: 0 };
    assert_eq!(bent(2, &[(1, 0x80)]), flags);
    let abort = RecordError::UnknownFlags { kind: Kind::End, got: 0xa0, known: 0xc0 };
    assert_eq!(bent(6, &[(1, 0xa0)]), abort, "an abort is no record");
    assert_eq!(bent(2, &[(3, 7)]), RecordError::Reserved { kind, got: [0, 7] });
    assert_eq!(bent(2, &[(7, 1)]), RecordError::Length { kind, got: 1, min: 0, max: 0 });
    let data = |got| RecordError::Length { kind: Kind::Data, got, min: 1, max: MAX_DATA };
    assert_eq!(bent(4, &[(5, 0)]), data(0));
    assert_eq!(bent(4, &[(7, 1)]), data(MAX_DATA + 1));
    assert_eq!(bent(4, &[(4, 0xff)]), data(0xff01_0000));
    let clc = |got| RecordError::Length { kind: Kind::Clc, got, min: 12, max: MAX_CLC };
    assert_eq!(bent(9, &[(7, 11)]), clc(11));
    assert_eq!(bent(9, &[(6, 0x10), (7, 1)]), clc(4097));
    let top = [8, 9, 10, 11, 12, 13, 14, 15].map(|at| (at, 0xff));
    assert_eq!(bent(5, &top), RecordError::Overflow { at: u64::MAX, len: 1 });
    assert_eq!(bent(0, &[(1, 0x06)]), RecordError::UnknownReason(6));
    assert_eq!(bent(6, &[(1, 0), (8, 0)]), RecordError::EndsNothing(0x0002_0304_0506_0708));
    assert_eq!(bent(9, &[(15, 3)]), RecordError::PositionOfClc(3));
}

#[test]
fn no_first_byte_is_that_of_another_message() {
    for kind in Kind::ALL {
        assert!(crate::wire::llc::Kind::from_type_byte(kind.code()).is_err(), "{kind:?}");
        assert!(!matches!(kind.code(), 0xe2 | crate::wire::cdc::CDC_TYPE));
    }
}

/// Feeds the pieces and returns the parts, with the bytes of each DATA in one part.
fn taken_apart(pieces: &[&[u8]]) -> Vec<Piece<'static>> {
    let (mut parser, mut parts, mut bytes) = (Parser::new(), Vec::new(), Vec::new());
    for mut piece in pieces.iter().copied() {
        while !piece.is_empty() {
            assert!(parser.wanted() > 0);
            let (taken, part) = parser.feed(piece).unwrap();
            assert!(taken > 0, "it goes on");
            piece = &piece[taken..];
            match part {
                Some(Piece::Bytes(body)) => bytes.extend_from_slice(body),
                Some(Piece::Record(record)) => {
                    parts.push(Piece::Record(record));
                    assert_eq!(parser.data_left() > 0, matches!(record, Record::Data { .. }));
                }
                Some(Piece::Clc(message)) => parts.push(Piece::Clc(message)),
                None => {}
            }
            if parser.data_left() == 0 && !bytes.is_empty() {
                parts.push(Piece::Clc(std::mem::take(&mut bytes)));
            }
        }
    }
    assert!(parser.is_between_records());
    parts
}

#[test]
fn a_stream_comes_apart_wherever_it_is_cut() {
    let (mut stream, mut expected) = (Vec::new(), Vec::new());
    for record in [
        Record::Leave { at: 5, reason: Reason::DeviceGone, more: true },
        Record::Received { at: 7 },
        Record::Data { at: 5, len: 3, more: false },
        Record::Clc { len: 12 },
        Record::End { at: 8, flags: DONE },
    ] {
        stream.extend(record.header());
        expected.push(Piece::Record(record));
        let body: Vec<u8> = (0..record.body_len() as u8).collect();
        if !body.is_empty() {
            stream.extend(&body);
            expected.push(Piece::Clc(body));
        }
    }
    for one in 0..=stream.len() {
        for two in one..=stream.len() {
            let pieces = [&stream[..one], &stream[one..two], &stream[two..]];
            assert_eq!(taken_apart(&pieces), expected, "cut at {one} and {two}");
        }
    }
    let bytes: Vec<&[u8]> = stream.chunks(1).collect();
    assert_eq!(taken_apart(&bytes), expected);
}

#[test]
fn data_can_be_read_past_the_parser() {
    let mut parser = Parser::new();
    let data = Record::Data { at: 0, len: 10, more: false };
    assert_eq!(parser.feed(&data.header()), Ok((HEADER_LEN, Some(Piece::Record(data)))));
    assert_eq!((parser.data_left(), parser.wanted()), (10, 10));
    parser.passed(4);
    assert_eq!(parser.feed(b"abcdefgh"), Ok((6, Some(Piece::Bytes(b"abcdef")))));
    assert!(parser.is_between_records());
    parser.passed(1);
    assert_eq!(parser.wanted(), HEADER_LEN);
}

#[test]
fn a_claim_allocates_nothing() {
    let mut parser = Parser::new();
    parser.feed(&Record::Clc { len: MAX_CLC }.header()).unwrap();
    parser.feed(&[0; 20]).unwrap();
    let Next::Clc(message) = &parser.next else { panic!("{parser:?}") };
    assert!(message.capacity() < 100);
}
