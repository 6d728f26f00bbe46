// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guests of a daemon: its fabrics, and a socket for each guest's front end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use virtio_ism_abi::Chid;
use virtio_ism_abi::event::LeaveReason;

use crate::config::{Caps, Config, ConfigError, FabricSpec, GuestSpec, Quotas};
use crate::service::error::DaemonError;
use crate::service::leave::{LeaveInfo, Leaving};
use crate::service::metrics;
use crate::vhost::device_pool::DevicePool;
use crate::vhost::device_slot::GuestStatus;
use crate::vhost::device_socket::{DeviceSocket, STOP};
use crate::vhost::event_loop::LoopHandle;
use crate::vhost::unix_socket::SocketNames;
use ism_device::sync::lock;
use ism_device::{Fabric, FabricCaps, GidPool, LeaveGroup, Limits};

/// The fabrics and guests of a daemon. The daemon and its management server share them.
pub(crate) struct Guests {
    config: Config,
    gids: Arc<GidPool>,
    fabrics: Mutex<BTreeMap<Chid, (FabricSpec, Arc<Fabric>)>>,
    sockets: Mutex<BTreeMap<String, Served>>,
    events: LoopHandle,
    names: Arc<dyn SocketNames>,
    started: Instant,
}

/// A served guest.
struct Served {
    spec: GuestSpec,
    /// `true`: from the configuration. `false`: added by the management socket.
    is_configured: bool,
    socket: GuestSocket,
}

/// The running socket of a guest.
pub(crate) enum GuestSocket {
    /// Of a guest with one device.
    Device(DeviceSocket),
    /// Of a device pool.
    Pool(DevicePool),
}

impl GuestSocket {
    fn status(&self) -> Vec<GuestStatus> {
        match self {
            GuestSocket::Device(socket) => vec![socket.status()],
            GuestSocket::Pool(pool) => pool.status(),
        }
    }

    /// Asks the drivers of the guest's devices to leave. Unless the drivers are to stay connected, no new
    /// front end gets a device from now on.
    pub(super) fn ask_to_leave(
        &self,
        reason: LeaveReason,
        within: Duration,
        group: &Arc<LeaveGroup>,
    ) {
        let stays = matches!(reason, LeaveReason::Drain | LeaveReason::Migration);
        match self {
            GuestSocket::Device(socket) => {
                if !stays {
                    socket.stop_listening();
                }
                socket.ask_to_leave(reason, within, group);
            }
            GuestSocket::Pool(pool) => {
                if !stays {
                    pool.stop_listening();
                }
                pool.ask_to_leave(reason, within, group);
            }
        }
    }

    fn stay(&self) -> usize {
        match self {
            GuestSocket::Device(socket) => socket.stay(),
            GuestSocket::Pool(pool) => pool.stay(),
        }
    }

    fn request_stop(&self) {
        match self {
            GuestSocket::Device(socket) => socket.request_stop(),
            GuestSocket::Pool(pool) => pool.request_stop(),
        }
    }

    /// Waits for the socket's end; `false` if a front end keeps a thread from ending.
    pub(crate) fn wait_stopped(&self, deadline: Instant) -> bool {
        match self {
            GuestSocket::Device(socket) => socket.wait_stopped(deadline),
            GuestSocket::Pool(pool) => pool.wait_stopped(deadline),
        }
    }
}

impl Guests {
    /// Makes the fabrics of `config`, without guests. `names` makes the guests' sockets.
    pub(crate) fn new(
        config: Config,
        events: LoopHandle,
        names: Arc<dyn SocketNames>,
    ) -> Result<Guests, DaemonError> {
        let guests = Guests {
            config,
            gids: Arc::default(),
            fabrics: Mutex::default(),
            sockets: Mutex::default(),
            events,
            names,
            started: Instant::now(),
        };
        for fabric in &guests.config.fabrics {
            guests.add_fabric(fabric)?;
        }
        Ok(guests)
    }

    /// Makes a fabric, unless present.
    pub(crate) fn add_fabric(&self, spec: &FabricSpec) -> Result<(), DaemonError> {
        let mut fabrics = lock(&self.fabrics);
        if fabrics.contains_key(&spec.chid) {
            return Ok(());
        }
        let made = Fabric::new(ism_device::FabricConfig {
            limits: limits(&spec.quotas),
            caps: caps(&spec.caps),
            gids: self.gids.clone(),
            ..ism_device::FabricConfig::new(spec.chid)
        });
        let made = made.map_err(|source| DaemonError::Fabric { chid: spec.chid, source })?;
        fabrics.insert(spec.chid, (spec.clone(), made));
        Ok(())
    }

    /// The present fabrics.
    pub(crate) fn fabrics(&self) -> Vec<FabricSpec> {
        lock(&self.fabrics).values().map(|(spec, _)| spec.clone()).collect()
    }

    /// Forgets fabrics without guests, except the fabrics chosen by `kept`.
    pub(crate) fn forget_fabrics(&self, kept: impl Fn(Chid) -> bool) {
        let used: BTreeSet<Chid> = lock(&self.sockets).values().map(|s| s.spec.chid).collect();
        lock(&self.fabrics).retain(|chid, _| kept(*chid) || used.contains(chid));
    }

    /// The served guests, with whether each is from the configuration.
    pub(crate) fn specs(&self) -> Vec<(GuestSpec, bool)> {
        let sockets = lock(&self.sockets);
        sockets.values().map(|served| (served.spec.clone(), served.is_configured)).collect()
    }

