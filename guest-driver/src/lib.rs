// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
//! ## Inside
//!
//! From the ground up: `reactor` puts threads to sleep and wakes them, `smcd` and `smcr` are the
//! two kinds of SMC, `handshake` is CLC over TCP, `conn` is one SMC connection, `byte_queue` what
//! it has not sent yet, `info` describes what there is, and [`socket`] is the public API.
//! [`traffic`] is what connections of a server or listener are like, [`program_file`] whether
//! LD_PRELOAD reaches a program.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod interpose;
pub mod program_file;
pub mod traffic;

mod byte_queue;
mod capture;
mod conn;
mod handshake;
mod info;
mod reactor;
mod smcd;
mod smcr;
pub mod socket;

pub use socket::{
    ChangeToken, Config, ConnectionInfo, ConnectionSnapshot, DataPath, Fallback, Interest,
    KeepAlive, MovedCounts, PollEvent, Poller, Readiness, Rnics, SmcListener, SmcStream, SmcdInfo,
    SmcrInfo, SmcrOptions, Stack, Totals, statistics,
};
pub use virtio_ism::transport::{DeviceAddress, PciAddress};
