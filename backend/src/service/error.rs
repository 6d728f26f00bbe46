// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The error of a daemon's calls.

use thiserror::Error;
use virtio_ism_abi::Chid;

use crate::config::ConfigError;
use crate::vhost::unix_socket::SocketError;
use ism_device::FabricError;

/// Why a daemon does not start, or a guest cannot be added or removed.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration has several mistakes.
    #[error("{}", list(.0))]
    Mistakes(Vec<ConfigError>),
    /// The new configuration has changes requiring a restart.
    #[error("a change of {} takes a restart", .0.join(", "))]
    Restart(Vec<String>),
    /// The daemon was started without a configuration file, so there is nothing to reread.
    #[error("the daemon was started without --config")]
    NoConfigFile,
    /// A fabric cannot be made.
    #[error("fabric {chid}: {source}")]
    Fabric {
        /// The fabric's CHID.
        chid: Chid,
        /// The reason.
        source: FabricError,
    },
    /// A guest's socket cannot be made.
    #[error("guest {name:?}: {source}")]
    Guest {
        /// The guest.
        name: String,
        /// The reason.
        source: SocketError,
    },
    /// The management socket cannot be made.
    #[error("management: {0}")]
    Management(#[from] SocketError),
    /// No guest has that name.
    #[error("there is no guest {0:?}")]
    NoSuchGuest(String),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

fn list(mistakes: &[ConfigError]) -> String {
    mistakes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
