// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From a socket to a running device.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Error as VhostUserError, Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_ism_abi::config::{CONFIG_LEN, Config, Features};
use virtio_ism_abi::{EVENT_QUEUE, FIRST_MOVE_QUEUE, WINDOW_SHMID};
use zerocopy::FromBytes;

use super::channel::{BackendChannel, StepDeadline, WindowServer};
use super::{VhostUser, connect_error, pool};
use crate::transport::doorbells::Doorbells;
use crate::transport::{RunningDevice, SetupOptions, TransportError};
use crate::virtqueue::{GuestPool, Health, QueueAddresses, Queues, Wiring};
use ism_sys::{EventFd, Reservation, connect_unix, is_other_kind, out_of_the_way};

/// VIRTIO_F_EVENT_IDX: event indices decide about notifications.
const EVENT_IDX: u64 = 1 << 29;
/// vhost-user: protocol features are negotiated.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// virtio 1.0 or later.
const VERSION_1: u64 = 1 << 32;

/// Windows beyond this are not reserved, bytes.
const LARGEST_WINDOW: u64 = 1 << 42;

/// How long the set-up may take.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the daemon of a free device may take to answer first. Longer waits are for a device in use.
const FIRST_ANSWER: Duration = Duration::from_millis(500);

/// Connects to a daemon's socket, of one device or of a pool, and sets up features, memory, queues and
/// window.
///
/// While another process uses the device, the call waits for `timeout`.
///
/// # Errors
/// The device stays in use, or belongs to another user than wanted; the daemon cannot be reached, lacks a
/// needed feature, or does not answer.
pub fn connect(
    socket: &Path,
    wanted: SetupOptions,
    timeout: Duration,
) -> Result<Arc<RunningDevice>, TransportError> {
    let deadline = Instant::now() + timeout;
    let (stream, owner) = match connect_unix(socket, timeout) {
        Ok(stream) => {
            let owner = super::owner(socket, &stream, wanted.owner)?;
            (stream, owner)
        }
        Err(error) if is_other_kind(&error) => pool::request(socket, wanted.owner, timeout)?,
        // While a process uses the device, the daemon keeps the queue of the socket full.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(TransportError::InUse);
        }
        Err(error) => return Err(connect_error(socket, error)),
    };
    let stream = UnixStream::from(stream);
    // If two processes connect at the same time, the later one may be in the queue itself.
    let left = deadline.saturating_duration_since(Instant::now());
    set_up(stream, owner, wanted, left.max(FIRST_ANSWER))
}

pub(super) fn set_up(
    stream: UnixStream,
    owner: u32,
    wanted: SetupOptions,
    first_answer: Duration,
) -> Result<Arc<RunningDevice>, TransportError> {
    let health = Health::new();
    let deadline = StepDeadline::within(first_answer);
    let server = Arc::new(WindowServer::default());
    let main = out_of_the_way(|| stream.as_fd().try_clone_to_owned()).map_err(system("dup"))?;
    let channel =
        BackendChannel::new(Arc::clone(&server), main, Arc::clone(&health), Arc::clone(&deadline))
            .map_err(system("backend channel"))?;
    let channel = Arc::new(channel);
    let daemon_end = channel.daemon_end().map_err(system("backend channel"))?;
    let thread = channel.start().map_err(system("thread"))?;

    let queues = u64::from(FIRST_MOVE_QUEUE) + u64::from(wanted.move_queues.max(1));
    let frontend = Frontend::from_stream(stream, queues);
    let result = negotiate(frontend, &server, daemon_end, wanted, &health, &deadline);
    match result {
        Ok(Negotiated { config, features, queues, pool, window, doorbells, frontend, events }) => {
            deadline.remove();
            let connection = Box::new(VhostUser {
                health: Arc::clone(&health),
                window,
                doorbells,
                frontend,
                channel,
                thread: Some(thread),
                events,
                owner,
            });
            Ok(Arc::new(RunningDevice::new(config, features, queues, pool, health, connection)))
        }
        Err(error) => {
            health.fail("set-up failed");
            let _ = thread.join();
            Err(error)
        }
    }
}

/// A device whose queues run.
struct Negotiated {
    config: Config,
    features: Features,
    queues: Queues,
    pool: Arc<GuestPool>,
    window: Option<Arc<Reservation>>,
    doorbells: Option<Arc<Doorbells>>,
    frontend: Frontend,
    events: Events,
}

