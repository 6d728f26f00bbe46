// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device slot: a place for one front end, with a device while one is connected.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use vhost::vhost_user::Listener;
use vhost_user_backend::Error as FrameworkError;

use super::connection::{Connection, Framework, GuestState, Options};
use super::counted_threads::CountedThreads;
use super::faults::{FAULTS, Fault, Faults, is_end_of_front_end};
use super::inline_delivery::InlineDelivery;
use super::notifier::Notifier;
use super::processor_account::ProcessorAccount;
use super::timers::Timers;
use crate::config::{Config, GuestSpec};
use ism_device::shm::TouchQuota;
use ism_device::sync::lock;
use ism_device::{DeviceConfig, DeviceInfo, Fabric, FixedWindow, LeaveGroup};
use virtio_ism_abi::event::LeaveReason;

/// How long the next connection waits for the threads of the last one.
const REAP: Duration = Duration::from_millis(500);

/// A guest, with the state shared by all its front ends.
pub(super) struct GuestContext {
    pub(super) spec: GuestSpec,
    fabric: Arc<Fabric>,
    options: Options,
    timers: Timers,
    pub(super) faults: Arc<Faults>,
    /// Bytes the daemon may allocate in the guest's memory, over all connections.
    pub(super) touches: Arc<TouchQuota>,
}

impl GuestContext {
    pub(super) fn new(
        spec: GuestSpec,
        fabric: Arc<Fabric>,
        config: &Config,
        timers: Timers,
    ) -> GuestContext {
        let options = Options {
            name: spec.name.clone(),
            window_size: config.window_size,
            move_queues: config.move_queues,
            allow_any_file: spec.allow_any_file,
            // With vfio-user a reset is distinct from a pause.
            stopped_grace: config.stopped_grace.filter(|_| !spec.vfio_user),
            ack_timeout: config.ack_timeout,
        };
        let touches = Arc::new(TouchQuota::new(fabric.limits().touched_memory));
        GuestContext { spec, fabric, options, timers, faults: Arc::default(), touches }
    }

    /// The window of a client that maps `areas` areas at its start; `None` without a window.
    pub(super) fn fixed_window(&self, areas: usize) -> Option<Arc<FixedWindow>> {
        match self.fabric.fixed_window(self.options.window_size, areas) {
            Ok(window) => window,
            Err(error) => {
                tracing::warn!(guest = self.spec.name, %error, "no memory for a window");
                None
            }
        }
    }

    /// Number of move queues of each device.
    pub(super) fn move_queues(&self) -> u16 {
        self.options.move_queues
    }
}

/// A guest and its counters, at one moment.
#[derive(Clone, Debug)]
pub struct GuestStatus {
    /// The guest's specification. A front end of a pool has a name of its own.
    pub spec: GuestSpec,
    /// The device of the connected front end; `None` without a connection.
    pub device: Option<DeviceInfo>,
    /// Counters of ended devices, from past front ends.
    pub ended: DeviceInfo,
    /// Connections so far.
    pub connections: u64,
    /// Threads of earlier connections kept from ending by their front end.
    pub hanging: usize,
    /// Bytes of guest memory allocated by the daemon's first touches.
    pub touched_bytes: u64,
    /// Faults so far, in the order of [`FAULTS`].
    pub faults: [u64; FAULTS.len()],
    /// State of the pool, for a device pool.
    pub pool: Option<PoolInfo>,
    /// The process, for a front end of a pool.
    pub member: Option<MemberInfo>,
}

/// A device pool, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolInfo {
    /// Devices in use, including the devices of disconnected front ends with running threads.
    pub in_use: u32,
    /// Connections refused a device.
    pub refused: u64,
    /// Whether the pool is drained: its devices, and later ones, take on no new DMBs.
    pub drained: bool,
}

/// A front end of a device pool, as the kernel knows its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Name of the pool.
    pub pool: String,
    /// Process id, in the daemon's namespace; 0 if the process is not visible there.
    pub pid: i32,
    /// User id in the daemon's namespace; `None`: not mapped there.
    pub uid: Option<u32>,
    /// Cookie of the network namespace the process created its socket in.
    pub network_namespace: u64,
}

pub(super) struct DeviceSlot {
    /// Name of the device, in logs and for operators.
    name: String,
    guest: Arc<GuestContext>,
    /// Threads a front end can keep from ending.
    threads: CountedThreads,
    /// Processor time of the daemon's threads for this front end. Not shared in a pool: one front end would
    /// make the others wait.
    account: Arc<ProcessorAccount>,
    devices: Mutex<Devices>,
}

/// Devices of a slot. One lock, so no reader counts a device twice or not at all.
#[derive(Default)]
struct Devices {
    connection: Option<Arc<Connection>>,
    /// Counters of ended devices.
    ended: DeviceInfo,
}

/// A connection, with the framework running it.
pub(super) struct RunningConnection {
    connection: Arc<Connection>,
    framework: Framework,
}

impl RunningConnection {
    /// A weak reference to the connection.
    pub(super) fn connection(&self) -> Weak<Connection> {
        Arc::downgrade(&self.connection)
    }
}

impl DeviceSlot {
    pub(super) fn new(name: String, guest: Arc<GuestContext>) -> DeviceSlot {
        let threads = CountedThreads::default();
        DeviceSlot { name, guest, threads, account: Arc::default(), devices: Mutex::default() }
    }

