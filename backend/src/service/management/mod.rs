// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The management socket: add, remove and list guests while the daemon runs, and read counters.
//!
//! One JSON object per line in either direction, on a Unix stream socket:
//!
//! ```text
//! > {"op":"list"}
//! < {"ok":true,"guests":[{"name":"vm1","socket":"/run/ism/vm1.sock","chid":"ff00",...}]}
//! > {"op":"add","socket":"/run/ism/vm2.sock","name":"vm2","chid":"ff00"}
//! < {"ok":true}
//! > {"op":"remove","name":"vm2"}
//! < {"ok":true}
//! > {"op":"metrics"}
//! < {"ok":true,"text":"# HELP ..."}
//! > {"op":"paint"}
//! < {"ok":false,"error":"unknown variant `paint`, expected one of ..."}
//! ```
//!
//! `{"op":"reload"}` has the effect of SIGHUP. The same socket answers `GET /metrics` over HTTP, for
//! Prometheus. A metrics socket answers this, `list` and `metrics`, and refuses the rest.

mod client;
mod server;
mod wire;

pub use crate::service::reload::ReloadInfo;
pub use client::{Client, ClientError};
pub use ism_device::{Counter, Counts};
pub(crate) use server::{Access, Server};
pub use wire::{AddGuest, Guest};
