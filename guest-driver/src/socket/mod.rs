// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets: `SmcListener` and `SmcStream`, their configuration, and ways to wait for them.

mod config;
mod connect;
mod counters;
mod devices;
mod discover;
pub(crate) mod handshake;
pub(crate) mod incoming;
pub(crate) mod inherit;
mod listener;
mod no_device;
mod offers;
mod options;
pub(crate) mod outgoing;
mod outlive;
mod poller;
mod returns;
mod stack;
pub mod statistics;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod upkeep;
pub(crate) mod watch;

pub use crate::smcr::{NoRdma, Rnics, SmcrOptions};
#[doc(hidden)]
pub use config::TestOptions;
pub use config::{Config, DEFAULT_EID, DataPath, MAX_DEVICES};
pub use listener::SmcListener;
pub use options::KeepAlive;
pub use poller::{Interest, PollEvent, Poller};
pub use smc_info::{
    CarrierChanges, ConnectionInfo, ConnectionSnapshot, CurrentCarrier, Cursors, Fallback,
    LinkGroupInfo, LinkInfo, MovedCounts, RnicInfo, SmcdInfo, SmcrInfo, show_gid,
};
pub use stack::{Stack, Totals};
pub use stream::SmcStream;
pub use watch::{ChangeToken, Readiness};
