// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer's stream of records, cut anywhere, into an end of a connection. A parsed record can be
//! written and parsed again, the cuts make no difference, no byte is passed through twice or left out,
//! and nothing follows a reset.
#![no_main]

use libfuzzer_sys::fuzz_target;
use smc_core::carrier::{Action, End, Input, Positions, Role};
use smc_core::wire::record::{HEADER_LEN, MAX_CLC, Parser, Piece, Record, RecordError};

/// Feeds a stream in pieces of `size`; returns the records, the bytes of DATA, and the error if there
/// is one.
fn apart(stream: &[u8], size: usize) -> (Vec<Record>, Vec<u8>, Option<RecordError>) {
    let (mut parser, mut records, mut bytes) = (Parser::new(), Vec::new(), Vec::new());
    for mut piece in stream.chunks(size.max(1)) {
        while !piece.is_empty() {
            let (taken, part) = match parser.feed(piece) {
                Ok(fed) => fed,
                Err(error) => return (records, bytes, Some(error)),
            };
            assert!(taken > 0 && taken <= piece.len());
            piece = &piece[taken..];
            match part {
                Some(Piece::Record(record)) => {
                    assert_eq!(Record::parse(&record.header()), Ok(record));
                    records.push(record);
                }
                Some(Piece::Bytes(body)) => bytes.extend_from_slice(body),
                Some(Piece::Clc(message)) => assert!(message.len() <= MAX_CLC as usize),
                None => {}
            }
            assert!(parser.wanted() > 0);
        }
    }
    (records, bytes, None)
}

fuzz_target!(|input: &[u8]| {
    let [size, start, stream @ ..] = input else { return };
    let (records, bytes, error) = apart(stream, usize::from(*size));
    assert_eq!(apart(stream, usize::MAX), (records.clone(), bytes.clone(), error));
    assert!(records.len() * HEADER_LEN + bytes.len() <= stream.len());

    let role = if start & 1 == 0 { Role::Client } else { Role::Server };
    let mut end = match start & 2 {
        0 => End::on_ring(role, true),
        _ => End::on_tcp(role),
    };
    let positions = Positions { sent: 10, kept: 8, arrived: 4, ..Positions::default() };
    for record in records {
        let was_over = end.is_over();
        let before = end;
        let actions = end.on(Input::Record(record), &positions);
        let reset = actions.iter().any(|action| matches!(action, Action::Reset(_)));
        assert_eq!(reset, end.is_over() && !was_over);
        assert!(!was_over || (actions.is_empty() && end == before));
        assert!(actions.len() <= 8, "{actions:?}");
    }
    let actions = end.on(Input::TcpEnded { whole: error.is_none() }, &positions);
    let ended = actions.iter().any(|action| matches!(action, Action::PeerEnded));
    assert!(!ended || error.is_none());
});
