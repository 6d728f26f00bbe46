// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device socket: the socket of one guest, with one connection at a time.
//!
//! The event loop waits for a front end. Each front end has a thread to make its device, serve the front end
//! and see its end; meanwhile the loop ignores the socket.
//!
//! The queue of the socket has room for one connection. While a front end is connected, the daemon fills the
//! queue with a connection of its own. A second front end then blocks in connect(2), or gets EAGAIN if
//! non-blocking. So processes find a free device without a lock or a file of their own: the first process to
//! connect has the device.
//!
//! A socket passed to the daemon may belong to another guest as soon as this guest is removed. So removal
//! first ends all use of the queue by this guest.

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
use super::vfio_user::{ConnectionSlot, VfioUserClient};
use super::waker::WakeOnDrop;
use super::watched_listener::{PAUSE, WatchedListener};
use crate::config::{Config, GuestSpec, Socket};
use ism_device::sync::lock;
use ism_device::{Fabric, LeaveGroup};
use virtio_ism_abi::event::LeaveReason;

/// Most hanging threads of earlier connections before new connections are refused.
const MAX_HANGING: usize = 4;
/// Time limit for stopping device sockets.
pub(crate) const STOP: Duration = Duration::from_secs(3);
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The running socket of one guest. Stops when dropped.
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
    /// No front end stays. The lock of the slot orders the word: a front end that
    /// [`DeviceSocket::request_stop`] does not find reads the word afterwards.
    stopping: AtomicBool,
    names: Arc<dyn SocketNames>,
    /// The socket's name, for filling its queue.
    name: Option<NameId>,
    queue: Mutex<Queue>,
    connections: AtomicU64,
    /// The client, on a vfio-user socket.
    client: VfioUserClient,
}

/// The queue of the socket. Connections are taken only with this lock.
struct Queue {
    /// `None`: the guest is removed, and the queue no longer belongs to the guest.
    socket: Option<Arc<OwnedFd>>,
    /// `true`: the first connection in the queue is the daemon's placeholder.
    is_filled: bool,
}

/// The event loop's subscriber for new front ends.
struct FrontEnds {
    inner: Arc<Inner>,
    listener: WatchedListener,
    thread: CountedThreads,
    events: LoopHandle,
}

impl DeviceSocket {
    /// Creates the socket and listens.
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
        // The framework's accept must block: on a non-blocking listener the framework would spin.
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

    /// Present status of the guest.
    pub(crate) fn status(&self) -> GuestStatus {
        let connections = self.inner.connections.load(Ordering::Relaxed);
        GuestStatus { connections, ..self.inner.slot.status() }
    }

    /// Stops listening and cuts the connection. The rest happens on other threads.
    pub(crate) fn request_stop(&self) {
        self.inner.stopping.store(true, Ordering::Release);
        self.stop_listening();
        self.inner.client.close();
        self.inner.slot.close();
    }

    /// Stops listening. A connected front end stays.
    pub(crate) fn stop_listening(&self) {
        self.inner.empty_queue();
        lock(&self.inner.queue).socket = None;
        *lock(&self.socket) = (None, None);
    }

    /// Asks the driver of the device, if any, to leave.
    pub(crate) fn ask_to_leave(
        &self,
        reason: LeaveReason,
        within: Duration,
        group: &Arc<LeaveGroup>,
    ) {
        self.inner.slot.ask_to_leave(reason, within, group);
    }

    /// Cancels the driver's leaving begun to drain the device. Returns the number of such drivers.
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

/// Converts a system error about a guest's socket.
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
        // The loop must not wait, so the front end's thread waits for the time charged here.
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
        self.stopping.load(Ordering::Acquire)
    }

    fn fault(&self, detail: std::fmt::Arguments<'_>) {
        self.slot.guest().faults.record(self.name(), Fault::RefusedConnection, detail);
    }

    /// Serves the next connection in the queue until its end.
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

    /// Makes a device for the next connection in the queue. `None`: the queue is empty, or belongs to another
    /// guest.
    fn connect_next(&self) -> Result<Option<RunningConnection>, Box<dyn std::error::Error>> {
        let queue = lock(&self.queue);
        let Some(socket) = queue.socket.as_ref().filter(|_| queue.has_next()) else {
            return Ok(None);
        };
        let mut listener = Listener::from(UnixListener::from(socket.try_clone()?));
        self.slot.connect(&mut listener, None).map(Some)
    }

    /// Serves the next vfio-user client in the queue. The client reaches its devices by private connections.
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
        let serve_device = |listener, behind: &ConnectionSlot, window| {
            self.slot.account().charge(Instant::now(), CONNECTION);
            self.slot.account().charge_and_wait(stopping);
            match self.slot.connect(&mut Listener::from(listener), window) {
                Ok(served) => {
                    let _ = behind.set(served.connection());
                    self.slot.serve(served, stopping, || ());
                }
                Err(error) => self.fault(format_args!("{error}")),
            }
        };
        let served = self.client.serve(client, &self.names, &self.slot, stopping, serve_device);
        if let Err(error) = served {
            self.fault(format_args!("{error}"));
        }
        self.empty_queue();
    }

    /// Fills the queue of the socket with a connection of the daemon's own. Without effect if another front
    /// end waits in the queue, or if the socket has lost its name and so cannot be connected to.
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

    /// Takes the daemon's own connection out of the queue, if present.
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
    /// Whether a connection waits in the queue.
    fn has_next(&self) -> bool {
        self.socket.as_ref().is_some_and(|socket| {
            poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&AT_ONCE)) == Ok(1)
        })
    }

    /// Ends the next connection, if any.
    fn drop_next(&self) {
        if let Some(socket) = self.socket.as_ref().filter(|_| self.has_next()) {
            drop(rustix::net::accept(socket));
        }
    }
}
