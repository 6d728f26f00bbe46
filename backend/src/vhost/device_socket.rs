// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device socket: the socket of one guest, and one connection after the other on it.
//!
//! The event loop waits for a front end. Each has a thread, which makes its device, serves it and sees
//! its end; meanwhile the loop leaves the socket alone.
//!
//! The queue of the socket has room for one connection. While a front end is connected, the daemon
//! fills the queue with a connection of its own. Another front end that connects then waits in
//! connect(2), and one that does not want to wait gets EAGAIN. So processes find a free device
//! without a lock or a file of their own, and who connects first has it.
//!
//! A socket that was passed to the daemon may be another guest's as soon as this guest is removed. So
//! removal ends, before it returns, all that this guest takes from the queue.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::{EventOps, Events, MutEventSubscriber};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketFlags;
use vhost::vhost_user::Listener;

use super::counted_threads::CountedThreads;
use super::device_slot::{DeviceSlot, GuestContext, GuestStatus, RunningConnection};
use super::event_loop::{LoopHandle, Registration};
use super::faults::Fault;
use super::processor_account::CONNECTION;
use super::unix_socket::{Backlog, BoundSocket, NameId, SocketError, SocketNames, path_of};
use super::vfio_user::VfioUserClient;
use super::waker::WakeOnDrop;
use super::watched_listener::{PAUSE, WatchedListener};
use crate::config::{Config, GuestSpec, Socket};
use ism_device::sync::lock;
use ism_device::{Fabric, LeaveGroup};
use virtio_ism_abi::event::LeaveReason;

/// Threads of earlier connections that may hang before new connections are refused.
const MAX_HANGING: usize = 4;
/// How long device sockets may take to stop.
pub(crate) const STOP: Duration = Duration::from_secs(3);
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The running socket of one guest. Dropping it stops it.
pub(crate) struct DeviceSocket {
    inner: Arc<Inner>,
    /// The thread of the front end.
    thread: CountedThreads,
    events: LoopHandle,
    /// The name of the socket, and the loop's interest in it.
    socket: Mutex<(Option<BoundSocket>, Option<Registration>)>,
}

struct Inner {
    slot: DeviceSlot,
    stopping: AtomicBool,
    names: Arc<dyn SocketNames>,
    /// The socket's name, by which its queue is filled.
    name: Option<NameId>,
    queue: Mutex<Queue>,
    connections: AtomicU64,
    /// The client of a socket at which front ends speak vfio-user.
    client: VfioUserClient,
}

/// The queue of the socket, of which nothing is taken without the lock.
struct Queue {
    /// `None`: the guest is removed, and the queue no longer its own.
    socket: Option<Arc<OwnedFd>>,
    /// `true`: the first connection in the queue is the placeholder that the daemon made.
    is_filled: bool,
}

/// What the event loop calls when a front end connects.
struct FrontEnds {
    inner: Arc<Inner>,
    listener: WatchedListener,
    thread: CountedThreads,
    events: LoopHandle,
}

impl DeviceSocket {
    /// Makes the socket and listens.
    pub(crate) fn start(
        spec: GuestSpec,
        fabric: Arc<Fabric>,
        config: &Config,
        events: LoopHandle,
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
        let listener = WatchedListener::new(listener.into()).map_err(system(&spec))?;
        let timers = events.timers().clone();
        let guest = Arc::new(GuestContext::new(spec, fabric, config, timers));
        let inner = Arc::new(Inner {
            slot: DeviceSlot::new(guest.spec.name.clone(), guest),
            stopping: AtomicBool::new(false),
            names,
            name,
            queue: Mutex::new(Queue { socket: Some(listener.socket().clone()), is_filled: false }),
            connections: AtomicU64::new(0),
            client: VfioUserClient::default(),
        });
        let thread = CountedThreads::default();
        let front_ends = FrontEnds {
            inner: inner.clone(),
            listener,
            thread: thread.clone(),
            events: events.clone(),
        };
        let watched = events.add(front_ends);
        Ok(DeviceSocket { inner, thread, events, socket: Mutex::new((socket, Some(watched))) })
    }

    /// The guest as it is now.
    pub(crate) fn status(&self) -> GuestStatus {
        let connections = self.inner.connections.load(Ordering::Relaxed);
        GuestStatus { connections, ..self.inner.slot.status() }
    }

    /// Stops listening and cuts the connection; the rest happens on other threads.
    pub(crate) fn request_stop(&self) {
        self.inner.stopping.store(true, Ordering::SeqCst);
        self.stop_listening();
        self.inner.client.close();
        self.inner.slot.close();
    }

    /// Stops listening. The front end that is connected stays.
    pub(crate) fn stop_listening(&self) {
        self.inner.empty_queue();
        lock(&self.inner.queue).socket = None;
        *lock(&self.socket) = (None, None);
    }

    /// Asks the driver of the device to leave, if there is one.
    pub(crate) fn ask_to_leave(
        &self,
        reason: LeaveReason,
        within: Duration,
        group: &Arc<LeaveGroup>,
    ) {
        self.inner.slot.ask_to_leave(reason, within, group);
    }

    /// Tells the driver that was to leave, to drain the device, that it need not. Returns how many were
    /// told.
    pub(crate) fn stay(&self) -> usize {
        usize::from(self.inner.slot.stay())
    }

