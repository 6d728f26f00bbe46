// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The stack of a process: its devices and RNICs, and state beyond a single socket.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use smc_core::handshake::{self, DeclineReason, IsmDevice as Offered, Kinds, Tolerance};
use smc_core::wire::clc::{CarrierOptions, Limits};
use smc_core::wire::ids::{Chid, Gid as WireGid, Hostname, LinkLimits, PeerId, Release};
use virtio_ism_abi::Gid;

use super::config::{Config, DataPath, MAX_DEVICES};
use super::counters::Counters;
use super::devices::{Cause, Current, Devices, OpenDevice, Slot};
use super::no_device::{kind_of_all, open_error};
use super::offers::Offers;
use super::outlive::{self, CarrierWatch};
use super::statistics::{Handshakes, Process, Server, TcpConnections};
use super::upkeep::Maintenance;
use super::{ConnectionSnapshot, LinkGroupInfo, RnicInfo, Rnics};
use crate::conn::{Common, Conn};
use crate::reactor::Reactor;
use crate::reactor::spin::Spin;
use crate::reactor::tcp_watch::TcpHandler;
use crate::smcd::{Fabric, Fabrics, SmcdSource};
use crate::smcr::{NoRdma, RdmaHost};
use crate::traffic::{CostModel, TrafficTable};
use ism_sys::{OnceBox, lock};
use smc_info::Fallback;
use smc_rendezvous::PeerDiscovery;
use virtio_ism::transport::DeviceAddress;
use virtio_ism::{IsmDevice, OpenOptions, Prefer};

/// The SMC stack of a process: its devices, RNICs, peers and configuration. Each socket belongs to a
/// stack and keeps it alive. A closed connection does not: bytes not sent before the drop of the stack
/// are lost, and the peer sees a reset, unless the connection has left its device and continues over
/// TCP ([`Config::outlive_device`]). [`Totals::closing`] has the number of such connections.
pub struct Stack {
    config: Config,
    peer_id: PeerId,
    peer_discovery: PeerDiscovery,
    pub(super) devices: Devices,
    rdma: OnceBox<Result<Rdma, NoRdma>>,
    pub(super) maintenance: Maintenance,
    common: Common,
    counters: Counters,
    /// Accepted clients without a Confirm.
    pub(super) offers: Arc<Offers>,
    statistics: OnceBox<Server>,
    pub(super) outliving: CarrierWatch,
}

/// Totals of a stack since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Connections over SMC.
    pub smc: u64,
    /// Connections over SMC-R among them.
    pub smc_r: u64,
    /// Connections that continued as TCP.
    pub tcp: u64,
    /// Handshakes that broke the connection.
    pub broken: u64,
    /// Closed connections whose peer has not closed yet.
    pub closing: usize,
    /// Peers known now on fabrics.
    pub peers: usize,
    /// DMBs and RMBs kept for the next connection.
    pub pooled: usize,
    /// Link groups of SMC-R now.
    pub groups: usize,
}

/// The RNICs, and the reactor of their events.
struct Rdma {
    host: Arc<RdmaHost>,
    reactor: Arc<Reactor<Conn>>,
}

