// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's driver under user-mode Linux: AF_SMC over the device. `cargo xtask uml` runs these
//! tests; each ends with a check of the mistakes found by the guests' kernels.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

mod backend;
mod conform;
mod ends;
mod fallback;
mod figures;
mod hostile;
mod interop;
mod lifecycle;
mod memory;
mod programs;
