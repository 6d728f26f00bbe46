//! What a process has, told to others: devices, connections, link groups, RNICs and totals.
//!
//! A process whose [`Config::statistics`](super::Config::statistics) names a socket listens there;
//! whoever connects gets one JSON document, a [`Process`], and the connection is closed. One thread
//! does this, which sleeps until somebody asks. It has a handful of readers at a time, and waits for
//! none of them longer than a moment. Only the user that the process runs as may connect.
//!
//! Sockets of processes that ended without a word stay behind; [`find`] and the next process that
//! listens in the directory remove them.

mod places;
mod plain;
mod report;
mod server;
#[cfg(test)]
mod tests;

pub use places::{ask, find, path_in};
pub use report::{
    Connection, Device, Group, Handshakes, Link, Process, Reason, Rnic, SmcD, SmcR, VERSION,
};

pub(super) use plain::{Described, Plain};
pub(super) use server::Server;
