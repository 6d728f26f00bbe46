// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Policy: the connections with the right to use SMC.
//!
//! A policy file is TOML. The first rule from the top that fits a connection decides.
//!
//! ```toml
//! default = "smc"                     # without a fitting rule: "smc" (if absent), "always-smc", "tcp"
//!
//! [[rule]]
//! use = "tcp"                         # no SMC ...
//! peers = ["192.0.2.0/24", "2001:db8::7"]     # ... with these
//!
//! [[rule]]
//! use = "smc"
//! when = "connect"                    # as client; "listen": as server; absent: both
//! ports = [6379, "8000-8999"]         # the server's port, on either side
//! programs = ["redis-cli", "/usr/bin/curl"]   # name or path of the executable
//! users = ["www-data", 1000]          # the user of the process, by name in /etc/passwd or number
//! cgroups = ["redis.service", "/system.slice"]    # a part of the path of its cgroup, or the first parts
//!
//! [[rule]]
//! use = "smc"
//! when = "connect"
//! share = "5%"                        # of the new connections that fit; the others are TCP
//! ```
//!
//! With "smc", a program under `smc run` leaves connections to TCP where TCP is faster. With "always-smc" no
//! connection is left to TCP.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use ism_sys::read_text;

use unknown_keys::take_unknown;

pub use share::Share;
pub use unknown_keys::UnknownKey;

/// Rules of a policy at most.
const MAX_RULES: usize = 256;
/// Networks of all its rules at most.
const MAX_NETWORKS: usize = 1024;
/// Bytes of a policy file at most.
const MAX_FILE: u64 = 1 << 20;
/// Bytes of /etc/passwd at most.
const MAX_PASSWD: u64 = 16 << 20;

/// The protocol allowed for a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllowedProtocol {
    /// SMC, if the peer speaks SMC, too.
    #[default]
    Smc,
    /// The same, even where TCP has been faster.
    AlwaysSmc,
    /// TCP only: option 254 is not sent (OPT-15). For connections that need IPsec, for example
    /// (SEC-4).
    Tcp,
}

/// The connections with the right to send and answer the option; by default every connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    default: AllowedProtocol,
    rules: Vec<Rule>,
    unknown: Vec<UnknownKey>,
}

/// Why a policy cannot be used.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    File {
        /// The policy file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// No TOML, or none of this form. The text says where.
    #[error("policy: {0}")]
    Syntax(#[from] toml::de::Error),
    /// Not an address, nor an address, `/` and the length of a prefix without bits beyond the length.
    #[error("policy, rule {rule}: `{text}` is no address and no network")]
    Network {
        /// The rule, from 1.
        rule: usize,
        /// The text in the file.
        text: String,
    },
    /// Not a port, nor two with `-` between them.
    #[error("policy, rule {rule}: `{text}` is no port and no range of ports")]
    Port {
        /// The rule, from 1.
        rule: usize,
        /// The text in the file.
        text: String,
    },
    /// A list is empty: an empty rule can never fit, or was meant to fit always.
    #[error("policy, rule {rule}: `{key}` is empty; leave it out to mean all")]
    Empty {
        /// The rule, from 1.
        rule: usize,
        /// Name of the list.
        key: &'static str,
    },
    /// Neither a number nor a name in /etc/passwd.
    #[error("policy, rule {rule}: there is no user {user:?} in /etc/passwd")]
    User {
        /// The rule, from 1.
        rule: usize,
        /// The user in the file.
        user: String,
    },
    /// Not a percentage from 0% to 100%.
    #[error("policy, rule {rule}: `{text}` is no share; \"0.5%\" is one")]
    Share {
        /// The rule, from 1.
        rule: usize,
        /// The text in the file.
        text: String,
    },
    /// A share of connections beyond the choice of a client.
    #[error(
        "policy, rule {rule}: a share needs when = \"connect\", and use = \"smc\" or \"always-smc\""
    )]
    ShareOfServer {
        /// The rule, from 1.
        rule: usize,
    },
    /// More rules or networks than are allowed.
    #[error("policy: {what}: {found}, and at most {most} are allowed")]
    TooMany {
        /// Rules or networks.
        what: &'static str,
        /// Number found.
        found: usize,
        /// How many there may be.
        most: usize,
    },
}

