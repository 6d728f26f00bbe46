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
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::Error as FrameworkError;

use super::connection::{Connection, Framework, GuestState, Options};
use super::counted_threads::CountedThreads;
use super::faults::{FAULTS, Fault};
use super::inline_delivery::InlineDelivery;
use super::notifier::Notifier;
use super::timers::Timers;
use super::unix_socket::{Backlog, BoundSocket, NameId, SocketError, SocketNames, path_of};
use crate::config::{Config, GuestSpec, Socket};
use crate::device::sync::lock;
use crate::device::{DeviceConfig, DeviceInfo, Fabric};
use crate::shm::TouchQuota;

/// Threads of earlier connections that may hang before new connections are refused.
const MAX_HANGING: usize = 4;
/// How long a new connection waits for the threads of the last one.
const REAP: Duration = Duration::from_millis(500);
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
    spec: GuestSpec,
    fabric: Arc<Fabric>,
    options: Options,
    guest: GuestState,
    stopping: AtomicBool,
    stop: OwnedFd,
    names: Arc<dyn SocketNames>,
    /// The socket's name, by which its queue is filled.
    name: Option<NameId>,
    connection: Mutex<Option<Arc<Connection>>>,
    connections: AtomicU64,
}

/// A guest and its counters, at one moment.
#[derive(Clone, Debug)]
pub struct GuestStatus {
    /// What it was made from.
    pub spec: GuestSpec,
    /// The device of the front end that is connected; `None` if none is.
    pub device: Option<DeviceInfo>,
    /// Connections so far.
    pub connections: u64,
    /// Threads of earlier connections that hang by their front end's doing.
    pub hanging: usize,
    /// Bytes of the guest's memory that the daemon has allocated by touching them first.
    pub touched_bytes: u64,
    /// Faults so far, in the order of [`FAULTS`].
    pub faults: [u64; FAULTS.len()],
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
                let mode = config.socket_mode;
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
        let options = Options {
            name: spec.name.clone(),
            window_size: config.window_size,
            move_queues: config.move_queues,
            allow_any_file: spec.allow_any_file,
            stopped_grace: config.stopped_grace,
            ack_timeout: config.ack_timeout,
        };
        let guest = GuestState {
            faults: Arc::default(),
            threads: CountedThreads::default(),
            timers,
            touches: Arc::new(TouchQuota::new(fabric.limits().touched_memory)),
            account: Arc::default(),
        };
        let inner = Arc::new(Inner {
            stop: stop.map_err(|error| system(&spec)(error.into()))?,
            spec,
            guest,
            fabric,
            options,
            stopping: AtomicBool::new(false),
            names,
            name,
            connection: Mutex::new(None),
            connections: AtomicU64::new(0),
        });
        let thread = CountedThreads::default();
        let runner = inner.clone();
        thread
            .spawn(&inner.spec.name, move || runner.run(listener))
            .map_err(system(&inner.spec))?;
        Ok(DeviceSocket { inner, thread, socket: Mutex::new(socket) })
    }

    /// What it was made from.
    pub(crate) fn spec(&self) -> &GuestSpec {
        &self.inner.spec
    }

    /// The guest as it is now.
    pub(crate) fn status(&self) -> GuestStatus {
        let inner = &self.inner;
        let connection = lock(&inner.connection).clone();
        let alive = inner.guest.threads.alive();
        GuestStatus {
            spec: inner.spec.clone(),
            hanging: if connection.is_some() { 0 } else { alive },
            device: connection.map(|connection| connection.device.info()),
            connections: inner.connections.load(Ordering::Relaxed),
            touched_bytes: inner.guest.touches.used(),
            faults: inner.guest.faults.snapshot(),
        }
    }

    /// Stops listening and cuts the connection; the rest happens on the socket's own thread.
    pub(crate) fn request_stop(&self) {
        *lock(&self.socket) = None;
        self.inner.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.inner.stop, &1u64.to_ne_bytes());
        let connection = lock(&self.inner.connection).clone();
        if let Some(connection) = connection {
            connection.close();
        }
    }

    /// Waits for the end of what [`request_stop`](Self::request_stop) began, at the latest until
    /// `deadline`; `false` if a front end keeps a thread from ending.
    pub(crate) fn wait_stopped(&self, deadline: Instant) -> bool {
        let left = || deadline.saturating_duration_since(Instant::now());
        self.thread.wait_for(0, left()) && self.inner.guest.threads.wait_for(0, left())
    }
}

