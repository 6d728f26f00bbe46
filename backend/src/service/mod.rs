// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon as a service of its host: options, helper processes, sandbox, management socket and its
//! client, metrics, reload, and the end.

mod activation;
pub mod args;
mod broker;
mod config_reader;
mod ctl;
mod daemon;
mod error;
#[allow(unsafe_code, reason = "no crate makes a process without `unsafe`")]
mod fork;
mod guests;
mod helper;
mod leave;
mod logging;
pub mod management;
mod metrics;
mod output;
mod packets;
mod privileges;
mod reload;
mod run;
pub mod sandbox;
mod service_manager;
mod signals;
mod table;

pub use daemon::Daemon;
pub use error::DaemonError;
pub use leave::LeaveInfo;
pub use run::run_main;
