// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod file;
mod places;

pub use file::{Rendezvous, Settings, SettingsError, file, parse_buffer, policy_file};
pub use places::{
    CLIENT, CONTAINER, CONTAINER_STATISTICS, Fabric, MANAGEMENT, NoFabric, NotPrivate, POOL, Place,
    PlaceReport, SERVER, device_sockets, find_fabric, find_management, make_own_directory,
    make_statistics_directory, own_directory, probe, statistics_directory_of_now, traffic_file,
};
