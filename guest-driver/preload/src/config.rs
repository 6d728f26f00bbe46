// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings of the library, passed by `smc run` in environment variables. Other programs with the
//! library use the settings of the machine.

use std::ffi::{OsStr, OsString, c_int};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ism_sys::OnceBox;
use smc_core::wire::ids::Eid;
use smc_rendezvous::{AllowedProtocol, Mode, PeerRule, Policy};
use smc_settings::Settings;

use crate::policies;

/// Devices, separated by colons: sockets, or directories of sockets (`*.sock`).
const DEVICES: &str = "SMC_RUN_DEVICES";
/// EIDs, separated by commas.
const EIDS: &str = "SMC_RUN_EIDS";
/// Rules for connections over SMC, separated by commas, see [`PeerRule`]. `smc run` has checked the
/// rules.
const CONNECT: &str = "SMC_RUN_CONNECT";
/// Rules for ports with SMC clients, separated by commas. The addresses in the rules are the clients'.
const ACCEPT: &str = "SMC_RUN_ACCEPT";
/// Whether TCP option 254 finds peers with SMC: `off` (the default), `auto` or `required`.
const RENDEZVOUS: &str = "SMC_RUN_RENDEZVOUS";
/// The descriptors of the rendezvous attached by `smc run`, if possible.
const OPTION: &str = "SMC_RUN_OPTION";
/// The reason why `smc run` could not attach the rendezvous.
const NO_OPTION: &str = "SMC_RUN_NO_OPTION";
/// A policy file.
const POLICY: &str = "SMC_RUN_POLICY";
/// Servers to which connections are SMC even where TCP is faster: rules separated by commas.
const ALWAYS: &str = "SMC_RUN_ALWAYS";
/// The descriptor of the program's traffic records, shared by its processes.
const TRAFFIC: &str = "SMC_RUN_TRAFFIC";
/// The file with the knowledge about servers for later programs.
const LEARNED: &str = "SMC_RUN_LEARNED";
/// A directory for the status files, one for each process with its connections.
const STATUS: &str = "SMC_RUN_STATUS";
/// A directory for the statistics sockets, one for each process with its connections.
const STATISTICS: &str = "SMC_RUN_STATISTICS";
/// Bytes of receive buffer.
const BUFFER: &str = "SMC_RUN_BUFFER";
/// Microseconds of spinning before a wait sleeps.
const SPIN: &str = "SMC_RUN_SPIN_US";
/// `true`: connections go on over TCP when their device is gone.
const OUTLIVE: &str = "SMC_RUN_OUTLIVE";
/// "true" to take over the system calls of programs in Go.
const GO: &str = "SMC_RUN_GO";
/// `true`: connections moved away from their device never return to the device.
const STAY_ON_TCP: &str = "SMC_RUN_STAY_ON_TCP";
/// Number of filters of system calls (seccomp) found harmless by `smc run`.
const FILTERS: &str = "SMC_RUN_FILTERS";
/// Milliseconds until a server takes a silent client for a client without SMC.
const DETECT: &str = "SMC_RUN_DETECT_MS";
/// Seconds until a keeper ends although peers have not taken all bytes.
const KEEPER: &str = "SMC_RUN_KEEPER_S";

/// `kernel`: TCP sockets become sockets of the kernel's AF_SMC, and the library does nothing else.
const STACK: &str = "SMC_RUN_STACK";

/// Settings needed by a program to answer like this process, and settings required to be the same if
/// set.
const FOR_SERVERS: [&str; 2] = [DEVICES, ACCEPT];
const THE_SAME: [&str; 6] = [DEVICES, ACCEPT, RENDEZVOUS, OPTION, POLICY, GO];

/// Whether a program with these settings would treat its connections as this process does. `theirs`:
/// the value of a variable in the program's environment.
pub(crate) fn is_same_for<'a>(theirs: impl Fn(&str) -> Option<&'a OsStr>) -> bool {
    let is_set = |name: &&str| theirs(name).is_some_and(|value| !value.is_empty());
    let is_same = |name: &&str| theirs(name) == OWN.get().and_then(|own| own.value(name));
    // Without these, this process and the program both use the settings of the machine.
    let has_own = |name: &&str| OWN.get().is_some_and(|own| own.value(name).is_some());
    let decided = FOR_SERVERS.iter().all(is_set) || !FOR_SERVERS.iter().any(has_own);
    decided && THE_SAME.iter().all(is_same)
}

/// Values of [`THE_SAME`] at the start of the program.
struct OwnValues(Vec<(&'static str, OsString)>);

impl OwnValues {
    fn value(&self, name: &str) -> Option<&OsStr> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_os_str())
    }
}

