// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line as a process: helper processes, sandbox, signals, and the end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use super::{ctl, fork, logging, output, privileges, sandbox};
use crate::config::{Config, ConfigError, Socket};
use crate::service::activation::{ActivatedSockets, PassedSockets};
use crate::service::args::{self, Args, SandboxMode};
use crate::service::broker::{Broker, BrokerLimits};
use crate::service::config_reader::ConfigReader;
use crate::service::daemon::Daemon;
use crate::service::privileges::{DEFAULT_USER, User};
use crate::service::reload::ConfigSource;
use crate::service::sandbox::{Process, SandboxError};
use crate::service::service_manager::ServiceManager;
use crate::service::signals::{self, OnSignal, Signal};
use crate::vhost;
use crate::vhost::event_loop::Registration;
use crate::vhost::timers::Timers;
use crate::vhost::unix_socket::{LocalNames, SocketNames, directory_of, path_of};
use ism_device::LeaveGroup;

/// Output of `--print-capabilities`: the type of device, in the format of VMM tools.
const CAPABILITIES: &str = "{\n  \"type\": \"ism\"\n}\n";
/// Longest time for the daemon's end after drivers have left, for the service manager.
const STOPPING: Duration = Duration::from_secs(10);
/// Interval of an ending daemon's checks for connected front ends.
const LOOK: Duration = Duration::from_secs(1);

/// Runs the command line until SIGTERM or SIGINT. `args` starts with the program's name.
pub fn run_main<I, T>(args: I) -> ExitCode
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(by_clap) => return output::answer(&by_clap),
    };
    if args.print_capabilities {
        return output::print_last(CAPABILITIES);
    }
    if let Some(args::Command::Ctl(args)) = &args.command {
        return run_ctl(args);
    }
    // First of all: a descriptor opened now could take the number of a passed descriptor.
    let passed = PassedSockets::from_environment(args.fd);
    logging::init(args.log_level);
    let (config, activated) = match to_config(&args, passed) {
        Ok(both) => both,
        Err(mistakes) => {
            mistakes.iter().for_each(|mistake| logging::print_error(mistake));
            return ExitCode::FAILURE;
        }
    };
    if args.check_config {
        let (fabrics, guests) = (config.fabrics.len(), config.guests.len());
        let passed = match activated.len() {
            0 => String::new(),
            passed => format!(", passed sockets: {passed}"),
        };
        return output::print_last(&format!(
            "nothing is wrong; fabrics: {fabrics}, guests: {guests}{passed}\n"
        ));
    }
    match run(&args, config, activated) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

