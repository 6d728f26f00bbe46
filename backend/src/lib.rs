//! `vhost-device-ism`: a vhost-user daemon that emulates the virtio-ism device.
//!
//! From the ground up:
//!
//! - [`shm`]: slabs, the memory that two front ends share; the only room with `unsafe`.
//! - [`device`]: the ISM device without virtio. Bytes of commands in, bytes of replies and events
//!   out; everything a guest claims is judged there.
//! - [`vhost`]: sockets, rings, mappings, notifications. What a front end does is judged there.
//! - [`config`], [`args`], [`management`], [`sandbox`]: what an operator sees.
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

pub mod args;
mod broker;
pub mod config;
mod daemon;
pub mod device;
mod error;
#[allow(unsafe_code, reason = "no crate makes a process without `unsafe`")]
mod fork;
mod guests;
mod logging;
pub mod management;
mod metrics;
mod privileges;
pub mod sandbox;
mod service_manager;
pub mod shm;
mod signals;
pub mod vhost;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

pub use config::Config;
pub use daemon::Daemon;
pub use error::DaemonError;
pub use vhost::device_slot::{GuestStatus, MemberInfo, PoolInfo};

use args::{Args, SandboxMode};
use broker::Broker;
use config::Socket;
use privileges::{DEFAULT_USER, User};
use sandbox::Process;
use service_manager::ServiceManager;
use vhost::unix_socket::{LocalNames, SocketNames, path_of};

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
    logging::init(args.log_level);
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let config = args.to_config()?;
    if config.guests.is_empty() && config.management.is_none() {
        return Err("nothing to do: give --socket-path, --fd, --config or --management".into());
    }
    let mode = args.sandbox_mode();
    let user = if mode == SandboxMode::Off && args.user.is_none() {
        None
    } else {
        User::choose(args.user.as_deref())?
    };
    raise_descriptor_limit();
    signals::catch()?;
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
        Arc::new(start_broker(&config, mode)?)
    };
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
    let daemon = Daemon::start_with(config, names)?;
    sandbox::restrict_syscalls(Process::Daemon, mode)?;
    manager.ready();
    while !signals::wait(manager.interval())? {
        // Takes the locks of all devices, so a daemon that hangs does not get further.
        daemon.list();
        manager.alive();
    }
    tracing::info!("ending");
    manager.stopping();
    daemon.stop();
    Ok(())
}

/// Starts the process that makes sockets.
fn start_broker(config: &Config, mode: SandboxMode) -> std::io::Result<Broker> {
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
    Broker::start(inherited.collect(), || {
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
    let mut directories: Vec<PathBuf> = paths
        .chain(config.management.as_deref())
        .map(|path| match path.parent() {
            Some(parent) if parent != Path::new("") => parent.into(),
            _ => PathBuf::from("."),
        })
        .collect();
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