impl Stack {
    /// Opens the devices and RNICs of the configuration.
    ///
    /// A device disappears when its daemon ends. Later connections and accepts try to open it again.
    ///
    /// # Errors
    /// None of the devices can be opened and there is no RNIC, or an RNIC named by the configuration
    /// cannot be used. With a configuration without either, every connection is TCP. The error is
    /// [`io::ErrorKind::ResourceBusy`] if other processes use all of the devices. If they fail alike in
    /// another way, the error is of the same kind: [`io::ErrorKind::NotFound`] without a socket, or
    /// [`io::ErrorKind::PermissionDenied`] for a socket this user may not connect to.
    pub fn open(config: Config) -> io::Result<Arc<Stack>> {
        let mut random = [0u8; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let devices = Devices::new(config.devices.iter().take(MAX_DEVICES));
        let wanted = !config.devices.is_empty();
        let common = Common {
            spin: Arc::new(Spin::new(config.spin)),
            moved: Arc::default(),
            close_timeout: config.testing.close_timeout,
        };
        let peer_discovery =
            PeerDiscovery::open(config.rendezvous, config.rendezvous_options.clone());
        let stack = Arc::new(Stack {
            peer_discovery,
            common,
            config,
            peer_id: PeerId(random),
            devices,
            rdma: OnceBox::new(),
            maintenance: Maintenance::default(),
            counters: Counters::default(),
            offers: Arc::default(),
            statistics: OnceBox::new(),
            outliving: CarrierWatch::default(),
        });
        let rdma = stack.start_rdma();
        match (&rdma, &stack.config.rnics) {
            (Err(NoRdma::Off), _) | (Ok(_), _) => {}
            (Err(why), Rnics::Names(_)) => return Err(io::Error::other(why.to_string())),
            (Err(why), _) => tracing::debug!(%why, "no SMC-R"),
        }
        let _ = stack.rdma.set(rdma);
        let current = stack.current();
        match current.no_device() {
            Some(Fallback::NoDevice(why)) if wanted => {
                return Err(io::Error::new(kind_of_all(&stack.devices.error_kinds()), why));
            }
            _ => {}
        }
        if let Some(path) = &stack.config.statistics {
            let reporting = Arc::downgrade(&stack);
            match Server::start(path, move || Some(reporting.upgrade()?.report())) {
                Ok(server) => {
                    let _ = stack.statistics.set(server);
                }
                // No connection depends on statistics.
                Err(error) => tracing::info!(path = %path.display(), %error, "no statistics"),
            }
        }
        Ok(stack)
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The id of this host in handshakes, different in each stack (CLC-8).
    pub(super) fn peer_id(&self) -> PeerId {
        self.peer_id
    }

    /// The discovery of peers that speak SMC.
    pub fn peer_discovery(&self) -> &PeerDiscovery {
        &self.peer_discovery
    }

    /// GIDs and CHIDs of the open devices.
    pub fn devices(self: &Arc<Self>) -> Vec<(virtio_ism_abi::Chid, Gid)> {
        let current = self.current();
        current.fabrics.0.iter().map(|f| (f.chid(), f.device().gid())).collect()
    }

    /// The counters kept by one of the devices for this process, indexed by
    /// [`virtio_ism_abi::command::stat`]: requested moves and kicks, posted wakes, and more.
    ///
    /// # Errors
    /// No open device has this GID, or the device has no counters.
    pub fn device_stats(self: &Arc<Self>, gid: Gid) -> io::Result<[u64; 16]> {
        let current = self.current();
        let fabric = current.fabrics.0.iter().find(|fabric| fabric.device().gid() == gid);
        let fabric = fabric.ok_or(io::ErrorKind::NotFound)?;
        fabric.device().stats().map_err(io::Error::other)
    }

    /// Totals since the start.
    pub fn totals(&self) -> Totals {
        let peers: Vec<_> = self.devices.open().iter().flat_map(|live| live.fabric.all()).collect();
        let groups = self.link_groups();
        let [smc, smc_r, tcp, broken] = self.counters.totals();
        let rmbs: usize = groups.iter().map(|group| group.rmbs.1).sum();
        Totals {
            smc,
            smc_r,
            tcp,
            broken,
            closing: lock(&self.maintenance.closing).len(),
            peers: peers.len(),
            pooled: peers.iter().map(|peer| peer.pooled()).sum::<usize>() + rmbs,
            groups: groups.len(),
        }
    }

    /// The costs and gains of this stack's connections.
    pub(super) fn cost_model(&self) -> &'static CostModel {
        let is_socket = |device: &DeviceAddress| matches!(device, DeviceAddress::Socket(_));
        match self.config.devices.iter().all(is_socket) {
            true => &CostModel::HOST,
            false => &CostModel::GUEST,
        }
    }

    /// The settings shared by the stack's connections.
    pub(crate) fn common(&self) -> &Common {
        &self.common
    }

    /// The counts of connections.
    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Accepted clients without a Confirm.
    pub(super) fn offers(&self) -> &Arc<Offers> {
        &self.offers
    }

    /// The TCP connections of this stack.
    pub(super) fn tcp_connections(&self) -> &TcpConnections {
        self.counters.tcp_connections()
    }

    /// The present devices, RNICs, link groups and connections, and totals since the start.
    pub fn report(&self) -> Process {
        let totals = self.totals();
        let (connections, [sent, received]) = self.common.moved.with_open(|| self.connections());
        let mut report = Process {
            devices: self.devices.infos(),
            rnics: self.rnics(),
            no_rdma: self.no_rdma().map(ToString::to_string),
            groups: self.link_groups(),
            endpoints: self
                .config
                .traffic
                .as_deref()
                .map(TrafficTable::endpoints)
                .unwrap_or_default(),
            totals: Handshakes {
                smc_d: totals.smc.saturating_sub(totals.smc_r),
                smc_r: totals.smc_r,
                tcp: totals.tcp,
                broken: totals.broken,
                closing: totals.closing,
                peers: totals.peers,
                pooled: totals.pooled,
                reasons: self.tcp_connections().reasons(),
                sent,
                received,
            },
            ..Process::new()
        };
        report.set_connections(connections, self.tcp_connections());
        report
    }

    /// Bytes of the own DMB of a new connection.
    pub(crate) fn buffer_len(&self) -> u32 {
        buffer_of(self.config.recv_buffer)
    }

    /// The open devices. Tries again to open the others.
    pub(crate) fn current(self: &Arc<Self>) -> Arc<Current> {
        self.current_for(Cause::Program)
    }

    /// Like [`Stack::current`], for this cause.
    pub(super) fn current_for(self: &Arc<Self>, cause: Cause) -> Arc<Current> {
        let open = |slot: &Slot| {
            let live = self.start(slot)?;
            self.outliving.device_opened();
            Ok(live)
        };
        self.devices.current(cause, open, |slots| self.describe(slots))
    }

    fn describe(&self, slots: &[Slot]) -> Current {
        let live: Vec<_> = slots.iter().filter_map(Slot::offered).collect();
        let mut config = handshake::Config::new(self.peer_id);
        config.hostname = hostname();
        config.ueids = self.config.eids.clone();
        config.seid = self.config.testing.seid;
        if live.is_empty() && slots.iter().any(|slot| slot.open().is_some()) {
            config.without_device = DeclineReason::Drained;
        }
        config.wait = self.config.clc_timeout;
        config.tolerance = Tolerance { sizes: Limits::LINUX, ..Tolerance::STRICT };
        config.carriers =
            (self.config.outlive_device).then(|| CarrierOptions::new(self.carrier_features()));
        if self.config.testing.release_2_0 {
            config.release = Release::V2_0;
        }
        if let Some(rdma) = self.rdma() {
            let smcr = &self.config.smcr;
            config.kinds.set(Kinds::SMCR_V1, smcr.v1);
            config.kinds.set(Kinds::SMCR_V2, smcr.v2);
            config.limits =
                LinkLimits { max_conns: smcr.max_connections, max_links: smcr.max_links };
            if let Some(mac) = rdma.host.shared().ports().iter().find_map(|port| port.mac()) {
                config.peer_id = PeerId::new(self.peer_id.instance(), mac);
            }
        }
        config.devices = live
            .iter()
            .map(|live| Offered {
                chid: Chid(live.fabric.chid().0),
                gid: WireGid(live.fabric.device().gid().0),
            })
            .collect();
        let mut missing: Vec<_> =
            slots.iter().filter(|slot| slot.offered().is_none()).map(Slot::problem).collect();
        if slots.is_empty() {
            missing.push("none configured".into());
        }
        if let Some(Err(why)) = self.rdma.get()
            && *why != NoRdma::Off
            // A user naming devices, and no RNIC, has not asked for RDMA.
            && (slots.is_empty() || !matches!(why, NoRdma::NoDevice | NoRdma::NoLibrary))
        {
            missing.push(why.to_string());
        }
        Current {
            fabrics: Fabrics(live.iter().map(|live| live.fabric.clone()).collect()),
            config: Arc::new(config),
            rdma: self.rdma().map(|rdma| (rdma.host.clone(), rdma.reactor.clone())),
            open: slots.iter().filter_map(Slot::open).cloned().collect(),
            gone: slots.iter().flat_map(Slot::gone).collect(),
            missing: missing.join("; "),
        }
    }

    /// Opens a device.
    fn start(self: &Arc<Self>, slot: &Slot) -> io::Result<OpenDevice> {
        // Connections waiting for the device on TCP keep their reactor.
        let last = slot.last_reactor().filter(|reactor| self.waits_on_tcp(reactor));
        if let Some(reactor) = last.filter(|reactor| !reactor.is_free()) {
            reactor.wake_background();
            return Err(io::Error::other("connections are leaving the device that is gone"));
        }
        let mut options = OpenOptions::new(slot.address().clone());
        options.guest_memory = self.config.guest_memory as u64;
        options.timeout = self.config.device_timeout;
        options.leaves = self.config.outlive_device;
        options.owner = slot.owner();
        options.prefer = match self.config.path {
            DataPath::Auto => Prefer::Auto,
            DataPath::Window => Prefer::Window,
            DataPath::Move => Prefer::Move,
        };
        let device =
            IsmDevice::open(options).map_err(|error| open_error(slot.address(), &error))?;
        let fabric = Fabric::new(device);
        let user: Weak<Stack> = Arc::downgrade(self);
        let source = SmcdSource::new(&fabric, user);
        let reactor = match last {
            Some(reactor) => {
                reactor.renew(source)?;
                reactor.clone()
            }
            None => Reactor::new(source)?,
        };
        let (stack, maintained) = (Arc::downgrade(self), Arc::downgrade(&fabric));
        let (parting, device) = (stack.clone(), fabric.device().clone());
        let maintenance = move || {
            let stack = stack.upgrade()?;
            let fabric = maintained.upgrade()?;
            stack.maintain(Some(&fabric))
        };
        let lost = move |reactor: &Reactor<Conn>| outlive::part_from(&parting, &device, reactor);
        run_in_background(&reactor, "smc-driver", maintenance, lost)?;
        Ok(OpenDevice { fabric, reactor })
    }

    fn start_rdma(self: &Arc<Self>) -> Result<Rdma, NoRdma> {
        let host = RdmaHost::open(&self.config.rnics, &self.config.smcr)?;
        let none = |error: io::Error| NoRdma::System(error.to_string());
        let reactor = Reactor::new(host.clone()).map_err(none)?;
        let stack = Arc::downgrade(self);
        let maintenance = move || stack.upgrade()?.maintain(None);
        run_in_background(&reactor, "smc-rdma", maintenance, |_| ()).map_err(none)?;
        Ok(Rdma { host, reactor })
    }

    fn rdma(&self) -> Option<&Rdma> {
        self.rdma.get()?.as_ref().ok()
    }

    /// The SMC connections of this stack. Connections closed by the application are among them until
    /// the peer has closed them, too.
    pub fn connections(&self) -> Vec<ConnectionSnapshot> {
        // The reactors are read once: a device going between two reads would be in both.
        let reactors = self.reactors();
        let mut all: Vec<_> = reactors.iter().flat_map(|reactor| reactor.connections()).collect();
        all.extend(self.not_among(&reactors));
        all.iter().map(|conn| conn.snapshot()).collect()
    }

    /// The reason for no SMC-R, if there is none.
    pub fn no_rdma(&self) -> Option<&NoRdma> {
        self.rdma.get()?.as_ref().err()
    }

    /// The RNIC ports usable by SMC-R.
    pub fn rnics(&self) -> Vec<RnicInfo> {
        self.rdma().map_or_else(Vec::new, |rdma| rdma.host.rnics())
    }

    /// The link groups of SMC-R, with their links.
    pub fn link_groups(&self) -> Vec<LinkGroupInfo> {
        self.rdma().map_or_else(Vec::new, |rdma| rdma.host.groups())
    }

    /// The open devices, without lost ones.
    pub(super) fn live_devices(&self) -> Vec<OpenDevice> {
        let mut open = self.devices.open();
        open.retain(|open| !open.fabric.device().is_gone());
        open
    }

    /// Connections closed by the application, but not by the peer.
    pub(super) fn closing(&self) -> &Mutex<Vec<Arc<Conn>>> {
        &self.maintenance.closing
    }

    pub(super) fn wake_backgrounds(&self) {
        for reactor in self.reactors() {
            reactor.wake_background();
        }
    }

    pub(super) fn reactors(&self) -> Vec<Arc<Reactor<Conn>>> {
        let live = self.live_devices().into_iter().map(|live| live.reactor);
        live.chain(self.rdma().map(|rdma| rdma.reactor.clone())).collect()
    }
}

/// The smallest DMB with room for this many bytes, else the largest (RMB-34).
pub(super) fn buffer_of(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX).clamp(16 << 10, 1 << 20).next_power_of_two()
}

