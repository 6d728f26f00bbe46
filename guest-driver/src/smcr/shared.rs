// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State shared by the link groups of a process: ports, links, connections by token, and the dispatch
//! of completions.
//!
//! Completions are data here. [`PollGuard::poll`](super::device::PollGuard::poll) takes a batch of
//! completions from an RNIC, without knowledge of links. [`Shared`] finds the link of each completion,
//! and the connection of each CDC message, stores the message's words, and only then, without any lock,
//! has the caller handle the tokens of the connections.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::time::{ClockId, Timespec};
use smc_core::handshake::LinkEnd;
use smc_core::link_group::RnicId;
use smc_core::time::Tick;
use smc_core::wire::cdc::Cdc;

use super::SmcrOptions;
use super::device::{BATCH, Counters, Device, PollGuard};
use super::endpoint::{Congestion, Endpoint};
use super::inbox::{Input, WorkSignal};
use super::link::Link;
use super::link_table::LinkTable;
use super::port::Port;
use super::tokens::Tokens;
use super::words::Received;
use crate::reactor::source::ReactorEvent;
use ism_sys::{lock, read_clock};
use smc_verbs::VerbsError;

/// The most batches taken from a queue by one call, so a peer sending without end leaves other peers
/// their turn.
const BATCHES: usize = 8;

/// The state used by every link group of a process.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The connections by alert token.
    pub(crate) tokens: Tokens<Endpoint>,
    /// The program's options for SMC-R.
    pub(crate) options: SmcrOptions,
    devices: Vec<Arc<Device>>,
    /// The links over each device, in the order of `devices`.
    links: Vec<LinkTable>,
    ports: Vec<Arc<Port>>,
    epoch: Instant,
    /// `epoch` on the kernel's clock.
    start: Timespec,
    /// Links and connections that end with the next work.
    deferred: Mutex<Vec<DeferredClose>>,
    events: Mutex<VecDeque<ReactorEvent>>,
    /// `events` may be non-empty. The lock orders the events; the word spares the lock.
    has_events: AtomicBool,
    signal: Arc<WorkSignal>,
    numbers: AtomicU32,
}

/// Stopped links, and connections ending with them. Messages received earlier count, and may still be
/// in the receive queue.
#[derive(Debug, Default)]
pub(super) struct DeferredClose {
    pub(super) links: Vec<Arc<Link>>,
    pub(super) lost: Vec<Arc<Endpoint>>,
    /// The connections may continue over TCP.
    pub(super) may_go_on: bool,
}

impl Shared {
    pub(super) fn new(
        devices: Vec<Arc<Device>>,
        ports: Vec<Arc<Port>>,
        options: SmcrOptions,
        signal: Arc<WorkSignal>,
    ) -> std::io::Result<Arc<Shared>> {
        // Group numbers begin anywhere, so a restart does not repeat them.
        let first = u32::from_ne_bytes(super::tokens::random()?);
        let table = |device: &Arc<Device>| {
            LinkTable::new(device.recv_cq().entries(), device.send_cq().entries())
        };
        Ok(Arc::new(Shared {
            tokens: Tokens::default(),
            options,
            links: devices.iter().map(table).collect(),
            devices,
            ports,
            epoch: Instant::now(),
            start: read_clock(ClockId::Monotonic),
            deferred: Mutex::default(),
            events: Mutex::default(),
            has_events: AtomicBool::new(false),
            signal,
            numbers: AtomicU32::new(first),
        }))
    }

    /// Like [`Shared::now`], but up to one tick of the kernel old. Reads the cheapest of the kernel's
    /// clocks.
    pub(super) fn lately(&self) -> Tick {
        let coarse = read_clock(ClockId::MonotonicCoarse);
        let micros = |time: Timespec| time.tv_sec * 1_000_000 + time.tv_nsec / 1000;
        Tick(u64::try_from(micros(coarse) - micros(self.start)).unwrap_or(0))
    }

    /// The present time for state machines.
    pub(crate) fn now(&self) -> Tick {
        self.tick(Instant::now())
    }