impl PolicyError {
    /// Whether there is no policy file at all.
    pub fn is_missing(&self) -> bool {
        matches!(self, PolicyError::File { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    /// The error as a text, with the name of the file.
    pub fn in_file(&self, file: &Path) -> String {
        match self {
            PolicyError::File { .. } => self.to_string(),
            _ => format!("{}: {self}", file.display()),
        }
    }
}

/// The side of a connection for a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Side {
    Connect,
    Listen,
}

/// A rule; an empty list fits everything.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    allowed: AllowedProtocol,
    side: Option<Side>,
    peers: Vec<Network>,
    ports: Vec<RangeInclusive<u16>>,
    programs: Vec<String>,
    users: Vec<u32>,
    cgroups: Vec<String>,
    share: Option<Share>,
}

/// The choice of a policy for one new connection of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyChoice {
    /// The connection may be on SMC.
    Smc,
    /// A rule says TCP.
    Tcp,
    /// The connection is outside of the share of its rule.
    OutsideShare,
}

/// The addresses with a common prefix. IPv4 addresses are the addresses of `::ffff:0:0/96`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Network {
    start: u128,
    /// Number of significant bits, up to 128.
    length: u8,
}

/// The clients of a listener: the longest prefix decides.
pub(super) type Clients = Vec<(Network, AllowedProtocol)>;

impl Policy {
    /// Reads a policy from text. A key without a meaning here may have one in a later release, and may narrow
    /// its rule, so the connections that fit the rest of the rule are TCP.
    ///
    /// # Errors
    /// The text is no TOML, or not of this form; see [`PolicyError`].
    pub fn parse(text: &str) -> Result<Policy, PolicyError> {
        let (mut file, unknown) = match toml::from_str::<File>(text) {
            Ok(file) => (file, Vec::new()),
            Err(error) => match take_unknown(text) {
                Some((known, unknown)) => (toml::from_str(&known)?, unknown),
                None => return Err(error.into()),
            },
        };
        for rule in unknown.iter().filter_map(|key| key.rule) {
            if let Some(rule) = file.rule.get_mut(rule - 1) {
                (rule.allowed, rule.share) = (AllowedProtocol::Tcp, None);
            }
        }
        let most = |what, found, most| {
            if found > most { Err(PolicyError::TooMany { what, found, most }) } else { Ok(()) }
        };
        most("rules", file.rule.len(), MAX_RULES)?;
        let peers = file.rule.iter().filter_map(|rule| rule.peers.as_ref());
        most("networks", peers.map(Vec::len).sum(), MAX_NETWORKS)?;
        let users = Users::of(&file.rule);
        let rules = file.rule.into_iter().enumerate();
        let rules = rules.map(|(at, rule)| rule.check(at + 1, &users)).collect::<Result<_, _>>()?;
        Ok(Policy { default: file.default, rules, unknown })
    }

    /// The policy without SMC for any connection.
    pub fn none() -> Policy {
        Policy { default: AllowedProtocol::Tcp, ..Policy::default() }
    }

    /// The keys of the file without a meaning here.
    pub fn unknown(&self) -> &[UnknownKey] {
        &self.unknown
    }

    /// Reads a policy file, a regular file of at most 1 MiB.
    ///
    /// # Errors
    /// As [`Policy::parse`]; the file cannot be read.
    pub fn load(path: &Path) -> Result<Policy, PolicyError> {
        let file = |error| PolicyError::File { path: path.to_owned(), error };
        Self::parse(&read_text(path, MAX_FILE).map_err(file)?)
    }

