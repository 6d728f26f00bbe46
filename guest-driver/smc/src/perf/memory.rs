// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How much memory, descriptors and threads idle devices and connections take.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_driver::{Config, SmcListener, SmcStream, Stack};
use serde::{Deserialize, Serialize};

use super::process_status::{memory_of, status_number};
use super::run::{CLIENT, SERVER};
use crate::error::CliError;
use crate::helper::{self, Helper};
use crate::stack;
use crate::temporary_fabric::TemporaryFabric;
use crate::transport::{self, Smc, Transport};

/// Idle devices.
const DEVICES: usize = 100;
/// Idle connections by default.
const CONNECTIONS: usize = 500;
/// How long a process may take to set things up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The result of the measure.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    daemon_idle: u64,
    daemon_devices: u64,
    per_connection: ConnectionCost,
    /// The same of connections that are bound to their device, if asked for.
    per_bound_connection: Option<ConnectionCost>,
}

/// The cost of one of many idle connections.
#[derive(Clone, Debug)]
struct ConnectionCost {
    /// Private bytes of daemon, server and client.
    private: [f64; 3],
    /// Bytes of slabs of both devices: memory that both ends map.
    slabs: f64,
    /// Descriptors of server and client.
    descriptors: [f64; 2],
    /// Threads of server and client, for all connections.
    threads: [u64; 2],
}

impl Memory {
    /// Name, unit and value of each result.
    pub(super) fn lines(&self) -> Vec<(&'static str, &'static str, f64)> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let per_device = (self.daemon_devices.saturating_sub(self.daemon_idle)) as f64;
        let ConnectionCost { private, slabs, descriptors, threads } = &self.per_connection;
        let [daemon, server, client] = *private;
        let bound = self.per_bound_connection.iter().flat_map(|bound| {
            let [daemon, server, client] = bound.private;
            [
                ("memory_bound_connection_daemon", "bytes", daemon),
                ("memory_bound_connection_server", "bytes", server),
                ("memory_bound_connection_client", "bytes", client),
            ]
        });
        let mut lines = vec![
            ("memory_daemon_100_devices", "MiB", mib(self.daemon_devices)),
            ("memory_daemon_per_device", "KiB", per_device / DEVICES as f64 / 1024.0),
            ("memory_connection_daemon", "bytes", daemon),
            ("memory_connection_server", "bytes", server),
            ("memory_connection_client", "bytes", client),
            ("memory_connection_slabs", "bytes", *slabs),
            ("descriptors_connection_server", "descriptors", descriptors[0]),
            ("descriptors_connection_client", "descriptors", descriptors[1]),
            ("threads_server", "threads", threads[0] as f64),
            ("threads_client", "threads", threads[1] as f64),
        ];
        lines.extend(bound);
        lines
    }
}

/// The task of an idle process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Task {
    /// Opens devices and leaves them idle.
    Devices(Vec<PathBuf>),
    /// Opens and closes a device.
    Probe(PathBuf),
    /// Accepts connections and leaves them idle.
    Accept { device: PathBuf, connections: usize, bound: bool },
    /// Makes connections and leaves them idle.
    Connect { device: PathBuf, connections: usize, address: String, bound: bool },
}

/// A message of an idle process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum IdleMessage {
    Listening(String),
    /// A device cannot be opened.
    Closed(String),
    /// Everything is set up; private memory before the connections, bytes.
    Ready {
        before: u64,
    },
}

/// Measures.
///
/// # Errors
/// A process failed.
pub(super) fn measure(connections: Option<usize>, bound: bool) -> Result<Memory, CliError> {
    let (daemon_idle, daemon_devices) = devices()?;
    let connections = connections.unwrap_or(CONNECTIONS);
    Ok(Memory {
        daemon_idle,
        daemon_devices,
        per_connection: per_connection(connections, false)?,
        per_bound_connection: bound.then(|| per_connection(connections, true)).transpose()?,
    })
}

/// Finds out whether a device can be opened. A separate process opens the device, so the device is
/// free again after the end of the process.
///
/// # Errors
/// [`CliError::Device`], or the process failed.
pub(super) fn probe(device: &Path, timeout: Duration) -> Result<(), CliError> {
    let probe = Helper::start("device", "__idle", &Task::Probe(device.into()))?;
    match probe.receive(timeout)? {
        IdleMessage::Ready { .. } => Ok(()),
        IdleMessage::Closed(why) => {
            Err(CliError::Device { device: device.into(), source: std::io::Error::other(why) })
        }
        IdleMessage::Listening(_) => Err(unexpected_report()),
    }
}

