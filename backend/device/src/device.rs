// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device from its front end's view: sessions come and go, the window stays.

use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::Duration;

use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::{Gid, REVISION, Status};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::accounts::{MapState, QuotaAccount};
use super::counters::CounterSnapshot;
use super::handle::DeviceHandle;
use super::leave_group::{LeaveEvent, Leaving};
use super::session::DeviceSession;
use super::sync::{lock, read, write};
use super::window::Window;
use super::{DeviceConfig, DeviceInfo, Fabric, Limits, Reply};

/// How a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The driver reset the device or said HELLO anew.
    Orderly,
    /// The front end vanished or broke a rule.
    Failed,
}

/// The device of one front end, on one fabric.
///
/// Any method may be called from any thread. Commands of one device are expected from one thread at
/// a time, as its control queue has an order.
pub struct Device {
    pub(super) name: String,
    pub(super) fabric: Arc<Fabric>,
    pub(super) me: Weak<Device>,
    pub(super) handle: Arc<DeviceHandle>,
    pub(super) limits: Limits,
    pub(super) max_maps: u32,
    num_move_queues: u16,
    /// The GID of every session: pinned, or the loopback fabric's.
    fixed_gid: Option<Gid>,
    /// Held while a session begins or ends, and while a DMB is unregistered. Never the locks of two devices
    /// at a time.
    pub(super) lifecycle: Mutex<MemberState>,
    /// The session allowed to move. Held only for a moment: threads of other devices take this lock.
    pub(super) current: RwLock<Option<Arc<DeviceSession>>>,
    /// Moves hold the read side while copying, so the end of a session can wait for moves. Only threads of
    /// this device take this lock.
    pub(super) moving: RwLock<()>,
    pub(super) state: Mutex<DeviceState>,
}

/// Whether a session can begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberState {
    /// The device is a member of its fabric.
    Member,
    /// The device has left, and serves no session.
    Left,
}

/// State under a device's lock. Never held together with another device's lock.
#[derive(Debug)]
pub(super) struct DeviceState {
    pub(super) account: Option<QuotaAccount>,
    pub(super) window: Window,
    pub(super) commands_full_at: u64,
    pub(super) queries_full_at: u64,
    session_count: u32,
    /// Drawn already, for display in the configuration space.
    next_gid: Option<Gid>,
    config_gid: Gid,
    /// The driver was asked to leave.
    pub(super) leaving: Option<Leaving>,
}

impl Device {
    pub(super) fn new(
        fabric: Arc<Fabric>,
        port: DeviceConfig,
        limits: Limits,
        handle: Arc<DeviceHandle>,
        first_gid: Gid,
    ) -> Arc<Device> {
        let state = DeviceState {
            account: None,
            window: port
                .fixed_window
                .as_ref()
                .map_or_else(Window::none, |w| Window::fixed(w.size())),
            commands_full_at: 0,
            queries_full_at: 0,
            session_count: 0,
            next_gid: Some(first_gid),
            config_gid: first_gid,
            leaving: None,
        };
        Arc::new_cyclic(|me| Device {
            name: port.name,
            fixed_gid: port.pinned_gid.or(fabric.shared_gid),
            fabric,
            me: me.clone(),
            handle,
            limits,
            // A slab in an area takes no slot.
            max_maps: match port.fixed_window {
                Some(_) => u32::MAX,
                None => port.max_maps.unwrap_or(limits.max_maps),
            },
            num_move_queues: port.num_move_queues.max(1),
            lifecycle: Mutex::new(MemberState::Member),
            current: RwLock::new(None),
            moving: RwLock::new(()),
            state: Mutex::new(state),
        })
    }

    /// The configuration space.
    pub fn config(&self) -> Config {
        let limits = &self.limits;
        Config {
            revision: REVISION.into(),
            features: (Features::all().bits() as u32).into(),
            gid: lock(&self.state).config_gid,
            chid: self.fabric.chid.0.into(),
            num_move_queues: self.num_move_queues.into(),
            max_dmbs: limits.max_dmbs.into(),
            dmb_min: limits.dmb_min.into(),
            dmb_max: limits.dmb_max.into(),
            dmb_align: limits.dmb_align.into(),
            max_sg: limits.max_sg.into(),
            max_segs: limits.max_segs.into(),
            max_move: limits.max_move.into(),
            max_attach: limits.max_attach.into(),
            max_peers: limits.max_peers.into(),
            slab_align: limits.slab_align.into(),
            window_size: self.handle.window().into(),
        }
    }

