// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon from a front end's view: sessions over vhost-user, hostile front ends, the management socket,
//! and the program itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod activation;
mod connection;
mod dashboard;
mod doorbells;
mod floods;
mod front_end;
mod hidden_features;
mod host;
mod hostile;
mod leaving;
mod management;
mod memory;
mod operations;
mod place;
mod pool;
mod program;
mod streams;
#[path = "../../vfio-user/tests/client/mod.rs"]
mod vfio_client;
mod vfio_user;