fn devices() -> Result<(u64, u64), CliError> {
    let names: Vec<String> = (0..DEVICES).map(|i| format!("d{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let fabric = TemporaryFabric::start(&names)?;
    let before = memory_of(fabric.daemon_pid(), "VmRSS:")?;
    let sockets = names.iter().map(|name| fabric.device(name)).collect();
    let holder = Helper::start("idle devices", "__idle", &Task::Devices(sockets))?;
    let IdleMessage::Ready { .. } = holder.receive(TIMEOUT)? else {
        return Err(unexpected_report());
    };
    // The daemon lists a device a moment after the start of its driver.
    let start = Instant::now();
    loop {
        let connected = fabric.management()?.list().map_err(refused)?;
        let connected = connected.iter().filter(|guest| guest.gid.is_some()).count();
        if connected == DEVICES {
            break;
        } else if start.elapsed() > TIMEOUT {
            return Err(CliError::Usage(format!("only {connected} of {DEVICES} devices are up")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok((before, memory_of(fabric.daemon_pid(), "VmRSS:")?))
}

fn per_connection(connections: usize, bound: bool) -> Result<ConnectionCost, CliError> {
    let fabric = TemporaryFabric::start(&[SERVER, CLIENT])?;
    let device = fabric.device(SERVER);
    let server = Helper::start("server", "__idle", &Task::Accept { device, connections, bound })?;
    let IdleMessage::Listening(address) = server.receive(TIMEOUT)? else {
        return Err(unexpected_report());
    };
    let device = fabric.device(CLIENT);
    let daemon_before = memory_of(fabric.daemon_pid(), "RssAnon:")?;
    let task = Task::Connect { device, connections, address, bound };
    let client = Helper::start("client", "__idle", &task)?;
    let IdleMessage::Ready { before: client_before } = client.receive(TIMEOUT)? else {
        return Err(unexpected_report());
    };
    let IdleMessage::Ready { before: server_before } = server.receive(TIMEOUT)? else {
        return Err(unexpected_report());
    };
    let grown = |pid: u32, before: u64| -> Result<f64, CliError> {
        let now = memory_of(pid, "RssAnon:")?;
        Ok(now.saturating_sub(before) as f64 / connections as f64)
    };
    let each = |all: u64| all as f64 / connections as f64;
    let guests = fabric.management()?.list().map_err(refused)?;
    let pids = [server.pid(), client.pid()];
    let [of_server, of_client] = pids.map(|pid| status_number(pid, "Threads:"));
    Ok(ConnectionCost {
        private: [
            grown(fabric.daemon_pid(), daemon_before)?,
            grown(server.pid(), server_before)?,
            grown(client.pid(), client_before)?,
        ],
        slabs: each(guests.iter().map(|guest| guest.slab_bytes).sum()),
        descriptors: pids.map(|pid| each(descriptors_of(pid))),
        threads: [of_server?, of_client?],
    })
}

/// Open descriptors of a process; 0 after its end.
fn descriptors_of(pid: u32) -> u64 {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |open| open.count() as u64)
}

pub(super) fn unexpected_report() -> CliError {
    CliError::Helper { name: "idle".into(), problem: "did not report what was expected".into() }
}

fn refused(source: vhost_device_ism::management::ClientError) -> CliError {
    CliError::Usage(format!("the daemon: {source}"))
}

/// The idle process.
pub(crate) fn idle(task: &str) -> ExitCode {
    helper::run_unwatched(task, |task: Task| {
        helper::raise_descriptor_limit();
        let send = |message| helper::send(&message).map_err(CliError::io("report"));
        match task {
            Task::Devices(sockets) => {
                let stacks: Result<Vec<_>, _> = sockets.iter().map(open).collect();
                let _held = stacks?;
                send(IdleMessage::Ready { before: 0 })?;
                helper::wait_for_parent_end();
            }
            Task::Probe(device) => send(match open(&device) {
                Ok(_) => IdleMessage::Ready { before: 0 },
                Err(CliError::Device { source, .. }) => IdleMessage::Closed(source.to_string()),
                Err(other) => IdleMessage::Closed(other.to_string()),
            })?,
            Task::Accept { device, connections, bound } => {
                let smc = Smc::new(open_bound(&device, bound)?, transport::Path::Window);
                let (listener, address) = smc.listen().map_err(CliError::io("listen"))?;
                send(IdleMessage::Listening(address))?;
                let held = accept(&smc, &listener, connections).map_err(CliError::io("accept"))?;
                send(IdleMessage::Ready { before: held.before })?;
                helper::wait_for_parent_end();
            }
            Task::Connect { device, connections, address, bound } => {
                let smc = Smc::new(open_bound(&device, bound)?, transport::Path::Window);
                let held = connect(&smc, &address, connections).map_err(CliError::io("connect"))?;
                send(IdleMessage::Ready { before: held.before })?;
                helper::wait_for_parent_end();
            }
        }
        Ok(())
    })
}

/// Open connections.
struct Held {
    before: u64,
    _streams: Vec<SmcStream>,
}

/// Accepts connections, and moves one byte to and fro on each, so set-up is complete on both sides.
/// The first connection is not counted, since it makes the link.
fn accept(smc: &Smc, listener: &SmcListener, n: usize) -> std::io::Result<Held> {
    let mut streams = Vec::with_capacity(n + 1);
    let mut before = 0;
    for _ in 0..=n {
        let mut stream = smc.accept(listener)?;
        let mut byte = [0u8; 1];
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
        streams.push(stream);
        if streams.len() == 1 {
            before = own_memory()?;
        }
    }
    Ok(Held { before, _streams: streams })
}

fn connect(smc: &Smc, address: &str, n: usize) -> std::io::Result<Held> {
    let mut streams = Vec::with_capacity(n + 1);
    let mut before = 0;
    for _ in 0..=n {
        let mut stream = smc.connect(address)?;
        stream.write_all(b"x")?;
        stream.read_exact(&mut [0u8; 1])?;
        streams.push(stream);
        if streams.len() == 1 {
            before = own_memory()?;
        }
    }
    Ok(Held { before, _streams: streams })
}

fn own_memory() -> std::io::Result<u64> {
    memory_of(std::process::id(), "RssAnon:").map_err(std::io::Error::other)
}

fn open(device: &PathBuf) -> Result<Arc<Stack>, CliError> {
    open_bound(device, false)
}

/// Opens a device; connections are bound to the device, or outlive it.
fn open_bound(device: &PathBuf, bound: bool) -> Result<Arc<Stack>, CliError> {
    let mut config = Config::new(device);
    config.outlive_device = !bound;
    stack::open(config, device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory() {
        assert!(own_memory().unwrap() > 100_000);
    }
}
