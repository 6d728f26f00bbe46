// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes explained field by field, for people: the output of `smc decode`.
//!
//! A view is never refused and never fails. Broken messages are its purpose: each recognizable
//! field is listed with its place and its value in words, a wrong field is marked, and unrecognized
//! bytes are listed raw. The fields always cover the whole input, in order and without overlap; an
//! offset leading backwards or outside is noted and not followed. If the strict parser refuses the
//! message, its error is listed as well.
//!
//! Values are shown as they are, DMB tokens and RKeys included.

mod cdc;
mod clc;
mod field;
mod llc;
mod record;
mod walk;
mod words;

pub use field::{Field, View};

use super::llc::Dialect;

/// Explains bytes of an unknown kind: CLC is recognized by its eye catcher, CDC and records by
/// their first byte; other bytes are taken for LLC.
pub fn any(bytes: &[u8]) -> View {
    match bytes {
        [0xe2, 0xd4, 0xc3, ..] => clc(bytes),
        [super::cdc::CDC_TYPE, ..] if bytes.len() == super::cdc::CONTROL_BLOCK_LEN => {
            control_block(bytes)
        }
        [super::cdc::CDC_TYPE, ..] => cdc(bytes),
        [first, ..] if super::record::Kind::from_code(*first).is_some() => record(bytes),
        [first, ..] if super::llc::Kind::from_type_byte(*first).is_ok() => {
            llc(bytes, &Dialect::default())
        }
        _ => clc(bytes),
    }
}

/// Explains a CLC message.
pub fn clc(bytes: &[u8]) -> View {
    clc::view(bytes)
}

/// Explains a record on TCP. The message of a CLC record is explained by [`clc`].
pub fn record(bytes: &[u8]) -> View {
    record::view(bytes)
}

/// Explains an LLC message.
pub fn llc(bytes: &[u8], dialect: &Dialect) -> View {
    llc::view(bytes, dialect)
}

/// Explains an SMC-R CDC message.
pub fn cdc(bytes: &[u8]) -> View {
    cdc::message(bytes)
}

/// Explains an SMC-D control block, the first 32 bytes of a DMB element.
pub fn control_block(bytes: &[u8]) -> View {
    cdc::control_block(bytes)
}

#[cfg(test)]
mod tests;
