// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The whole configuration.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use virtio_ism_abi::Chid;

use super::bounds::{
    DEFAULT_CHID, DEFAULT_WINDOW, MAX_MOVE_QUEUES, MAX_WINDOW, MIN_WINDOW, check_socket_path,
};
use super::error::ConfigError;
use super::spec::{FabricSpec, GuestSpec};

/// Everything a [`Daemon`](crate::Daemon) needs to start.
#[derive(Clone, Debug)]
pub struct Config {
    /// The fabrics. Each guest must be on one of these.
    pub fabrics: Vec<FabricSpec>,
    /// The front ends to listen for from the start.
    pub guests: Vec<GuestSpec>,
    /// Path of the management socket; none if not wanted.
    pub management: Option<PathBuf>,
    /// Path of the read-only metrics socket; none if not wanted.
    pub metrics: Option<PathBuf>,
    /// Size of each front end's window, bytes, a power of two.
    pub window_size: u64,
    /// Move queues of each device, 1 to [`MAX_MOVE_QUEUES`].
    pub move_queues: u16,
    /// How long a device outlives the stop of all its rings; none: for ever.
    pub stopped_grace: Option<Duration>,
    /// Time for the drivers of an ending device to leave; zero: drivers are not asked.
    pub leave_timeout: Duration,
    /// Time for a front end to acknowledge a mapping before the daemon drops the front end.
    pub ack_timeout: Duration,
    /// Permission bits of sockets.
    pub socket_mode: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            fabrics: vec![FabricSpec::new(DEFAULT_CHID)],
            guests: Vec::new(),
            management: None,
            metrics: None,
            window_size: DEFAULT_WINDOW,
            move_queues: 2,
            stopped_grace: Some(Duration::from_secs(60)),
            leave_timeout: Duration::from_secs(1),
            ack_timeout: Duration::from_secs(5),
            socket_mode: 0o600,
        }
    }
}

impl Config {
    /// CHID of a guest without one: the first fabric's.
    pub fn default_chid(&self) -> Chid {
        self.fabrics.first().map_or(DEFAULT_CHID, |fabric| fabric.chid)
    }

    /// Checks the whole.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.mistakes().into_iter().next().map_or(Ok(()), Err)
    }

    /// Every mistake.
    pub fn mistakes(&self) -> Vec<ConfigError> {
        let mut mistakes = Vec::new();
        if !self.window_size.is_power_of_two()
            || !(MIN_WINDOW..=MAX_WINDOW).contains(&self.window_size)
        {
            mistakes.push(ConfigError::WindowSize(self.window_size));
        }
        if self.move_queues == 0 || self.move_queues > MAX_MOVE_QUEUES {
            mistakes.push(ConfigError::MoveQueues(self.move_queues));
        }
        if self.socket_mode > 0o777 {
            mistakes.push(ConfigError::SocketMode(format!("{:o}", self.socket_mode)));
        }
        let mut chids = BTreeSet::new();
        for fabric in &self.fabrics {
            if !fabric.chid.is_emulated() {
                mistakes.push(ConfigError::Chid(fabric.chid.to_string()));
            }
            if !chids.insert(fabric.chid) {
                mistakes.push(ConfigError::DuplicateChid(fabric.chid));
            }
        }
        let own = self.management.iter().chain(&self.metrics);
        mistakes.extend(own.filter_map(|path| check_socket_path(path).err()));
        let mut names = BTreeSet::new();
        let mut paths: BTreeSet<_> = self.management.as_deref().into_iter().collect();
        mistakes.extend(self.metrics.as_deref().and_then(|path| {
            (!paths.insert(path)).then(|| ConfigError::DuplicateSocket(path.into()))
        }));
        for guest in &self.guests {
            mistakes.extend(guest.check().err());
            if !names.insert(guest.name.as_str()) {
                mistakes.push(ConfigError::DuplicateName(guest.name.clone()));
            }
            if let Some(path) = guest.path()
                && !paths.insert(path)
            {
                mistakes.push(ConfigError::DuplicateSocket(path.into()));
            }
            if !chids.contains(&guest.chid) {
                let name = guest.name.clone();
                mistakes.push(ConfigError::UnknownFabric { name, chid: guest.chid });
            }
        }
        mistakes
    }
}
