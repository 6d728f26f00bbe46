// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device pools of vhost-device-ism for the pods of a node of Kubernetes: a device plugin (API v1beta1), or
//! a driver of dynamic resource allocation (DRAPlugin v1).
//!
//! Each pool of a node is a resource. A container asking for the resource gets the CDI device of the pool, by
//! the specification of `smc cdi`. Neither plugin nor driver touches the pool or the container.

#![forbid(unsafe_code)]

pub mod api;
mod api_server;
mod dra;
pub mod dra_api;
mod node;
mod plugin;
mod registration;
mod slices;
mod socket;

pub use api_server::{ApiError, ApiServer};
pub use dra::{Files, drive};
pub use node::{NoNode, Node};
pub use plugin::{DevicePlugin, NoPool, Pool};
pub use registration::serve;
