// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A conformance suite for implementations of SMC (RFC 7609, SMCv2.1): cases as data, played against
//! a server or a client.
//!
//! The suite has tables and an encoder of its own. Only the names of fields come from smc-core, as
//! printed by `smc decode`. docs/conformance.md describes files of cases and reports.
#![forbid(unsafe_code)]

mod builtin;
mod case;
mod check;
mod dialogue;
mod edit;
mod fabric;
mod facts;
mod layout;
mod link;
mod llc;
mod message;
mod outcome;
mod peer;
mod rdma;
mod report;
mod rules;
mod stream;
mod suite;
mod value;
#[cfg(test)]
mod wireshark_tests;

pub use case::{Case, Cases, Level, Role};
pub use dialogue::{DataPath, Verdict};
pub use fabric::{Buffer, Fabric, PeerBuffer};
pub use facts::Facts;
pub use link::{Passed, Path, Sender};
pub use peer::Announce;
pub use rdma::{LinkEnd, QueuePair, RdmaDevice};
pub use report::{Comparison, NoReport, Report, RunHeader, compare};
pub use suite::{CaseResult, Names, Options, Results, RunStatus, SuiteError, Target, run};
