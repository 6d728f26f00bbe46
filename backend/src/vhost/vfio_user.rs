// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vfio-user front end: the front end gets a virtio function over PCI, backed by a vhost-user connection of
//! its own. The daemon checks, counts and limits everything on this connection, except the processor time of
//! the function's thread, charged to the account of the front end.
//!
//! The function's thread serves a kick itself if the worker of the queue is idle: waking the worker would
//! take longer than most kicks.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use vfio_user_virtio::{BackEndError, EndError, Event, Identity, SharedMemory, VhostUser, serve};
use virtio_ism_abi::config::CONFIG_LEN;
use virtio_ism_abi::{FIRST_MOVE_QUEUE, VIRTIO_ID_ISM, WINDOW_SHMID};

use super::connection::Connection;
use super::counted_threads::CountedThreads;
use super::device_slot::{DeviceSlot, GuestContext};
use super::faults::Fault;
use super::unix_socket::SocketNames;
use ism_device::FixedWindow;
use ism_device::sync::lock;

/// The device behind a connection of the function, once made.
pub(super) type ConnectionSlot = OnceLock<Weak<Connection>>;

/// PCI class of communication devices of no other kind.
const COMMUNICATION: u32 = 0x07_8000;
/// Most entries of a queue, the usual value of monitors for virtio functions.
const QUEUE_SIZE: u16 = 256;

/// The client of a socket, if one is connected.
#[derive(Default)]
pub(super) struct VfioUserClient {
    /// The client's socket, for ending the client.
    socket: Arc<Mutex<Option<UnixStream>>>,
    thread: CountedThreads,
}

impl VfioUserClient {
    /// Serves a client to its end. The client's function runs on a thread of its own. Each connection of the
    /// function to its device goes to `serve_device` in turn, with the window mapped by the client, and
    /// `serve_device` sets the device behind the connection. `is_stopping` tells whether to end the client at once.
    ///
    /// # Errors
    /// The system has no thread or descriptor left.
    pub(super) fn serve(
        &self,
        client: UnixStream,
        names: &Arc<dyn SocketNames>,
        slot: &DeviceSlot,
        is_stopping: impl FnOnce() -> bool,
        serve_device: impl Fn(UnixListener, &ConnectionSlot, Option<Arc<FixedWindow>>),
    ) -> io::Result<()> {
        *lock(&self.socket) = Some(client.try_clone()?);
        if is_stopping() {
            self.close();
        }
        let (listeners, connections) = channel();
        let (names, guest) = (names.clone(), slot.guest().clone());
        let (account, socket) = (slot.account().clone(), self.socket.clone());
        self.thread.spawn(&slot.guest().spec.name, move || {
            let identity = guest.function();
            // The areas stay the client's for as long as the client, over all its connections.
            let window = OnceLock::new();
            let share = |areas| {
                let fixed = guest.fixed_window(areas)?;
                let files = fixed.files().map(|file| file.try_clone_to_owned());
                let files = files.collect::<io::Result<Vec<_>>>().ok()?;
                let shared = SharedMemory { id: WINDOW_SHMID, area_len: fixed.area_len(), files };
                window.set(fixed).ok().map(|()| shared)
            };
            let connect = || {
                let (listener, device) = names.pair()?;
                let behind = Arc::new(ConnectionSlot::new());
                let place = (listener, behind.clone(), window.get().cloned());
                listeners.send(place).map_err(io::Error::other)?;
                let mut device = VhostUser::new(device.into(), identity.queues)?;
                device.serve_kicks_by(move |queue| {
                    let connection = behind.get().and_then(Weak::upgrade);
                    connection.is_some_and(|connection| connection.serve_kick(queue))
                });
                Ok(device)
            };
            let pace = || account.charge_and_wait(|| lock(&socket).is_none());
            serve_function(client, identity, share, connect, pace, &guest);
            account.charge_ending_thread(Instant::now());
        })?;
        // `connections` ends with the function's thread.
        for (listener, behind, window) in connections {
            serve_device(listener, &behind, window);
        }
        *lock(&self.socket) = None;
        Ok(())
    }

    /// Ends the client, if any.
    pub(super) fn close(&self) {
        if let Some(socket) = lock(&self.socket).take() {
            // An unconnected socket is no error here.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Waits for the end of the client's thread; `false` on time-out.
    pub(super) fn wait_ended(&self, limit: Duration) -> bool {
        self.thread.wait_for(0, limit)
    }
}

impl GuestContext {
    /// The PCI function of this guest's clients.
    fn function(&self) -> Identity {
        Identity {
            device_id: VIRTIO_ID_ISM as u16,
            class: COMMUNICATION,
            config_len: CONFIG_LEN as u16,
            queues: FIRST_MOVE_QUEUE + self.move_queues(),
            queue_size: QUEUE_SIZE,
        }
    }
}

fn serve_function(
    client: UnixStream,
    identity: Identity,
    share: impl FnOnce(usize) -> Option<SharedMemory>,
    mut connect: impl FnMut() -> Result<VhostUser, BackEndError>,
    pace: impl Fn(),
    guest: &GuestContext,
) {
    let name = &guest.spec.name;
    let fault = |error: &dyn std::fmt::Display| {
        guest.faults.record(name, Fault::BadMessage, format_args!("vfio-user: {error}"));
    };
    let mut report = |event: Event<'_>| match event {
        Event::Request => pace(),
        Event::Refused(error) => fault(&error),
        // The connection has recorded the reason.
        Event::BackEndLost(error) => tracing::debug!(guest = name, %error, "vfio-user"),
    };
    let Err(end) = serve(client, identity, share, &mut connect, &mut report);
    match &end {
        end if end.is_orderly() => {}
        EndError::BackEnd(error) => tracing::debug!(guest = name, %error, "vfio-user"),
        end => fault(end),
    }
}
