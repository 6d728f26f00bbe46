// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The CLC handshake from outside: both roles against each other, captured Linux messages, damage.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod carriers;
mod damage;
mod declines;
mod golden;
mod pairs;
mod smcd_v1;
mod smcr_damage;
mod smcr_declines;
mod smcr_golden;
mod smcr_pairs;
mod smcr_support;
mod stated;
mod support;
mod types;
