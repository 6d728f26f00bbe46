// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of Linux 7.2 on the wire (x86-64): each decodes to the configured values and encodes to
//! the same bytes again.
//!
//! Where a capture was noted by its significant fields only, the others hold example values.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its vector fails here")]

mod cdc;
mod clc;
mod llc;

use smc_core::wire::view::View;

/// Bytes of a written-down message.
///
/// Tokens are separated by blanks; `|` is for the eye. `e2d4` is bytes, `00*8` a byte repeated, and
/// `LAB-1@32` text padded with blanks to 32.
fn bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for token in text.split_whitespace().filter(|token| *token != "|") {
        if let Some((text, length)) = token.split_once('@') {
            let length: usize = length.parse().unwrap();
            bytes.extend(format!("{text:length$}").into_bytes());
        } else if let Some((byte, count)) = token.split_once('*') {
            let byte = u8::from_str_radix(byte, 16).unwrap();
            bytes.extend(vec![byte; count.parse().unwrap()]);
        } else {
            for at in (0..token.len()).step_by(2) {
                bytes.push(u8::from_str_radix(&token[at..at + 2], 16).unwrap());
            }
        }
    }
    bytes
}

/// Converts to an array, like `bytes`.
fn array<const N: usize>(text: &str) -> [u8; N] {
    bytes(text).try_into().unwrap()
}

/// A message of Linux has no error.
fn no_problem(view: &View) {
    assert_eq!(view.error, None, "{view}");
    assert!(view.fields.iter().all(|field| field.problem.is_none()), "{view}");
}
