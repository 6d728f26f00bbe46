//! A device as its front end sees it: lives come and go, the window stays.
//!
//! Rules kept here: CLOSE-38.

use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::Duration;

use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::{Gid, REVISION, Status};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::counters::Tally;
use super::life::{Contact, Life};
use super::session::{MapState, Session};
use super::sync::{lock, read, write};
use super::window::Window;
use super::{DeviceInfo, Fabric, Limits, PortConfig, Reply};

/// How a device learns that it has something to take.
pub trait Doorbell: Send + Sync {
    /// Events wait for this device. Called from any thread, with locks held: must not block, and
    /// must not call into the device.
    fn ring(&self);
}

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// The driver reset the device or said HELLO anew.
    Orderly,
    /// The front end vanished or broke a rule.
    Failed,
}

/// A front end's place on a fabric.
///
/// Any method may be called from any thread. Commands of one device are expected from one thread at
/// a time, as its control queue has an order.
pub struct Device {
    pub(super) name: String,
    pub(super) fabric: Arc<Fabric>,
    pub(super) me: Weak<Device>,
    pub(super) contact: Arc<Contact>,
    pub(super) limits: Limits,
    pub(super) max_maps: u32,
    num_move_queues: u16,
    /// The GID of every life: pinned, or the loopback fabric's.
    fixed_gid: Option<Gid>,
    /// Held while a life begins or ends. Never that of two devices at a time.
    lifecycle: Mutex<()>,
    /// The life that may move. Moves hold its read side, so that its end waits for them.
    pub(super) mover: RwLock<Option<Arc<Life>>>,
    pub(super) state: Mutex<State>,
}

/// What a device's lock guards. It is never held together with another device's.
#[derive(Debug)]
pub(super) struct State {
    pub(super) session: Option<Session>,
    pub(super) window: Window,
    pub(super) commands_full_at: u64,
    pub(super) queries_full_at: u64,
    sessions: u32,
    /// Drawn already, so that the configuration can tell it.
    next_gid: Option<Gid>,
    config_gid: Gid,
}

impl Device {
    pub(super) fn new(
        fabric: Arc<Fabric>,
        port: PortConfig,
        limits: Limits,
        contact: Arc<Contact>,
        first_gid: Gid,
    ) -> Arc<Device> {
        let state = State {
            session: None,
            window: Window::none(),
            commands_full_at: 0,
            queries_full_at: 0,
            sessions: 0,
            next_gid: Some(first_gid),
            config_gid: first_gid,
        };
        Arc::new_cyclic(|me| Device {
            name: port.name,
            fixed_gid: port.pinned_gid.or(fabric.shared_gid),
            fabric,
            me: me.clone(),
            contact,
            limits,
            max_maps: port.max_maps.unwrap_or(limits.max_maps),
            num_move_queues: port.num_move_queues.max(1),
            lifecycle: Mutex::new(()),
            mover: RwLock::new(None),
            state: Mutex::new(state),
        })
    }

    /// The configuration space.
    pub fn config(&self) -> Config {
        let limits = &self.limits;
        Config {
            revision: REVISION.into(),
            reserved: 0.into(),
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
            window_size: self.contact.window().into(),
        }
    }

    /// The features the driver accepted. Ops of others get EINVAL. All, until told.
    pub fn set_features(&self, features: Features) {
        self.contact.set_features(features);
    }

