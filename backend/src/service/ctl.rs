// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-ism ctl`: verbs over the management socket.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use thiserror::Error;

use crate::config::log_output::LogOutput;
use crate::config::{ConfigError, DEFAULT_CHID, GuestSpec, parse_seconds};
use crate::service::leave::LeaveInfo;
use crate::service::management::{AddGuest, Client, ClientError, Guest, ReloadInfo};
use crate::service::{output, table};

/// The variable with the management socket, shared with the `smc` command.
const OF_SMC: &str = "SMC_MANAGEMENT";

/// Options of `vhost-device-ism ctl`.
#[derive(Clone, Debug, Args)]
pub struct ControlArgs {
    /// The management socket of the daemon [default: $SMC_MANAGEMENT; else the socket of /etc/smc/smc.toml;
    /// else the first one accessible to this user: the packaged service's or the user's own "smc fabric"].
    #[arg(long, value_name = "PATH", env = "VHOST_DEVICE_ISM_MANAGEMENT")]
    management: Option<PathBuf>,

    #[command(subcommand)]
    verb: Verb,
}

/// The verbs.
#[derive(Clone, Debug, Subcommand)]
enum Verb {
    /// List the guests, and the users of pool devices.
    List {
        /// Print JSON, with all counters.
        #[arg(long)]
        json: bool,
    },
    /// Print counters in Prometheus' text format.
    Metrics,
    /// Add a guest until the daemon ends. The configuration file stays unchanged.
    Add {
        /// The guest's socket, with settings as for --socket-path of the daemon.
        #[arg(value_name = "PATH[,KEY=VALUE..]")]
        socket: String,
    },
    /// Remove a guest; its front end loses the device.
    ///
    /// Drivers with support for leaving are told before, and waited for.
    Remove {
        /// Name of the guest.
        name: String,
        /// How many seconds drivers get to leave; by default the daemon's --leave-timeout.
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        timeout: Option<Duration>,
    },
    /// Have the drivers of a guest leave its devices; the devices then take on nothing new.
    ///
    /// The guest stays, and a front end connecting again gets a device as usual. Fails if a driver has not
    /// left in time.
    Drain {
        /// Name of the guest.
        name: String,
        /// How many seconds drivers get to leave; by default the daemon's --leave-timeout.
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        timeout: Option<Duration>,
        /// Tell the drivers of a move of their machine to another host.
        #[arg(long)]
        migration: bool,
    },
    /// Take a drain back: the devices of a guest take on connections again.
    ///
    /// Connections return to the device, even if only some had left. Does nothing for a guest without a
    /// drain.
    Undrain {
        /// Name of the guest.
        name: String,
    },
    /// Have the daemon read its configuration file again, as SIGHUP does.
    Reload,
}

