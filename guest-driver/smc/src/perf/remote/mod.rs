// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc perf --serve` and `smc perf --to`: measurements between two machines.
//!
//! The client requests one run at a time over a control connection (TCP, a JSON object per line). A
//! new process at either end then does the run, as between processes of one machine:
//!
//! ```text
//! server                                   client
//! hello {version, vsock, ..}      ->
//!                                 <-       {program, transport, size, seconds, ..}
//! listening {port}                ->       (starts its process, which connects to that port)
//! done {result, what SMC did, ..} ->       or error "why"
//! ```
//!
//! Neither end trusts the other: the length of lines is bounded, and each end checks received
//! values before using or printing the values.

mod client;
mod control;
mod report;
mod request;
mod server;

pub(super) use client::{Target, measure};
pub(super) use server::serve;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::job::EndReport;
use super::peer;
use crate::error::CliError;

/// Version of the protocol; both ends must have the same.
const VERSION: u32 = 4;
/// How long a process may take to start, open its device and listen or connect; guests without
/// hardware support are slow.
const TIMEOUT: Duration = Duration::from_secs(90);

/// How long a run of this length may take, including the warm-up and a possible queue of bytes in
/// flight.
fn limit(seconds: f64) -> Duration {
    TIMEOUT + Duration::from_secs_f64(seconds * 2.0)
}

/// The device and EIDs of this end.
#[derive(Clone, Debug)]
pub(super) struct Own {
    /// Socket or address of the device.
    pub(super) device: PathBuf,
    /// User EIDs; none: the default.
    pub(super) eids: Vec<String>,
}

impl Own {
    /// From options and the environment (`SMC_DEVICE`, `SMC_EID`); else the device of the default
    /// fabric called `name`.
    ///
    /// # Errors
    /// [`CliError::Eid`], [`CliError::NotPrivate`].
    pub(super) fn of(
        device: Option<&PathBuf>,
        eids: &[String],
        name: &str,
    ) -> Result<Own, CliError> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let device = device.cloned().or_else(|| set("SMC_DEVICE").map(PathBuf::from));
        let mut eids = eids.to_vec();
        if let Some(names) = set("SMC_EID").filter(|_| eids.is_empty()) {
            eids = names.to_string_lossy().split(',').map(str::to_owned).collect();
        }
        for name in &eids {
            peer::eid(name)?;
        }
        let device = device.map_or_else(|| crate::stack::default_device(name), Ok)?;
        Ok(Own { device, eids })
    }
}

/// A line of the server.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ServerMessage {
    /// The first line.
    Hello(Hello),
    /// The run's server process listens on this port, of TCP or of virtio sockets.
    Listening {
        /// The port.
        port: u32,
    },
    /// The run is over.
    Done(Box<EndReport>),
    /// There is no result.
    Error(String),
}

/// Description of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    /// [`VERSION`].
    version: u32,
    /// The server can listen on virtio sockets.
    vsock: bool,
    /// Processors of the machine.
    processors: usize,
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(0, |n| n.get())
}
