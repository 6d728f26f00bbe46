// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A daemon's configuration: fabrics, front ends, limits. Built from options, from a TOML file, or in code by
//! a program running the daemon in its own process.

mod bounds;
mod error;
mod file;
pub(crate) mod id_map;
pub(crate) mod log_output;
mod spec;
mod whole;

pub use bounds::{
    DEFAULT_CHID, DEFAULT_WINDOW, MAX_MOVE_QUEUES, MAX_POOL, MAX_WINDOW, MIN_WINDOW, parse_chid,
    parse_gid, parse_mode,
};
pub(crate) use bounds::{LeaveTime, parse_seconds, parse_size};
pub use error::{ConfigError, PassedDescriptor, PassedDescriptorError, SETTINGS};
pub(crate) use file::{FileGuest, read_text};
pub use spec::{Caps, FabricSpec, GuestSpec, Quotas, Socket};
pub use whole::Config;