    /// The rules for a program, given the path of its executable.
    pub fn of_program(self, executable: &Path) -> Policy {
        self.of_program_started_as(executable, executable)
    }

    /// Like [`Policy::of_program`], for a program possibly started by another path: by a link to its
    /// executable, or as the interpreter of a script.
    pub fn of_program_started_as(mut self, executable: &Path, started_as: &Path) -> Policy {
        let texts = [executable, started_as].map(|path| path.to_string_lossy());
        // The kernel appends this when the file has been replaced since.
        let paths = texts.each_ref().map(|path| path.strip_suffix(" (deleted)").unwrap_or(path));
        let is_path =
            |program: &str, path: &str| program == path || Some(program) == path.rsplit('/').next();
        self.rules.retain_mut(|rule| {
            let all = rule.programs.is_empty();
            let is_named = |program: &String| paths.iter().any(|path| is_path(program, path));
            let named = rule.programs.iter().any(is_named);
            rule.programs.clear();
            all || named
        });
        self
    }

    fn of_cgroups(mut self, paths: &[String]) -> Policy {
        let is_in = |cgroup: &str, path: &str| match cgroup.starts_with('/') {
            true => {
                let rest = path.strip_prefix(cgroup.trim_end_matches('/'));
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
            false => path.split('/').any(|part| part == cgroup),
        };
        self.rules.retain_mut(|rule| {
            let all = rule.cgroups.is_empty();
            let is_named = |cgroup: &String| paths.iter().any(|path| is_in(cgroup, path));
            let named = rule.cgroups.iter().any(is_named);
            rule.cgroups.clear();
            all || named
        });
        self
    }

    /// The rules for a process in the present cgroups of this process.
    pub fn of_own_cgroups(self) -> Policy {
        if self.rules.iter().all(|rule| rule.cgroups.is_empty()) {
            return self;
        }
        let text = read_text(Path::new("/proc/self/cgroup"), MAX_FILE).unwrap_or_default();
        self.of_cgroups(&paths_of_cgroups(&text))
    }

    /// The rules for this process: its program, and its present cgroups. The user of the process may change,
    /// and counts when a connection is made.
    pub fn of_this_process(self) -> Policy {
        let policy = self.of_own_cgroups();
        match std::env::current_exe() {
            Ok(executable) => {
                let started_as = ism_sys::started_as().unwrap_or_else(|| executable.clone());
                policy.of_program_started_as(&executable, &started_as)
            }
            Err(_) => policy,
        }
    }

    /// Number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The shares of the rules, in their order.
    pub fn shares(&self) -> impl Iterator<Item = Share> + '_ {
        self.rules.iter().filter_map(|rule| rule.share)
    }

    /// The protocol for a client of this server. A share of connections counts as all.
    pub fn connect(&self, server: &SocketAddr) -> AllowedProtocol {
        self.rule_to(server).map_or(self.default, |rule| rule.allowed)
    }

    /// The choice for the next connection to this server. The choice by a share is made anew with each call.
    pub fn choose(&self, server: &SocketAddr) -> PolicyChoice {
        let rule = self.rule_to(server);
        let share = rule.and_then(|rule| rule.share);
        match rule.map_or(self.default, |rule| rule.allowed) {
            AllowedProtocol::Tcp => PolicyChoice::Tcp,
            _ if share.is_none_or(Share::takes_next) => PolicyChoice::Smc,
            _ => PolicyChoice::OutsideShare,
        }
    }

    fn rule_to(&self, server: &SocketAddr) -> Option<&Rule> {
        let rules = self.rules.iter().filter(|rule| rule.fits(Side::Connect, server.port()));
        first_around(rules, Network::of(server.ip()))
    }

    /// The protocol for a server with this client, on a port of its own.
    pub fn accept(&self, client: IpAddr, port: u16) -> AllowedProtocol {
        let rules = self.rules.iter().filter(|rule| rule.fits(Side::Listen, port));
        first_around(rules, Network::of(client)).map_or(self.default, |rule| rule.allowed)
    }

