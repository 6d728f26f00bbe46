// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A link group: its queue pairs, buffers and connections.
//!
//! [`LinkGroup`] decides. Inputs wait in an inbox, so the thread dispatching completions need not wait,
//! and [`Group::work`] hands the inputs over in order.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use smc_core::handshake::{PeerRnic, TermsR};
use smc_core::link_group::{
    Cause, Ending, FirstLink, LinkGroup, LinkKey, LinkState, Params, PeerRmbId, Reason, Region,
    RemoteEnd, RmbId, Role, UseError,
};
use smc_core::time::Tick;
use smc_core::wire::clc::Version;

use super::buffers::{Buffers, Rmb, send_buffer};
use super::device::Device;
use super::endpoint::{Endpoint, Target};
use super::inbox::{Inbox, Input};
use super::link::{Link, Path};
use super::shared::Shared;
use ism_sys::{EventFd, OnceBox, lock};
use smc_verbs::VerbsError;

/// The status of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// First contact is under way.
    Forming,
    /// Connections may use the group.
    Usable,
    /// The group is over.
    Over,
}

/// A group.
pub(crate) struct Group {
    number: u32,
    role: Role,
    version: Version,
    /// The peer, by the identity in its messages: a server finds the group by it; at a client, the peer
    /// as the client knows it.
    peer: PeerRnic,
    /// Known to a client from the beginning, to a server after Confirm.
    terms: OnceBox<TermsR>,
    shared: Arc<Shared>,
    inbox: Arc<Inbox>,
    /// Held by the thread handling the inbox, to keep the order of inputs. Locked before `core`.
    working: Mutex<()>,
    pub(super) core: Mutex<Core>,
    status: AtomicU8,
    over: OnceBox<(Reason, Ending)>,
    watchers: Mutex<Vec<Weak<EventFd>>>,
    failovers: AtomicU64,
    connections: AtomicU32,
}

/// The state of a group.
#[derive(Default)]
pub(super) struct Core {
    /// `None` as long as CLC is under way.
    pub(super) machine: Option<LinkGroup>,
    pub(super) links: Vec<Arc<Link>>,
    pub(super) buffers: Buffers,
    pub(super) confirmed: HashSet<RmbId>,
    pub(super) refused: HashSet<RmbId>,
    /// Connections, each with the link counting it.
    pub(super) connections: HashMap<u32, (Arc<Endpoint>, LinkKey)>,
    /// Tokens of connections without the peer's rkey on their new link, with the end of the wait.
    pub(super) awaiting_rkey: Vec<(u32, Tick)>,
}

/// The reason for refusing a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JoinError {
    /// An error of memory or queue pairs.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// An error of the group.
    #[error(transparent)]
    Use(#[from] UseError),
    /// The group is over, or not yet established.
    #[error("the link group is gone")]
    Gone,
}

impl Group {
    /// A new group, at the beginning of first contact.
    pub(crate) fn new(number: u32, role: Role, peer: PeerRnic, shared: &Arc<Shared>) -> Arc<Group> {
        Arc::new(Group {
            number,
            role,
            version: peer.version(),
            peer,
            terms: OnceBox::new(),
            shared: shared.clone(),
            inbox: Inbox::new(shared.signal()),
            working: Mutex::default(),
            core: Mutex::default(),
            status: AtomicU8::new(0),
            over: OnceBox::new(),
            watchers: Mutex::default(),
            failovers: AtomicU64::new(0),
            connections: AtomicU32::new(0),
        })
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// This host's number of the group.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// The role of this end.
    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// Version of the group's messages.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// The peer.
    pub(crate) fn peer(&self) -> &PeerRnic {
        &self.peer
    }

    /// Whether the peer is this stack, over any adapter. A stack without an identity may be any: then
    /// the addresses of links have to decide.
    pub(crate) fn is_with_stack(&self, peer: &PeerRnic) -> bool {
        self.peer.version() == peer.version() && self.peer.peer_id() == peer.peer_id()
    }

    /// Whether a link of the group ends at this adapter of the peer, by the rules of Linux (CLC-19,
    /// LG-60).
    pub(crate) fn is_with(&self, peer: &PeerRnic) -> bool {
        if self.peer == *peer {
            return true;
        }
        let core = self.core();
        let links = core.machine.iter().flat_map(|machine| machine.links());
        let mut ends = links
            .filter(|link| link.state == LinkState::Active)
            .filter_map(|link| link.remote.as_ref());
        let same = |end: &RemoteEnd| {
            end.gid.same_address(peer.gid())
                && (self.version == Version::V2 || end.mac == peer.mac())
        };
        self.is_with_stack(peer) && ends.any(same)
    }

    /// The result of CLC, if finished.
    pub(crate) fn terms(&self) -> Option<TermsR> {
        self.terms.get().copied()
    }

    /// The state shared by the groups of the process.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn status(&self) -> Status {
        match self.status.load(Ordering::Acquire) {
            0 => Status::Forming,
            1 => Status::Usable,
            _ => Status::Over,
        }
    }

