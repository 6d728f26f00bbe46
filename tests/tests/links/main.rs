// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC-R over RNIC doubles in this process: link groups lose their only link under connections with an
//! agreement to go on over TCP.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

mod ends;
mod returns;
mod scene;
mod streams;
