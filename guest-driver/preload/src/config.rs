//! The settings that `smc run` passes to the library in environment variables.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use guest_driver::rendezvous::{AllowedProtocol, Mode, Policy};
use smc_core::wire::ids::Eid;

/// Devices, separated by colons: sockets, or directories of sockets (`*.sock`).
const DEVICES: &str = "SMC_RUN_DEVICES";
/// EIDs, separated by commas.
const EIDS: &str = "SMC_RUN_EIDS";
/// Which connections to make over SMC: rules separated by commas, see [`PeerRule`].
const CONNECT: &str = "SMC_RUN_CONNECT";
/// Which ports accept SMC clients: rules separated by commas. The addresses in the rules are the
/// clients'.
const ACCEPT: &str = "SMC_RUN_ACCEPT";
/// Whether TCP option 254 finds peers that speak SMC: `off` (the default), `auto` or `required`.
const RENDEZVOUS: &str = "SMC_RUN_RENDEZVOUS";
/// The descriptors of the rendezvous that `smc run` attached, if it could.
const OPTION: &str = "SMC_RUN_OPTION";
/// Why `smc run` could not attach the rendezvous.
const NO_OPTION: &str = "SMC_RUN_NO_OPTION";
/// A policy file.
const POLICY: &str = "SMC_RUN_POLICY";
/// A directory in which each process writes a file about its connections.
const STATUS: &str = "SMC_RUN_STATUS";
/// A directory in which each process opens a socket that answers questions about its connections.
const STATISTICS: &str = "SMC_RUN_STATISTICS";
/// Bytes of receive buffer.
const BUFFER: &str = "SMC_RUN_BUFFER";
/// Microseconds for which a wait spins before it sleeps.
const SPIN: &str = "SMC_RUN_SPIN_US";
/// Milliseconds after which a server takes a client that sends nothing for one without SMC.
const DETECT: &str = "SMC_RUN_DETECT_MS";

/// The settings of this process.
#[derive(Debug, Default)]
pub(crate) struct RunConfig {
    /// Sockets of devices, or directories of them.
    pub(crate) devices: Vec<PathBuf>,
    /// User EIDs.
    pub(crate) eids: Vec<Eid>,
    /// Servers to which the program connects over SMC.
    pub(crate) connect: Vec<PeerRule>,
    /// Clients, and ports of this process, that may be on SMC.
    pub(crate) accept: Vec<PeerRule>,
    /// How TCP option 254 is used.
    pub(crate) rendezvous: Mode,
    /// The descriptors of the rendezvous that `smc run` attached.
    pub(crate) option: Option<String>,
    /// Why `smc run` could not attach the rendezvous.
    pub(crate) no_option: Option<String>,
    /// Which connections may be on SMC at all.
    pub(crate) policy: Policy,
    /// Directory of status files.
    pub(crate) status: Option<PathBuf>,
    /// Directory of statistics sockets.
    pub(crate) statistics: Option<PathBuf>,
    /// Bytes of receive buffer.
    pub(crate) buffer: usize,
    /// How long a wait spins before it sleeps.
    pub(crate) spin: Duration,
    /// How long a server waits for the first bytes of a client.
    pub(crate) detect: Duration,
}

static CONFIG: OnceLock<RunConfig> = OnceLock::new();

/// Stores the settings of this process; once.
pub(crate) fn set(config: RunConfig) {
    let _ = CONFIG.set(config);
}

/// The settings of this process; `None`: the library does nothing.
#[inline]
pub(crate) fn get() -> Option<&'static RunConfig> {
    CONFIG.get()
}

/// A peer filter: `ADDRESS[/BITS][:PORT[-PORT]]`, where the address may be `*`, and an IPv6 address
/// has brackets if a port follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerRule {
    address: Option<(IpAddr, u8)>,
    ports: (u16, u16),
}

impl PeerRule {
    /// Reads one rule.
    pub(crate) fn parse(text: &str) -> Option<PeerRule> {
        let (host, ports) = match text.rfind(':') {
            Some(at) if text.starts_with('[') || text.find(':') == Some(at) => {
                (text.get(..at)?, Some(text.get(at + 1..)?))
            }
            _ => (text, None),
        };
        let ports = match ports {
            None | Some("*") => (0, u16::MAX),
            Some(ports) => match ports.split_once('-') {
                Some((first, last)) => (first.parse().ok()?, last.parse().ok()?),
                None => ports.parse().ok().map(|port| (port, port))?,
            },
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = match host {
            "*" | "any" | "" => None,
            host => {
                let (ip, bits) = host.split_once('/').unwrap_or((host, ""));
                let ip: IpAddr = ip.trim_end_matches(']').parse().ok()?;
                let most = if ip.is_ipv4() { 32 } else { 128 };
                let bits = if bits.is_empty() { most } else { bits.parse().ok()? };
                (bits <= most).then_some(())?;
                Some((ip, bits))
            }
        };
        Some(PeerRule { address, ports })
    }

    /// Whether the rule is about all clients.
    pub(crate) fn is_everyone(&self) -> bool {
        self.address.is_none()
    }

    /// Whether the rule is about this port.
    pub(crate) fn has_port(&self, port: u16) -> bool {
        (self.ports.0..=self.ports.1).contains(&port)
    }

    /// Whether the rule is about this address and port.
    pub(crate) fn matches(&self, ip: IpAddr, port: u16) -> bool {
        self.has_port(port)
            && self.address.is_none_or(|(net, bits)| within(ip.to_canonical(), net, bits))
    }
}

fn within(ip: IpAddr, net: IpAddr, bits: u8) -> bool {
    match (ip, net) {
        (IpAddr::V4(ip), IpAddr::V4(net)) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            ip.to_bits() & mask == net.to_bits() & mask
        }
        (IpAddr::V6(ip), IpAddr::V6(net)) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            ip.to_bits() & mask == net.to_bits() & mask
        }
        _ => false,
    }
}

