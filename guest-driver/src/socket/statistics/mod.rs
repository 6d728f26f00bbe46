// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reports of a process to others: devices, connections, link groups, RNICs and totals.
//!
//! A process listens on the socket named by [`Config::statistics`](super::Config::statistics). The
//! socket sends each client one JSON document, a [`Process`], and closes the connection. One thread
//! does this, and sleeps until a client connects. It serves a handful of clients at a time, none of
//! them for longer than a moment. Only the user of the process may connect.
//!
//! A killed process leaves its socket behind. [`find`] removes such sockets, and so does the next
//! process that listens in the directory.

mod names;
mod paths;
mod reason;
mod report;
mod report_reader;
mod server;
mod tcp_connections;
mod tcp_notes;
#[cfg(test)]
mod tests;

pub use crate::capture::{Direction, Record};
pub use paths::{capture, find, path_in};
pub use reason::Reason;
pub use report::{
    Connection, DeviceInfo, Handshakes, MAX_CONNECTIONS, Process, VERSION, tcp_state,
};
pub use report_reader::{ReportReader, ask};
pub use tcp_notes::{TcpReasonReader, TcpReasons};

pub(super) use server::{OwnReport, Server};
pub(super) use tcp_connections::{TcpConnections, TcpSocket};