fn run_ctl(args: &ctl::ControlArgs) -> ExitCode {
    match ctl::run(args) {
        Ok(text) => output::print_last(&text),
        Err(error) => {
            logging::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// The configuration with its passed sockets, checked as far as possible before making a socket.
fn to_config(
    args: &Args,
    passed: Result<PassedSockets, ConfigError>,
) -> Result<(Config, ActivatedSockets), Vec<ConfigError>> {
    let config = args.to_config()?;
    let mut mistakes: Vec<ConfigError> = Vec::new();
    let assigned = passed.map_err(|wrong| vec![wrong]).and_then(|passed| passed.assign(&config));
    let activated = assigned.unwrap_or_else(|wrong| {
        mistakes.extend(wrong);
        ActivatedSockets::default()
    });
    if config.guests.is_empty() && config.management.is_none() {
        mistakes.push(ConfigError::Nothing(match &args.config {
            Some(path) => format!("{} has no guest and no management socket", path.display()),
            None => "give --socket-path, --fd, --config or --management".to_owned(),
        }));
    }
    let missing = socket_directories(&config).into_iter().filter(|path| !path.is_dir());
    mistakes.extend(missing.map(ConfigError::NoDirectory));
    if mistakes.is_empty() { Ok((config, activated)) } else { Err(mistakes) }
}

fn run(
    args: &Args,
    config: Config,
    activated: ActivatedSockets,
) -> Result<(), Box<dyn std::error::Error>> {
    let mode = args.sandbox_mode();
    let user = if mode == SandboxMode::Off && args.user.is_none() {
        None
    } else {
        User::choose(args.user.as_deref())?
    };
    raise_descriptor_limit();
    activated.listen()?;
    signals::catch()?;
    // Before the broker: otherwise the reader would inherit the daemon's channel to the broker.
    let reader = match &args.config {
        Some(path) if mode == SandboxMode::Off => Some(ConfigReader::direct(path)),
        Some(path) => Some(start_config_reader(path, mode)?),
        None => None,
    }
    .map(Arc::new);
    let broker = if mode == SandboxMode::Off {
        tracing::warn!("running without a sandbox");
        None
    } else {
        if geteuid().is_root() && user.is_none() {
            tracing::warn!(
                "running as root, without capabilities: there is no user {DEFAULT_USER}; \
                 make one, or give --user"
            );
        }
        // After `catch`: the broker inherits the blocked ending signals, so the broker outlives this process
        // whatever sends the signal.
        Some(Arc::new(start_broker(&config, &activated, mode)?))
    };
    let names: Arc<dyn SocketNames> = match &broker {
        Some(broker) => broker.clone(),
        None => Arc::new(LocalNames::default()),
    };
    let names = activated.before(names);
    let manager = ServiceManager::from_environment();
    vhost::prepare();
    if mode != SandboxMode::Off {
        fork::enter_empty_namespaces();
        privileges::enter_empty_root();
        privileges::give_up(user, CapabilitySet::empty())?;
        sandbox::forbid_dumps()?;
        sandbox::restrict_files([])?;
    } else if user.is_some() {
        privileges::give_up(user, CapabilitySet::empty())?;
    }
    let can_reload = reader.is_some();
    let read = reader.clone().map(|reader| {
        let args = args.clone();
        Box::new(move || {
            let text = reader.text().map_err(|wrong| vec![wrong])?;
            args.to_config_again(&text)
        }) as ConfigSource
    });
    let leave_timeout = config.leave_timeout;
    let daemon = Daemon::start_with(config, names, read)?;
    sandbox::restrict_syscalls(Process::Daemon, mode)?;
    let manager = Arc::new(manager);
    let (end, ended) = mpsc::channel();
    let group = LeaveGroup::new();
    let on_signal = on_signal(&daemon, can_reload, &manager, end.clone(), group.clone());
    let _signals = daemon.events().add(OnSignal(on_signal));
    let _ends = watch_helpers(&daemon, broker.as_ref(), reader.as_deref(), &manager, end)?;
    keep_alive(daemon.events().timers(), &manager, daemon.check());
    manager.ready();
    signals::unblock()?;
    let end = ended.recv().map_err(|_| "the event loop has ended")?;
    tracing::info!("ending");
    manager.stopping(leave_timeout + STOPPING);
    if matches!(end, End::Signal) {
        daemon.leave(&group);
    }
    daemon.stop();
    match end {
        End::Signal => Ok(()),
        End::NoBroker => {
            Err("the broker is gone, so no front end of a pool could be served".into())
        }
    }
}

/// Why the daemon ends.
enum End {
    Signal,
    /// The broker and its parent are gone, and no front end is connected.
    NoBroker,
}

/// Watches for the ends of the daemon's other processes. A killed broker is replaced, so a broker is gone
/// only if its parent was killed, too.
fn watch_helpers(
    daemon: &Daemon,
    broker: Option<&Arc<Broker>>,
    reader: Option<&ConfigReader>,
    manager: &Arc<ServiceManager>,
    end: mpsc::Sender<End>,
) -> std::io::Result<[Option<Registration>; 2]> {
    let events = daemon.events();
    let reader = reader.map(|reader| {
        reader.on_end(events, || {
            tracing::error!("the reader of the configuration is gone: a reload takes a restart");
        })
    });
    let (timers, manager, is_idle) = (events.timers().clone(), manager.clone(), daemon.is_idle());
    let broker = broker.map(|broker| {
        broker.on_end(events, move || {
            tracing::error!(
                "the broker is gone: guests that are connected are served, pools refuse all others, \
                 and the daemon ends when no front end is connected"
            );
            manager.say_status("the broker is gone: this ends when no front end is connected");
            end_when_idle(&timers, is_idle, end);
        })
    });
    Ok([reader.transpose()?.flatten(), broker.transpose()?])
}

/// Ends the daemon when no front end is connected.
fn end_when_idle(
    timers: &Timers,
    is_idle: impl Fn() -> bool + Send + 'static,
    end: mpsc::Sender<End>,
) {
    if is_idle() {
        let _ = end.send(End::NoBroker);
        return;
    }
    let own = timers.clone();
    timers.call_at(Instant::now() + LOOK, move || end_when_idle(&own, is_idle, end));
}

/// Handles a signal.
fn on_signal(
    daemon: &Daemon,
    can_reload: bool,
    manager: &Arc<ServiceManager>,
    end: mpsc::Sender<End>,
    group: Arc<LeaveGroup>,
) -> impl FnMut(Signal) + Send + 'static + use<> {
    let (reload, manager) = (daemon.reload().clone(), manager.clone());
    let mut is_ending = false;
    move |signal| match signal {
        Signal::Hangup if can_reload => {
            manager.reloading();
            let manager = manager.clone();
            // The log has the result.
            reload.request(move |_| manager.ready());
        }
        // Without a configuration file, SIGHUP means the end of a terminal.
        Signal::End | Signal::Hangup => {
            // The second signal: drivers get no more time.
            if std::mem::replace(&mut is_ending, true) {
                group.give_up();
            }
            let _ = end.send(End::Signal);
        }
    }
}

/// Sends the service manager a sign of life after each return of `check`.
fn keep_alive(timers: &Timers, manager: &Arc<ServiceManager>, check: impl Fn() + Send + 'static) {
    let Some(interval) = manager.interval() else { return };
    let (own, manager) = (timers.clone(), manager.clone());
    timers.call_at(Instant::now() + interval, move || {
        check();
        manager.alive();
        keep_alive(&own, &manager, check);
    });
}

/// Confines a helper process `who`: first by `further`, then its system calls by `calls`.
fn confine(
    who: Process,
    keep: CapabilitySet,
    further: impl FnOnce() -> Result<(), SandboxError>,
    calls: impl FnOnce() -> Result<(), SandboxError>,
) -> bool {
    let confine = || -> Result<(), Box<dyn std::error::Error>> {
        fork::enter_empty_namespaces();
        privileges::give_up(None, keep)?;
        sandbox::forbid_dumps()?;
        further()?;
        calls()?;
        Ok(())
    };
    is_confined(who, confine())
}

fn is_confined<E: std::fmt::Display>(who: Process, confined: Result<(), E>) -> bool {
    if let Err(error) = &confined {
        tracing::error!(%error, "a process has no sandbox: {who:?}");
    }
    confined.is_ok()
}

/// Starts the config reader.
fn start_config_reader(path: &Path, mode: SandboxMode) -> std::io::Result<ConfigReader> {
    // The target of a link may be in another directory.
    let target = std::fs::canonicalize(path).ok();
    let directories = [Some(path), target.as_deref()].map(|path| path.map(directory_of));
    let directories = directories.iter().flatten().map(PathBuf::as_path);
    let who = Process::ConfigReader;
    ConfigReader::start(path, || {
        let files = || sandbox::restrict_files_to_reading(directories);
        confine(who, CapabilitySet::empty(), files, || sandbox::restrict_syscalls(who, mode))
    })
}

/// Starts the broker.
fn start_broker(
    config: &Config,
    activated: &ActivatedSockets,
    mode: SandboxMode,
) -> std::io::Result<Broker> {
    let inherited = config.guests.iter().filter_map(|guest| match &guest.socket {
        Socket::Path(_) => None,
        Socket::Listening(fd) => path_of(fd),
    });
    let rules = BrokerLimits {
        directories: socket_directories(config),
        configured: socket_paths(config).map(Path::to_owned).collect(),
        inherited: inherited.chain(activated.paths()).collect(),
    };
    let directories = rules.directories.clone();
    let who = Process::Broker;
    // Directories may belong to another user, such as a VMM's.
    let files = || sandbox::restrict_files(directories.iter().map(PathBuf::as_path));
    let calls = || sandbox::restrict_keeper_syscalls(mode);
    Broker::start(
        rules,
        || confine(who, CapabilitySet::DAC_OVERRIDE, files, calls),
        || is_confined(who, sandbox::restrict_syscalls(who, mode)),
    )
}

/// Paths of the configured sockets.
fn socket_paths(config: &Config) -> impl Iterator<Item = &Path> {
    let others = config.management.iter().chain(&config.metrics).map(PathBuf::as_path);
    config.guests.iter().filter_map(|guest| guest.path()).chain(others)
}

/// Directories in which sockets are made and removed.
fn socket_directories(config: &Config) -> Vec<PathBuf> {
    let mut directories: Vec<PathBuf> = socket_paths(config).map(directory_of).collect();
    directories.sort();
    directories.dedup();
    directories
}

/// A front end costs about twenty-five descriptors, and two for each peer.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open descriptors");
    }
}
