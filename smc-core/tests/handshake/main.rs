//! The CLC handshake from outside: both roles against each other, captured Linux messages, damage.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod damage;
mod declines;
mod golden;
mod pairs;
mod support;
