// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings of the library: `smc run` passes them in environment variables. Other programs with the
//! library use those of the machine.

use std::ffi::{OsStr, OsString, c_int};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use smc_core::wire::ids::Eid;
use smc_rendezvous::{AllowedProtocol, Mode, PeerRule, Policy};
use smc_settings::Settings;

/// Devices, separated by colons: sockets, or directories of sockets (`*.sock`).
const DEVICES: &str = "SMC_RUN_DEVICES";
/// EIDs, separated by commas.
const EIDS: &str = "SMC_RUN_EIDS";
/// Which connections to make over SMC: rules separated by commas, see [`PeerRule`]. `smc run` has
/// checked them.
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
/// Servers to which connections are SMC even where TCP is faster: rules separated by commas.
const ALWAYS: &str = "SMC_RUN_ALWAYS";
/// The descriptor of what the program's processes learn of their connections.
const TRAFFIC: &str = "SMC_RUN_TRAFFIC";
/// A directory in which each process writes a file about its connections.
const STATUS: &str = "SMC_RUN_STATUS";
/// A directory in which each process opens a socket that answers questions about its connections.
const STATISTICS: &str = "SMC_RUN_STATISTICS";
/// Bytes of receive buffer.
const BUFFER: &str = "SMC_RUN_BUFFER";
/// Microseconds for which a wait spins before it sleeps.
const SPIN: &str = "SMC_RUN_SPIN_US";
/// `true`: connections go on over TCP when their device is gone.
const OUTLIVE: &str = "SMC_RUN_OUTLIVE";
/// `true`: connections that have left their device do not come back to it.
const STAY_ON_TCP: &str = "SMC_RUN_STAY_ON_TCP";
/// How many filters of system calls (seccomp) `smc run` has found harmless.
const FILTERS: &str = "SMC_RUN_FILTERS";
/// Milliseconds after which a server takes a client that sends nothing for one without SMC.
const DETECT: &str = "SMC_RUN_DETECT_MS";

/// `kernel`: TCP sockets become sockets of the kernel's AF_SMC, and the library does nothing else.
const STACK: &str = "SMC_RUN_STACK";

/// The settings without which a program does not answer as this one does, and those that must be the
/// same for it if they are set.
const FOR_SERVERS: [&str; 2] = [DEVICES, ACCEPT];
const THE_SAME: [&str; 5] = [DEVICES, ACCEPT, RENDEZVOUS, OPTION, POLICY];

/// Whether a program with these settings would treat its connections as this process does. `theirs`:
/// the value of a variable in its environment.
pub(crate) fn is_same_for<'a>(theirs: impl Fn(&str) -> Option<&'a OsStr>) -> bool {
    let is_set = |name: &&str| theirs(name).is_some_and(|value| !value.is_empty());
    let is_same = |name: &&str| theirs(name) == OWN.get().and_then(|own| own.value(name));
    // Without these, this process and the program both use the settings of the machine.
    let has_own = |name: &&str| OWN.get().is_some_and(|own| own.value(name).is_some());
    let decided = FOR_SERVERS.iter().all(is_set) || !FOR_SERVERS.iter().any(has_own);
    decided && THE_SAME.iter().all(is_same)
}

/// What [`THE_SAME`] were when the program began.
struct OwnValues(Vec<(&'static str, OsString)>);

impl OwnValues {
    fn value(&self, name: &str) -> Option<&OsStr> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_os_str())
    }
}

static OWN: OnceLock<OwnValues> = OnceLock::new();

/// The settings of this process.
#[derive(Debug, Default)]
pub(crate) struct RunConfig {
    /// Sockets of devices, or directories of them. Empty: those of the first fabric that this user may
    /// use.
    pub(crate) devices: Vec<PathBuf>,
    /// User EIDs.
    pub(crate) eids: Vec<Eid>,
    /// Servers to which the program connects over SMC.
    pub(crate) connect: Vec<PeerRule>,
    /// Clients, and ports of this process, that may be on SMC.
    pub(crate) accept: Vec<PeerRule>,
    /// Servers to which connections are SMC even where TCP is faster.
    pub(crate) always: Vec<PeerRule>,
    /// The descriptor of what the program's processes learn of their connections.
    pub(crate) traffic: Option<c_int>,
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
    /// Directory of statistics sockets, of the user who started the program.
    pub(crate) statistics: Option<PathBuf>,
    /// Bytes of receive buffer.
    pub(crate) buffer: usize,
    /// How long a wait spins before it sleeps.
    pub(crate) spin: Duration,
    /// Connections go on over TCP when their device is gone.
    pub(crate) outlive_device: bool,
    /// Connections that have left their device do not come back to it.
    pub(crate) stay_on_tcp: bool,
    /// How long a server waits for the first bytes of a client.
    pub(crate) detect: Duration,
    /// What could not be read, for the user.
    pub(crate) mistakes: Vec<String>,
}

static CONFIG: OnceLock<RunConfig> = OnceLock::new();
/// Whether new sockets are the kernel's SMC sockets.
static BY_KERNEL: AtomicBool = AtomicBool::new(false);

