// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages to a service manager such as systemd (sd_notify(3)): the daemon is ready, alive, ending.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager of this process, if any.
#[derive(Debug)]
pub(crate) struct ServiceManager {
    socket: Option<UnixDatagram>,
    /// The watchdog's time limit between two signs of life.
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Connects to the service manager of the environment. To be called before the sandbox blocks files.
    pub(crate) fn from_environment() -> ServiceManager {
        let socket = env::var_os("NOTIFY_SOCKET").and_then(|name| {
            connect(&name)
                .inspect_err(|error| tracing::warn!(%error, "no way to the service manager"))
                .ok()
        });
        let number = |key: &str| env::var(key).ok()?.parse::<u64>().ok();
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|usec| ours && *usec > 0);
        ServiceManager {
            watchdog: watchdog.filter(|_| socket.is_some()).map(Duration::from_micros),
            socket,
        }
    }

    /// Interval for the daemon's signs of life; `None`: not needed.
    pub(crate) fn interval(&self) -> Option<Duration> {
        Some(self.watchdog? / 2)
    }

    /// The daemon serves its sockets.
    pub(crate) fn ready(&self) {
        self.say("READY=1");
    }

    /// The daemon reads its configuration again; [`ready`](Self::ready) follows.
    pub(crate) fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let usec = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
        self.say(&format!("RELOADING=1\nMONOTONIC_USEC={usec}"));
    }

    /// The daemon lives.
    pub(crate) fn alive(&self) {
        self.say("WATCHDOG=1");
    }

    /// The text shown by `systemctl status`.
    pub(crate) fn say_status(&self, status: &str) {
        self.say(&format!("STATUS={status}"));
    }

    /// The daemon ends within `within`.
    pub(crate) fn stopping(&self, within: Duration) {
        let usec = within.as_micros();
        self.say(&format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={usec}"));
    }

    fn say(&self, what: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(what.as_bytes())
        {
            tracing::warn!(%error, what, "the service manager does not listen");
        }
    }
}

fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    match name.as_bytes() {
        [b'@', name @ ..] => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        _ => socket.connect(name)?,
    }
    // A manager not reading must not stop the daemon.
    socket.set_nonblocking(true)?;
    Ok(socket)
}
