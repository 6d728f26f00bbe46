// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parts shared by the suites of the whole system: a daemon with stacks around it, deadlines, leak
//! counters, helper processes, and peers speaking the protocol by hand.
//!
//! Everything here is for tests: each unexpected result is a panic with a sentence.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]
#![forbid(unsafe_code)]

pub mod agent;
pub mod bench;
pub mod bytes;
pub mod end;
pub mod helper;
pub mod hostile;
pub mod interop;
pub mod leaks;
pub mod linux;
pub mod outlive;
pub mod raw;
pub mod restored;
pub mod rogue;
pub mod soak;
pub mod streams;
pub mod talk;
pub mod vm;
pub mod watch;

pub use bench::{Bench, Dir, Fabric, Pair, eid, run};
pub use bytes::{Rng, pattern, read_exactly, send_all, slurp};
pub use watch::{TIMEOUT, eventually, fewer, note, slowly, test_timeout, watched};