fn rules(name: &str) -> Vec<PeerRule> {
    let text = std::env::var(name).unwrap_or_default();
    text.split(',').filter(|rule| !rule.is_empty()).filter_map(PeerRule::parse).collect()
}

/// The rules for this program. If the file can no longer be read, no connection may be on SMC: `smc
/// run` has read the file before, so the user meant it to hold.
fn policy(path: &std::ffi::OsStr) -> Policy {
    let policy = Policy::load(std::path::Path::new(path)).unwrap_or_else(|_| Policy::none());
    match std::env::current_exe() {
        Ok(program) => policy.of_program(&program),
        Err(_) => policy,
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

impl RunConfig {
    /// Reads the environment. `None`: `smc run` did not start this program.
    pub(crate) fn from_environment() -> Option<RunConfig> {
        let devices = std::env::var_os(DEVICES)?;
        let eids = std::env::var(EIDS).unwrap_or_default();
        Some(RunConfig {
            devices: std::env::split_paths(&devices)
                .filter(|p| !p.as_os_str().is_empty())
                .collect(),
            eids: eids.split(',').filter_map(|eid| Eid::new(eid).ok()).collect(),
            connect: rules(CONNECT),
            accept: rules(ACCEPT),
            rendezvous: match std::env::var(RENDEZVOUS).as_deref() {
                Ok("auto") => Mode::Auto,
                Ok("required") => Mode::Required,
                _ => Mode::Off,
            },
            option: std::env::var(OPTION).ok(),
            no_option: std::env::var(NO_OPTION).ok(),
            policy: std::env::var_os(POLICY).map(|path| policy(&path)).unwrap_or_default(),
            status: std::env::var_os(STATUS).map(PathBuf::from),
            statistics: std::env::var_os(STATISTICS).map(PathBuf::from),
            buffer: usize::try_from(number(BUFFER, 256 << 10)).unwrap_or(256 << 10),
            spin: Duration::from_micros(number(SPIN, 50)),
            detect: Duration::from_millis(number(DETECT, 200)),
        })
    }

    /// Whether a connection to this server is to be SMC.
    pub(crate) fn connects(&self, server: SocketAddr) -> bool {
        self.connect.iter().any(|rule| rule.matches(server.ip(), server.port()))
    }

    /// Whether a connection from this client to this own port may be SMC.
    pub(crate) fn accepts(&self, client: IpAddr, port: u16) -> bool {
        self.accept.iter().any(|rule| rule.matches(client, port))
            && self.policy.accept(client, port) == AllowedProtocol::Smc
    }

    /// Whether the settings name the clients that may be on SMC.
    pub(crate) fn names_clients(&self) -> bool {
        !self.accept.iter().all(PeerRule::is_everyone)
    }

    /// Whether it depends on a client's address what an accepted connection may be.
    pub(crate) fn depends_on_client(&self) -> bool {
        self.policy.depends_on_client() || self.names_clients()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(rule: &str, addr: &str) -> bool {
        let addr: SocketAddr = addr.parse().unwrap();
        PeerRule::parse(rule).unwrap().matches(addr.ip(), addr.port())
    }

    #[test]
    fn rules_name_networks_and_ports() {
        assert!(matches("*", "10.1.2.3:80"));
        assert!(matches("*:80", "10.1.2.3:80"));
        assert!(!matches("*:81-90", "10.1.2.3:80"));
        assert!(matches("10.0.0.0/8:70-80", "10.1.2.3:80"));
        assert!(!matches("10.0.0.0/8", "11.1.2.3:80"));
        assert!(matches("10.1.2.3", "10.1.2.3:80"));
        assert!(matches("0.0.0.0/0", "10.1.2.3:80"));
        assert!(matches("[fd00::/8]:80", "[fd01::2]:80"));
        assert!(matches("fd00::/8", "[fd01::2]:80"));
        assert!(!matches("fd00::/8", "10.1.2.3:80"));
        assert!(matches("10.0.0.0/8", "[::ffff:10.1.2.3]:80"));
    }

    #[test]
    fn nonsense_is_no_rule() {
        for bad in ["10.0.0.0/33", "host:80", "*:x", "*:1-", "*:70000"] {
            assert_eq!(PeerRule::parse(bad), None, "{bad}");
        }
    }
}