static OWN: OnceBox<OwnValues> = OnceBox::new();

/// The settings of this process.
#[derive(Debug, Default)]
pub(crate) struct RunConfig {
    /// Sockets of devices, or directories of sockets. Empty: the first fabric open to this user.
    pub(crate) devices: Vec<PathBuf>,
    /// User EIDs.
    pub(crate) eids: Vec<Eid>,
    /// Servers reached over SMC.
    pub(crate) connect: Vec<PeerRule>,
    /// Clients, and ports of this process, allowed on SMC.
    pub(crate) accept: Vec<PeerRule>,
    /// Servers to which connections are SMC even where TCP is faster.
    pub(crate) always: Vec<PeerRule>,
    /// The descriptor of the program's traffic records, shared by its processes.
    pub(crate) traffic: Option<c_int>,
    /// The file with the knowledge about servers for later programs.
    pub(crate) learned: Option<PathBuf>,
    /// Use of TCP option 254.
    pub(crate) rendezvous: Mode,
    /// The descriptors of the rendezvous attached by `smc run`.
    pub(crate) option: Option<String>,
    /// The reason why `smc run` could not attach the rendezvous.
    pub(crate) no_option: Option<String>,
    /// The policy of connections allowed on SMC at all, at the start of the program; see
    /// [`RunConfig::policy`].
    first_policy: Policy,
    /// The file of the policy. `None`: the first policy stays.
    pub(crate) policy_file: Option<PathBuf>,
    /// Directory of status files.
    pub(crate) status: Option<PathBuf>,
    /// Directory of statistics sockets, owned by the user at the program's start.
    pub(crate) statistics: Option<PathBuf>,
    /// Bytes of receive buffer.
    pub(crate) buffer: usize,
    /// Duration of spinning before a wait sleeps.
    pub(crate) spin: Duration,
    /// Connections go on over TCP when their device is gone.
    pub(crate) outlive_device: bool,
    /// Whether system calls of programs in Go are taken over.
    pub(crate) go: bool,
    /// Connections moved away from their device never return to the device.
    pub(crate) stay_on_tcp: bool,
    /// Limit for a server to wait for the first bytes of a client.
    pub(crate) detect: Duration,
    /// Limit for a keeper to wait for peers without progress.
    pub(crate) keeper: Duration,
    /// Unreadable settings, for the user.
    pub(crate) mistakes: Vec<String>,
}

static CONFIG: OnceBox<RunConfig> = OnceBox::new();
/// Whether new sockets are the kernel's SMC sockets.
static BY_KERNEL: AtomicBool = AtomicBool::new(false);

/// Reads which stack's SMC sockets this process gets.
pub(crate) fn read_stack() {
    let by_kernel = std::env::var_os(STACK).is_some_and(|stack| stack == "kernel");
    BY_KERNEL.store(by_kernel, Ordering::Relaxed);
}

/// Whether new TCP sockets are to be the kernel's SMC sockets.
#[inline]
pub(crate) fn is_by_kernel() -> bool {
    BY_KERNEL.load(Ordering::Relaxed)
}

/// Stores the settings of this process; once.
pub(crate) fn set(config: RunConfig) {
    let _ = CONFIG.set(config);
}

/// The settings of this process; `None`: the library does nothing.
#[inline]
pub(crate) fn get() -> Option<&'static RunConfig> {
    CONFIG.get().filter(|_| !is_off())
}

/// Whether [`switch_off`] was called.
#[inline]
pub(crate) fn is_off() -> bool {
    IS_OFF.load(Ordering::Relaxed)
}

static IS_OFF: AtomicBool = AtomicBool::new(false);

/// Switches the library off from now on, in this process and its forked children.
pub(crate) fn switch_off() {
    IS_OFF.store(true, Ordering::Relaxed);
}

/// The rules of a list. An unreadable rule matches no peer, and so does not widen the list.
fn rules(name: &str, text: &str, mistakes: &mut Vec<String>) -> Vec<PeerRule> {
    let rules = text.split(',').filter(|rule| !rule.is_empty());
    rules
        .map(|rule| {
            rule.parse().unwrap_or_else(|error| {
                mistakes.push(format!("{name}: {error}"));
                PeerRule::NONE
            })
        })
        .collect()
}

/// The EIDs of a list; `None`: one of them is unreadable.
fn eids(text: &str, mistakes: &mut Vec<String>) -> Option<Vec<Eid>> {
    let eids = text.split(',').filter(|eid| !eid.is_empty());
    let read = eids.map(|eid| Eid::new(eid).map_err(|error| format!("{EIDS}: `{eid}`: {error}")));
    read.collect::<Result<_, _>>().map_err(|error| mistakes.push(error)).ok()
}