/// Reads whose SMC sockets this process gets.
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

/// Has the library do nothing from now on, in this process and those that it forks.
pub(crate) fn switch_off() {
    IS_OFF.store(true, Ordering::Relaxed);
}

/// The rules of a list. One that cannot be read matches no peer, so it does not widen the list.
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

/// The EIDs of a list; `None`: one of them cannot be read.
fn eids(text: &str, mistakes: &mut Vec<String>) -> Option<Vec<Eid>> {
    let eids = text.split(',').filter(|eid| !eid.is_empty());
    let read = eids.map(|eid| Eid::new(eid).map_err(|error| format!("{EIDS}: `{eid}`: {error}")));
    read.collect::<Result<_, _>>().map_err(|error| mistakes.push(error)).ok()
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

/// The value that a variable would have if `smc run` had started the program with the settings of the
/// machine. `None`: its default holds.
fn of_machine(settings: &Settings, name: &str) -> Option<OsString> {
    let list = |list: &[String]| (!list.is_empty()).then(|| list.join(",").into());
    match name {
        DEVICES => std::env::join_paths(&settings.device).ok(),
        EIDS => list(&settings.eids),
        CONNECT => list(&settings.peers),
        ACCEPT => list(&settings.accept).or_else(|| Some("*".into())),
        ALWAYS => list(&settings.always),
        RENDEZVOUS => Some(settings.rendezvous.map_or("auto", |how| how.word()).into()),
        // The cgroup may have been granted it.
        OPTION => Some("granted".into()),
        POLICY => settings.policy.clone().map(OsString::from),
        STATISTICS => smc_settings::make_statistics_directory().map(OsString::from),
        BUFFER => settings.buffer.map(|bytes| bytes.to_string().into()),
        SPIN => settings.spin_us.map(|us| us.to_string().into()),
        OUTLIVE => settings.outlive_device.map(|outlive| outlive.to_string().into()),
        STAY_ON_TCP => settings.stay_on_tcp.map(|stay| stay.to_string().into()),
        _ => None,
    }
}

impl RunConfig {
    /// Reads the environment. A program that `smc run` did not start gets the settings of the machine.
    /// `None`: the library does no more than [`read_stack`] says.
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
            // What the file would have kept on TCP is not known.
            config.policy = Policy::none();
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
        let policy = variable(POLICY).map(|path| policy(&path)).unwrap_or_default();
        let devices = variable(DEVICES).unwrap_or_default();
        RunConfig {
            devices: std::env::split_paths(&devices)
                .filter(|p| !p.as_os_str().is_empty())
                .collect(),
            connect: rules(CONNECT, &text(CONNECT), &mut mistakes),
            accept: rules(ACCEPT, &text(ACCEPT), &mut mistakes),
            always: rules(ALWAYS, &text(ALWAYS), &mut mistakes),
            traffic: text(TRAFFIC).parse().ok(),
            // Without EIDs the stack would use the default, which the user did not mean.
            policy: if eids.is_some() { policy } else { Policy::none() },
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
            outlive_device: text(OUTLIVE) == "true",
            stay_on_tcp: text(STAY_ON_TCP) == "true",
            detect: Duration::from_millis(number(DETECT, 200)),
        }
    }

    /// The directory of statistics sockets for the user that this process runs as.
    pub(crate) fn statistics_of_now(&self) -> Option<PathBuf> {
        smc_settings::statistics_directory_of_now(self.statistics.as_deref()?)
    }

    /// Whether the rules for a program are those for this one.
    pub(crate) fn has_rules_of(&self, program: &std::path::Path) -> bool {
        let file = OWN.get().and_then(|own| own.value(POLICY));
        file.is_none_or(|file| {
            let all = Policy::load(std::path::Path::new(file));
            all.is_ok_and(|all| all.of_program(program) == self.policy)
        })
    }

    /// Whether a connection to this server is to be SMC.
    pub(crate) fn connects(&self, server: SocketAddr) -> bool {
        self.connect.iter().any(|rule| rule.matches(server.ip(), server.port()))
    }

    /// Whether a rule forces SMC for connections to this server.
    pub(crate) fn forces(&self, server: &SocketAddr) -> bool {
        self.always.iter().any(|rule| rule.matches(server.ip(), server.port()))
            || self.policy.connect(server) == AllowedProtocol::AlwaysSmc
    }

    /// Whether a rule names this client of this own port. The policy may still say TCP.
    pub(crate) fn names_client(&self, client: IpAddr, port: u16) -> bool {
        self.accept.iter().any(|rule| rule.matches(client, port))
    }

    /// Whether a connection from this client to this own port may be SMC.
    pub(crate) fn accepts(&self, client: IpAddr, port: u16) -> bool {
        self.names_client(client, port) && self.policy.accept(client, port) != AllowedProtocol::Tcp
    }

    /// Whether connections of all clients to all ports may be SMC, so that no address has to be
    /// looked at.
    pub(crate) fn accepts_all(&self) -> bool {
        self.accept.contains(&PeerRule::ALL) && self.policy.accepts_all()
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
