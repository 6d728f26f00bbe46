// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection as two values: its sending half and its receiving half.
//!
//! [`crate::connection`] has the rules of a ring and of the end, [`crate::carrier`] the records by
//! which a connection leaves its ring and comes back. This module puts both together: the state of
//! one end that needs no clock, lock, socket, descriptor or heap. The owner keeps each half under a
//! lock of its own, moves the bytes, and reports what has happened.

mod places;

pub use places::{cursor_at, distance, last_of, offset_of, pieces_before};