    /// The protocol of a listener on this port, by client. The networks of the policy before are among the
    /// networks, to replace its answers.
    pub(super) fn listen(&self, port: u16, before: Option<&Policy>) -> Clients {
        let rules: Vec<_> =
            self.rules.iter().filter(|rule| rule.fits(Side::Listen, port)).collect();
        // Of all networks around an address, each contains the smaller networks. So every network of the
        // rules around the address contains the smallest network, and the first rule for the smallest network
        // is also the first rule for the address.
        let before = before.into_iter().flat_map(|before| &before.rules);
        let of_rules = |rule: &Rule| rule.peers.clone();
        let mut networks: Vec<_> = rules.iter().copied().chain(before).flat_map(of_rules).collect();
        networks.push(Network::ALL);
        networks.sort_unstable();
        networks.dedup();
        let allowed = |network: &Network| {
            let rule = first_around(rules.iter().copied(), *network);
            rule.map_or(self.default, |rule| rule.allowed)
        };
        networks.iter().map(|network| (*network, allowed(network))).collect()
    }

    /// Whether a server may use SMC with all clients, on all ports.
    pub fn accepts_all(&self) -> bool {
        self.default != AllowedProtocol::Tcp
            && self.rules.iter().all(|rule| rule.side == Some(Side::Connect))
    }

    /// Whether the answer of a listener depends on the client's address.
    pub fn depends_on_client(&self) -> bool {
        self.rules.iter().any(|rule| !rule.peers.is_empty() && rule.side != Some(Side::Connect))
    }
}

/// The first of these rules around a peer.
fn first_around<'a>(rules: impl Iterator<Item = &'a Rule>, peer: Network) -> Option<&'a Rule> {
    let mut rules = rules;
    rules.find(|rule| {
        rule.peers.is_empty() || rule.peers.iter().any(|network| network.contains(peer))
    })
}

impl Rule {
    fn fits(&self, side: Side, port: u16) -> bool {
        self.side.is_none_or(|only| only == side)
            && (self.ports.is_empty() || self.ports.iter().any(|range| range.contains(&port)))
            && (self.users.is_empty() || self.users.contains(&ism_sys::effective_user()))
    }
}

impl Network {
    pub(super) const ALL: Network = Network { start: 0, length: 0 };

    /// The network of one address.
    pub(super) fn of(address: IpAddr) -> Network {
        let address = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        Network { start: address.to_bits(), length: 128 }
    }

    /// An address, or an address, `/` and the length of a prefix without bits beyond the length.
    pub(super) fn parse(text: &str) -> Option<Network> {
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length.parse::<u8>().ok()?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let (before, bits) = if address.is_ipv4() { (96, 32) } else { (0, 128) };
        let length = length.unwrap_or(bits);
        let start = Network::of(address).start;
        let network = Network { start, length: before + length.min(bits) };
        (length <= bits && start & !network.mask() == 0).then_some(network)
    }

    fn mask(self) -> u128 {
        u128::MAX.checked_shl(128 - u32::from(self.length)).unwrap_or(0)
    }

    /// Whether this network contains the whole of the other.
    pub(super) fn contains(self, other: Network) -> bool {
        other.length >= self.length && other.start & self.mask() == self.start
    }

    /// The first address in network order, and the number of significant bits.
    pub(super) fn prefix(self) -> ([u8; 16], u8) {
        (self.start.to_be_bytes(), self.length)
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv6Addr::from_bits(self.start), self.length)
    }
}

/// The file in its written form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    default: AllowedProtocol,
    #[serde(default)]
    rule: Vec<Written>,
}

/// A rule in its written form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(rename = "use")]
    allowed: AllowedProtocol,
    when: Option<Side>,
    peers: Option<Vec<String>>,
    ports: Option<Vec<Port>>,
    programs: Option<Vec<String>>,
    users: Option<Vec<User>>,
    cgroups: Option<Vec<String>>,
    share: Option<String>,
}

