//! SMC-R over the RNICs of a process: executes `smc_core::link_group` over verbs.
//!
//! From the ground up: [`device`] and [`port`] are the RNICs, [`link`] is one queue pair,
//! [`buffers`] are RMBs and send elements, [`endpoint`] is one connection as links see it, [`group`]
//! a link group with all of them, [`shared`] what groups share. [`host`] makes one source of
//! wake-ups of it, [`client`] and [`server`] are the handshakes, [`element`] is what a connection
//! gets of all this.
//!
//! # Locks
//!
//! In this order: the state of a group, a connection's sending side, the queues of a link. None of
//! them is held while the layer above is called. The sending of a message takes the connection's
//! lock only; its receipt the two of the connection's words. Completions are taken by one thread
//! at a time per RNIC, and who finds another one at it goes on.

pub(crate) mod alternates;
pub(crate) mod buffers;
mod carry_out;
mod device;
pub(crate) mod element;
pub(crate) mod endpoint;
pub(crate) mod group;
pub(crate) mod groups;
pub(crate) mod host;
mod inbox;
mod info;
mod interfaces;
pub(crate) mod link;
mod link_table;
mod llc;
mod moving;
mod options;
mod outbound;
pub(crate) mod pnet;
pub(crate) mod port;
mod route;
pub(crate) mod shared;
mod slots;
pub(crate) mod spans;
mod tokens;
mod words;

pub(crate) use element::SmcrConn;
pub(crate) use endpoint::SmcrSendError;
pub(crate) use host::RdmaHost;
pub use options::{NoRdma, Rnics, SmcrOptions};
