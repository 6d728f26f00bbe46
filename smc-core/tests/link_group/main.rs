// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two link groups connected to each other.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;
mod tables;

mod collisions;
mod deletion;
mod failover;
mod first_contact;
mod golden;
mod hostile;
mod links;
mod rkeys;
