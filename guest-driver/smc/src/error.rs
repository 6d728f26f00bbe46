// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the command, and a hint for the user about each.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_driver::DeviceAddress;
use ism_sys::connect_unix;
use thiserror::Error;

use crate::{access, output};

/// Why there is no program to run.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum NoProgram {
    /// Nothing has the name.
    #[error("no such program")]
    NotFound,
    /// A directory has the name.
    #[error("it is a directory")]
    Directory,
    /// The file exists, but no mode bit allows its execution.
    #[error("it is no executable file")]
    NotExecutable,
}

/// Why a command failed.
#[derive(Debug, Error)]
pub(crate) enum CliError {
    /// A device could not be opened.
    #[error("cannot open the device {device}: {}", without_path(device, source))]
    Device {
        /// Its socket.
        device: PathBuf,
        /// The error of the library.
        source: io::Error,
    },
    /// The daemon did not answer on its management socket.
    #[error("cannot ask the daemon at {socket}: {source}")]
    Management {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: vhost_device_ism::management::ClientError,
    },
    /// There is neither a daemon nor a process to ask.
    #[error("no daemon listens at {socket}, and no process of yours has SMC")]
    NothingRuns {
        /// The management socket.
        socket: PathBuf,
    },
    /// A meaningless command of smc-tools.
    #[error("{0}")]
    Tool(String),
    /// The settings of the machine cannot be read.
    #[error("settings: {0}")]
    Settings(String),
    /// No CDI specification can be made.
    #[error("no specification for containers: {0}")]
    Cdi(String),
    /// A process cannot be captured.
    #[error("no capture: {0}")]
    Capture(String),
    /// A cgroup cannot be granted TCP option 254.
    #[error("no grant: {0}")]
    Grant(String),
    /// Text without an address to listen on.
    #[error("{0:?} is no address to listen on: expected HOST:PORT, [IPV6]:PORT, :PORT or PORT")]
    Address(String),
    /// Text naming no server.
    #[error("{0:?} names no server: expected HOST:PORT, [IPV6]:PORT, or HOST PORT")]
    Server(String),
    /// A name without an address.
    #[error("{host} is not known: {why}")]
    Unknown {
        /// The name.
        host: String,
        /// The error of the resolver.
        why: String,
    },
    /// A user EID unfit for CLC.
    #[error("{name:?} is not an EID: {why}")]
    Eid {
        /// The given name.
        name: String,
        /// The defect of the name.
        why: String,
    },
    /// Listening failed.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// Connecting failed.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Where to.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// A program could not be run.
    #[error("cannot run {program}: {why}")]
    Run {
        /// Its name.
        program: String,
        /// Why.
        why: String,
    },
    /// There is no program to run.
    #[error("cannot run {program}: {why}")]
    NoProgram {
        /// Its name.
        program: String,
        /// The reason.
        why: NoProgram,
    },
    /// The system does not execute a program.
    #[error("cannot run {program}: {source}")]
    Exec {
        /// Its name.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A measuring server does not answer.
    #[error("cannot connect to {address}: {source}")]
    NoPerfServer {
        /// Where to.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The connection is TCP, but has to be SMC.
    #[error("the connection is not SMC: {why}")]
    NotSmc {
        /// The reason for TCP.
        why: String,
    },
    /// Bytes of a connection did not arrive.
    #[error("connection with {peer}: {source}")]
    Transfer {
        /// The other end.
        peer: String,
        /// Why.
        source: io::Error,
    },
    /// The default directory of sockets belongs to another user.
    #[error("{0} is not a directory that belongs to you alone")]
    NotPrivate(PathBuf),
    /// A file or other thing of the system.
    #[error("{what}: {source}")]
    Io {
        /// The attempted operation.
        what: String,
        /// The error of the operation.
        source: io::Error,
    },
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Output(io::Error),
    /// The conformance suite has no results.
    #[error("{0}")]
    Conform(smc_conform::SuiteError),
    /// Two files that cannot be compared.
    #[error("{} and {}: {why}", .earlier.display(), .later.display())]
    Compare {
        /// The first file.
        earlier: PathBuf,
        /// The second file.
        later: PathBuf,
        /// Why not.
        why: smc_conform::NoReport,
    },
    /// The RDMA device for the suite cannot be used.
    #[error("--rnic {name}: {why}")]
    ConformRnic {
        /// The device.
        name: String,
        /// Why not.
        why: String,
    },
    /// A process started by this one has failed.
    #[error("the {name} process {problem}")]
    Helper {
        /// The purpose of the process.
        name: String,
        /// The problem, as the end of the sentence.
        problem: String,
    },
    /// Contradictory options, or a meaningless value.
    #[error("{0}")]
    Usage(String),
    /// Failed measurements; the results of the others are printed.
    #[error("{}", .0.join("\n"))]
    Runs(Vec<String>),
    /// The returned copy differs from the sent data.
    #[error("the {what} differ: {sent} was sent, {got} arrived")]
    Different {
        /// The compared property.
        what: &'static str,
        /// The property of the sent data.
        sent: String,
        /// The property of the received data.
        got: String,
    },
    /// Something could not be decoded.
    #[error(transparent)]
    Decode(#[from] crate::decode::DecodeError),
    /// A plot could not be drawn.
    #[error("plot: {0}")]
    Plot(String),
}

/// Advice about a socket without access for this user; `None` if access is not the problem.
pub(crate) fn permission_hint(socket: &Path) -> Option<String> {
    let error = connect_unix(socket, Duration::ZERO).err()?;
    // A regular file refuses connections like a socket without a listener.
    let is_other = error.kind() == io::ErrorKind::ConnectionRefused
        && socket.metadata().is_ok_and(|data| !data.file_type().is_socket());
    match is_other || error.kind() == io::ErrorKind::PermissionDenied {
        true => access::hint(socket),
        false => None,
    }
}

/// Advice about a server after a failed connection.
fn connect_hint(address: &str, source: &io::Error) -> Option<String> {
    let port = address.rsplit(':').next().unwrap_or_default();
    match source.kind() {
        io::ErrorKind::ConnectionRefused => {
            Some(format!("Is a server there? Start one with \"smc listen {port}\"."))
        }
        // The server sent no CLC message, or nothing.
        io::ErrorKind::InvalidData | io::ErrorKind::TimedOut if source.get_ref().is_some() => Some(
            "Is it an ordinary TCP server? Such a server takes the handshake for data. \"smc check\" \
             tells, and with \"--rendezvous auto\" only servers that announce SMC are sent a \
             handshake."
                .into(),
        ),
        _ => None,
    }
}

/// The error of a device without its path, named by the caller already.
pub(crate) fn without_path(device: &Path, source: impl std::fmt::Display) -> String {
    let path = device.display();
    let text = source.to_string().replace(&format!("connecting to {path}: "), "");
    let text = text.replace(&format!("{path}: "), "");
    // Users naming a device have not asked for RDMA.
    text.strip_suffix("; no RNIC").map_or(text.clone(), str::to_owned)
}

fn is_pci(device: &Path) -> bool {
    !matches!(DeviceAddress::from(device), DeviceAddress::Socket(_))
}

/// Whether the user meant a PCI address: no socket has such a name.
fn is_like_pci(device: &Path) -> bool {
    let name = device.to_string_lossy();
    let is_address = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
    name.contains(':') && name.chars().all(is_address)
}

impl CliError {
    /// For `map_err`: a [`CliError::Io`] with the attempted operation.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> CliError {
        let what = what.into();
        move |source| CliError::Io { what, source }
    }

    /// Prints the error, with advice.
    pub(crate) fn show(&self) {
        let hint = self.hint().map(|hint| format!("\n     {}", output::printable(&hint)));
        let text = output::printable(&self.to_string());
        output::note(&format!("smc: {text}{}", hint.unwrap_or_default()));
    }

    /// The exit status of the command. "smc run" usually exits with the program's status, so
    /// failures of "smc run" itself have the numbers of env(1).
    pub(crate) fn status(&self) -> u8 {
        match self {
            CliError::Run { .. } => 125,
            CliError::NoProgram { why: NoProgram::NotFound, .. } => 127,
            CliError::NoProgram { .. } | CliError::Exec { .. } => 126,
            _ => 1,
        }
    }

    /// Whether the reader of standard output has closed the pipe.
    pub(crate) fn is_closed_output(&self) -> bool {
        matches!(self, CliError::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Advice for the user, if any.
    pub(crate) fn hint(&self) -> Option<String> {
        let socket = match self {
            CliError::Device { device, .. } if !is_pci(device) => Some(device),
            CliError::Management { socket, .. } | CliError::NothingRuns { socket } => Some(socket),
            _ => None,
        };
        if let Some(hint) = socket.and_then(|socket| permission_hint(socket)) {
            return Some(hint);
        }
        let hint = match self {
            CliError::Device { device, .. } if is_pci(device) => "\"smc devices\" lists the PCI \
                devices of this machine and what is wrong with each. \"smc devices --bind\" makes \
                them usable by programs."
                .into(),
            CliError::Device { device, .. } if device.as_os_str() == "none" => {
                "Without a device a connection needs an RNIC: \"smc devices\" lists them, and \"smc \
                 doctor\" shows how to make one."
                    .into()
            }
            CliError::Device { device, .. } if is_like_pci(device) => "That is no PCI address, as \
                0000:00:04.0 is (a device is at most 1f, a function at most 7). \"smc devices\" lists \
                those of this machine."
                .into(),
            CliError::Device { device, .. } if !device.exists() => format!(
                "No daemon listens there. Start one with \"smc fabric\", with \"smc fabric --socket-path {}\", \
                 or as the packaged service vhost-device-ism; or name another socket with --device or \
                 SMC_DEVICE. \"smc config\" shows where it was looked for.",
                device.display()
            ),
            CliError::Device { .. } => "Either no daemon listens there any more (start one with \
                \"smc fabric\"), or another process uses the device: it serves one at a time \
                (\"smc stat\" shows which; name another device with --device or SMC_DEVICE)."
                .into(),
            CliError::Management { socket, .. } if !socket.exists() => format!(
                "No daemon listens there. Start one with \"smc fabric\", or with \"smc fabric \
                 --management {} --socket-path ...\"; or name another socket with --management or \
                 SMC_MANAGEMENT.",
                socket.display()
            ),
            CliError::NothingRuns { socket } => format!(
                "No daemon listens there. Start one with \"smc fabric\", or with \"smc fabric \
                 --management {} --socket-path ...\"; or name another socket with --management or \
                 SMC_MANAGEMENT. Processes are \"smc listen\", \"smc connect\", and programs under \
                 \"smc run\".",
                socket.display()
            ),
            CliError::Eid { .. } => {
                "An EID has at most 32 characters: A-Z, 0-9, '.' and '-', the first a letter or \
                 digit. Both ends need one in common."
                    .into()
            }
            CliError::NotSmc { .. } => "Both ends need a device on the same fabric and an EID in \
                common, and the server must be one that speaks SMC (\"smc listen\"). With --tcp-ok \
                the connection goes on as TCP."
                .into(),
            CliError::Connect { address, source } => return connect_hint(address, source),
            CliError::NoPerfServer { address, .. } => {
                let port = address.rsplit(':').next().unwrap_or_default();
                format!("Is a server there? Start one with \"smc perf --serve {port}\".")
            }
            CliError::NotPrivate(_) => {
                "Set XDG_RUNTIME_DIR to a directory of yours, or name sockets with --socket-path, \
                 --device and --management."
                    .into()
            }
            _ => return None,
        };
        Some(hint)
    }
}
