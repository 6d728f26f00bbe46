// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The format of SMC bytes, at two levels.
//!
//! The strict level turns bytes into meaningful values: [`clc::Message::parse`],
//! [`llc::Llc::parse`], [`cdc::Cdc::parse`]. Other bytes are refused with a [`WireError`] for the
//! kind of error, with the wrong value inside. Parsed messages are plain owned data and can be
//! written again with `emit`. Reserved fields are zero on emit and ignored on parse (CLC-4).
//!
//! The other level never refuses: [`view`] lists the fields of any bytes, also of a broken message,
//! in words for a person in search of the mistake.
//!
//! All integers on the wire are big-endian; the SMC-D control block alone is in host order
//! ([`cdc`]).

pub mod cdc;
pub mod claim;
pub mod clc;
mod codec;
pub mod cursor;
mod error;
pub mod ids;
mod list;
pub mod llc;
pub mod record;

#[cfg(test)]
mod properties;
pub mod view;

pub use cursor::Cursor;
pub use error::{Reaction, WireError};
pub use list::{Full, List};