    pub(super) fn tick(&self, at: Instant) -> Tick {
        let since = at.saturating_duration_since(self.epoch);
        Tick(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }

    pub(super) fn instant(&self, tick: Tick) -> Instant {
        self.epoch + std::time::Duration::from_micros(tick.0)
    }

    /// A number for a new group: 24 bits.
    pub(crate) fn next_number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed) & 0x00ff_ffff
    }

    pub(crate) fn ports(&self) -> &[Arc<Port>] {
        &self.ports
    }

    /// A port by its number.
    pub(crate) fn port(&self, id: RnicId) -> Option<Arc<Port>> {
        self.ports.iter().find(|port| port.id() == id).cloned()
    }

    /// The open RNICs.
    pub(crate) fn devices(&self) -> &[Arc<Device>] {
        &self.devices
    }

    /// Wakes the thread listening to the RNICs.
    pub(crate) fn signal(&self) -> &Arc<WorkSignal> {
        &self.signal
    }

    fn table(&self, device: &Device) -> Option<&LinkTable> {
        self.links.get(device.index())
    }

    /// The links over this device.
    pub(crate) fn links_over(&self, device: &Device) -> Vec<Arc<Link>> {
        self.table(device).map(LinkTable::all).unwrap_or_default()
    }

    /// Enters a link, as the receiver of its completions from now on.
    ///
    /// # Errors
    /// The completion queues have no room for another link.
    pub(crate) fn add_link(&self, link: &Arc<Link>) -> Result<(), VerbsError> {
        let table = self.table(link.port().device());
        if table.is_some_and(|table| table.insert(link.qpn(), link)) {
            return Ok(());
        }
        let source = std::io::ErrorKind::QuotaExceeded.into();
        Err(VerbsError::Call { call: "completion queue", source })
    }

    /// Closes a link: later completions are dropped.
    pub(crate) fn close_link(&self, link: &Link) {
        // Outstanding requests name memory about to be freed.
        link.stop();
        if let Some(table) = self.table(link.port().device()) {
            table.remove(link.qpn());
        }
        link.close();
    }

    /// Fails the links over RNICs with failed completion queues.
    pub(super) fn fail_links_of_broken_devices(&self) {
        for device in self.devices.iter().filter(|device| device.is_broken()) {
            self.links_over(device).iter().for_each(|link| link.fail());
        }
    }

    /// Takes received messages, unless another thread does, and calls `handle` with the token of each
    /// connection with new words. `handle` is called without locks.
    #[inline]
    pub(crate) fn poll_receives(
        &self,
        device: &Device,
        now: impl Fn() -> Tick,
        mut handle: impl FnMut(u32),
    ) {
        let mut batches = BATCHES;
        loop {
            let Some(guard) = device.try_receives() else { return };
            let full = self.receive_batch(device, guard, &now, &mut handle);
            batches -= 1;
            if full && batches > 0 {
                continue;
            }
            if !device.was_overlooked() {
                return;
            }
            batches = BATCHES;
        }
    }

    /// Takes every message received by now, after a wait for another thread taking messages. The
    /// connections' events go to the next [`take_events`](Shared::take_events). Called without locks of
    /// groups' states or connections.
    pub(super) fn take_receives(&self, device: &Device) {
        // This many rounds take a full queue; any message beyond has come since.
        let rounds = device.recv_cq().entries() as usize / BATCH + 1;
        loop {
            for _ in 0..rounds {
                let tell = &mut |token| self.post_event(ReactorEvent::Arrived(token));
                if !self.receive_batch(device, device.receives(), &|| self.now(), tell) {
                    break;
                }
            }
            if !device.was_overlooked() {
                return;
            }
        }
    }

    /// Takes one batch of messages and stores their words, and then, without the lock of the
    /// receives, handles the connections' tokens. `true`: the batch was full, so there may be more.
    #[inline]
    fn receive_batch(
        &self,
        device: &Device,
        mut guard: PollGuard<'_>,
        now: &impl Fn() -> Tick,
        handle: &mut impl FnMut(u32),
    ) -> bool {
        let batch = guard.poll();
        let (full, Some(table)) = (batch.len() == BATCH, self.table(device)) else { return false };
        if batch.is_empty() {
            return false;
        }
        // One time serves for each message of a batch.
        let now = now();
        let mut fresh = FreshTokens::new();
        for completion in batch {
            // A completion of a removed link is dropped.
            let Some(link) = table.get(completion.qp_num()) else { continue };
            if let Some(cdc) = link.on_receive(completion, now)
                && self.store_words(&link, &cdc)
            {
                fresh.push(cdc.token);
            }
        }
        drop(guard);
        fresh.as_slice().iter().for_each(|token| handle(*token));
        full
    }

    /// Stores the words of a CDC message, for the connection named by its token (CDC-4) in the group of
    /// the link, over any of the group's links (LG-63). `true`: the connection has an event.
    #[inline]
    fn store_words(&self, link: &Link, cdc: &Cdc) -> bool {
        let count = |counter: fn(&Counters) -> &AtomicU64| {
            counter(link.port().device().counters()).fetch_add(1, Ordering::Relaxed);
            false
        };
        let found = self.tokens.get(cdc.token);
        let Some(endpoint) = found.filter(|endpoint| endpoint.group() == link.group()) else {
            return count(|counters| &counters.unknown_token);
        };
        match endpoint.words().take(cdc) {
            Received::Stored | Received::Validated => true,
            Received::Overtaken => count(|counters| &counters.overtaken),
            Received::Missing(number) => {
                link.inputs().put(Input::Missing(cdc.token, number));
                true
            }
        }
    }

    /// Takes send completions, unless another thread does. Frees slots without using them:
    /// [`Shared::flush_waiting`] does.
    pub(crate) fn poll_sends(&self, device: &Device) {
        let Some(mut guard) = device.try_sends() else { return };
        let Some(table) = self.table(device) else { return };
        loop {
            let batch = guard.poll();
            for completion in batch {
                if let Some(link) = table.get(completion.qp_num()) {
                    link.on_sent(completion);
                }
            }
            if batch.len() < BATCH {
                return;
            }
        }
    }

    /// Has connections and link groups send after a lack of room on links over this device. Called
    /// without locks.
    #[inline]
    pub(crate) fn flush_device(&self, device: &Device) {
        if device.has_waiting() {
            for link in self.links_over(device) {
                self.flush_waiting(&link);
                link.flush_llc();
            }
        }
    }

    /// Has connections send after a lack of room on a link. Called without locks.
    fn flush_waiting(&self, link: &Link) {
        for token in link.take_waiting() {
            if let Some(endpoint) = self.tokens.get(token) {
                self.flush(&endpoint);
            }
        }
    }

    /// Sends pending messages of a connection. Without room even after a poll of send completions, the
    /// connection waits for some.
    pub(crate) fn flush(&self, endpoint: &Endpoint) {
        if let Some(Congestion::Full(link)) = endpoint.flush() {
            self.poll_sends(link.port().device());
            endpoint.flush_or_wait();
        }
    }

    /// Polls the send completions of a link with few free slots or none, and flushes the connections
    /// waiting for one, the given one first. Called without locks.
    #[cold]
    pub(crate) fn make_room(&self, endpoint: &Endpoint, congestion: &Congestion) {
        let link = match congestion {
            Congestion::Short(link) => link,
            Congestion::Full(link) => {
                self.poll_sends(link.port().device());
                match endpoint.flush_or_wait() {
                    // The queue was armed: an earlier completion causes no notice.
                    Some(_) => link,
                    None => return,
                }
            }
        };
        self.poll_sends(link.port().device());
        self.flush_waiting(link);
    }

    /// Stops links now, and has the next work close them and fail the connections, after taking their
    /// last messages.
    pub(super) fn defer_close(&self, deferred: DeferredClose) {
        deferred.links.iter().for_each(|link| link.stop());
        lock(&self.deferred).push(deferred);
        self.signal.post();
    }

    /// Whether links or connections wait for their end.
    pub(super) fn has_deferred(&self) -> bool {
        !lock(&self.deferred).is_empty()
    }

    /// Closes the deferred links and fails the deferred connections. Called without locks.
    pub(super) fn close_deferred(&self) {
        let deferred = std::mem::take(&mut *lock(&self.deferred));
        for DeferredClose { links, lost, may_go_on } in deferred {
            for link in links {
                self.take_receives(link.port().device());
                self.close_link(&link);
            }
            for endpoint in lost {
                match may_go_on {
                    true => endpoint.lose_links(),
                    false => endpoint.fail(),
                }
                self.post_lost(endpoint.token());
            }
        }
    }

    fn post_event(&self, event: ReactorEvent) {
        lock(&self.events).push_back(event);
        if !self.has_events.swap(true, Ordering::AcqRel) {
            self.signal.wake();
        }
    }

    /// Posts the event of a failed connection.
    pub(crate) fn post_lost(&self, token: u32) {
        self.post_event(ReactorEvent::Lost(token));
    }

    /// Posts the event of an element given by the peer to another connection.
    pub(crate) fn post_taken(&self, token: u32) {
        self.post_event(ReactorEvent::Taken(token));
    }

    /// Posts the event of a possibly earlier timer of a group.
    pub(crate) fn timers_changed(&self) {
        let posted = lock(&self.events).iter().any(|event| matches!(event, ReactorEvent::Timers));
        if !posted {
            self.post_event(ReactorEvent::Timers);
        }
    }

    pub(super) fn take_events(&self) -> VecDeque<ReactorEvent> {
        if !self.has_events.load(Ordering::Acquire)
            || !self.has_events.swap(false, Ordering::AcqRel)
        {
            return VecDeque::new();
        }
        std::mem::take(&mut *lock(&self.events))
    }
}

/// Tokens of connections with new words from one batch.
struct FreshTokens {
    tokens: [u32; BATCH],
    len: usize,
}

impl FreshTokens {
    #[inline]
    fn new() -> FreshTokens {
        FreshTokens { tokens: [0; BATCH], len: 0 }
    }

    #[inline]
    fn push(&mut self, token: u32) {
        if let Some(place) = self.tokens.get_mut(self.len) {
            *place = token;
            self.len += 1;
        }
    }

    #[inline]
    fn as_slice(&self) -> &[u32] {
        self.tokens.get(..self.len).unwrap_or_default()
    }
}

/// This end of a link for Accept or Confirm, without the element.
pub(crate) fn link_end(link: &super::link::Link, direct: bool) -> LinkEnd {
    use smc_core::wire::ids::{Mac, Rkey, SizeCode};
    LinkEnd {
        gid: link.gid(),
        mac: link.port().mac().unwrap_or(Mac::NONE),
        qpn: link.qpn(),
        psn: link.psn(),
        mtu: link.port().view().mtu,
        rkey: Rkey(0),
        address: 0,
        index: 1,
        token: 0,
        size: SizeCode::MIN,
        direct,
    }
}