    pub(super) fn guest(&self) -> &Arc<GuestContext> {
        &self.guest
    }

    pub(super) fn threads(&self) -> &CountedThreads {
        &self.threads
    }

    pub(super) fn account(&self) -> &Arc<ProcessorAccount> {
        &self.account
    }

    /// Status of the guest, with the device of this slot.
    pub(super) fn status(&self) -> GuestStatus {
        let (connection, ended) = {
            let devices = lock(&self.devices);
            (devices.connection.clone(), devices.ended.clone())
        };
        let alive = self.threads.alive();
        GuestStatus {
            spec: GuestSpec { name: self.name.clone(), ..self.guest.spec.clone() },
            hanging: if connection.is_some() { 0 } else { alive },
            device: connection.map(|connection| connection.device.info()),
            ended,
            connections: 0,
            touched_bytes: self.guest.touches.used(),
            faults: self.guest.faults.snapshot(),
            pool: None,
            member: None,
        }
    }

    /// Cuts the connection, if any.
    pub(super) fn close(&self) {
        let connection = lock(&self.devices).connection.clone();
        if let Some(connection) = connection {
            connection.close();
        }
    }

    /// Asks the driver of the device, if any, to leave.
    pub(super) fn ask_to_leave(
        &self,
        reason: LeaveReason,
        within: Duration,
        group: &Arc<LeaveGroup>,
    ) {
        let connection = lock(&self.devices).connection.clone();
        if let Some(connection) = connection {
            connection.device.ask_to_leave(reason, within, group);
        }
    }

    /// Cancels the leaving of the device's driver. Returns whether the driver was leaving.
    pub(super) fn stay(&self) -> bool {
        let connection = lock(&self.devices).connection.clone();
        connection.is_some_and(|connection| connection.device.stay())
    }

    /// Makes a device and a connection, and starts the framework on the next connection of `listener`.
    /// `fixed_window` is of a front end that maps at its start only.
    pub(super) fn connect(
        &self,
        listener: &mut Listener,
        fixed_window: Option<Arc<FixedWindow>>,
    ) -> Result<RunningConnection, Box<dyn std::error::Error>> {
        let GuestContext { spec, fabric, options, timers, faults, touches } = &*self.guest;
        let notifier = Arc::new(Notifier::new()?);
        let port = DeviceConfig {
            name: self.name.clone(),
            pinned_gid: spec.gid,
            limits: None,
            max_maps: spec.max_maps,
            fixed_window,
            num_move_queues: options.move_queues,
        };
        let delivery = Arc::new(InlineDelivery::new(notifier.clone()));
        let device = fabric.join(port, delivery.clone())?;
        let (connection, mut framework) = Connection::new(
            Options { name: self.name.clone(), ..options.clone() },
            device,
            notifier,
            GuestState {
                faults: faults.clone(),
                threads: self.threads.clone(),
                timers: timers.clone(),
                touches: touches.clone(),
                account: self.account.clone(),
            },
        )?;
        let weak = Arc::downgrade(&connection);
        let owner = weak.clone();
        delivery.set_on_slow_memory(move || {
            if let Some(owner) = owner.upgrade() {
                owner.on_slow_memory();
            }
        });
        delivery.set(move || weak.upgrade().is_some_and(|owner| owner.deliver_inline()));
        if let Err(error) = framework.start(listener) {
            self.finish(&connection, framework);
            return Err(error.to_string().into());
        }
        connection.phase.set_link(framework.shutdown_handle());
        Ok(RunningConnection { connection, framework })
    }

    /// Serves a connection until its end. `connected` runs once the slot has the device, and tells whether to
    /// end the connection at once; `disconnected` runs after the front end has left, before the end of its threads.
    pub(super) fn serve(
        &self,
        served: RunningConnection,
        connected: impl FnOnce() -> bool,
        disconnected: impl FnOnce(),
    ) {
        let RunningConnection { connection, mut framework } = served;
        lock(&self.devices).connection = Some(connection.clone());
        if connected() {
            connection.close();
        }
        self.log_connection("front end connected");
        match framework.wait() {
            Ok(()) => {}
            Err(FrameworkError::HandleRequest(error)) if is_end_of_front_end(&error) => {}
            Err(error) => connection.fault(Fault::BadMessage, format_args!("{error}")),
        }
        {
            let mut devices = lock(&self.devices);
            devices.ended.add_counters(&connection.device.info());
            devices.connection = None;
        }
        disconnected();
        self.finish(&connection, framework);
        self.log_connection("front end gone");
    }

    /// Logs within the guest's budget: a front end can come and go thousands of times a second.
    fn log_connection(&self, what: &str) {
        self.guest.faults.log_connection(|withheld| {
            let guest = &self.name;
            match withheld {
                0 => tracing::info!(guest, "{what}"),
                _ => tracing::info!(guest, withheld, "{what}"),
            }
        });
    }

    /// Ends a connection. A thread of its own drops the framework's object, since a front end can make the
    /// workers hang.
    fn finish(&self, connection: &Arc<Connection>, framework: Framework) {
        connection.end();
        let account = self.account.clone();
        let reap = move || {
            drop(framework);
            account.charge_thread(Instant::now());
        };
        if let Err(error) = self.threads.spawn("reaper", reap) {
            tracing::error!(guest = self.name, %error, "cannot start a thread");
        }
        self.threads.wait_for(0, REAP);
    }
}