/// The file of the policy, and the rules for this program. If a named file is unreadable, no connection
/// may be on SMC: `smc run` has read the file before, so the user meant the file to hold. The file of the
/// machine may be missing.
fn read_policy(named: Option<OsString>) -> (Option<PathBuf>, Policy) {
    let is_named = named.is_some();
    let Some(file) = named.map(PathBuf::from).or_else(smc_settings::policy_file) else {
        return (None, Policy::default());
    };
    let read = match Policy::load(&file) {
        Ok(policy) => policy.of_this_process(),
        Err(error) if !is_named && error.is_missing() => Policy::default(),
        Err(_) => Policy::none(),
    };
    (Some(file), read)
}

/// The value of a variable after a start by `smc run` with the settings of the machine. `None`: the
/// default holds.
fn of_machine(settings: &Settings, name: &str) -> Option<OsString> {
    let list = |list: &[String]| (!list.is_empty()).then(|| list.join(",").into());
    match name {
        DEVICES => std::env::join_paths(&settings.device).ok(),
        EIDS => list(&settings.eids),
        CONNECT => list(&settings.peers),
        ACCEPT => list(&settings.accept).or_else(|| Some("*".into())),
        ALWAYS => list(&settings.always),
        RENDEZVOUS => Some(settings.rendezvous.map_or("auto", |how| how.word()).into()),
        // The cgroup may have a granted rendezvous.
        OPTION => Some("granted".into()),
        POLICY => settings.policy.clone().map(OsString::from),
        STATISTICS => smc_settings::make_statistics_directory().map(OsString::from),
        BUFFER => settings.buffer.map(|bytes| bytes.to_string().into()),
        SPIN => settings.spin_us.map(|us| us.to_string().into()),
        OUTLIVE => settings.outlive_device.map(|outlive| outlive.to_string().into()),
        GO => settings.go.map(|go| go.to_string().into()),
        STAY_ON_TCP => settings.stay_on_tcp.map(|stay| stay.to_string().into()),
        _ => None,
    }
}

impl RunConfig {
    /// Reads the environment. A program not started by `smc run` gets the settings of the machine.
    /// `None`: the library does no more than after [`read_stack`].
    pub(crate) fn from_environment() -> Option<RunConfig> {
        let filters = std::env::var(FILTERS).ok().and_then(|number| number.parse().ok());
        ism_sys::know_filters(filters.unwrap_or(0));
        let own = THE_SAME.iter().filter_map(|name| Some((*name, std::env::var_os(name)?)));
        let _ = OWN.set(OwnValues(own.collect()));
        if std::env::var_os(DEVICES).is_some() {
            return Some(RunConfig::read(|name| std::env::var_os(name)));
        }
        if is_by_kernel() {
            return None;
        }
        let (settings, mistake) = match Settings::load() {
            Ok(settings) => (settings, None),
            Err(error) => (Settings::default(), Some(error.to_string())),
        };
        let variable = |name: &str| std::env::var_os(name).or_else(|| of_machine(&settings, name));
        let mut config = RunConfig::read(variable);
        if let Some(mistake) = mistake {
            // The file's rules for TCP are unknown.
            (config.policy_file, config.first_policy) = (None, Policy::none());
            config.mistakes.push(mistake);
        }
        Some(config)
    }

    /// Makes the settings from variables.
    fn read(variable: impl Fn(&str) -> Option<OsString>) -> RunConfig {
        let text =
            |name| variable(name).and_then(|value| value.into_string().ok()).unwrap_or_default();
        let number = |name, default| text(name).parse().unwrap_or(default);
        let mut mistakes = Vec::new();
        let eids = eids(&text(EIDS), &mut mistakes);
        let (policy_file, first_policy) = match eids {
            Some(_) => read_policy(variable(POLICY)),
            // Without EIDs the stack would use the default, against the user's intention.
            None => (None, Policy::none()),
        };
        let devices = variable(DEVICES).unwrap_or_default();
        RunConfig {
            devices: std::env::split_paths(&devices)
                .filter(|p| !p.as_os_str().is_empty())
                .collect(),
            connect: rules(CONNECT, &text(CONNECT), &mut mistakes),
            accept: rules(ACCEPT, &text(ACCEPT), &mut mistakes),
            always: rules(ALWAYS, &text(ALWAYS), &mut mistakes),
            traffic: text(TRAFFIC).parse().ok(),
            policy_file,
            first_policy,
            learned: variable(LEARNED).map(PathBuf::from),
            eids: eids.unwrap_or_default(),
            mistakes,
            rendezvous: match text(RENDEZVOUS).as_str() {
                "auto" => Mode::Auto,
                "required" => Mode::Required,
                _ => Mode::Off,
            },
            option: variable(OPTION).and_then(|value| value.into_string().ok()),
            no_option: variable(NO_OPTION).and_then(|value| value.into_string().ok()),
            status: variable(STATUS).map(PathBuf::from),
            statistics: variable(STATISTICS).map(PathBuf::from),
            buffer: usize::try_from(number(BUFFER, 256 << 10)).unwrap_or(256 << 10),
            spin: Duration::from_micros(number(SPIN, 50)),
            outlive_device: text(OUTLIVE) != "false",
            go: text(GO) == "true",
            stay_on_tcp: text(STAY_ON_TCP) == "true",
            detect: Duration::from_millis(number(DETECT, 200)),
            keeper: Duration::from_secs(number(KEEPER, 900)),
        }
    }

