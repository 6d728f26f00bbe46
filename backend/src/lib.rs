//! `vhost-device-ism`: a vhost-user daemon that emulates the virtio-ism device.
//!
//! From the ground up:
//!
//! - [`shm`]: slabs, the memory that two front ends share; the only room with `unsafe`.
//! - [`device`]: the ISM device without virtio. Bytes of commands in, bytes of replies and events
//!   out; everything a guest claims is judged there.
//! - [`vhost`]: sockets, rings, mappings, notifications. What a front end does is judged there.
//! - [`config`], [`args`], [`management`], [`sandbox`]: what an operator sees; `reload` is SIGHUP, and
//!   `ctl` talks to a running daemon.
//! - [`Daemon`]: all of it as a value. A program can run one in its own process:
//!
//! ```no_run
//! use vhost_device_ism::{Config, Daemon, config::GuestSpec};
//!
//! let daemon = Daemon::start(Config::default())?;
//! daemon.add_guest(GuestSpec::new("/run/ism/vm1.sock"))?;
//! daemon.add_guest(GuestSpec::new("/run/ism/vm2.sock"))?;
//! // Front ends come and go.
//! daemon.stop();
//! # Ok::<(), vhost_device_ism::DaemonError>(())
//! ```
#![deny(unsafe_code)]

mod activation;
pub mod args;
mod broker;
pub mod config;
mod config_reader;
mod ctl;
mod daemon;
pub mod device;
mod error;
#[allow(unsafe_code, reason = "no crate makes a process without `unsafe`")]
mod fork;
mod guests;
mod id_map;
mod logging;
pub mod management;
mod metrics;
mod packets;
mod privileges;
mod reload;
pub mod sandbox;
mod service_manager;
pub mod shm;
mod signals;
pub mod vhost;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use clap::Parser;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

pub use config::Config;
pub use daemon::Daemon;
pub use error::DaemonError;
pub use vhost::device_slot::{GuestStatus, MemberInfo, PoolInfo};

use activation::{ActivatedSockets, PassedSockets};
use args::{Args, SandboxMode};
use broker::Broker;
use config::{ConfigError, Socket};
use config_reader::ConfigReader;
use privileges::{DEFAULT_USER, User};
use reload::ConfigSource;
use sandbox::Process;
use service_manager::ServiceManager;
use signals::{OnSignal, Signal};
use vhost::timers::Timers;
use vhost::unix_socket::{LocalNames, SocketNames, directory_of, path_of};

/// What `--print-capabilities` prints: the type of device, as a VMM's tools expect it.
const CAPABILITIES: &str = "{\n  \"type\": \"ism\"\n}";

/// Runs the command line until SIGTERM or SIGINT. `args` starts with the program's name.
pub fn run_main<I, T>(args: I) -> ExitCode
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    if args.print_capabilities {
        println!("{CAPABILITIES}");
        return ExitCode::SUCCESS;
    }
    if let Some(args::Command::Ctl(args)) = &args.command {
        return ctl(args);
    }
    // First of all: what is opened now could have the number of a descriptor that was promised.
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
        println!("nothing is wrong; fabrics: {fabrics}, guests: {guests}{passed}");
        return ExitCode::SUCCESS;
    }
    match run(&args, config, activated) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

