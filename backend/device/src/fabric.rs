// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fabric: one CHID with its own devices, GIDs and tokens.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};

use virtio_ism_abi::{Chid, Gid};

use super::dmb::Tokens;
use super::fixed_window::{FixedWindow, FixedWindows};
use super::gid::usable;
use super::handle::DeviceHandle;
use super::session::DeviceSession;
use super::shm::ShmError;
use super::slab::Gauges;
use super::sync::{lock, read, write};
use super::{
    Clock, CloseReason, Device, EventNotifier, FabricCaps, FabricInfo, GidPool, Limits,
    MonotonicClock,
};

/// Parameters of a fabric.
#[derive(Clone)]
pub struct FabricConfig {
    /// The fabric's CHID, 0xFF00 to 0xFFFF.
    pub chid: Chid,
    /// Limits of a device without limits of its own.
    pub limits: Limits,
    /// Caps on the sum of the devices' limits.
    pub caps: FabricCaps,
    /// GIDs of the host: one pool for all fabrics of a daemon.
    pub gids: Arc<GidPool>,
    /// The clock of rates and event times.
    pub clock: Arc<dyn Clock>,
}

impl FabricConfig {
    /// A fabric with default limits and caps.
    pub fn new(chid: Chid) -> FabricConfig {
        FabricConfig {
            chid,
            limits: Limits::default(),
            caps: FabricCaps::default(),
            gids: Arc::default(),
            clock: Arc::new(MonotonicClock::default()),
        }
    }
}

