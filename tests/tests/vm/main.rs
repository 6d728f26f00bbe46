// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests under QEMU, with the driver inside. `cargo xtask vm` runs these tests; see `smc_tests::vm`
//! for their means.
//!
//! A file is a room of tests, and its head says for what, with the variables. Fast and broad tests
//! come first. `interop` runs beside all others, since it mostly waits for time-outs of AF_SMC;
//! `alone` and `stock` come last, when nothing else has guests. `--slow` adds the conformance suite
//! over each kind of soft-RoCE, PostgreSQL, Node.js and Go, and the figures of docs/linux.md.
//! `SMC_VM_BEDS` is how many tests have guests at a time (2). A guest may wait seconds for a
//! processor of a busy host, so limits are generous, and a test that measures a pause adds the
//! waiting time of its guests (`Guest::run_delay`).
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

mod alone;
mod boots;
mod conformance;
mod devices;
mod ends;
mod fabrics;
mod failover;
mod faults;
mod hostile;
mod interop;
mod isolation;
mod kernel;
mod kvm;
mod lifecycle;
mod migration;
mod moved;
mod outlive;
mod page;
mod programs;
mod rdma;
mod rendezvous;
mod smcr;
mod stock;
mod vfio_user;
