// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device pool: one socket for many devices, one device per connection.
//!
//! The socket carries packets. A connecting process gets one packet, a
//! [`PoolAnswer`](virtio_ism_abi::PoolAnswer), with a connected socket. On this socket the process is the
//! front end of a device of its own. The daemon then closes the first connection. So the answering event loop
//! never waits, and keeps no state of refused processes. Each front end has a thread to make its device,
//! serve the front end and see its end.
//!
//! # Shares
//!
//! Processes sharing a pool do not trust each other; [`pool_shares`](super::pool_shares) decides whether a
//! process gets a device. A disconnected front end with running threads still counts. A front end leaving
//! without a command counts for [`HELD`], to bound the number of devices in a flood of such front ends.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::{EventOps, Events, MutEventSubscriber};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with, sendmsg,
};
use vhost::vhost_user::Listener;
use virtio_ism_abi::event::LeaveReason;
use virtio_ism_abi::{PoolAnswer, PoolStatus};
use zerocopy::IntoBytes;

use super::counted_threads::CountedThreads;
use super::device_slot::{DeviceSlot, GuestContext, GuestStatus, MemberInfo, PoolInfo};
use super::device_socket::system;
use super::event_loop::{LoopHandle, Registration};
use super::faults::Fault;
use super::peer::Peer;
use super::pool_shares::{PoolPeer, account_of, admit};
use super::unix_socket::{Backlog, BoundSocket, SocketError, SocketKind, SocketNames};
use super::watched_listener::WatchedListener;
use crate::config::id_map;
use crate::config::{Config, GuestSpec};
use ism_device::sync::lock;
use ism_device::{DeviceInfo, Fabric, LeaveGroup};

/// How long a device counts from its grant on, if its front end leaves without a command.
const HELD: Duration = Duration::from_millis(100);
/// Clients answered before the event loop does other work.
const AT_A_TIME: usize = 64;

/// The running socket of one pool. Stops when dropped.
pub(crate) struct DevicePool {
    inner: Arc<Inner>,
    /// Threads of the pool's front ends.
    threads: CountedThreads,
    events: LoopHandle,
    /// The name of the socket, and the loop's interest in it.
    socket: Mutex<(Option<BoundSocket>, Option<Registration>)>,
}

/// The event loop's subscriber for new clients.
struct Clients {
    inner: Arc<Inner>,
    listener: WatchedListener,
    threads: CountedThreads,
    events: LoopHandle,
}

struct Inner {
    guest: Arc<GuestContext>,
    devices: u32,
    names: Arc<dyn SocketNames>,
    /// No front end stays. The lock of a slot orders the word: a front end that [`DevicePool::request_stop`]
    /// does not find reads the word afterwards.
    stopping: AtomicBool,
    members: Mutex<Members>,
    refused: AtomicU64,
    /// A drain of the pool, with the time for its drivers: a later front end gets a device that is drained,
    /// too. The lock is held until all present devices know, and taken before all others.
    drained: Mutex<Option<Duration>>,
}

#[derive(Default)]
struct Members {
    /// Number of the last front end; also the number of connections granted a device.
    last: u64,
    all: BTreeMap<u64, Member>,
    /// Counters of ended devices.
    ended: DeviceInfo,
}

/// One front end.
struct Member {
    slot: Arc<DeviceSlot>,
    info: MemberInfo,
    party: PoolPeer,
    granted: Instant,
    /// Set once the front end has left: the earliest time to stop counting the device.
    gone: Option<Instant>,
}

/// Runs at the end of a front end, however its thread ends.
struct Leave<'a> {
    inner: &'a Inner,
    number: u64,
    slot: &'a DeviceSlot,
}

impl DevicePool {
    /// Creates the socket and listens. `devices`: size of the pool.
    pub(crate) fn start(
        spec: GuestSpec,
        devices: u32,
        fabric: Arc<Fabric>,
        config: &Config,
        events: LoopHandle,
        names: Arc<dyn SocketNames>,
    ) -> Result<DevicePool, SocketError> {
        let path = spec.path().unwrap_or(std::path::Path::new("")).to_owned();
        let mode = spec.mode.unwrap_or(config.socket_mode);
        if !id_map::users().is_whole() {
            tracing::warn!(
                guest = spec.name,
                "the daemon's user namespace does not have all users: those that it does not have \
                 count as one in a pool"
            );
        }
        let kind = SocketKind::Packets;
        let (listener, socket) = BoundSocket::bind_kind(&names, &path, mode, kind, Backlog::Many)?;
        rustix::fs::fcntl_setfl(&listener, rustix::fs::OFlags::NONBLOCK)
            .map_err(|error| system(&spec)(error.into()))?;
        let listener = WatchedListener::new(listener).map_err(system(&spec))?;
        let timers = events.timers().clone();
        let inner = Arc::new(Inner {
            guest: Arc::new(GuestContext::new(spec, fabric, config, timers)),
            devices,
            names,
            stopping: AtomicBool::new(false),
            members: Mutex::default(),
            refused: AtomicU64::new(0),
            drained: Mutex::default(),
        });
        let threads = CountedThreads::default();
        let watched = events.add(Clients {
            inner: inner.clone(),
            listener,
            threads: threads.clone(),
            events: events.clone(),
        });
        Ok(DevicePool { inner, threads, events, socket: Mutex::new((Some(socket), Some(watched))) })
    }

