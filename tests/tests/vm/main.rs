// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests under QEMU, with the driver inside. `cargo xtask vm` runs these tests; see `smc_tests::vm`
//! for their means.
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
