// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The `smc` command, as run by its users.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod capture;
mod capture_who;
mod check;
mod conform;
mod decode;
mod demo;
mod every_command;
mod files;
mod first_hour;
mod help;
mod hostile;
mod load_check;
mod pages;
mod perf;
mod perf_remote;
mod pipe;
mod plan;
mod rollout;
mod run;
mod settings;
mod smc_tools;
mod stat;
mod stat_tcp;
mod support;
mod terminal;
