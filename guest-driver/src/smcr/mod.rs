// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC-R over the RNICs of a process: `smc_core::link_group` executed over verbs.
//!
//! From the ground up; each file uses only files before it:
//!
//! - [`inbox`]: the inputs of a link group, and the signal for a thread to handle them.
//! - [`slots`], [`words`], [`llc`], [`tokens`], [`buffers`]: room in a send queue, the peer's control
//!   words, LLC messages, tables and memory.
//! - [`device`], [`port`], [`pnet`]: the RNICs, their ports and addresses.
//! - [`link`]: one queue pair. [`link_table`]: the links over one RNIC.
//! - [`endpoint`]: one connection as links see it.
//! - [`shared`]: the state of the process for every link group, and the dispatch of completions.
//! - [`group`]: one link group with its links, buffers and connections.
//! - [`groups`]: the link groups of the process.
//! - [`conn`]: one connection as the sockets see it.
//! - [`host`]: the RNICs as one event source of a reactor.
//!
//! # How a completion travels
//!
//! Completions are data. No layer calls a layer above it.
//!
//! 1. [`host`] calls `Shared::poll_receives`. `Device::try_receives` locks the receives of one RNIC,
//!    and `PollGuard::poll` copies up to 32 completions out of the queue.
//! 2. Under that lock, `Shared` finds the link of each completion in its table. `Link::on_receive`
//!    returns a CDC message, or puts an LLC message into the inbox of its group. `Shared` finds the
//!    connection of a CDC message by its token and stores the words.
//! 3. `Shared` releases the lock and returns the tokens of the batch's connections, one call of the
//!    handler each. The handler runs without any lock of this module, so it may poll, send, or drop
//!    a connection.
//! 4. `LinkGroups::work` has each group handle its inbox. A group first takes all messages that have
//!    arrived over its RNICs, because two RNICs have two queues, and the last words of a connection
//!    must count before the message that ends its link group.
//! 5. `LinkGroups` closes connections whose last words have arrived. `host` then hands over the
//!    events that 2 to 5 caused.
//!
//! A link may vanish between two completions of a batch: its later completions find no entry in the
//! table and are dropped. A connection may vanish likewise.
//!
//! Send completions free slots. A connection without a slot returns its link (`Congestion`) to its
//! caller, not holding any lock: the caller polls the send completions, tries again, and then has the
//! link keep the connection's token. The link returns the tokens after later completions.
//!
//! # Locks
//!
//! In this order:
//!
//! 1. the work of a group (one thread at a time handles an inbox)
//! 2. the receives of an RNIC
//! 3. the state of a group
//! 4. the sending side of a connection
//! 5. the sends of an RNIC (only tried)
//! 6. LLC queue of a link
//! 7. leaves: words, slots of receives, waiting tokens, inboxes, tables
//!
//! The receives are never locked by a thread holding a group's state, a sending side, or the receives
//! of another RNIC. Sending a message takes the sending side only; receiving one takes the receives
//! once per batch, and the lock of the connection's words.

pub(crate) mod alternates;
pub(crate) mod buffers;
pub(crate) mod conn;
mod device;
mod effects;
pub(crate) mod endpoint;
mod failover;
pub(crate) mod group;
pub(crate) mod groups;
pub(crate) mod host;
mod inbox;
mod info;
mod interfaces;
pub(crate) mod link;
mod link_table;
mod llc;
mod options;
pub(crate) mod pnet;
pub(crate) mod port;
mod route;
pub(crate) mod shared;
mod slots;
mod subnets;
mod tokens;
mod words;

pub(crate) use buffers::BufferError;
pub(crate) use conn::SmcrConn;
pub(crate) use endpoint::SmcrSendError;
pub(crate) use host::RdmaHost;
pub use options::{NoRdma, Rnics, SmcrOptions};
