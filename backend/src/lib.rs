// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-ism`: a vhost-user daemon that emulates the virtio-ism device.
//!
//! From the ground up:
//!
//! - [`ism_device`]: the ISM device without virtio, a crate of its own. Bytes of commands in, bytes of
//!   replies and events out; checks every claim of a guest.
//! - [`vhost`]: sockets, rings, mappings, notifications; checks every action of a front end.
//! - [`config`]: the configuration of a daemon.
//! - `service`: the operator's view: [`args`], [`management`], [`sandbox`]; `reload` is SIGHUP, and `ctl`
//!   talks to a running daemon.
//! - [`Daemon`]: the whole as a value. A program can run a daemon in its own process:
//!
//! ```no_run
//! use vhost_device_ism::{Config, Daemon, config::GuestSpec};
//!
//! let daemon = Daemon::start(Config::default())?;
//! daemon.add_guest(GuestSpec::new("/run/ism/vm1.sock"))?;
//! daemon.add_guest(GuestSpec::new("/run/ism/vm2.sock"))?;
//! // Front ends come and go.
//! daemon.stop();
//! # Ok::<(), vhost_device_ism::DaemonError>(())
//! ```
#![deny(unsafe_code)]
// Printing panics on an unwritable stream.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod config;
mod service;
pub mod vhost;

pub use config::Config;
pub use service::{Daemon, DaemonError, LeaveInfo, args, management, run_main, sandbox};
pub use vhost::device_slot::{GuestStatus, MemberInfo, PoolInfo};