/// Why a fabric cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// The CHID is below 0xFF00.
    #[error("CHID {0} is not in the range of emulated devices (ff00 to ffff)")]
    Chid(Chid),
    /// The default limits contradict each other.
    #[error("illegal limit: {0}")]
    Limits(&'static str),
    /// The system gives no random numbers.
    #[error("no random numbers")]
    Random(#[source] std::io::Error),
}

/// Why a device cannot join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The sum of limits would exceed a cap of the fabric.
    #[error("{what} of all devices would exceed the fabric's cap")]
    Cap {
        /// Name of the sum.
        what: &'static str,
    },
    /// The port's limits contradict each other.
    #[error("illegal limit: {0}")]
    Limits(&'static str),
    /// The pinned GID is alive already, or equals a living one in its second half.
    #[error("GID {0} is in use")]
    GidInUse(Gid),
    /// The pinned GID has a half of zeroes, unusable for drivers.
    #[error("GID {0} is not usable")]
    GidIllegal(Gid),
    /// A pinned GID on the loopback fabric, where every device has the fabric's GID.
    #[error("a GID cannot be pinned on the loopback fabric")]
    GidOnLoopback,
    /// The system gives no random numbers.
    #[error("no random numbers")]
    Random(#[source] std::io::Error),
}

/// Parameters of a joining front end.
#[derive(Clone, Debug, Default)]
pub struct DeviceConfig {
    /// Name for logs and metrics.
    pub name: String,
    /// GID of every session. For tests: a returning GID can be taken for its predecessor.
    pub pinned_gid: Option<Gid>,
    /// Limits, if different from the fabric's defaults.
    pub limits: Option<Limits>,
    /// Mapping slots of the front end, if different from the limits.
    pub max_maps: Option<u32>,
    /// The window of a front end that maps at its start only.
    pub fixed_window: Option<Arc<FixedWindow>>,
    /// Move queues, shown in the configuration space. 0 counts as 1.
    pub num_move_queues: u16,
}

/// One CHID.
pub struct Fabric {
    pub(super) chid: Chid,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) gids: Arc<GidPool>,
    pub(super) tokens: Tokens,
    pub(super) gauges: Arc<Gauges>,
    /// On loopback: the GID of every member.
    pub(super) shared_gid: Option<Gid>,
    limits: Limits,
    caps: FabricCaps,
    serial: AtomicU64,
    /// The sessions of a GID: one, except on loopback.
    sessions: RwLock<HashMap<Gid, Vec<Arc<DeviceSession>>>>,
    members: Mutex<Members>,
    fixed_windows: FixedWindows,
}

#[derive(Default)]
struct Members {
    devices: HashMap<u64, (Weak<Device>, Limits)>,
}

impl Fabric {
    /// A fabric without devices.
    ///
    /// # Errors
    /// See [`FabricError`].
    pub fn new(config: FabricConfig) -> Result<Arc<Fabric>, FabricError> {
        let FabricConfig { chid, limits, caps, gids, clock } = config;
        if !chid.is_emulated() {
            return Err(FabricError::Chid(chid));
        }
        limits.check().map_err(FabricError::Limits)?;
        let shared_gid =
            if chid.is_loopback() { Some(gids.draw().map_err(FabricError::Random)?) } else { None };
        Ok(Arc::new(Fabric {
            chid,
            clock,
            gids,
            tokens: Tokens::default(),
            gauges: Arc::default(),
            shared_gid,
            limits,
            caps,
            serial: AtomicU64::new(0),
            sessions: RwLock::default(),
            members: Mutex::default(),
            fixed_windows: FixedWindows::default(),
        }))
    }

    /// The default limits of the fabric's devices.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Adds a device. The device calls `notifier` when it has pending events. Dropping its last `Arc` removes
    /// the device.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub fn join(
        self: &Arc<Fabric>,
        port: DeviceConfig,
        notifier: Arc<dyn EventNotifier>,
    ) -> Result<Arc<Device>, JoinError> {
        let limits = port.limits.unwrap_or(self.limits);
        limits.check().map_err(JoinError::Limits)?;
        let member = self.next_serial();
        // Held until the device is added: two joining devices are counted one after the other.
        let mut members = lock(&self.members);
        members.check_caps(&self.caps, &limits)?;
        let first_gid = self.first_gid(port.pinned_gid)?;
        let fixed = port.fixed_window.clone();
        let handle =
            DeviceHandle::new(member, notifier, self.clock.clone(), limits.wake_rate(), fixed);
        let device = Device::new(self.clone(), port, limits, Arc::new(handle), first_gid);
        members.devices.insert(member, (Arc::downgrade(&device), limits));
        Ok(device)
    }

    /// A window of at most `most` bytes and `areas` areas, for a front end that maps at its start only. All
    /// bytes count as those of slabs: the front end can touch each of them. `None`: too small for a slab, or
    /// the fabric is loopback, where a slab has more than two ends.
    ///
    /// # Errors
    /// As [`PairMemory::new`](super::shm::PairMemory::new).
    pub fn fixed_window(
        &self,
        most: u64,
        areas: usize,
    ) -> Result<Option<Arc<FixedWindow>>, ShmError> {
        if self.shared_gid.is_some() {
            return Ok(None);
        }
        let most = most.min(self.limits.slab_bytes).min(self.limits.attached_slab_bytes);
        self.fixed_windows.open(self.next_serial(), most, areas, self.limits.slab_align)
    }

    /// The present state of the fabric.
    pub fn snapshot(&self) -> FabricInfo {
        let mut devices = self.devices();
        devices.sort_by_key(|device| device.handle.member);
        FabricInfo {
            chid: self.chid,
            tokens: self.tokens.len(),
            slabs: self.gauges.slabs.load(Ordering::Relaxed),
            slab_bytes: self.gauges.slab_bytes.load(Ordering::Relaxed),
            devices: devices.iter().map(|device| device.info()).collect(),
        }
    }

    fn first_gid(&self, pinned: Option<Gid>) -> Result<Gid, JoinError> {
        match (pinned, self.shared_gid) {
            (Some(_), Some(_)) => Err(JoinError::GidOnLoopback),
            (None, Some(shared)) => Ok(shared),
            (Some(pinned), None) if !usable(pinned) => Err(JoinError::GidIllegal(pinned)),
            (Some(pinned), None) if !self.gids.reserve(pinned) => Err(JoinError::GidInUse(pinned)),
            (Some(pinned), None) => Ok(pinned),
            (None, None) => self.gids.draw().map_err(JoinError::Random),
        }
    }

    /// A number unique on the fabric.
    pub(super) fn next_serial(&self) -> u64 {
        self.serial.fetch_add(1, Ordering::Relaxed)
    }

    /// The sessions with this GID.
    pub(super) fn find(&self, gid: Gid) -> Vec<Arc<DeviceSession>> {
        read(&self.sessions).get(&gid).cloned().unwrap_or_default()
    }

    /// Adds a session to the table of GIDs.
    pub(super) fn add_session(&self, session: &Arc<DeviceSession>) {
        write(&self.sessions).entry(session.gid).or_default().push(session.clone());
    }

    /// Removes a session from the table of GIDs: no new command can name it.
    pub(super) fn remove_session(&self, session: &Arc<DeviceSession>) {
        let mut sessions = write(&self.sessions);
        if let Some(same) = sessions.get_mut(&session.gid) {
            same.retain(|other| !Arc::ptr_eq(other, session));
            if same.is_empty() {
                sessions.remove(&session.gid);
            }
        }
    }

    /// Queues PEER_DOWN for each related device: a session has ended. The caller holds no lock of a device.
    pub(super) fn notify_peers_of_end(&self, session: &DeviceSession, how: CloseReason) {
        // Members of a loopback fabric share the GID: the end of one is not the end of the GID.
        if self.shared_gid.is_some() {
            return;
        }
        for device in self.devices() {
            if device.handle.member != session.handle.member {
                device.peer_ended(session.gid, how == CloseReason::Failed);
            }
        }
    }

    /// Removes an ending device.
    pub(super) fn remove_device(&self, member: u64) {
        lock(&self.members).devices.remove(&member);
    }

    fn devices(&self) -> Vec<Arc<Device>> {
        lock(&self.members).devices.values().filter_map(|(device, _)| device.upgrade()).collect()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if let Some(gid) = self.shared_gid {
            self.gids.release(gid);
        }
    }
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric").field("chid", &self.chid).finish_non_exhaustive()
    }
}

impl Members {
    /// Whether one more device with these limits stays within the caps.
    fn check_caps(&self, caps: &FabricCaps, new: &Limits) -> Result<(), JoinError> {
        let all = || self.devices.values().map(|(_, limits)| limits).chain([new]);
        let sum = |of: fn(&Limits) -> u64| all().fold(0u64, |sum, l| sum.saturating_add(of(l)));
        for (what, sum, cap) in [
            ("devices", sum(|_| 1), u64::from(caps.devices)),
            ("DMBs", sum(|l| l.max_dmbs.into()), caps.dmbs),
            ("DMB bytes", sum(|l| l.dmb_bytes), caps.dmb_bytes),
            ("slab bytes", sum(|l| l.slab_bytes), caps.slab_bytes),
        ] {
            if sum > cap {
                return Err(JoinError::Cap { what });
            }
        }
        Ok(())
    }
}
