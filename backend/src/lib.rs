// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-ism`: a vhost-user daemon that emulates the virtio-ism device.
//!
//! From the ground up:
//!
//! - [`ism_device`]: the ISM device without virtio, a crate of its own. Bytes of commands in, bytes
//!   of replies and events out; everything a guest claims is judged there.
//! - [`vhost`]: sockets, rings, mappings, notifications. What a front end does is judged there.
//! - [`config`]: what a daemon serves.
//! - `service`: what an operator sees: [`args`], [`management`], [`sandbox`]; `reload` is SIGHUP, and
//!   `ctl` talks to a running daemon.
//! - [`Daemon`]: all of it as a value. A program can run one in its own process:
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
// These panic where the stream cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod config;
mod service;
pub mod vhost;

pub use config::Config;
pub use service::{Daemon, DaemonError, LeaveInfo, args, management, run_main, sandbox};
pub use vhost::device_slot::{GuestStatus, MemberInfo, PoolInfo};
