// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC sockets for user space.
//!
//! From the ground up: `reactor` puts threads to sleep and wakes them, `smcd` and `smcr` are the
//! two kinds of SMC, `handshake` is CLC over TCP, `conn` is one SMC connection, `byte_queue` what
//! it has not sent yet, `info` describes what there is, and [`socket`] is the public API.
//! [`traffic`] is what connections of a server or listener are like, [`program_file`] whether
//! LD_PRELOAD reaches a program.
#![forbid(unsafe_code)]

pub mod program_file;
pub mod traffic;

mod byte_queue;
mod conn;
mod handshake;
mod info;
mod reactor;
mod smcd;
mod smcr;
pub mod socket;

pub use byte_queue::{BytePiece, ByteQueue};
pub use socket::{
    AfterFork, ArmedLines, ChangeToken, Config, ConnectionInfo, ConnectionSnapshot, DataPath,
    Fallback, FirstBytes, Incoming, Interest, KeepAlive, Outgoing, PendingDecline, PollEvent,
    Poller, Readiness, Rnics, SignalMask, SmcListener, SmcStream, SmcdInfo, SmcrInfo, SmcrOptions,
    Stack, StackUpkeep, Totals, Watch, WatchedStream, Woken, statistics,
};
pub use virtio_ism::transport::{DeviceAddress, PciAddress};

// Its examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
