//! Errors of the command, and a hint for the user about each.

use std::io;
use std::path::PathBuf;

use guest_driver::DeviceAddress;
use thiserror::Error;

/// Why a command failed.
#[derive(Debug, Error)]
pub(crate) enum CliError {
    /// A device could not be opened.
    #[error("cannot open the device {device}: {source}")]
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
    /// Text that is not an address.
    #[error("{0:?} is not an address: expected ADDR:PORT, :PORT or PORT")]
    Address(String),
    /// A user EID that CLC cannot carry.
    #[error("{name:?} is not an EID: {why}")]
    Eid {
        /// What was given.
        name: String,
        /// What is wrong with it.
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
    /// The connection is TCP, and that was not allowed.
    #[error("the connection is not SMC: {why}")]
    NotSmc {
        /// Why it is TCP.
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
    /// The default directory of sockets belongs to somebody else.
    #[error("{0} is not a directory that belongs to you alone")]
    NotPrivate(PathBuf),
    /// A file or other thing of the system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Output(io::Error),
    /// A process that this one started has failed.
    #[error("the {name} process {problem}")]
    Helper {
        /// What the process is for.
        name: String,
        /// What happened.
        problem: String,
    },
    /// Options that contradict each other, or a value that makes no sense.
    #[error("{0}")]
    Usage(String),
    /// The copy that came back is not what was sent.
    #[error("the {what} differ: {sent} was sent, {got} arrived")]
    Different {
        /// What was compared.
        what: &'static str,
        /// Of what was sent.
        sent: String,
        /// Of what arrived.
        got: String,
    },
    /// Something could not be decoded.
    #[error(transparent)]
    Decode(#[from] crate::decode::DecodeError),
    /// A plot could not be drawn.
    #[error("plot: {0}")]
    Plot(String),
}

fn is_pci(device: &std::path::Path) -> bool {
    !matches!(DeviceAddress::from(device), DeviceAddress::Socket(_))
}

impl CliError {
    /// For `map_err`: an [`CliError::Io`] that names what was tried.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> CliError {
        let what = what.into();
        move |source| CliError::Io { what, source }
    }

    /// Whether the reader of standard output has closed it.
    pub(crate) fn is_closed_output(&self) -> bool {
        matches!(self, CliError::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// What the user can do about it, if anything.
    pub(crate) fn hint(&self) -> Option<String> {
        let hint = match self {
            CliError::Device { device, .. } if is_pci(device) => "\"smc devices\" lists the PCI \
                devices of this machine and what is wrong with each. \"smc devices --bind\" makes \
                them usable by programs."
                .into(),
            CliError::Device { device, .. } if !device.exists() => format!(
                "No daemon listens there. Start one with \"smc fabric\" (it prints its sockets), or \
                 with \"smc fabric --socket-path {}\"; or name another socket with --device or \
                 SMC_DEVICE.",
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
            CliError::Connect { address, .. } => {
                format!("Is a server there? Start one with \"smc listen {address}\".")
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
