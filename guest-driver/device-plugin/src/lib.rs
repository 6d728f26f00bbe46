// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device plugin of Kubernetes (API v1beta1) for the device pools of vhost-device-ism.
//!
//! Each pool of a node is a resource. A container asking for the resource gets the CDI device of the pool, by
//! the specification of `smc cdi`. The plugin touches neither the pool nor the container.

#![forbid(unsafe_code)]

pub mod api;
mod api_server;
pub mod dra_api;
mod node;
mod plugin;
mod registration;
mod slices;
mod socket;

pub use api_server::{ApiError, ApiServer};
pub use node::{NoNode, Node};
pub use plugin::{DevicePlugin, NoPool, Pool};
pub use registration::serve;
pub use slices::publish;