fn ctl(args: &ctl::ControlArgs) -> ExitCode {
    match ctl::run(args) {
        Ok(text) => {
            // A reader of the pipe that has gone is no failure.
            let _ = std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("vhost-device-ism: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The configuration with the sockets that were passed for it, and what can be checked before a
/// socket is made.
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
    // Before the broker: else it would have the daemon's channel to the broker.
    let reader = match &args.config {
        Some(path) if mode == SandboxMode::Off => Some(ConfigReader::direct(path)),
        Some(path) => Some(start_config_reader(path, mode)?),
        None => None,
    };
    let names: Arc<dyn SocketNames> = if mode == SandboxMode::Off {
        tracing::warn!("running without a sandbox");
        Arc::new(LocalNames::default())
    } else {
        if geteuid().is_root() && user.is_none() {
            tracing::warn!(
                "running as root, without capabilities: there is no user {DEFAULT_USER}; \
                 make one, or give --user"
            );
        }
        // After `catch`: it inherits that the ending signals are blocked, so it outlives this
        // process, whatever sends the signal.
        Arc::new(start_broker(&config, &activated, mode)?)
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
    let read = reader.map(|reader| {
        let args = args.clone();
        Box::new(move || {
            let text = reader.text().map_err(|wrong| vec![wrong])?;
            args.to_config_again(&text)
        }) as ConfigSource
    });
    let daemon = Daemon::start_with(config, names, read)?;
    sandbox::restrict_syscalls(Process::Daemon, mode)?;
    let manager = Arc::new(manager);
    let (end, ended) = mpsc::channel();
    let _signals = daemon.events().add(OnSignal(on_signal(&daemon, can_reload, &manager, end)));
    keep_alive(daemon.events().timers(), &manager, daemon.check());
    manager.ready();
    signals::unblock()?;
    ended.recv().map_err(|_| "the event loop has ended")?;
    tracing::info!("ending");
    manager.stopping();
    daemon.stop();
    Ok(())
}

/// What is done on a signal.
fn on_signal(
    daemon: &Daemon,
    can_reload: bool,
    manager: &Arc<ServiceManager>,
    end: mpsc::Sender<()>,
) -> impl FnMut(Signal) + Send + 'static + use<> {
    let (reload, manager) = (daemon.reload().clone(), manager.clone());
    move |signal| match signal {
        Signal::Hangup if can_reload => {
            manager.reloading();
            let manager = manager.clone();
            // The log says what became of it.
            reload.request(move |_| manager.ready());
        }
        // Without a file that could be read again, this is the end of a terminal.
        Signal::End | Signal::Hangup => {
            let _ = end.send(());
        }
    }
}

/// Tells the service manager that the daemon lives, each time that `check` returns.
fn keep_alive(timers: &Timers, manager: &Arc<ServiceManager>, check: impl Fn() + Send + 'static) {
    let Some(interval) = manager.interval() else { return };
    let (own, manager) = (timers.clone(), manager.clone());
    timers.call_at(Instant::now() + interval, move || {
        check();
        manager.alive();
        keep_alive(&own, &manager, check);
    });
}

/// Starts the process that opens the configuration file again.
fn start_config_reader(path: &Path, mode: SandboxMode) -> std::io::Result<ConfigReader> {
    // Where a link leads to now may be elsewhere.
    let target = std::fs::canonicalize(path).ok();
    let directories = [Some(path), target.as_deref()].map(|path| path.map(directory_of));
    let confine = || -> Result<(), Box<dyn std::error::Error>> {
        fork::enter_empty_namespaces();
        privileges::give_up(None, CapabilitySet::empty())?;
        sandbox::forbid_dumps()?;
        sandbox::restrict_files_to_reading(directories.iter().flatten().map(PathBuf::as_path))?;
        sandbox::restrict_syscalls(Process::ConfigReader, mode)?;
        Ok(())
    };
    ConfigReader::start(path, || {
        let confined = confine();
        if let Err(error) = &confined {
            tracing::error!(%error, "the process that reads the configuration has no sandbox");
        }
        confined.is_ok()
    })
}

/// Starts the process that makes sockets.
fn start_broker(
    config: &Config,
    activated: &ActivatedSockets,
    mode: SandboxMode,
) -> std::io::Result<Broker> {
    let directories = socket_directories(config);
    let inherited = config.guests.iter().filter_map(|guest| match &guest.socket {
        Socket::Path(_) => None,
        Socket::Listening(fd) => path_of(fd),
    });
    let confine = || -> Result<(), Box<dyn std::error::Error>> {
        fork::enter_empty_namespaces();
        // Directories may be another user's, as those of a VMM are.
        privileges::give_up(None, CapabilitySet::DAC_OVERRIDE)?;
        sandbox::forbid_dumps()?;
        sandbox::restrict_files(directories.iter().map(PathBuf::as_path))?;
        sandbox::restrict_syscalls(Process::Broker, mode)?;
        Ok(())
    };
    let inherited = inherited.chain(activated.paths());
    Broker::start(inherited.collect(), directories.clone(), || {
        let confined = confine();
        if let Err(error) = &confined {
            tracing::error!(%error, "the broker has no sandbox");
        }
        confined.is_ok()
    })
}

/// Directories in which sockets are made and removed.
fn socket_directories(config: &Config) -> Vec<PathBuf> {
    let paths = config.guests.iter().filter_map(|guest| guest.path());
    let others = config.management.iter().chain(&config.metrics).map(PathBuf::as_path);
    let mut directories: Vec<PathBuf> = paths.chain(others).map(directory_of).collect();
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