    /// Present state of the pool and its front ends.
    pub(crate) fn status(&self) -> Vec<GuestStatus> {
        let inner = &self.inner;
        let is_drained = lock(&inner.drained).is_some();
        let mut members = lock(&inner.members);
        members.forget_ended();
        let pool = GuestStatus {
            spec: inner.guest.spec.clone(),
            device: None,
            ended: members.ended.clone(),
            connections: members.last,
            hanging: members.all.values().map(|member| member.slot.status().hanging).sum(),
            touched_bytes: inner.guest.touches.used(),
            faults: inner.guest.faults.snapshot(),
            pool: Some(PoolInfo {
                in_use: members.count(),
                refused: inner.refused.load(Ordering::Relaxed),
                drained: is_drained,
            }),
            member: None,
        };
        let front_ends =
            members.all.values().filter(|member| member.gone.is_none()).map(|member| {
                // The pool's own entry has these counters.
                GuestStatus {
                    connections: 1,
                    touched_bytes: 0,
                    faults: Default::default(),
                    member: Some(member.info.clone()),
                    ..member.slot.status()
                }
            });
        std::iter::once(pool).chain(front_ends).collect()
    }

    /// Stops listening and cuts all connections. The rest happens on the front ends' own threads.
    pub(crate) fn request_stop(&self) {
        self.inner.stopping.store(true, Ordering::Release);
        self.stop_listening();
        for slot in self.slots() {
            slot.close();
        }
    }

    /// Stops listening. Connected front ends stay.
    pub(crate) fn stop_listening(&self) {
        *lock(&self.socket) = (None, None);
    }

    /// Asks the drivers of all devices in use to leave; for a drain, later drivers, too.
    pub(crate) fn ask_to_leave(
        &self,
        reason: LeaveReason,
        within: Duration,
        group: &Arc<LeaveGroup>,
    ) {
        let mut drained = lock(&self.inner.drained);
        if reason == LeaveReason::Drain {
            *drained = Some(within);
        }
        for slot in self.slots() {
            slot.ask_to_leave(reason, within, group);
        }
    }

    /// Cancels a drain of the pool. Returns the number of devices back in service.
    pub(crate) fn stay(&self) -> usize {
        let mut drained = lock(&self.inner.drained);
        *drained = None;
        self.slots().iter().filter(|slot| slot.stay()).count()
    }

    /// Waits for the end of what [`request_stop`](Self::request_stop) began, at the latest until
    /// `deadline`; `false` if a front end keeps a thread from ending.
    pub(crate) fn wait_stopped(&self, deadline: Instant) -> bool {
        let left = || deadline.saturating_duration_since(Instant::now());
        self.events.wait_done(deadline)
            && self.threads.wait_for(0, left())
            && self.slots().iter().all(|slot| slot.threads().wait_for(0, left()))
    }

    fn slots(&self) -> Vec<Arc<DeviceSlot>> {
        lock(&self.inner.members).all.values().map(|member| member.slot.clone()).collect()
    }
}

impl Drop for DevicePool {
    fn drop(&mut self) {
        self.request_stop();
    }
}

impl Members {
    /// Devices in use.
    fn count(&self) -> u32 {
        u32::try_from(self.all.len()).unwrap_or(u32::MAX)
    }

    /// Forgets disconnected front ends without running threads.
    fn forget_ended(&mut self) {
        let now = Instant::now();
        self.all.retain(|_, member| {
            member.gone.is_none_or(|until| until > now || member.slot.threads().alive() > 0)
        });
    }
}

impl MutEventSubscriber for Clients {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.listener.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if !self.listener.is_ready(events, ops) {
            return;
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        for _ in 0..AT_A_TIME {
            if self.inner.stopping.load(Ordering::Acquire) {
                return;
            }
            match accept_with(self.listener.socket(), flags) {
                Ok(client) if has_gone(&client) => {}
                Ok(client) => self.inner.answer(&client, &self.threads),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    self.inner.fault(format_args!("{error}"));
                    self.listener.pause_briefly(self.events.timers(), ops);
                    return;
                }
            }
        }
    }
}

