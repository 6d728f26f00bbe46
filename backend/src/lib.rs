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
pub mod config;
mod daemon;
pub mod device;
mod error;
mod guests;
mod logging;
pub mod management;
mod metrics;
pub mod sandbox;
pub mod shm;
mod signals;
pub mod vhost;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub use config::Config;
pub use daemon::Daemon;
pub use error::DaemonError;
pub use vhost::device_socket::GuestStatus;

use args::{Args, SandboxMode};

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
    raise_descriptor_limit();
    signals::catch()?;
    let mode = args.sandbox_mode();
    if mode == SandboxMode::Off {
        tracing::warn!("running without a sandbox");
    } else {
        sandbox::forbid_dumps()?;
        let directories = socket_directories(&config);
        sandbox::restrict_files(directories.iter().map(PathBuf::as_path))?;
    }
    let daemon = Daemon::start(config)?;
    sandbox::restrict_syscalls(mode)?;
    signals::wait()?;
    tracing::info!("ending");
    daemon.stop();
    Ok(())
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
