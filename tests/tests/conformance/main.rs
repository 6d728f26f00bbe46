// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guarantees for an application: one suite over the window, over moves, over loopback, and over
//! the TCP of a declined connection. The last one keeps the suite honest: its demands are met by the
//! kernel's TCP.
//!
//! The two ends are in this process (`over_window`, `over_moves`, `over_loopback`, `tcp_fallback`), in
//! two processes (`across_processes`), or in two machines (`far`). For the last one start
//! `smc-test-peer agent pci 0.0.0.0:PORT` in the other machine, and in this one
//!
//! ```text
//! SMC_TEST_FAR=HOST:PORT SMC_TEST_DEVICE=pci conformance --ignored far::window
//! ```
//!
//! and the same with `far::moves`, `far::fallback`, with `far::rdma::` and `far::rdma_v1::` where both
//! machines have RNICs, and with `far::turned` (server and client the other way round). On emulated
//! machines `SMC_TEST_SLOW=5` gives five times as much time, and cuts long runs of identical rounds to
//! a fifth.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

/// A test per name, fabric and place. A name is a function of a `&Site` with two ports.
macro_rules! on_every_fabric {
    ($($name:ident)*) => {
        in_this_process!($($name)*);
        across_processes!(Server Client $($name)*);
        mod far {
            use super::*;
            between_machines!(window Window Server $($name)*);
            between_machines!(moves Move Client $($name)*);
            between_machines!(fallback Fallback Server $($name)*);
            between_machines!(rdma Rdma Server $($name)*);
            between_machines!(rdma_v1 RdmaV1 Server $($name)*);
            mod turned {
                use super::*;
                between_machines!(window Window Client $($name)*);
                between_machines!(moves Move Server $($name)*);
                between_machines!(rdma Rdma Client $($name)*);
                between_machines!(rdma_v1 RdmaV1 Client $($name)*);
            }
        }
    };
}

/// Like `on_every_fabric!`, without TCP: for features missing in TCP.
macro_rules! on_smc {
    ($($name:ident)*) => {
        on_smc_in_this_process!($($name)*);
        across_processes!(Server Client $($name)*);
        mod far {
            use super::*;
            between_machines!(window Window Server $($name)*);
            between_machines!(moves Move Client $($name)*);
            between_machines!(rdma Rdma Server $($name)*);
            between_machines!(rdma_v1 RdmaV1 Server $($name)*);
            mod turned {
                use super::*;
                between_machines!(window Window Client $($name)*);
                between_machines!(moves Move Server $($name)*);
                between_machines!(rdma Rdma Client $($name)*);
                between_machines!(rdma_v1 RdmaV1 Client $($name)*);
            }
        }
    };
}

/// Like `on_smc!`, for features of SMC-D only.
macro_rules! on_smc_d {
    ($($name:ident)*) => {
        on_smc_in_this_process!($($name)*);
        across_processes!(Server Client $($name)*);
        mod far {
            use super::*;
            between_machines!(window Window Server $($name)*);
            between_machines!(moves Move Client $($name)*);
            mod turned {
                use super::*;
                between_machines!(window Window Client $($name)*);
                between_machines!(moves Move Server $($name)*);
            }
        }
    };
}

/// Like `on_every_fabric!`, for tests polling the server's descriptors: only the client is ever
/// elsewhere.
macro_rules! with_the_server_here {
    ($($name:ident)*) => { with_one_end_here!(Client $($name)*); };
}

/// Like `on_every_fabric!`, for tests polling the client's descriptors: only the server is ever
/// elsewhere.
macro_rules! with_the_client_here {
    ($($name:ident)*) => { with_one_end_here!(Server $($name)*); };
}

macro_rules! with_one_end_here {
    ($far:ident $($name:ident)*) => {
        in_this_process!($($name)*);
        across_processes!($far $far $($name)*);
        mod far {
            use super::*;
            between_machines!(window Window $far $($name)*);
            between_machines!(moves Move $far $($name)*);
            between_machines!(fallback Fallback $far $($name)*);
            between_machines!(rdma Rdma $far $($name)*);
            between_machines!(rdma_v1 RdmaV1 $far $($name)*);
        }
    };
}

/// Like `on_every_fabric!`, but not between machines, as these have one device each: for tests with
/// several stacks in a place.
macro_rules! with_several_devices {
    ($($name:ident)*) => {
        in_this_process!($($name)*);
        across_processes!(Client Client $($name)*);
    };
}

/// On the window only: for tests independent of the data path.
macro_rules! on_the_window {
    ($($name:ident)*) => {
        on!(over_window Window (smc_tests::end::Place::Here) $($name)*);
        mod across_processes {
            use super::*;
            on!(window Window (smc_tests::end::Place::Process(
                crate::PEER, smc_tests::end::Role::Server)) $($name)*);
        }
        mod far {
            use super::*;
            between_machines!(window Window Server $($name)*);
            mod turned {
                use super::*;
                between_machines!(window Window Client $($name)*);
            }
        }
    };
}

macro_rules! in_this_process {
    ($($name:ident)*) => {
        on_smc_in_this_process!($($name)*);
        on!(tcp_fallback Fallback (smc_tests::end::Place::Here) $($name)*);
    };
}

macro_rules! on_smc_in_this_process {
    ($($name:ident)*) => {
        on!(over_window Window (smc_tests::end::Place::Here) $($name)*);
        on!(over_moves Move (smc_tests::end::Place::Here) $($name)*);
        on!(over_loopback Loopback (smc_tests::end::Place::Here) $($name)*);
    };
}

/// One end in another process, with the window and with moves.
macro_rules! across_processes {
    ($window:ident $moves:ident $($name:ident)*) => {
        mod across_processes {
            use super::*;
            on!(window Window (smc_tests::end::Place::Process(
                crate::PEER, smc_tests::end::Role::$window)) $($name)*);
            on!(moves Move (smc_tests::end::Place::Process(
                crate::PEER, smc_tests::end::Role::$moves)) $($name)*);
        }
    };
}

macro_rules! between_machines {
    ($module:ident $fabric:ident $far:ident $($name:ident)*) => {
        mod $module {
            $(
                #[test]
                #[ignore = "between machines: cargo xtask vm"]
                fn $name() {
                    let place = smc_tests::end::Place::Machine(smc_tests::end::Role::$far);
                    smc_tests::end::run(smc_tests::Fabric::$fabric, place, super::$name);
                }
            )*
        }
    };
}

macro_rules! on {
    ($module:ident $fabric:ident $place:tt $($name:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $name() {
                    smc_tests::end::run(smc_tests::Fabric::$fabric, $place, super::$name);
                }
            )*
        }
    };
}

/// The program with the far ends of `across_processes`.
const PEER: &str = env!("CARGO_BIN_EXE_smc-test-peer");

mod close;
mod contact;
mod data;
mod eligibility;
mod many;
mod poll;
mod room;
mod timing;
mod urgent;
