// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bytes and events of a connection, for people: adjacent segments as one entry, explained as
//! in `smc decode`.

use std::fmt::Write as _;

use serde::Serialize;
use smc_core::wire::llc::Dialect;
use smc_core::wire::view;

use crate::link::{Passed, Path, Sender};
use crate::value::to_hex;

/// Bytes of one direction until the other one has its turn, or an event.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Exchange {
    /// Connection of the case, from 1.
    pub(super) connection: usize,
    /// Milliseconds since the connection began.
    pub(super) ms: u64,
    pub(super) from: &'static str,
    /// "llc" and "cdc" for messages on a link of SMC-R; empty: TCP.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) path: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) hex: String,
    /// Lengths of the segments, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) segments: Vec<usize>,
    /// FIN, RST, or why bytes were not sent.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) event: String,
    /// The fields.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) explained: String,
}

/// The exchanges on all connections of a case.
pub(super) fn of_case(connections: &[Vec<Passed>]) -> Vec<Exchange> {
    let mut all = Vec::new();
    for (i, passed) in connections.iter().enumerate() {
        let mut rest = passed.as_slice();
        while let Some((first, others)) = rest.split_first() {
            let more = others.iter().take_while(|next| {
                let both = !first.bytes.is_empty() && !next.bytes.is_empty();
                both && next.from == first.from && (next.path, first.path) == (Path::Tcp, Path::Tcp)
            });
            let count = 1 + more.count();
            let (own, others) = rest.split_at_checked(count).unwrap_or((rest, &[]));
            rest = others;
            let bytes = own.iter().flat_map(|one| one.bytes.iter().copied()).collect::<Vec<_>>();
            let segments = own.iter().map(|one| one.bytes.len()).collect::<Vec<_>>();
            all.push(Exchange {
                connection: i + 1,
                ms: first.at,
                from: match first.from {
                    Sender::Suite => "suite",
                    Sender::Target => "target",
                },
                path: match (first.path, first.bytes.first()) {
                    (Path::Tcp, _) => "",
                    (Path::Link, Some(0xfe)) => "cdc",
                    (Path::Link, _) => "llc",
                },
                hex: to_hex(&bytes),
                segments: if segments.len() > 1 { segments } else { Vec::new() },
                event: own.iter().map(|one| one.event.as_str()).collect::<Vec<_>>().concat(),
                explained: match first.path {
                    Path::Tcp => explain(&bytes),
                    Path::Link if bytes.is_empty() => String::new(),
                    Path::Link if bytes.first() == Some(&0xfe) => view::cdc(&bytes).to_string(),
                    Path::Link => view::llc(&bytes, &Dialect::SPEC).to_string(),
                },
            });
        }
    }
    all
}

/// CLC messages field by field, and how much data stands between them.
fn explain(mut bytes: &[u8]) -> String {
    let mut text = String::new();
    while !bytes.is_empty() {
        let len = match bytes {
            [0xe2, 0xd4, 0xc3, _, _, high, low, ..] => {
                usize::from(u16::from_be_bytes([*high, *low])).max(8)
            }
            _ => bytes.len(),
        };
        let (own, rest) = bytes.split_at_checked(len).unwrap_or((bytes, &[]));
        bytes = rest;
        match own {
            [0xe2, 0xd4, 0xc3, ..] => {
                let _ = write!(text, "{}", view::clc(own));
            }
            data => {
                let words: String = data.iter().take(64).map(|byte| printable(*byte)).collect();
                let _ = writeln!(text, "data, {} bytes: {words}", data.len());
            }
        }
    }
    text
}

fn printable(byte: u8) -> char {
    if byte.is_ascii_graphic() || byte == b' ' { byte.into() } else { '.' }
}
