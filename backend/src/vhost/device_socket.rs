//! A device socket: the socket of one guest, and one connection after the other on it.
//!
//! The queue of the socket has room for one connection. While a front end is connected, the daemon
//! fills the queue with a connection of its own. Another front end that connects then waits in
//! connect(2), and one that does not want to wait gets EAGAIN. So processes find a free device
//! without a lock or a file of their own, and who connects first has it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use vhost::vhost_user::Listener;

use super::counted_threads::CountedThreads;
use super::device_slot::{DeviceSlot, GuestContext, GuestStatus, RunningConnection};
use super::faults::Fault;
use super::timers::Timers;
use super::unix_socket::{Backlog, BoundSocket, NameId, SocketError, SocketNames, path_of};
use crate::config::{Config, GuestSpec, Socket};
use crate::device::Fabric;
use crate::device::sync::lock;

/// Threads of earlier connections that may hang before new connections are refused.
const MAX_HANGING: usize = 4;
/// How long device sockets may take to stop.
pub(crate) const STOP: Duration = Duration::from_secs(3);
/// Pause after an error that would repeat at once.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The running socket of one guest. Dropping it stops it.
pub(crate) struct DeviceSocket {
    inner: Arc<Inner>,
    /// The socket's own thread, counted.
    thread: CountedThreads,
    socket: Mutex<Option<BoundSocket>>,
}

struct Inner {
    slot: DeviceSlot,
    stopping: AtomicBool,
    stop: OwnedFd,
    names: Arc<dyn SocketNames>,
    /// The socket's name, by which its queue is filled.
    name: Option<NameId>,
    connections: AtomicU64,
}

impl DeviceSocket {
    /// Makes the socket and listens.
    pub(crate) fn start(
        spec: GuestSpec,
        fabric: Arc<Fabric>,
        config: &Config,
        timers: Timers,
        names: Arc<dyn SocketNames>,
    ) -> Result<DeviceSocket, SocketError> {
        let (listener, socket, name) = match &spec.socket {
            Socket::Path(path) => {
                let mode = spec.mode.unwrap_or(config.socket_mode);
                let (listener, socket) = BoundSocket::bind(&names, path, mode, Backlog::One)?;
                let name = socket.name();
                (listener, Some(socket), Some(name))
            }
            Socket::Listening(fd) => {
                let listener = fd.try_clone().map(UnixListener::from).map_err(system(&spec))?;
                let name = path_of(&listener).map(|path| names.adopt(&path)).transpose()?;
                (listener, None, name)
            }
        };
        // The framework's accept must block: it spins on a listener that does not.
        listener.set_nonblocking(false).map_err(system(&spec))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = stop.map_err(|error| system(&spec)(error.into()))?;
        let guest = Arc::new(GuestContext::new(spec, fabric, config, timers));
        let spec = guest.spec.clone();
        let inner = Arc::new(Inner {
            slot: DeviceSlot::new(spec.name.clone(), guest),
            stopping: AtomicBool::new(false),
            stop,
            names,
            name,
            connections: AtomicU64::new(0),
        });
        let thread = CountedThreads::default();
        let runner = inner.clone();
        thread.spawn(&spec.name, move || runner.run(listener)).map_err(system(&spec))?;
        Ok(DeviceSocket { inner, thread, socket: Mutex::new(socket) })
    }

    /// The guest as it is now.
    pub(crate) fn status(&self) -> GuestStatus {
        let connections = self.inner.connections.load(Ordering::Relaxed);
        GuestStatus { connections, ..self.inner.slot.status() }
    }

    /// Stops listening and cuts the connection; the rest happens on the socket's own thread.
    pub(crate) fn request_stop(&self) {
        *lock(&self.socket) = None;
        self.inner.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.inner.stop, &1u64.to_ne_bytes());
        self.inner.slot.close();
    }

    /// Waits for the end of what [`request_stop`](Self::request_stop) began, at the latest until
    /// `deadline`; `false` if a front end keeps a thread from ending.
    pub(crate) fn wait_stopped(&self, deadline: Instant) -> bool {
        let left = || deadline.saturating_duration_since(Instant::now());
        self.thread.wait_for(0, left()) && self.inner.slot.threads().wait_for(0, left())
    }
}

impl Drop for DeviceSocket {
    fn drop(&mut self) {
        self.request_stop();
    }
}

/// An error of the system about a guest's socket.
pub(super) fn system(spec: &GuestSpec) -> impl Fn(std::io::Error) -> SocketError {
    let path: PathBuf = spec.path().map_or_else(|| spec.name.clone().into(), Into::into);
    move |source| SocketError::Io { action: "listen on", path: path.clone(), source }
}

impl Inner {
    fn name(&self) -> &str {
        &self.slot.guest().spec.name
    }

    fn run(&self, socket: UnixListener) {
        let Ok(listener) = socket.try_clone() else {
            tracing::error!(guest = self.name(), "no descriptor left for the socket");
            return;
        };
        let mut listener = Listener::from(listener);
        while self.wait_for_front_end(&socket) {
            self.slot.account().settle(|| self.stopping.load(Ordering::SeqCst));
            let hanging = self.slot.threads().alive();
            if hanging >= MAX_HANGING {
                self.refuse(
                    &socket,
                    Fault::RefusedConnection,
                    format_args!("{hanging} threads of earlier connections still hang"),
                );
                continue;
            }
            match self.slot.connect(&mut listener) {
                Ok(served) => self.serve(served, &socket),
                Err(error) => {
                    self.refuse(&socket, Fault::RefusedConnection, format_args!("{error}"));
                    self.pause();
                }
            }
        }
        tracing::debug!(guest = self.name(), "stopped");
    }

    /// `false`: the socket is to stop.
    fn wait_for_front_end(&self, socket: &UnixListener) -> bool {
        loop {
            let mut fds =
                [PollFd::new(socket, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if self.stopping.load(Ordering::SeqCst) => return false,
                Ok(_) if fds[0].revents().contains(PollFlags::IN) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(guest = self.name(), %error, "cannot wait; giving up");
                    return false;
                }
            }
        }
    }

    fn pause(&self) {
        let mut fds = [PollFd::new(&self.stop, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&PAUSE));
    }

    fn refuse(&self, socket: &UnixListener, fault: Fault, detail: std::fmt::Arguments<'_>) {
        self.slot.guest().faults.record(self.name(), fault, detail);
        self.drop_next(socket);
    }

    /// Fills the queue of the socket with a connection of the daemon's own. `false`: it is full by
    /// another front end, which waits, or the socket has lost its name, so nobody connects.
    fn fill_queue(&self) -> bool {
        let Some(name) = self.name else { return false };
        let filled = self.names.fill(name);
        if let Err(error) = &filled {
            tracing::debug!(guest = self.name(), %error, "the queue was not filled");
        }
        filled.is_ok()
    }

    /// Ends the connection that is next in the queue, if there is one.
    fn drop_next(&self, socket: &UnixListener) {
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        if poll(&mut fds, Some(&AT_ONCE)) == Ok(1) {
            drop(socket.accept());
        }
    }

    fn serve(&self, served: RunningConnection, socket: &UnixListener) {
        let filled = self.fill_queue();
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.slot.serve(
            served,
            || self.stopping.load(Ordering::SeqCst),
            || {
                if filled {
                    self.drop_next(socket);
                }
            },
        );
    }
}
