// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod file;

pub use file::{Rendezvous, Settings, SettingsError, file, parse_buffer};