    /// Sets the features used by the driver, see [`Features::in_use`]; until then all features. An op of
    /// another feature gets EINVAL.
    pub fn set_features(&self, features: Features) {
        self.handle.set_features(features);
    }

    /// Size of the window in bytes, a power of two; 0 (the initial value) if the front end cannot map, or
    /// does not acknowledge mappings.
    ///
    /// Ignored while a session has mappings, and for a [fixed window](super::FixedWindow). While ranges of past sessions may be mapped, only the size of
    /// their window or 0 is taken; any other size counts as 0.
    pub fn set_window(&self, bytes: u64) {
        let mut state = lock(&self.state);
        let has_maps = state.account.as_ref().is_some_and(|account| !account.maps.is_empty());
        if has_maps || self.handle.fixed_window.is_some() {
            return;
        }
        let mut usable = bytes;
        if bytes != 0 && bytes != state.window.size() {
            if state.window.is_unused() {
                state.window = Window::new(bytes, self.limits.slab_align);
            } else {
                usable = 0;
            }
        }
        self.handle.set_window(usable);
    }

    /// Most bytes of all regions of the driver's memory together.
    pub fn max_guest_memory(&self) -> u64 {
        self.limits.guest_memory
    }

    /// Sets the driver's memory. To be called again for a new handle; the table behind the handle may change
    /// at any time.
    pub fn set_memory(&self, memory: GuestMemoryAtomic<GuestMemoryMmap>) {
        self.handle.set_memory(memory);
    }

    /// Whether [`next_event`](Self::next_event) would return a record now.
    pub fn has_events(&self) -> bool {
        read(&self.current).as_ref().is_some_and(|session| session.has_records())
    }

    /// The next record. To be called only with a buffer at hand: the device forgets the returned record.
    pub fn next_event(&self) -> Option<[u8; EVENT_LEN]> {
        read(&self.current).as_ref()?.next_record()
    }

    /// Time until the next wake delayed by its rate limit; `None` without a delayed wake. The device does not
    /// call its notifier at the end of this time.
    pub fn next_event_in(&self) -> Option<Duration> {
        read(&self.current).as_ref()?.next_due().map(Duration::from_nanos)
    }

    /// Ends the session, if any: reset or loss of the front end. Waits only for running moves.
    pub fn close_session(&self, how: CloseReason) {
        let _lifecycle = lock(&self.lifecycle);
        self.end_session(how);
        let mut state = lock(&self.state);
        state.config_gid = state.next_gid.unwrap_or(Gid::NONE);
    }

    /// Ends the session and leaves the fabric: the device no longer counts against the fabric's caps, and
    /// begins no further session. A hanging thread may hold the device for as long as its front end likes.
    pub fn leave(&self) {
        self.close_session(CloseReason::Failed);
        // A HELLO may have come between.
        let mut lifecycle = lock(&self.lifecycle);
        *lifecycle = MemberState::Left;
        self.end_session(CloseReason::Failed);
        drop(lifecycle);
        self.fabric.remove_device(self.handle.member);
    }

    /// HELLO: ends the old session and begins a new one.
    pub(super) fn begin(
        &self,
        driver_max_idx: u32,
        big_endian: bool,
    ) -> Result<Arc<DeviceSession>, Status> {
        let lifecycle = lock(&self.lifecycle);
        if *lifecycle == MemberState::Left {
            return Err(Status::Eio);
        }
        self.end_session(CloseReason::Orderly);
        let mut state = lock(&self.state);
        let gid = match state.next_gid.take() {
            Some(gid) => gid,
            None => self.draw().ok_or(Status::Eio)?,
        };
        state.session_count = state.session_count.wrapping_add(1);
        let session = DeviceSession::new(gid, state.session_count, big_endian, self.handle.clone());
        let idx_bound = driver_max_idx.min(self.limits.max_dmbs);
        let at_start = CounterSnapshot::of(&self.handle.counters);
        state.account = Some(QuotaAccount::new(session.clone(), idx_bound, at_start));
        if let Some(request) = state.leaving.as_mut().and_then(Leaving::restart)
            && self.knows_leave()
        {
            session.push_leave(LeaveEvent::Leave(request));
        }
        drop(state);
        *write(&self.current) = Some(session.clone());
        self.fabric.add_session(&session);
        Ok(session)
    }