    /// Marks a guest as configured.
    pub(crate) fn set_configured(&self, name: &str) {
        if let Some(served) = lock(&self.sockets).get_mut(name) {
            served.is_configured = true;
        }
    }

    /// The loop waiting for the guests' front ends.
    pub(crate) fn events(&self) -> &LoopHandle {
        &self.events
    }

    /// Maker of the sockets.
    pub(crate) fn names(&self) -> &Arc<dyn SocketNames> {
        &self.names
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Adds a guest: makes its socket and listens.
    pub(crate) fn add(&self, spec: GuestSpec, is_configured: bool) -> Result<(), DaemonError> {
        spec.check()?;
        let name = spec.name.clone();
        let fabric = lock(&self.fabrics).get(&spec.chid).map(|(_, fabric)| fabric.clone());
        let fabric = fabric
            .ok_or_else(|| ConfigError::UnknownFabric { name: name.clone(), chid: spec.chid })?;
        let mut sockets = lock(&self.sockets);
        if sockets.contains_key(&name) {
            return Err(ConfigError::DuplicateName(name).into());
        }
        let events = self.events.clone();
        let (config, names) = (&self.config, self.names.clone());
        let (chid, served) = (spec.chid, spec.clone());
        let started = match spec.devices {
            None => {
                DeviceSocket::start(spec, fabric, config, events, names).map(GuestSocket::Device)
            }
            Some(devices) => DevicePool::start(spec, devices, fabric, config, events, names)
                .map(GuestSocket::Pool),
        };
        let socket = started.map_err(|source| DaemonError::Guest { name: name.clone(), source })?;
        tracing::info!(guest = name, %chid, "listening");
        sockets.insert(name, Served { spec: served, is_configured, socket });
        Ok(())
    }

    /// Removes a guest and stops its socket. The socket stops on its own threads; the caller may wait for the
    /// end.
    pub(crate) fn remove(&self, name: &str) -> Result<GuestSocket, DaemonError> {
        let socket = lock(&self.sockets).remove(name);
        let Served { socket, .. } = socket.ok_or_else(|| DaemonError::NoSuchGuest(name.into()))?;
        socket.request_stop();
        tracing::info!(guest = name, "removed");
        Ok(socket)
    }

    /// Asks the drivers of a guest to leave. The caller has to wait.
    pub(crate) fn ask_to_leave(
        &self,
        name: &str,
        reason: LeaveReason,
        within: Option<Duration>,
    ) -> Result<Leaving, DaemonError> {
        let within = within.unwrap_or(self.config.leave_timeout);
        let leaving = Leaving::new(LeaveGroup::new(), reason, within);
        let sockets = lock(&self.sockets);
        let served = sockets.get(name).ok_or_else(|| DaemonError::NoSuchGuest(name.into()))?;
        leaving.ask(name, &served.socket);
        Ok(leaving)
    }

    /// Cancels the drain of a guest. Returns the number of drained devices.
    pub(crate) fn undrain(&self, name: &str) -> Result<usize, DaemonError> {
        let sockets = lock(&self.sockets);
        let served = sockets.get(name).ok_or_else(|| DaemonError::NoSuchGuest(name.into()))?;
        let devices = served.socket.stay();
        if devices > 0 {
            tracing::info!(guest = name, devices, "the drain was taken back");
        }
        Ok(devices)
    }

    /// Asks the drivers of these guests to leave, each for its reason, and waits for all together.
    pub(crate) fn leave_together<'a>(&self, guests: impl Iterator<Item = (&'a str, LeaveReason)>) {
        let within = self.config.leave_timeout;
        let leaving = Leaving::new(LeaveGroup::new(), LeaveReason::Removal, within);
        {
            let sockets = lock(&self.sockets);
            for (name, reason) in guests {
                if let Some(served) = sockets.get(name) {
                    leaving.ask_for(name, &served.socket, reason);
                }
            }
        }
        leaving.wait();
    }

    /// Asks all drivers to leave because of the daemon's end, and waits. `group` ends the wait early.
    pub(crate) fn leave_all(&self, group: &Arc<LeaveGroup>) -> LeaveInfo {
        let within = self.config.leave_timeout;
        let leaving = Leaving::new(group.clone(), LeaveReason::Restart, within);
        for (name, served) in &*lock(&self.sockets) {
            leaving.ask(name, &served.socket);
        }
        leaving.wait()
    }

    pub(crate) fn list(&self) -> Vec<GuestStatus> {
        lock(&self.sockets).values().flat_map(|served| served.socket.status()).collect()
    }

    /// Metrics in Prometheus' text format.
    pub(crate) fn metrics(&self) -> String {
        metrics::render(&self.list(), self.names.is_up(), self.started.elapsed())
    }

    /// Removes all guests, and waits for the end of their sockets.
    pub(crate) fn shutdown(&self) {
        let sockets = std::mem::take(&mut *lock(&self.sockets));
        // Stop all at the same time, so one hanging socket does not delay the others.
        for Served { socket, .. } in sockets.values() {
            socket.request_stop();
        }
        let deadline = Instant::now() + STOP;
        for (name, Served { socket, .. }) in &sockets {
            if !socket.wait_stopped(deadline) {
                tracing::warn!(
                    guest = name,
                    "a thread still runs because its front end keeps it from ending"
                );
            }
        }
        self.events.timers().close();
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
