//! The daemon as a value: fabrics, guests, management. A program can run one in its own process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use thiserror::Error;
use virtio_ism_abi::Chid;

use crate::config::{Caps, Config, ConfigError, GuestSpec, Quotas};
use crate::device::sync::lock;
use crate::device::{self, Fabric, FabricCaps, FabricError, GidPool, Limits};
use crate::management::Server;
use crate::metrics;
use crate::timers::Timers;
use crate::vhost::device_socket::{DeviceSocket, GuestStatus, STOP};
use crate::vhost::unix_socket::SocketError;

/// Why a daemon does not start, or a port cannot be added or removed.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A fabric cannot be made.
    #[error("fabric {chid}: {source}")]
    Fabric {
        /// Its CHID.
        chid: Chid,
        /// Why.
        source: FabricError,
    },
    /// A guest's socket cannot be made.
    #[error("guest {name:?}: {source}")]
    Guest {
        /// The guest.
        name: String,
        /// Why.
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

/// A running daemon. Dropping it stops it.
pub struct Daemon {
    core: Arc<Core>,
    management: Option<Server>,
}

/// What the daemon's parts share.
pub(crate) struct Core {
    config: Config,
    fabrics: BTreeMap<Chid, Arc<Fabric>>,
    guests: Mutex<BTreeMap<String, DeviceSocket>>,
    timers: Timers,
}

impl Daemon {
    /// Makes the fabrics and the sockets, and starts to listen.
    ///
    /// # Errors
    /// The first thing that cannot be done; what was done before is undone.
    pub fn start(config: Config) -> Result<Daemon, DaemonError> {
        config.check()?;
        crate::vhost::prepare();
        let gids = Arc::new(GidPool::default());
        let mut fabrics = BTreeMap::new();
        for fabric in &config.fabrics {
            let made = Fabric::new(device::FabricConfig {
                limits: limits(&fabric.quotas),
                caps: caps(&fabric.caps),
                gids: gids.clone(),
                ..device::FabricConfig::new(fabric.chid)
            })
            .map_err(|source| DaemonError::Fabric { chid: fabric.chid, source })?;
            fabrics.insert(fabric.chid, made);
        }
        let core =
            Arc::new(Core { fabrics, guests: Mutex::default(), timers: Timers::default(), config });
        let mut daemon = Daemon { core, management: None };
        for spec in &daemon.core.config.guests {
            daemon.core.add_guest(spec.clone())?;
        }
        if let Some(path) = &daemon.core.config.management {
            let mode = daemon.core.config.socket_mode;
            daemon.management = Some(Server::start(path, mode, daemon.core.clone())?);
        }
        Ok(daemon)
    }

    /// Adds a guest: makes its socket and listens.
    ///
    /// # Errors
    /// A name or socket in use, an unknown fabric, or a socket that cannot be made.
    pub fn add_guest(&self, spec: GuestSpec) -> Result<(), DaemonError> {
        self.core.add_guest(spec)
    }

    /// Removes a guest: its socket goes, its front end is disconnected, the fabric
    /// removes its device. Waits for that, unless its front end keeps it from ending.
    ///
    /// # Errors
    /// [`DaemonError::NoSuchGuest`].
    pub fn remove_guest(&self, name: &str) -> Result<(), DaemonError> {
        let socket = self.core.take_guest(name)?;
        socket.wait_stopped(Instant::now() + STOP);
        Ok(())
    }

    /// The guests, by name.
    pub fn list(&self) -> Vec<GuestStatus> {
        self.core.list()
    }

    /// Metrics in Prometheus' text format (OpenMetrics).
    pub fn metrics(&self) -> String {
        metrics::render(&self.core.list())
    }

    /// Ends everything and waits for it; a front end that keeps a thread from ending is left.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(management) = self.management.take() {
            management.stop();
        }
        let sockets = std::mem::take(&mut *self.core.lock());
        // First all, then wait: one that hangs does not delay the others' end.
        for socket in sockets.values() {
            socket.request_stop();
        }
        let deadline = Instant::now() + STOP;
        for (name, socket) in &sockets {
            if !socket.wait_stopped(deadline) {
                tracing::warn!(
                    guest = name,
                    "a thread still runs because its front end keeps it from ending"
                );
            }
        }
        self.core.timers.close();
    }
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, DeviceSocket>> {
        lock(&self.guests)
    }

    /// The fabric of guests that name none.
    pub(crate) fn default_chid(&self) -> Chid {
        self.config.default_chid()
    }

    pub(crate) fn add_guest(&self, spec: GuestSpec) -> Result<(), DaemonError> {
        spec.check()?;
        let name = spec.name.clone();
        let fabric = self
            .fabrics
            .get(&spec.chid)
            .ok_or_else(|| ConfigError::UnknownFabric { name: name.clone(), chid: spec.chid })?;
        let mut sockets = self.lock();
        if sockets.contains_key(&name) {
            return Err(ConfigError::DuplicateName(name).into());
        }
        let timers = self.timers.clone();
        let socket = DeviceSocket::start(spec, fabric.clone(), &self.config, timers)
            .map_err(|source| DaemonError::Guest { name: name.clone(), source })?;
        tracing::info!(guest = name, chid = %socket.spec().chid, "listening");
        sockets.insert(name, socket);
        Ok(())
    }

    /// Takes a port out and makes it end; the end happens on its own threads.
    pub(crate) fn take_guest(&self, name: &str) -> Result<DeviceSocket, DaemonError> {
        let socket = self.lock().remove(name);
        let socket = socket.ok_or_else(|| DaemonError::NoSuchGuest(name.into()))?;
        socket.request_stop();
        tracing::info!(guest = name, "removed");
        Ok(socket)
    }

    pub(crate) fn list(&self) -> Vec<GuestStatus> {
        self.lock().values().map(DeviceSocket::status).collect()
    }
}

fn limits(quotas: &Quotas) -> Limits {
    let default = Limits::default();
    Limits {
        max_dmbs: quotas.max_dmbs.unwrap_or(default.max_dmbs),
        dmb_bytes: quotas.max_dmb_bytes.unwrap_or(default.dmb_bytes),
        slab_bytes: quotas.max_slab_bytes.unwrap_or(default.slab_bytes),
        attached_slab_bytes: quotas.max_attached_bytes.unwrap_or(default.attached_slab_bytes),
        max_attach: quotas.max_attach.unwrap_or(default.max_attach),
        max_peers: quotas.max_peers.unwrap_or(default.max_peers),
        max_maps: quotas.max_maps.unwrap_or(default.max_maps),
        commands_per_second: quotas.commands_per_second.unwrap_or(default.commands_per_second),
        wakes_per_second: quotas.wakes_per_second.unwrap_or(default.wakes_per_second),
        ..default
    }
}

fn caps(caps: &Caps) -> FabricCaps {
    let default = FabricCaps::default();
    FabricCaps {
        devices: caps.devices.unwrap_or(default.devices),
        dmb_bytes: caps.dmb_bytes.unwrap_or(default.dmb_bytes),
        slab_bytes: caps.slab_bytes.unwrap_or(default.slab_bytes),
        ..default
    }
}
