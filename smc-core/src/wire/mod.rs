// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How SMC bytes look, at two levels.
//!
//! The strict level turns bytes into values that can be meant: [`clc::Message::parse`],
//! [`llc::Llc::parse`], [`cdc::Cdc::parse`]. It refuses everything else with a [`WireError`] that
//! names the way of being wrong and carries the wrong value, and what it returns is plain owned
//! data that can be written again with `emit`. Reserved fields are zero on emit and ignored
//! on parse (CLC-4).
//!
//! The other level judges nothing: [`view`] lists the fields of any bytes, also of a broken message,
//! in the words a person needs to find the mistake.
//!
//! All integers on the wire are big-endian; the SMC-D control block alone is in host order
//! ([`cdc`]).

pub mod cdc;
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
