// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The part of a handshake specific to SMC-R: LLC brings the link up.

mod bring_up;
pub(super) mod client;
mod pending;
pub(super) mod server;

pub(super) use client::Connecting;
pub(super) use server::{Accepting, Refused};
