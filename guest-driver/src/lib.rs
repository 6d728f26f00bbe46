// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
//! ## Inside
//!
//! From the ground up: `reactor` puts threads to sleep and wakes them, `smcd` and `smcr` are the two
//! kinds of SMC, `handshake` is CLC over TCP, `conn` is one SMC connection, `byte_queue` has its
//! queues, and [`socket`] is the public API. [`traffic`]
//! keeps estimates of a server's or listener's connections, [`program_file`] checks whether LD_PRELOAD
//! reaches a program, and `capture` copies bytes for `smc capture`.
#![forbid(unsafe_code)]

pub mod go_program;
#[doc(hidden)]
pub mod interpose;
#[doc(hidden)]
pub mod kernel_calls;
pub mod program_file;
pub mod traffic;

mod byte_queue;
mod capture;
mod conn;
mod handshake;
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
