// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets: `SmcListener` and `SmcStream`, their configuration, and how programs wait for them.

mod config;
mod connect;
mod incoming;
mod inherit;
mod listener;
mod offers;
mod options;
mod outgoing;
mod poller;
mod stack;
pub mod statistics;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod watch;

pub use crate::handshake::{ClcPrefix, FirstBytes};
pub use crate::info::{
    ConnectionInfo, ConnectionSnapshot, Cursors, Fallback, LinkGroupInfo, LinkInfo, RnicInfo,
    SmcdInfo, SmcrInfo, show_gid,
};
pub use crate::smcr::{NoRdma, Rnics, SmcrOptions};
#[doc(hidden)]
pub use config::TestOptions;
pub use config::{Config, DEFAULT_EID, DataPath, MAX_DEVICES};
pub use incoming::Incoming;
pub use inherit::{AfterFork, PendingDecline, StackUpkeep};
pub use listener::SmcListener;
pub use options::KeepAlive;
pub use outgoing::Outgoing;
pub use poller::{Interest, PollEvent, Poller};
pub use stack::{Stack, Totals};
pub use stream::SmcStream;
pub use watch::{ArmedLines, ChangeToken, Readiness, SignalMask, Watch, WatchedStream, Woken};
