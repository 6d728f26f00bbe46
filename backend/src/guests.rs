//! The guests of a daemon: its fabrics, and a socket for each guest's front end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use virtio_ism_abi::Chid;

use crate::config::{Caps, Config, ConfigError, GuestSpec, Quotas};
use crate::device::sync::lock;
use crate::device::{self, Fabric, FabricCaps, GidPool, Limits};
use crate::error::DaemonError;
use crate::vhost::device_pool::DevicePool;
use crate::vhost::device_slot::GuestStatus;
use crate::vhost::device_socket::{DeviceSocket, STOP};
use crate::vhost::timers::Timers;
use crate::vhost::unix_socket::SocketNames;

/// The fabrics and guests of a daemon. The daemon and its management server share them.
pub(crate) struct Guests {
    config: Config,
    fabrics: BTreeMap<Chid, Arc<Fabric>>,
    sockets: Mutex<BTreeMap<String, GuestSocket>>,
    timers: Timers,
    names: Arc<dyn SocketNames>,
}

/// The running socket of a guest.
pub(crate) enum GuestSocket {
    /// Of one device.
    Device(DeviceSocket),
    /// Of many.
    Pool(DevicePool),
}

impl GuestSocket {
    fn status(&self) -> Vec<GuestStatus> {
        match self {
            GuestSocket::Device(socket) => vec![socket.status()],
            GuestSocket::Pool(pool) => pool.status(),
        }
    }

    fn request_stop(&self) {
        match self {
            GuestSocket::Device(socket) => socket.request_stop(),
            GuestSocket::Pool(pool) => pool.request_stop(),
        }
    }

    /// Waits until it has stopped; `false` if a front end keeps a thread from ending.
    pub(crate) fn wait_stopped(&self, deadline: Instant) -> bool {
        match self {
            GuestSocket::Device(socket) => socket.wait_stopped(deadline),
            GuestSocket::Pool(pool) => pool.wait_stopped(deadline),
        }
    }
}

impl Guests {
    /// Makes the fabrics of `config`. There are no guests yet. `names` makes their sockets.
    pub(crate) fn new(config: Config, names: Arc<dyn SocketNames>) -> Result<Guests, DaemonError> {
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
        Ok(Guests { config, fabrics, sockets: Mutex::default(), timers: Timers::default(), names })
    }

    /// Makes sockets.
    pub(crate) fn names(&self) -> &Arc<dyn SocketNames> {
        &self.names
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Adds a guest: makes its socket and listens.
    pub(crate) fn add(&self, spec: GuestSpec) -> Result<(), DaemonError> {
        spec.check()?;
        let name = spec.name.clone();
        let fabric = self
            .fabrics
            .get(&spec.chid)
            .ok_or_else(|| ConfigError::UnknownFabric { name: name.clone(), chid: spec.chid })?;
        let mut sockets = lock(&self.sockets);
        if sockets.contains_key(&name) {
            return Err(ConfigError::DuplicateName(name).into());
        }
        let timers = self.timers.clone();
        let (fabric, config, names) = (fabric.clone(), &self.config, self.names.clone());
        let chid = spec.chid;
        let started = match spec.devices {
            None => {
                DeviceSocket::start(spec, fabric, config, timers, names).map(GuestSocket::Device)
            }
            Some(devices) => DevicePool::start(spec, devices, fabric, config, timers, names)
                .map(GuestSocket::Pool),
        };
        let socket = started.map_err(|source| DaemonError::Guest { name: name.clone(), source })?;
        tracing::info!(guest = name, %chid, "listening");
        sockets.insert(name, socket);
        Ok(())
    }

    /// Removes a guest and makes its socket stop. The socket stops on its own threads; the caller
    /// may wait for it.
    pub(crate) fn remove(&self, name: &str) -> Result<GuestSocket, DaemonError> {
        let socket = lock(&self.sockets).remove(name);
        let socket = socket.ok_or_else(|| DaemonError::NoSuchGuest(name.into()))?;
        socket.request_stop();
        tracing::info!(guest = name, "removed");
        Ok(socket)
    }

    pub(crate) fn list(&self) -> Vec<GuestStatus> {
        lock(&self.sockets).values().flat_map(GuestSocket::status).collect()
    }

    /// Removes all guests, and waits until their sockets have stopped.
    pub(crate) fn shutdown(&self) {
        let sockets = std::mem::take(&mut *lock(&self.sockets));
        // All stop at the same time, so that one that hangs does not delay the others.
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
        self.timers.close();
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
        guest_memory: quotas.max_guest_memory.unwrap_or(default.guest_memory),
        touched_memory: quotas.max_touched_bytes.unwrap_or(default.touched_memory),
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