    /// Waits for the end of what [`request_stop`](Self::request_stop) began, at the latest until
    /// `deadline`; `false` if a front end keeps a thread from ending.
    pub(crate) fn wait_stopped(&self, deadline: Instant) -> bool {
        let left = || deadline.saturating_duration_since(Instant::now());
        self.events.wait_done(deadline)
            && self.thread.wait_for(0, left())
            && self.inner.client.wait_ended(left())
            && self.inner.slot.threads().wait_for(0, left())
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

impl MutEventSubscriber for FrontEnds {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.listener.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if !self.listener.is_ready(events, ops) || self.inner.is_stopping() {
            return;
        }
        // The loop waits for nobody, so the thread does, for what this costs.
        self.inner.slot.account().charge(Instant::now(), CONNECTION);
        let resume = self.listener.pause(ops);
        let inner = self.inner.clone();
        let spawned = self.thread.spawn(self.inner.name(), move || {
            let _resume = WakeOnDrop(resume);
            inner.serve_next();
        });
        if let Err(error) = spawned {
            self.inner.fault(format_args!("{error}"));
            self.listener.pause_briefly(self.events.timers(), ops);
        }
    }
}

impl Inner {
    fn name(&self) -> &str {
        &self.slot.guest().spec.name
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn fault(&self, detail: std::fmt::Arguments<'_>) {
        self.slot.guest().faults.record(self.name(), Fault::RefusedConnection, detail);
    }

    /// Serves the connection that is next in the queue, to its end.
    fn serve_next(&self) {
        self.slot.account().charge_and_wait(|| self.is_stopping());
        let hanging = self.slot.threads().alive();
        if hanging >= MAX_HANGING {
            self.fault(format_args!("{hanging} threads of earlier connections still hang"));
            lock(&self.queue).drop_next();
        } else if self.slot.guest().spec.vfio_user {
            self.serve_vfio_user();
        } else {
            match self.connect_next() {
                Ok(Some(served)) => self.serve(served),
                Ok(None) => {}
                Err(error) => {
                    self.fault(format_args!("{error}"));
                    lock(&self.queue).drop_next();
                    std::thread::sleep(PAUSE);
                }
            }
        }
        self.slot.account().charge_ending_thread(Instant::now());
    }

    /// A device for the connection that is next in the queue; `None`: there is none, or it is for
    /// another guest.
    fn connect_next(&self) -> Result<Option<RunningConnection>, Box<dyn std::error::Error>> {
        let queue = lock(&self.queue);
        let Some(socket) = queue.socket.as_ref().filter(|_| queue.has_next()) else {
            return Ok(None);
        };
        let mut listener = Listener::from(UnixListener::from(socket.try_clone()?));
        self.slot.connect(&mut listener).map(Some)
    }

    /// Serves the vfio-user client that is next in the queue. It comes to its devices by connections
    /// that nobody else can make.
    fn serve_vfio_user(&self) {
        let accepted = {
            let queue = lock(&self.queue);
            let socket = queue.socket.as_ref().filter(|_| queue.has_next());
            socket.map(|socket| rustix::net::accept_with(socket, SocketFlags::CLOEXEC))
        };
        let client = match accepted {
            None => return,
            Some(Ok(client)) => UnixStream::from(client),
            Some(Err(error)) => return self.fault(format_args!("{error}")),
        };
        self.fill_queue();
        self.connections.fetch_add(1, Ordering::Relaxed);
        let stopping = || self.is_stopping();
        let served =
            self.client.serve(client, &self.names, &self.slot, stopping, |listener, behind| {
                self.slot.account().charge(Instant::now(), CONNECTION);
                self.slot.account().charge_and_wait(stopping);
                match self.slot.connect(&mut Listener::from(listener)) {
                    Ok(served) => {
                        let _ = behind.set(served.connection());
                        self.slot.serve(served, stopping, || ());
                    }
                    Err(error) => self.fault(format_args!("{error}")),
                }
            });
        if let Err(error) = served {
            self.fault(format_args!("{error}"));
        }
        self.empty_queue();
    }

    /// Fills the queue of the socket with a connection of the daemon's own. It stays as it is if another
    /// front end waits in it, or if the socket has lost its name, so that nobody connects.
    fn fill_queue(&self) {
        let mut queue = lock(&self.queue);
        let Some(name) = self.name.filter(|_| queue.socket.is_some()) else { return };
        match self.names.fill(name) {
            Ok(()) => queue.is_filled = true,
            Err(error) => {
                tracing::debug!(guest = self.name(), %error, "the queue was not filled");
            }
        }
    }

    /// Takes the daemon's own connection out of the queue, if it is there.
    fn empty_queue(&self) {
        let mut queue = lock(&self.queue);
        if std::mem::take(&mut queue.is_filled) {
            queue.drop_next();
        }
    }

    fn serve(&self, served: RunningConnection) {
        self.fill_queue();
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.slot.serve(served, || self.is_stopping(), || self.empty_queue());
    }
}

impl Queue {
    /// Whether a connection is in it.
    fn has_next(&self) -> bool {
        self.socket.as_ref().is_some_and(|socket| {
            poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&AT_ONCE)) == Ok(1)
        })
    }

    /// Ends the connection that is next, if there is one.
    fn drop_next(&self) {
        if let Some(socket) = self.socket.as_ref().filter(|_| self.has_next()) {
            drop(rustix::net::accept(socket));
        }
    }
}
