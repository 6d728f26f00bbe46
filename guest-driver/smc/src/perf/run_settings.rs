// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings of a run: network namespaces, for the transports with a network of their own,
//! or a cgroup, for programs of the kernel.
//!
//! A process in each namespace keeps it. The kernel closes this process's standard input when the
//! starting process ends for any reason; then the namespace ends too.

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use smc_rendezvous::Sockmap;

use super::job::TransportKind;
use crate::error::CliError;
use crate::transport::LOOPBACK;

/// The server's address of a pair of veth devices. Link-local, so no route of the host is hidden.
const SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 1);
/// The client's address.
const CLIENT: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 2);

/// `net.ipv4.tcp_fastopen`: clients (1), servers (2), and every listener without a request (0x400).
const FAST_OPEN: u32 = 0x403;

/// The settings of one run.
#[derive(Debug, Default)]
pub(super) struct RunSettings {
    // Dropped first: the devices of both end with it.
    client: Option<Keeper>,
    server: Option<Keeper>,
    sockmap: Option<Sockmap>,
}

impl RunSettings {
    /// Makes the settings of a transport; mostly nothing.
    ///
    /// # Errors
    /// The rights are missing, or a program (unshare, ip).
    pub(super) fn of(transport: TransportKind) -> Result<RunSettings, CliError> {
        match transport {
            TransportKind::Veth => {
                let server = Keeper::start("ip link set lo up")?;
                let client = Keeper::start(&format!(
                    "ip link add smc-client type veth peer name smc-server netns {pid}
                     ip address add {CLIENT}/30 dev smc-client
                     ip link set smc-client up
                     nsenter --net --target {pid} ip address add {SERVER}/30 dev smc-server
                     nsenter --net --target {pid} ip link set smc-server up",
                    pid = server.0.id(),
                ))?;
                Ok(RunSettings { client: Some(client), server: Some(server), sockmap: None })
            }
            // The setting of the host stays as it is.
            TransportKind::FastOpen => {
                let server = Keeper::start(&format!(
                    "ip link set lo up\necho {FAST_OPEN} >/proc/sys/net/ipv4/tcp_fastopen"
                ))?;
                Ok(RunSettings { server: Some(server), ..RunSettings::default() })
            }
            TransportKind::Sockmap => {
                let name = format!("smc-perf-{}", std::process::id());
                let made = Sockmap::make(&name)
                    .map_err(|why| CliError::Usage(format!("a map of sockets: {why}")))?;
                Ok(RunSettings { sockmap: Some(made), ..RunSettings::default() })
            }
            _ => Ok(RunSettings::default()),
        }
    }

    /// The address for servers of TCP.
    pub(super) fn bind(&self) -> SocketAddr {
        match self.client {
            Some(_) => SocketAddr::new(IpAddr::V4(SERVER), 0),
            None => LOOPBACK,
        }
    }

    /// The cgroup of both ends, if not the usual one.
    pub(super) fn cgroup(&self) -> Option<PathBuf> {
        self.sockmap.as_ref().map(|sockmap| sockmap.cgroup().to_path_buf())
    }

    /// The server's namespace, if not the usual one.
    pub(super) fn of_server(&self) -> Option<PathBuf> {
        self.server.as_ref().map(Keeper::path)
    }

    /// The client's namespace, if not the usual one.
    pub(super) fn of_client(&self) -> Option<PathBuf> {
        self.client.as_ref().or(self.server.as_ref()).map(Keeper::path)
    }
}

/// The process in a namespace. Dropping the value ends both.
#[derive(Debug)]
struct Keeper(Child);

impl Keeper {
    /// Makes a namespace, and runs these commands in it.
    fn start(commands: &str) -> Result<Keeper, CliError> {
        let failed = |why: String| CliError::Usage(format!("a network namespace {why}"));
        if !rustix::process::geteuid().is_root() {
            return Err(failed("needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)".into()));
        }
        let mut child = Command::new("unshare")
            .args(["--net", "--", "sh", "-ec", &format!("{commands}\necho made\nexec cat")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(format!("needs unshare(1): {error}")))?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let keeper = Keeper(child);
        let mut line = String::new();
        if let Some(out) = out {
            let _ = BufReader::new(out).read_line(&mut line);
        }
        if line != "made\n" {
            let mut why = String::new();
            err.map(|mut err| err.read_to_string(&mut why));
            return Err(failed(format!("cannot be made: {}", why.trim())));
        }
        Ok(keeper)
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