fn negotiate(
    mut frontend: Frontend,
    server: &WindowServer,
    daemon_end: OwnedFd,
    wanted: SetupOptions,
    health: &Arc<Health>,
    deadline: &StepDeadline,
) -> Result<Negotiated, TransportError> {
    frontend.set_owner().map_err(first_step("SET_OWNER"))?;
    let offered = frontend.get_features().map_err(first_step("GET_FEATURES"))?;
    deadline.extend(SETUP_TIMEOUT);
    for (bit, name) in [(VERSION_1, "VERSION_1"), (PROTOCOL_FEATURES, "PROTOCOL_FEATURES")] {
        if offered & bit == 0 {
            return Err(TransportError::Missing(name));
        }
    }
    let protocol = negotiate_protocol(&mut frontend)?;
    let queues = frontend.get_queue_num().map_err(step("GET_QUEUE_NUM"))?;
    let region = if protocol.contains(VhostUserProtocolFeatures::SHMEM) {
        let regions = frontend.get_shmem_config().map_err(step("GET_SHMEM_CONFIG"))?;
        let sizes = regions.memory_sizes;
        sizes.get(usize::from(WINDOW_SHMID)).copied().unwrap_or(0)
    } else {
        0
    };
    // The next answer shows whether the daemon has taken these two: a daemon refusing one of them closes
    // the connection.
    frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
    frontend.set_backend_request_fd(&daemon_end).map_err(step("SET_BACKEND_REQ_FD"))?;
    drop(daemon_end);

    let event_idx = offered & EVENT_IDX != 0;
    let known = Features::from_bits_truncate(offered);
    let window = if known.contains(Features::WINDOW) { reserve(region) } else { None };
    let mut refused = wanted.refused();
    if window.is_none() {
        // Without stores into the window no thread reads the armed words.
        refused |=
            Features::WINDOW | Features::PEER_FUTEX | Features::DOORBELL | Features::SLAB_LINE;
    }
    let accepted = (known - refused).bits() | VERSION_1 | PROTOCOL_FEATURES | (offered & EVENT_IDX);
    frontend.set_features(accepted).map_err(step("SET_FEATURES"))?;
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let config = read_config(&mut frontend)?;
    let mut features = Features::usable(offered, &config) - refused;

    // The window is used only if the configuration and the region have the same size.
    let window = window.filter(|window| window.size() == config.window_size.get());
    match &window {
        Some(window) => server.open(window),
        None => features.remove(Features::WINDOW),
    }

    let move_queues = u64::from(wanted.move_queues.max(1))
        .min(config.num_move_queues.get().into())
        .min(queues.saturating_sub(FIRST_MOVE_QUEUE.into()));
    if move_queues == 0 {
        return Err(TransportError::Missing("a move queue"));
    }
    let (pool, file) = GuestPool::new(wanted.guest_memory).map_err(system("guest memory"))?;
    let (wirings, kicks, calls) =
        wire(usize::from(FIRST_MOVE_QUEUE) + move_queues as usize, event_idx, health)?;
    let events_call = calls.get(usize::from(EVENT_QUEUE));
    let doorbells = match events_call.filter(|_| features.contains(Features::DOORBELL)) {
        Some(call) => Some(Arc::new(Doorbells::new(call.as_fd()).map_err(system("epoll"))?)),
        None => None,
    };
    if let Some(doorbells) = &doorbells {
        server.take_doorbells(doorbells);
    }
    let mut wirings = wirings.into_iter();
    let (Some(control), Some(events)) = (wirings.next(), wirings.next()) else {
        return Err(TransportError::Missing("a queue"));
    };
    let max_move = config.max_move.get() as usize;
    let queues = Queues::new(&pool, max_move, control, events, wirings)?;

    set_mem_table(&frontend, &pool, &file)?;
    // Both sides have mapped the file.
    drop(file);
    let rings = queues.addresses();
    for (i, ring) in rings.iter().enumerate() {
        if let (Some(kick), Some(call)) = (kicks.get(i), calls.get(i)) {
            start_queue(&mut frontend, i, ring, kick, call, i + 1 == rings.len())?;
        }
    }
    queues.events.start()?;
    let events = kicks.into_iter().chain(calls).collect();
    Ok(Negotiated { config, features, queues, pool, window, doorbells, frontend, events })
}