/// Why a request to the daemon failed.
#[derive(Debug, Error)]
pub(crate) enum ControlError {
    /// The daemon cannot be reached.
    #[error("cannot connect to {path}: {source}{hint}")]
    Connect { path: PathBuf, source: ClientError, hint: &'static str },
    /// The daemon refuses, or does not answer.
    #[error(transparent)]
    Refused(#[from] ClientError),
    /// The description of a socket is wrong.
    #[error(transparent)]
    Socket(#[from] ConfigError),
    /// A guest of the new configuration is not served.
    #[error("the file was read again, but {}", .0.join("; "))]
    Partly(Vec<String>),
    /// The settings of the machine cannot be read.
    #[error(transparent)]
    Settings(#[from] smc_settings::SettingsError),
    /// No daemon runs, and the place of this user's own daemon is writable by others.
    #[error(transparent)]
    NotPrivate(#[from] smc_settings::NotPrivate),
    /// Another operator has taken the drain back.
    #[error("the drain was taken back before all drivers had left")]
    TakenBack,
    /// Drivers still use their devices.
    #[error("{} of {} drivers have not left in time", .0.asked - .0.left, .0.asked)]
    Staying(LeaveInfo),
    /// The working directory is gone.
    #[error("{0}")]
    Directory(#[from] std::io::Error),
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Output(std::io::Error),
    /// The result cannot be printed as JSON.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}

/// The management socket to use without an option.
fn default_socket() -> Result<PathBuf, ControlError> {
    if let Some(named) = std::env::var_os(OF_SMC).filter(|named| !named.is_empty()) {
        return Ok(named.into());
    }
    match smc_settings::Settings::load()?.management {
        Some(of_file) => Ok(of_file),
        None => Ok(smc_settings::find_management()?),
    }
}

/// Asks the daemon. Returns what to print.
///
/// # Errors
/// See [`ControlError`].
pub(crate) fn run(args: &ControlArgs) -> Result<String, ControlError> {
    let socket = args.management.clone().map_or_else(default_socket, Ok)?;
    let mut client = Client::connect(&socket).map_err(|source| {
        let hint = match &source {
            ClientError::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
                "; is the daemon running, with this --management?"
            }
            ClientError::Io(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                "; the daemon made it for its own user and group, see socket-mode"
            }
            _ => "",
        };
        ControlError::Connect { path: socket.clone(), source, hint }
    })?;
    Ok(match &args.verb {
        Verb::List { json: true } => serde_json::to_string_pretty(&client.list()?)? + "\n",
        Verb::List { json: false } => list(&client.list()?, table::columns()),
        Verb::Metrics => client.metrics()?,
        Verb::Add { socket } => {
            client.add(&guest(socket)?)?;
            String::new()
        }
        Verb::Remove { name, timeout } => {
            client.remove_within(name, *timeout)?;
            String::new()
        }
        Verb::Drain { name, timeout, migration } => {
            let info = client.drain(name, *timeout, *migration)?;
            if info.taken_back > 0 {
                return Err(ControlError::TakenBack);
            }
            if info.left < info.asked {
                return Err(ControlError::Staying(info));
            }
            format!("drivers that have left: {}\n", info.left)
        }
        Verb::Undrain { name } => format!("devices in service again: {}\n", client.undrain(name)?),
        Verb::Reload => {
            let ReloadInfo { added, removed, changed, failed } = client.reload()?;
            let mut text = String::new();
            for (what, names) in [("added", added), ("removed", removed), ("changed", changed)] {
                for name in names {
                    let _ = writeln!(text, "{what} {name}");
                }
            }
            if !failed.is_empty() {
                output::print(&text).map_err(ControlError::Output)?;
                return Err(ControlError::Partly(failed));
            }
            text
        }
    })
}

/// A guest in the form of the management socket.
fn guest(text: &str) -> Result<AddGuest, ControlError> {
    let spec = GuestSpec::parse(text, DEFAULT_CHID)?;
    spec.check()?;
    let path = spec.path().unwrap_or(std::path::Path::new(""));
    let names_chid = text.split(',').any(|word| word.starts_with("chid="));
    Ok(AddGuest {
        // The daemon has another working directory.
        socket: std::path::absolute(path)?,
        chid: names_chid.then(|| spec.chid.to_string()),
        gid: spec.gid.map(|gid| gid.to_string()),
        max_maps: spec.max_maps,
        allow_any_file: spec.allow_any_file,
        mode: spec.mode.map(|mode| format!("{mode:o}")),
        devices: spec.devices,
        peer_uid: spec.peer_uid,
        peer_gid: spec.peer_gid,
        vfio_user: spec.vfio_user,
        name: Some(spec.name),
    })
}

/// The guests, one per line. `room`: columns of the terminal, if any.
fn list(guests: &[Guest], room: Option<usize>) -> String {
    let head =
        ["NAME", "CHID", "FRONT END", "DMBS", "PEERS", "MOVED", "REFUSED", "FAULTS", "SOCKET"];
    let mut lines = vec![head.map(str::to_owned)];
    let sum = |counts: &std::collections::BTreeMap<String, u64>| counts.values().sum::<u64>();
    for guest in guests {
        let front_end = match (guest.devices, guest.pid) {
            (Some(devices), _) => format!("{} of {devices}", guest.devices_in_use.unwrap_or(0)),
            (None, Some(pid)) => match guest.uid {
                Some(uid) => format!("pid {pid} uid {uid}"),
                None => format!("pid {pid} uid ?"),
            },
            (None, None) if !guest.connected => "-".to_owned(),
            (None, None) if guest.vfio_user => "connected by vfio-user".to_owned(),
            (None, None) => "connected".to_owned(),
        };
        let front_end = if guest.leaving { front_end + ", leaving" } else { front_end };
        let socket = match (&guest.pool, &guest.socket) {
            (None, Some(path)) => LogOutput(path.display()).to_string(),
            _ => "-".to_owned(),
        };
        lines.push([
            guest.name.clone(),
            guest.chid.clone(),
            front_end,
            guest.dmbs.to_string(),
            guest.peers.to_string(),
            guest.counts.move_bytes.to_string(),
            (sum(&guest.refusals) + sum(&guest.move_refusals)).to_string(),
            sum(&guest.faults).to_string(),
            socket,
        ]);
    }
    table::text(&lines, room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_a_socket_are_those_of_the_daemons_option() {
        let text = "/s,name=x,chid=ff01,mode=660,devices=3,peer-uid=7,allow-any-file,max-maps=2";
        let guest = guest(text).unwrap();
        assert_eq!(guest.socket, PathBuf::from("/s"));
        assert_eq!((guest.name.as_deref(), guest.chid.as_deref()), (Some("x"), Some("ff01")));
        assert_eq!((guest.mode.as_deref(), guest.devices), (Some("660"), Some(3)));
        assert_eq!(
            (guest.peer_uid, guest.max_maps, guest.allow_any_file),
            (Some(7), Some(2), true)
        );
    }

    #[test]
    fn a_guest_that_names_no_fabric_gets_the_daemons_first() {
        assert_eq!(guest("/s").unwrap().chid, None);
        assert!(guest("/s,foo").is_err());
    }

    #[test]
    fn the_table_has_a_line_for_each_guest() {
        let pool = Guest { name: "any".into(), devices: Some(4), ..Guest::default() };
        let member =
            Guest { name: "any/1".into(), pool: Some("any".into()), pid: Some(7), ..pool.clone() };
        let text = list(&[pool, Guest { devices: None, ..member }], None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[1].contains("0 of 4") && lines[2].contains("pid 7"), "{text}");
    }
}