    /// The reason and the kind of the group's end.
    pub(crate) fn ending(&self) -> Option<(Reason, Ending)> {
        self.over.get().copied()
    }

    pub(super) fn set_status(&self, status: Status) {
        self.status.store(status as u8, Ordering::Release);
        self.notify_watchers();
    }

    pub(super) fn set_ending(&self, reason: Reason, ending: Ending) {
        let _ = self.over.set((reason, ending));
    }

    /// Number of moves of connections to another link.
    pub(crate) fn failovers(&self) -> &AtomicU64 {
        &self.failovers
    }

    /// Number of connections now.
    pub(crate) fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Signals `notifier` at each change of interest to a handshake.
    pub(crate) fn watch(&self, notifier: &Arc<EventFd>) {
        lock(&self.watchers).push(Arc::downgrade(notifier));
    }

    pub(super) fn notify_watchers(&self) {
        lock(&self.watchers).retain(|notifier| match notifier.upgrade() {
            Some(notifier) => {
                notifier.signal();
                true
            }
            None => false,
        });
    }

    pub(crate) fn inputs(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Adds an input, to be handled soon.
    pub(crate) fn put(&self, input: Input) {
        self.inbox.put(input);
    }

    /// Handles the inputs, after every CDC message received before. Called without locks of
    /// connections.
    pub(crate) fn work(self: &Arc<Self>) {
        let _working = lock(&self.working);
        loop {
            let inputs = self.inbox.take();
            if inputs.is_empty() {
                return;
            }
            self.drain_receives();
            let mut core = self.core();
            for input in inputs {
                self.take(&mut core, input);
                self.apply_outputs(&mut core);
            }
        }
    }

    /// Takes the messages received over the group's links. Two links over two RNICs have two queues, so
    /// an LLC message may be taken before an earlier CDC message, for example the end of an RMB before
    /// the last words of its connection. Called without the group's state.
    fn drain_receives(&self) {
        let mut devices: Vec<Arc<Device>> = Vec::new();
        for link in &self.core().links {
            let device = link.port().device();
            if !devices.iter().any(|other| Arc::ptr_eq(other, device)) {
                devices.push(device.clone());
            }
        }
        devices.iter().for_each(|device| self.shared.take_receives(device));
    }

    fn take(self: &Arc<Self>, core: &mut Core, input: Input) {
        let now = self.shared.now();
        let Some(machine) = &mut core.machine else { return };
        match input {
            Input::Message(link, bytes) => {
                if let Err(odd) = machine.handle_message(link, &bytes, now) {
                    tracing::debug!(group = self.number, link = link.get(), %odd, "LLC");
                }
            }
            Input::Failed(link, cause) => machine.handle_link_failed(link, cause, now),
            Input::Sent(receipt) => machine.handle_sent(receipt, now),
            Input::PortUp(rnic) => machine.handle_rnic_up(rnic, now),
            Input::PortDown(rnic) => machine.handle_rnic_down(rnic, now),
            Input::PeerGaveUp => {
                let all: Vec<_> = machine.links().iter().map(|link| link.key).collect();
                for key in all {
                    machine.handle_link_failed(key, Cause::QueuePair, now);
                }
            }
            Input::Missing(token, number) => {
                let endpoint = self.shared.tokens.get(token);
                // The message may have come over another RNIC, with a queue polled since.
                if let Some(endpoint) = endpoint.filter(|known| !known.words().has_seen(number)) {
                    // The stream has a hole: nothing but a reset is right (LG-37).
                    self.fail_connection(&endpoint);
                }
            }
        }
    }

    /// Fails a connection and posts its event.
    pub(super) fn fail_connection(&self, endpoint: &Endpoint) {
        endpoint.break_off();
        self.shared.post_lost(endpoint.token());
    }

    /// Handles due timers. Returns the time of the next one.
    pub(crate) fn on_timer(self: &Arc<Self>, now: Tick) -> Option<Tick> {
        let due = |core: &Core| core.machine.as_ref()?.poll_timeout().filter(|due| due.0 <= now.0);
        if due(&self.core()).is_some() {
            self.drain_receives();
        }
        let mut core = self.core();
        let core = &mut *core;
        let machine = core.machine.as_mut()?;
        for link in &core.links {
            if let Some(last_receipt) = link.take_last_receipt() {
                machine.handle_received(link.key(), last_receipt);
            }
        }
        if machine.poll_timeout().is_some_and(|due| due.0 <= now.0) {
            machine.handle_timeout(now);
            self.apply_outputs(core);
        }
        self.retry_awaiting_rkey(core);
        let awaiting_rkey = core.awaiting_rkey.iter().map(|(_, until)| *until);
        awaiting_rkey.chain(core.machine.as_ref()?.poll_timeout()).min()
    }

    /// Makes the first link.
    ///
    /// # Errors
    /// An error of the verbs.
    pub(crate) fn add_first_link(
        self: &Arc<Self>,
        port: &Arc<super::port::Port>,
        source: super::port::Source,
    ) -> Result<Arc<Link>, VerbsError> {
        let group = (self.number, &self.inbox);
        let address = (source.index, source.gid);
        let link = Link::new(LinkKey::FIRST, group, port, address, self.version)?;
        self.shared.add_link(&link)?;
        self.core().links.push(link.clone());
        Ok(link)
    }

    /// CLC is finished: LLC begins (LG-6).
    pub(crate) fn start(self: &Arc<Self>, terms: TermsR, params: Params, first: FirstLink) {
        let _ = self.terms.set(terms);
        let mut core = self.core();
        core.confirmed.insert(first.rmb);
        let now = self.shared.now();
        let mut machine = LinkGroup::new(params, first, now);
        for (_, on) in core.connections.values() {
            // There is room for one connection in any group.
            let _ = machine.connection_added(*on, now);
        }
        core.machine = Some(machine);
        self.apply_outputs(&mut core);
        drop(core);
        // Inputs received earlier have waited.
        self.work();
    }

    /// An RMB of `len` bytes for a new connection over the link `on`. [`Group::is_confirmed`] returns
    /// whether the peer knows the RMB on every link. RMBs are made on demand (RMB-15).
    ///
    /// # Errors
    /// See [`JoinError`].
    pub(crate) fn take_rmb(self: &Arc<Self>, len: u32, on: LinkKey) -> Result<Arc<Rmb>, JoinError> {
        let mut guard = self.core();
        let core = &mut *guard;
        if let Some(rmb) = core.buffers.take(len) {
            return Ok(rmb);
        }
        let rmb = Rmb::new(core.buffers.next_id(), len, self.shared.options.eye_catcher)?;
        let Some(machine) = &mut core.machine else {
            // First contact: CLC itself tells the peer.
            for link in &core.links {
                rmb.buffer().register(link.key(), link.pd())?;
            }
            core.buffers.add(rmb.clone());
            return Ok(rmb);
        };
        let mut regions: Vec<(LinkKey, Region)> = Vec::new();
        for key in machine.key_links() {
            let Some(link) = core.links.iter().find(|link| link.key() == key) else { continue };
            rmb.buffer().register(key, link.pd())?;
            regions.extend(rmb.buffer().region(key).map(|region| (key, region)));
        }
        machine.add_rmb(rmb.id(), Some(on), &regions, self.shared.now())?;
        core.buffers.add(rmb.clone());
        self.apply_outputs(core);
        Ok(rmb)
    }

    /// Whether the peer knows an RMB; `None`: the peer has refused the RMB, or the group is over.
    pub(crate) fn is_confirmed(&self, rmb: &Rmb) -> Option<bool> {
        let core = self.core();
        if core.refused.contains(&rmb.id()) || self.status() == Status::Over {
            return None;
        }
        Some(core.confirmed.contains(&rmb.id()))
    }

    /// Returns an RMB of a connection to the pool. The peer has written at most its first `dirty`
    /// bytes; without that number the RMB is removed (LLC-57).
    pub(crate) fn release_rmb(self: &Arc<Self>, rmb: &Rmb, dirty: Option<usize>) {
        // No byte of this connection may reach the next one (SEC-8).
        let clean = dirty.is_some_and(|dirty| rmb.clear(dirty));
        let mut core = self.core();
        let known = core.confirmed.contains(&rmb.id());
        if clean && known && self.status() != Status::Over && core.buffers.put_back(rmb) {
            return;
        }
        let now = self.shared.now();
        match &mut core.machine {
            Some(machine) if !machine.is_over() => {
                machine.remove_rmb(rmb.id(), now);
                self.apply_outputs(&mut core);
            }
            _ => core.buffers.remove(rmb.id()),
        }
    }

    /// Reserves a connection of a link.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub(crate) fn reserve(
        self: &Arc<Self>,
        endpoint: &Arc<Endpoint>,
        on: LinkKey,
    ) -> Result<(), JoinError> {
        let mut guard = self.core();
        let core = &mut *guard;
        if let Some(machine) = &mut core.machine {
            machine.connection_added(on, self.shared.now())?;
        }
        if let Some(link) = core.links.iter().find(|link| link.key() == on) {
            link.connections().fetch_add(1, Ordering::Relaxed);
        }
        self.connections.fetch_add(1, Ordering::Relaxed);
        core.connections.insert(endpoint.token(), (endpoint.clone(), on));
        self.apply_outputs(core);
        Ok(())
    }