    /// Ends the session with all its state (CLOSE-38). The caller holds `lifecycle`. For the order, see
    /// docs/virtio-ism.md, "Reset, pause, departure".
    fn end_session(&self, how: CloseReason) {
        let mut state = lock(&self.state);
        let Some(mut account) = state.account.take() else { return };
        let session = account.session.clone();
        session.close();
        for mapping in account.maps.values() {
            let busy = mapping.state != MapState::Mapped;
            state.window.mark_stale(mapping.offset, mapping.slab.len(), busy);
            if account.owns(&mapping.slab) {
                mapping.slab.close();
            }
        }
        state.next_gid = self.draw();
        drop(state);
        // 1. No new command can name the session.
        self.fabric.remove_session(&session);
        // 2. Its moves finish; those into its DMBs do so in 3, one DMB at a time.
        *write(&self.current) = None;
        drop(write(&self.moving));
        // 3. Its DMBs are closed, and their users get DMB_GONE.
        for entry in account.dmbs.values().filter(|entry| entry.ready) {
            entry.dmb.close(&self.fabric.tokens, false);
        }
        for entry in account.attached.values().filter(|entry| entry.ready) {
            self.detach_session(&session, entry);
        }
        // 4. PEER_DOWN, the last event of this GID.
        self.fabric.notify_peers_of_end(&session, how);
        session.close_events();
        if self.fixed_gid.is_none() {
            self.fabric.gids.release(session.gid);
        }
        account.finish_leaving();
    }

    /// Another device's session has ended.
    pub(super) fn peer_ended(&self, gid: Gid, failed: bool) {
        if let Some(account) = &mut lock(&self.state).account
            && account.unrelate(gid)
        {
            account.session.push_peer_down(gid, failed);
        }
    }

    fn draw(&self) -> Option<Gid> {
        self.fixed_gid.or_else(|| self.fabric.gids.draw().ok())
    }

    /// Counts a reply and truncates it to the available room.
    pub(super) fn account(&self, reply: Reply) -> Reply {
        match reply.status() {
            Some(Status::Ok) => self.handle.counters.commands.add(1),
            Some(status) => self.handle.counters.refusals.add(status),
            None => {}
        }
        reply
    }

    /// The present state of the device.
    pub fn info(&self) -> DeviceInfo {
        let counters = &self.handle.counters;
        let mut info = DeviceInfo {
            name: self.name.clone(),
            window_size: self.handle.window(),
            counts: counters.get(),
            refusals: counters.refusals.get(),
            move_refusals: counters.move_refusals.get(),
            ..DeviceInfo::default()
        };
        let state = lock(&self.state);
        info.is_leaving = state.is_leaving();
        info.stale_maps = state.window.stale() as u64;
        if let Some(account) = &state.account {
            info.gid = Some(account.session.gid);
            info.session = account.session.number;
            info.dmbs = account.dmbs.len() as u64;
            info.dmb_bytes = account.dmb_bytes;
            info.attached = account.attached.len() as u64;
            info.slabs = account.maps.len() as u64;
            info.slab_bytes = account.slab_bytes;
            info.attached_slab_bytes = account.attached_bytes;
            info.map_slots = account.slots();
            info.peers = account.related_peers();
        }
        info
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.close_session(CloseReason::Failed);
        if self.fabric.shared_gid.is_none()
            && let Some(gid) = lock(&self.state).next_gid.or(self.fixed_gid)
        {
            self.fabric.gids.release(gid);
        }
        self.fabric.remove_device(self.handle.member);
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("name", &self.name).finish_non_exhaustive()
    }
}
