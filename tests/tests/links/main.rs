// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC-R over RNICs that are doubles in this process: link groups lose their only link under
//! connections whose ends have agreed to go on over TCP.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

mod ends;
mod returns;
mod scene;
mod streams;