impl Drop for Stack {
    fn drop(&mut self) {
        if let Some(watch) = self.outliving.watch() {
            let closing =
                self.maintenance.closing.get_mut().unwrap_or_else(PoisonError::into_inner);
            watch.stop_after(closing.drain(..).filter(|conn| conn.is_sending()).collect());
        }
        self.devices.stop();
        if let Some(rdma) = self.rdma() {
            rdma.host.shut_down();
            rdma.reactor.stop();
        }
    }
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stack").field("devices", &self.config.devices).finish_non_exhaustive()
    }
}

fn run_in_background(
    reactor: &Arc<Reactor<Conn>>,
    name: &str,
    maintenance: impl FnMut() -> Option<Duration> + Send + 'static,
    lost: impl FnOnce(&Reactor<Conn>) + Send + 'static,
) -> io::Result<()> {
    let running = reactor.clone();
    let body = move || {
        running.run(maintenance);
        if running.is_lost() {
            lost(&running);
        }
        // From here on the reactor may get another source.
        running.stopped();
    };
    let thread = ism_sys::start_thread(name, ism_sys::USUAL_STACK, body);
    thread.map(|_| ()).inspect_err(|_| reactor.stopped())
}

/// This host's name, as far as possible in CLC.
fn hostname() -> Hostname {
    let name = ism_sys::machine().and_then(|(name, _)| Hostname::new(&name).ok());
    name.unwrap_or(Hostname::BLANK)
}

#[cfg(test)]
mod tests {
    use crate::socket::{Config, Rnics, Stack};

    // Shows: RMB-34.
    #[test]
    fn a_buffer_has_a_size_that_there_is_a_code_for_the_largest_at_most() {
        let sizes = [(1, 16 << 10), ((16 << 10) + 1, 32 << 10), (usize::MAX, 1 << 20)];
        for (recv_buffer, expected) in sizes {
            let config = Config { rnics: Rnics::None, recv_buffer, ..Config::default() };
            assert_eq!(Stack::open(config).unwrap().buffer_len(), expected, "{recv_buffer}");
        }
    }
}