    /// The directory of statistics sockets for the present user of this process.
    pub(crate) fn statistics_of_now(&self) -> Option<PathBuf> {
        smc_settings::statistics_directory_of_now(self.statistics.as_deref()?)
    }

    /// Whether the rules for a program are the same as for this program. `program`: a path, maybe of a
    /// link.
    pub(crate) fn has_rules_of(&self, program: &std::path::Path) -> bool {
        self.policy_file.as_ref().is_none_or(|file| {
            let all = match Policy::load(file) {
                Err(error) if error.is_missing() => Ok(Policy::default()),
                read => read.map(Policy::of_own_cgroups),
            };
            let executable = program.canonicalize().unwrap_or_else(|_| program.to_owned());
            all.is_ok_and(|all| all.of_program_started_as(&executable, program) == *self.policy())
        })
    }

    /// The policy in force.
    pub(crate) fn policy(&self) -> &Policy {
        policies::changed().unwrap_or(&self.first_policy)
    }

    /// The policies before the one in force, the latest first.
    pub(crate) fn earlier_policies(&self) -> impl Iterator<Item = &Policy> {
        let first = policies::changed().map(|_| &self.first_policy);
        policies::changes().skip(1).chain(first)
    }

    /// Whether a connection to this server is to be SMC.
    pub(crate) fn connects(&self, server: SocketAddr) -> bool {
        self.connect.iter().any(|rule| rule.matches(server.ip(), server.port()))
    }

    /// Whether a rule forces SMC for connections to this server.
    pub(crate) fn forces(&self, server: &SocketAddr) -> bool {
        self.always.iter().any(|rule| rule.matches(server.ip(), server.port()))
            || self.policy().connect(server) == AllowedProtocol::AlwaysSmc
    }

    /// Whether a rule names this client of this own port. The policy may still say TCP.
    pub(crate) fn names_client(&self, client: IpAddr, port: u16) -> bool {
        self.accept.iter().any(|rule| rule.matches(client, port))
    }

    /// Whether a connection from this client to this own port may be SMC.
    pub(crate) fn accepts(&self, client: IpAddr, port: u16) -> bool {
        self.names_client(client, port)
            && self.policy().accept(client, port) != AllowedProtocol::Tcp
    }

    /// Whether a client could ever expect SMC of this own port, by any policy so far.
    pub(crate) fn has_accepted(&self, client: IpAddr, port: u16) -> bool {
        let smc = |policy: &Policy| policy.accept(client, port) != AllowedProtocol::Tcp;
        self.names_client(client, port) && self.earlier_policies().any(smc)
    }

    /// Whether connections of all clients to all ports may be SMC, so no address needs a check.
    pub(crate) fn accepts_all(&self) -> bool {
        self.accept.contains(&PeerRule::ALL) && self.policy().accepts_all()
    }

    /// Whether the settings name the clients allowed on SMC.
    pub(crate) fn names_clients(&self) -> bool {
        !self.accept.iter().all(PeerRule::is_everyone)
    }

    /// Whether the protocol of an accepted connection depends on the client's address.
    pub(crate) fn depends_on_client(&self) -> bool {
        self.policy().depends_on_client() || self.names_clients()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_cannot_be_read_matches_nothing() {
        let mut mistakes = Vec::new();
        let ip = "10.1.2.3".parse().unwrap();
        let rules = rules(CONNECT, "10.1.2.3/8x,typo.example,,*:70000", &mut mistakes);
        assert_eq!(rules, [PeerRule::NONE, PeerRule::NONE, PeerRule::NONE]);
        assert!(!rules.iter().any(|rule| rule.matches(ip, 80)));
        assert_eq!(mistakes.len(), 3);
        assert!(mistakes[1].starts_with("SMC_RUN_CONNECT: `typo.example` is not"), "{mistakes:?}");
    }
}