/// A user, by number or name.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected the number or name of a user")]
enum User {
    Number(u32),
    Name(String),
}

/// The text of /etc/passwd, if a rule has the name of a user.
struct Users(String);

impl Users {
    fn of(rules: &[Written]) -> Users {
        let mut users = rules.iter().filter_map(|rule| rule.users.as_ref()).flatten();
        let text = users.any(|user| matches!(user, User::Name(_)));
        let text = text.then(|| read_text(Path::new("/etc/passwd"), MAX_PASSWD).ok()).flatten();
        Users(text.unwrap_or_default())
    }

    fn number(&self, user: &User) -> Option<u32> {
        let name = match user {
            User::Number(number) => return Some(*number),
            User::Name(name) => name,
        };
        let mut lines = self.0.lines().map(|line| line.split(':'));
        let found = lines.find_map(|mut fields| (fields.next()? == name).then(|| fields.nth(1))?);
        found?.parse().ok()
    }
}

/// The paths in a process's file `cgroup`: of cgroup v2, and of the hierarchy of systemd.
fn paths_of_cgroups(text: &str) -> Vec<String> {
    let fields = text.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
    let paths = fields.filter_map(|fields| match fields[..] {
        [_, "" | "name=systemd", path] => Some(path.to_owned()),
        _ => None,
    });
    paths.collect()
}

/// A port, or two with `-` between them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Port {
    Number(i64),
    Text(String),
}

impl Written {
    fn check(self, rule: usize, known: &Users) -> Result<Rule, PolicyError> {
        let lists = [
            ("peers", self.peers.as_ref().map(Vec::len)),
            ("ports", self.ports.as_ref().map(Vec::len)),
            ("programs", self.programs.as_ref().map(Vec::len)),
            ("users", self.users.as_ref().map(Vec::len)),
            ("cgroups", self.cgroups.as_ref().map(Vec::len)),
        ];
        if let Some((key, _)) = lists.into_iter().find(|(_, length)| *length == Some(0)) {
            return Err(PolicyError::Empty { rule, key });
        }
        let peers = self
            .peers
            .unwrap_or_default()
            .into_iter()
            .map(|text| Network::parse(&text).ok_or(PolicyError::Network { rule, text }));
        let ports = self.ports.unwrap_or_default().into_iter().map(|port| {
            let text = match port {
                Port::Number(number) => number.to_string(),
                Port::Text(text) => text,
            };
            ports(&text).ok_or(PolicyError::Port { rule, text })
        });
        let users = self.users.unwrap_or_default().into_iter().map(|user| {
            let number = known.number(&user);
            number.ok_or_else(|| match user {
                User::Number(number) => PolicyError::User { rule, user: number.to_string() },
                User::Name(user) => PolicyError::User { rule, user },
            })
        });
        let share =
            self.share.map(|text| Share::parse(&text).ok_or(PolicyError::Share { rule, text }));
        let share = share.transpose()?;
        // The server answers before it knows the connection, and would take a share of the client's share.
        let is_choice = self.allowed != AllowedProtocol::Tcp && self.when == Some(Side::Connect);
        if share.is_some() && !is_choice {
            return Err(PolicyError::ShareOfServer { rule });
        }
        Ok(Rule {
            share,
            users: users.collect::<Result<_, _>>()?,
            cgroups: self.cgroups.unwrap_or_default(),
            allowed: self.allowed,
            side: self.when,
            peers: peers.collect::<Result<_, _>>()?,
            ports: ports.collect::<Result<_, _>>()?,
            programs: self.programs.unwrap_or_default(),
        })
    }
}

/// A port, or two with `-` between them.
pub(super) fn ports(text: &str) -> Option<RangeInclusive<u16>> {
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port != 0);
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    (first <= last).then_some(first..=last)
}

mod share;
#[cfg(test)]
mod tests;
mod unknown_keys;