fn negotiate_protocol(
    frontend: &mut Frontend,
) -> Result<VhostUserProtocolFeatures, TransportError> {
    type P = VhostUserProtocolFeatures;
    let offered = frontend.get_protocol_features().map_err(step("GET_PROTOCOL_FEATURES"))?;
    let needed = [
        (P::CONFIG, "protocol feature CONFIG"),
        (P::MQ, "protocol feature MQ"),
        (P::REPLY_ACK, "protocol feature REPLY_ACK"),
        (P::BACKEND_REQ, "protocol feature BACKEND_REQ"),
    ];
    for (feature, name) in needed {
        if !offered.contains(feature) {
            return Err(TransportError::Missing(name));
        }
    }
    let wanted = P::CONFIG | P::MQ | P::REPLY_ACK | P::BACKEND_REQ | P::SHMEM | P::RESET_DEVICE;
    let accepted = offered & wanted;
    frontend.set_protocol_features(accepted).map_err(step("SET_PROTOCOL_FEATURES"))?;
    // The daemon acknowledges every request from here on, to report a refusal at its request.
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    Ok(accepted)
}

fn read_config(frontend: &mut Frontend) -> Result<Config, TransportError> {
    let room = [0; CONFIG_LEN];
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) =
        frontend.get_config(0, CONFIG_LEN as u32, flags, &room).map_err(step("GET_CONFIG"))?;
    Config::read_from_bytes(&bytes)
        .map_err(|_| TransportError::ConfigLength { len: bytes.len(), expected: CONFIG_LEN })
}

/// Reserves address space for the window. Without a window, the device works by moves.
fn reserve(size: u64) -> Option<Arc<Reservation>> {
    let size = Some(size).filter(|size| (1..=LARGEST_WINDOW).contains(size))?;
    match Reservation::new(size) {
        Ok(window) => Some(Arc::new(window)),
        Err(error) => {
            tracing::warn!(size, %error, "no address space for the window, moves only");
            None
        }
    }
}

type Events = Vec<Arc<EventFd>>;

/// Eventfds for `n` queues.
fn wire(
    n: usize,
    event_idx: bool,
    health: &Arc<Health>,
) -> Result<(Vec<Wiring>, Events, Events), TransportError> {
    let (mut wirings, mut kicks, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..n {
        let kick = Arc::new(EventFd::new().map_err(system("eventfd"))?);
        let call = Arc::new(EventFd::new().map_err(system("eventfd"))?);
        health.wake_with(&call);
        wirings.push(Wiring {
            kick: Box::new(Arc::clone(&kick)),
            call: Arc::clone(&call),
            health: Arc::clone(health),
            event_idx,
        });
        kicks.push(kick);
        calls.push(call);
    }
    Ok((wirings, kicks, calls))
}

fn set_mem_table(
    frontend: &Frontend,
    pool: &GuestPool,
    file: &OwnedFd,
) -> Result<(), TransportError> {
    let address = pool.whole().address() as u64;
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: address,
        memory_size: pool.whole().len() as u64,
        userspace_addr: address,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    frontend.set_mem_table(&[region]).map_err(step("SET_MEM_TABLE"))?;
    Ok(())
}

fn start_queue(
    frontend: &mut Frontend,
    index: usize,
    ring: &QueueAddresses,
    kick: &EventFd,
    call: &EventFd,
    last: bool,
) -> Result<(), TransportError> {
    // Only the last request waits for an answer: a daemon refusing one of these requests closes the
    // connection.
    frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
    frontend.set_vring_num(index, ring.size).map_err(step("SET_VRING_NUM"))?;
    let layout = VringConfigData {
        queue_max_size: ring.size,
        queue_size: ring.size,
        flags: 0,
        desc_table_addr: ring.descriptors,
        used_ring_addr: ring.used,
        avail_ring_addr: ring.available,
        log_addr: None,
    };
    frontend.set_vring_addr(index, &layout).map_err(step("SET_VRING_ADDR"))?;
    frontend.set_vring_base(index, 0).map_err(step("SET_VRING_BASE"))?;
    frontend.set_vring_call(index, call.as_vmm()).map_err(step("SET_VRING_CALL"))?;
    frontend.set_vring_kick(index, kick.as_vmm()).map_err(step("SET_VRING_KICK"))?;
    if last {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    frontend.set_vring_enable(index, true).map_err(step("SET_VRING_ENABLE"))?;
    Ok(())
}

/// An error before the daemon's first answer: the daemon serves another process. After a time-out this end
/// closes the connection.
fn first_step(what: &'static str) -> impl Fn(vhost::Error) -> TransportError {
    move |error| match error {
        vhost::Error::VhostUserProtocol(
            VhostUserError::Disconnected
            | VhostUserError::PartialMessage
            | VhostUserError::SocketBroken(_),
        ) => TransportError::InUse,
        error => step(what)(error),
    }
}

fn step<E: Display>(step: &'static str) -> impl Fn(E) -> TransportError {
    move |error| TransportError::Setup { step, reason: error.to_string() }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> TransportError {
    move |source| TransportError::System { what, source }
}