/// Whether a client has closed its socket and so cannot get an answer.
fn has_gone(client: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(client, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let polled = poll(&mut asked, Some(&at_once));
    polled == Ok(1) && asked[0].revents().contains(PollFlags::HUP)
}

impl Inner {
    fn name(&self) -> &str {
        &self.guest.spec.name
    }

    fn fault(&self, detail: std::fmt::Arguments<'_>) {
        self.guest.faults.record(self.name(), Fault::RefusedConnection, detail);
    }

    /// Answers one client.
    fn answer(self: &Arc<Self>, client: &OwnedFd, threads: &CountedThreads) {
        let (status, device) = match self.grant(client, threads) {
            Ok(device) => (PoolStatus::Granted, Some(device)),
            Err(status) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                (status, None)
            }
        };
        let answer = PoolAnswer::new(status);
        let fds: Vec<_> = device.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // The descriptor of a disconnected client is closed unsent, and ends the device.
        let sent = sendmsg(client, &[IoSlice::new(answer.as_bytes())], &mut ancillary, flags);
        if let Err(error) = sent {
            tracing::debug!(guest = self.name(), %error, "a client of the pool is gone");
        }
    }

    /// Makes a device's socket for a client, with the client as front end.
    fn grant(
        self: &Arc<Self>,
        client: &OwnedFd,
        threads: &CountedThreads,
    ) -> Result<OwnedFd, PoolStatus> {
        let spec = &self.guest.spec;
        let failed = |error: std::io::Error| {
            self.fault(format_args!("{error}"));
            PoolStatus::Failed
        };
        let Peer { pid, uid, gid, network_namespace } = Peer::of(client).map_err(failed)?;
        if spec.peer_uid.is_some_and(|only| uid != Some(only))
            || spec.peer_gid.is_some_and(|only| gid != Some(only))
        {
            let (uid, gid) = (shown(uid), shown(gid));
            self.fault(format_args!("user {uid}, group {gid}: not permitted"));
            return Err(PoolStatus::NotPermitted);
        }
        let party = PoolPeer { account: account_of(uid), namespace: network_namespace };
        let mut members = lock(&self.members);
        members.forget_ended();
        let held: Vec<_> = members.all.values().map(|member| &member.party).collect();
        if let Err(refused) = admit(self.devices, &held, &party) {
            tracing::debug!(guest = self.name(), network_namespace, ?refused, "no device");
            return Err(refused);
        }
        let (listener, device) = self.names.pair().map_err(failed)?;
        let number = members.last + 1;
        let name = format!("{}/{number}", spec.name);
        let slot = Arc::new(DeviceSlot::new(name.clone(), self.guest.clone()));
        let (inner, own) = (self.clone(), slot.clone());
        threads.spawn(&name, move || inner.serve(number, &own, listener)).map_err(failed)?;
        self.guest.faults.log_connection(|withheld| {
            let guest = &name;
            let uid = shown(uid);
            tracing::info!(guest, pid, %uid, network_namespace, withheld, "a device of the pool");
        });
        let info = MemberInfo { pool: spec.name.clone(), pid, uid, network_namespace };
        let granted = Instant::now();
        members.all.insert(number, Member { slot, info, party, granted, gone: None });
        members.last = number;
        Ok(device)
    }

    /// Drains the device of a new front end with its pool. Returns whether to end the connection at once.
    fn connected(&self, slot: &DeviceSlot) -> bool {
        if let Some(within) = *lock(&self.drained) {
            // A group of its own: the requester of the drain waits for earlier drivers only.
            slot.ask_to_leave(LeaveReason::Drain, within, &LeaveGroup::new());
        }
        self.stopping.load(Ordering::Acquire)
    }

    /// Serves a front end, on a thread of its own.
    fn serve(&self, number: u64, slot: &DeviceSlot, listener: UnixListener) {
        let _leave = Leave { inner: self, number, slot };
        let mut listener = Listener::from(listener);
        let connected = slot.connect(&mut listener, None);
        drop(listener);
        match connected {
            Ok(served) => slot.serve(served, || self.connected(slot), || ()),
            Err(error) => self.fault(format_args!("{error}")),
        }
    }
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let ended = self.slot.status().ended;
        let mut members = lock(&self.inner.members);
        members.ended.add_counters(&ended);
        if let Some(member) = members.all.get_mut(&self.number) {
            let held = if ended.counts.commands == 0 { HELD } else { Duration::ZERO };
            member.gone = Some(member.granted + held);
        }
        members.forget_ended();
    }
}

/// A user or group id for the log.
fn shown(id: Option<u32>) -> String {
    id.map_or_else(|| "of another namespace".into(), |id| id.to_string())
}