impl Drop for DeviceSocket {
    fn drop(&mut self) {
        self.request_stop();
    }
}

fn system(spec: &GuestSpec) -> impl Fn(std::io::Error) -> SocketError {
    let path: PathBuf = spec.path().map_or_else(|| spec.name.clone().into(), Into::into);
    move |source| SocketError::Io { action: "listen on", path: path.clone(), source }
}

impl Inner {
    fn run(&self, socket: UnixListener) {
        let Ok(listener) = socket.try_clone() else {
            tracing::error!(guest = self.spec.name, "no descriptor left for the socket");
            return;
        };
        let mut listener = Listener::from(listener);
        while self.wait_for_front_end(&socket) {
            self.guest.account.settle(|| self.stopping.load(Ordering::SeqCst));
            let hanging = self.guest.threads.alive();
            if hanging >= MAX_HANGING {
                self.refuse(
                    &socket,
                    Fault::RefusedConnection,
                    format_args!("{hanging} threads of earlier connections still hang"),
                );
                continue;
            }
            match self.connect(&mut listener) {
                Ok((connection, framework)) => self.serve(&connection, framework, &socket),
                Err(error) => {
                    self.refuse(&socket, Fault::RefusedConnection, format_args!("{error}"));
                    self.pause();
                }
            }
        }
        tracing::debug!(guest = self.spec.name, "stopped");
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
                    tracing::error!(guest = self.spec.name, %error, "cannot wait; giving up");
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
        self.guest.faults.record(&self.spec.name, fault, detail);
        self.drop_next(socket);
    }

    /// Fills the queue of the socket with a connection of the daemon's own. `false`: it is full by
    /// another front end, which waits, or the socket has lost its name, so nobody connects.
    fn fill_queue(&self) -> bool {
        let Some(name) = self.name else { return false };
        let filled = self.names.fill(name);
        if let Err(error) = &filled {
            tracing::debug!(guest = self.spec.name, %error, "the queue was not filled");
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

    /// A device, a connection, and the framework at work on a new connection.
    fn connect(
        &self,
        listener: &mut Listener,
    ) -> Result<(Arc<Connection>, Framework), Box<dyn std::error::Error>> {
        let notifier = Arc::new(Notifier::new()?);
        let port = DeviceConfig {
            name: self.spec.name.clone(),
            pinned_gid: self.spec.gid,
            limits: None,
            max_maps: self.spec.max_maps,
            num_move_queues: self.options.move_queues,
        };
        let delivery = Arc::new(InlineDelivery::new(notifier.clone()));
        let device = self.fabric.join(port, delivery.clone())?;
        let (connection, mut framework) =
            Connection::new(self.options.clone(), device, notifier, self.guest.clone())?;
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
        connection.set_link(framework.shutdown_handle());
        Ok((connection, framework))
    }

    fn serve(&self, connection: &Arc<Connection>, mut framework: Framework, socket: &UnixListener) {
        let filled = self.fill_queue();
        self.connections.fetch_add(1, Ordering::Relaxed);
        *lock(&self.connection) = Some(connection.clone());
        if self.stopping.load(Ordering::SeqCst) {
            connection.close();
        }
        self.log_connection("front end connected");
        match framework.wait() {
            Ok(())
            | Err(FrameworkError::HandleRequest(
                VhostUserError::Disconnected | VhostUserError::PartialMessage,
            )) => {}
            Err(error) => connection.fault(Fault::BadMessage, format_args!("{error}")),
        }
        *lock(&self.connection) = None;
        if filled {
            self.drop_next(socket);
        }
        self.finish(connection, framework);
        self.log_connection("front end gone");
    }

    /// Logs within the guest's budget: a front end can come and go thousands of times a second.
    fn log_connection(&self, what: &str) {
        self.guest.faults.log_connection(|withheld| {
            let guest = &self.spec.name;
            match withheld {
                0 => tracing::info!(guest, "{what}"),
                _ => tracing::info!(guest, withheld, "{what}"),
            }
        });
    }

    /// Ends a connection. The framework's object is taken apart in a thread of its own, since its
    /// workers can hang by the front end's will.
    fn finish(&self, connection: &Arc<Connection>, framework: Framework) {
        connection.end();
        let account = self.guest.account.clone();
        let reap = move || {
            drop(framework);
            account.charge_thread(Instant::now());
        };
        if let Err(error) = self.guest.threads.spawn("reaper", reap) {
            tracing::error!(guest = self.spec.name, %error, "cannot start a thread");
        }
        self.guest.threads.wait_for(0, REAP);
    }
}
