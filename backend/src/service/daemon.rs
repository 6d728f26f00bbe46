// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon as a value: fabrics, guests, management. A program can run one in its own process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::{Config, GuestSpec};
use crate::service::error::DaemonError;
use crate::service::guests::Guests;
use crate::service::leave::LeaveInfo;
use crate::service::management::{Access, Server};
use crate::service::reload::{ConfigSource, Reload};
use crate::vhost::device_slot::GuestStatus;
use crate::vhost::device_socket::STOP;
use crate::vhost::event_loop::{EventLoop, LoopHandle};
use crate::vhost::unix_socket::{LocalNames, SocketNames};
use ism_device::LeaveGroup;
use virtio_ism_abi::event::LeaveReason;

/// A running daemon. Stops when dropped.
pub struct Daemon {
    guests: Arc<Guests>,
    reload: Arc<Reload>,
    servers: Vec<Server>,
    /// Dropped last.
    events: EventLoop,
}

impl Daemon {
    /// Makes the fabrics and the sockets, and starts to listen.
    ///
    /// # Errors
    /// The first step that fails; the steps before it are undone.
    pub fn start(config: Config) -> Result<Daemon, DaemonError> {
        Daemon::start_with(config, Arc::new(LocalNames::default()), None)
    }

    /// Like [`start`](Self::start); `names` makes the sockets, and `read` reads the configuration again.
    pub(crate) fn start_with(
        config: Config,
        names: Arc<dyn SocketNames>,
        read: Option<ConfigSource>,
    ) -> Result<Daemon, DaemonError> {
        config.check()?;
        crate::vhost::prepare();
        let events = EventLoop::start().map_err(DaemonError::Thread)?;
        let guests = Arc::new(Guests::new(config, events.handle().clone(), names)?);
        let reload = Arc::new(Reload::new(guests.clone(), read));
        let mut daemon = Daemon { guests: guests.clone(), reload, servers: Vec::new(), events };
        let config = guests.config();
        for spec in &config.guests {
            guests.add(spec.clone(), true)?;
        }
        let sockets = [(&config.management, Access::Full), (&config.metrics, Access::Read)];
        for (path, access) in sockets {
            if let Some(path) = path {
                let (guests, reload) = (guests.clone(), daemon.reload.clone());
                let mode = config.socket_mode;
                daemon.servers.push(Server::start(path, mode, access, guests, reload)?);
            }
        }
        Ok(daemon)
    }

    /// The loop for the daemon's own work.
    pub(crate) fn events(&self) -> &LoopHandle {
        self.events.handle()
    }

    /// Rereads the configuration.
    pub(crate) fn reload(&self) -> &Arc<Reload> {
        &self.reload
    }

    /// A check taking the locks of all devices, to detect a lock never released.
    pub(crate) fn check(&self) -> impl Fn() + Send + 'static + use<> {
        let guests = self.guests.clone();
        move || drop(guests.list())
    }

    /// Whether no front end is connected.
    pub(crate) fn is_idle(&self) -> impl Fn() -> bool + Send + 'static + use<> {
        let guests = self.guests.clone();
        move || guests.list().iter().all(|guest| guest.device.is_none())
    }

    /// Adds a guest: makes its socket and listens.
    ///
    /// # Errors
    /// A name or socket in use, an unknown fabric, or a socket that cannot be made.
    pub fn add_guest(&self, spec: GuestSpec) -> Result<(), DaemonError> {
        self.guests.add(spec, false)
    }

    /// Removes a guest: removes its socket and its device and disconnects its front end. Waits for
    /// completion, unless the front end keeps a thread from ending.
    ///
    /// # Errors
    /// [`DaemonError::NoSuchGuest`].
    pub fn remove_guest(&self, name: &str) -> Result<(), DaemonError> {
        let socket = self.guests.remove(name)?;
        socket.wait_stopped(Instant::now() + STOP);
        Ok(())
    }

    /// Tells the drivers of all devices of the daemon's end, and waits for drivers with support for leaving,
    /// at most [`Config::leave_timeout`], or until `group` is given up. New connections are refused from now
    /// on.
    pub fn leave(&self, group: &Arc<LeaveGroup>) -> LeaveInfo {
        self.guests.leave_all(group)
    }

    /// Asks the drivers of a guest to leave for `reason`, and waits at most `within`. The guest stays; its
    /// devices take on nothing new.
    ///
    /// # Errors
    /// [`DaemonError::NoSuchGuest`].
    pub fn drain(
        &self,
        name: &str,
        reason: LeaveReason,
        within: Duration,
    ) -> Result<LeaveInfo, DaemonError> {
        Ok(self.guests.ask_to_leave(name, reason, Some(within))?.wait())
    }

    /// Cancels a [`drain`](Self::drain), before or after the drivers have left. The devices take on new DMBs
    /// again, and connections return. Returns the number of drained devices.
    ///
    /// # Errors
    /// [`DaemonError::NoSuchGuest`].
    pub fn undrain(&self, name: &str) -> Result<usize, DaemonError> {
        self.guests.undrain(name)
    }

    /// The guests, by name.
    pub fn list(&self) -> Vec<GuestStatus> {
        self.guests.list()
    }

    /// Metrics in Prometheus' text format (OpenMetrics).
    pub fn metrics(&self) -> String {
        self.guests.metrics()
    }

    /// Stops everything and waits for the end of all threads, except a thread kept from ending by a front
    /// end.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        for server in self.servers.drain(..) {
            server.stop();
        }
        self.reload.wait_done(Instant::now() + STOP);
        self.guests.shutdown();
    }
}