    /// Joins a connection with a reserved place to a link: the connection can send from now on.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub(crate) fn join(
        self: &Arc<Self>,
        endpoint: &Arc<Endpoint>,
        on: LinkKey,
        region: Region,
        target: impl FnOnce(PeerRmbId) -> Target,
    ) -> Result<(), JoinError> {
        let mut guard = self.core();
        let core = &mut *guard;
        let machine = core.machine.as_mut().ok_or(JoinError::Gone)?;
        let now = self.shared.now();
        let target = target(machine.bind_peer_rmb(on, region)?);
        for (other, _) in core.connections.values() {
            // The peer has not received the end of the old connection, or no longer waited for it. The
            // old connection is over, and the new one continues (RMB-24). Both ends check: the client
            // at Accept, the server at Confirm (CLC-37, CLC-45, RMB-25).
            if other.fail_if_reused(&target) {
                tracing::debug!(token = other.token(), "the peer reuses the element: reset");
                self.shared.post_taken(other.token());
            }
        }
        let link = core.links.iter().find(|link| link.key() == on).ok_or(JoinError::Gone)?;
        let len = target.ring.element_len();
        let send_buffer = match core.buffers.take_send_buffer(len) {
            Some(send_buffer) => send_buffer,
            None => send_buffer(len)?,
        };
        let path = Path {
            link: link.clone(),
            send_buffer: send_buffer.register(on, link.pd())?,
            address: region.address.wrapping_add(target.offset),
            rkey: region.rkey,
        };
        // The peer may have chosen a link other than the reserved one.
        let counted = core.connections.get(&endpoint.token()).map(|(_, on)| *on);
        if counted != Some(on) {
            machine.connection_added(on, now)?;
            link.connections().fetch_add(1, Ordering::Relaxed);
            if let Some(before) = counted {
                machine.connection_removed(before, now);
                uncount(&core.links, before);
            }
            core.connections.insert(endpoint.token(), (endpoint.clone(), on));
        }
        endpoint.open(target, send_buffer, path);
        self.apply_outputs(core);
        Ok(())
    }

    /// Removes a finished connection.
    pub(crate) fn remove_connection(self: &Arc<Self>, endpoint: &Endpoint) {
        let mut core = self.core();
        let Some((_, on)) = core.connections.remove(&endpoint.token()) else { return };
        self.connections.fetch_sub(1, Ordering::Relaxed);
        uncount(&core.links, on);
        if let Some(send_buffer) = endpoint.close() {
            core.buffers.put_back_send_buffer(send_buffer);
        }
        let now = self.shared.now();
        if let Some(machine) = &mut core.machine {
            machine.connection_removed(on, now);
            self.apply_outputs(&mut core);
        }
    }

    /// Ends the group of a first contact that failed before LLC began (CLC-58).
    pub(crate) fn fail_first_contact(self: &Arc<Self>) {
        let mut core = self.core();
        if core.machine.is_some() {
            return;
        }
        for link in std::mem::take(&mut core.links) {
            self.shared.close_link(&link);
            link.keep(core.buffers.remove_link(link.key()));
        }
        core.buffers = Buffers::default();
        drop(core);
        self.set_status(Status::Over);
        self.shared.signal().post();
    }

    /// Runs `f` on the state machine, and executes the resulting outputs.
    pub(crate) fn with<T>(
        self: &Arc<Self>,
        f: impl FnOnce(&mut LinkGroup, Tick) -> T,
    ) -> Option<T> {
        let mut core = self.core();
        let done = f(core.machine.as_mut()?, self.shared.now());
        self.apply_outputs(&mut core);
        Some(done)
    }

    /// The first link, as a pattern for further ones, and whether no router is in between.
    pub(crate) fn pattern(&self) -> Option<(Arc<Link>, bool)> {
        let core = self.core();
        let link = core.links.first()?;
        let known = core.machine.as_ref().and_then(|machine| machine.link(link.key()));
        Some((link.clone(), known.is_none_or(|link| link.rnic.direct)))
    }

    /// A link by its name.
    pub(crate) fn link(&self, key: LinkKey) -> Option<Arc<Link>> {
        self.core().links.iter().find(|link| link.key() == key).cloned()
    }
}

/// A connection leaves a link.
fn uncount(links: &[Arc<Link>], on: LinkKey) {
    if let Some(link) = links.iter().find(|link| link.key() == on) {
        link.connections().fetch_sub(1, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("number", &self.number).finish_non_exhaustive()
    }
}