    /// Size of the window in bytes, a power of two; 0 (as at first) if the front end cannot map or
    /// does not acknowledge that it has.
    ///
    /// Ignored while a life has mappings. While ranges of past lives may be mapped, only their
    /// window's size or 0 is taken; anything else counts as 0.
    pub fn set_window(&self, bytes: u64) {
        let mut state = lock(&self.state);
        if state.session.as_ref().is_some_and(|session| !session.maps.is_empty()) {
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
        self.contact.set_window(usable);
    }

    /// The driver's memory. To be called again when there is another handle; what is behind the
    /// handle may change at any time.
    pub fn set_memory(&self, memory: GuestMemoryAtomic<GuestMemoryMmap>) {
        self.contact.set_memory(memory);
    }

    /// Whether [`next_event`](Self::next_event) would give a record now.
    pub fn has_events(&self) -> bool {
        read(&self.mover).as_ref().is_some_and(|life| life.has_records())
    }

    /// The next record. To be called only with a buffer in hand: what it gives is forgotten here.
    pub fn next_event(&self) -> Option<[u8; EVENT_LEN]> {
        read(&self.mover).as_ref()?.next_record()
    }

    /// Time until a wake that is delayed by its rate limit can be taken; `None` if none is delayed.
    /// The bell is not rung then.
    pub fn next_event_in(&self) -> Option<Duration> {
        read(&self.mover).as_ref()?.next_due().map(Duration::from_nanos)
    }

    /// Ends the life, if there is one: reset or loss of the front end. Waits for the moves that run,
    /// and for nothing else.
    pub fn end(&self, how: Departure) {
        let _lifecycle = lock(&self.lifecycle);
        self.finish(how);
        let mut state = lock(&self.state);
        state.config_gid = state.next_gid.unwrap_or(Gid::NONE);
    }

    /// HELLO: ends the life that was and begins one.
    pub(super) fn begin(&self, driver_max_idx: u32) -> Result<Arc<Life>, Status> {
        let _lifecycle = lock(&self.lifecycle);
        self.finish(Departure::Orderly);
        let mut state = lock(&self.state);
        let gid = match state.next_gid.take() {
            Some(gid) => gid,
            None => self.draw().ok_or(Status::Eio)?,
        };
        state.sessions = state.sessions.wrapping_add(1);
        let life = Life::new(gid, state.sessions, self.contact.clone());
        let idx_bound = driver_max_idx.min(self.limits.max_dmbs);
        let tally = Tally::of(&self.contact.counters);
        state.session = Some(Session::new(life.clone(), idx_bound, tally));
        drop(state);
        *write(&self.mover) = Some(life.clone());
        self.fabric.enlist(&life);
        Ok(life)
    }

    /// Ends the life. The caller holds `lifecycle`. The order is that of docs/virtio-ism.md,
    /// "Reset, pause, departure".
    fn finish(&self, how: Departure) {
        let mut state = lock(&self.state);
        let Some(session) = state.session.take() else { return };
        let life = session.life.clone();
        life.die();
        for mapping in session.maps.values() {
            let busy = mapping.state != MapState::Mapped;
            state.window.retire(mapping.offset, mapping.slab.len(), busy);
            if session.owns(&mapping.slab) {
                mapping.slab.close();
            }
        }
        state.next_gid = self.draw();
        drop(state);
        // 1. Nothing new can name it.
        self.fabric.retire(&life);
        // 2. Its moves finish; those into its DMBs do so in 3, one DMB at a time.
        *write(&self.mover) = None;
        // 3. Its DMBs end and their users are told.
        for holding in session.dmbs.values().filter(|holding| holding.ready) {
            holding.dmb.close(&self.fabric.tokens, false);
        }
        for holding in session.attached.values().filter(|holding| holding.ready) {
            self.let_go(&life, holding);
        }
        // 4. The last word.
        self.fabric.announce_end(&life, how);
        life.close_mailbox();
        if self.fixed_gid.is_none() {
            self.fabric.gids.release(life.gid);
        }
    }

    /// Another device's life has ended.
    pub(super) fn peer_ended(&self, gid: Gid, failed: bool) {
        if let Some(session) = &mut lock(&self.state).session
            && session.unrelate(gid)
        {
            session.life.tell_down(gid, failed);
        }
    }

    fn draw(&self) -> Option<Gid> {
        self.fixed_gid.or_else(|| self.fabric.gids.draw().ok())
    }

    /// Counts a reply and cuts it to the room there is for it.
    pub(super) fn account(&self, reply: Reply) -> Reply {
        match reply.status() {
            Some(Status::Ok) => self.contact.counters.commands.add(1),
            Some(status) => self.contact.counters.refusals.add(status),
            None => {}
        }
        reply
    }

    /// The device as it is now.
    pub fn info(&self) -> DeviceInfo {
        let counters = &self.contact.counters;
        let mut info = DeviceInfo {
            name: self.name.clone(),
            window_size: self.contact.window(),
            commands: counters.commands.get(),
            refusals: counters.refusals.get(),
            moves: counters.moves.get(),
            move_bytes: counters.move_bytes.get(),
            move_refusals: counters.move_refusals.get(),
            signals: counters.signals.get(),
            kicks_saved: counters.kicks_saved.get(),
            coalesced: counters.coalesced.get(),
            wakes: counters.wakes.get(),
            sw_events: counters.sw_events.get(),
            sw_events_lost: counters.sw_events_lost.get(),
            ..DeviceInfo::default()
        };
        let state = lock(&self.state);
        info.stale_maps = state.window.stale() as u64;
        if let Some(session) = &state.session {
            info.gid = Some(session.life.gid);
            info.session = session.life.session;
            info.dmbs = session.dmbs.len() as u64;
            info.dmb_bytes = session.dmb_bytes;
            info.attached = session.attached.len() as u64;
            info.slabs = session.maps.len() as u64;
            info.slab_bytes = session.slab_bytes;
            info.attached_slab_bytes = session.attached_bytes;
            info.map_slots = session.slots();
            info.peers = session.related_peers();
        }
        info
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.end(Departure::Failed);
        if self.fabric.shared_gid.is_none()
            && let Some(gid) = lock(&self.state).next_gid.or(self.fixed_gid)
        {
            self.fabric.gids.release(gid);
        }
        self.fabric.leave(self.contact.member);
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("name", &self.name).finish_non_exhaustive()
    }
}
