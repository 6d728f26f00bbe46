//! Connections go over to another link.
//!
//! Rules kept here: LG-30.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smc_core::link_group::LinkKey;
use smc_core::time::Tick;

use super::carry_out::find;
use super::endpoint::Endpoint;
use super::group::{Core, Group};
use super::link::{Link, Path};

/// How long writes that are under way on a link that still works are waited for before its
/// connections go to another one.
const LAST_WRITES: Duration = Duration::from_millis(500);
/// How often it is looked whether they have arrived.
const LOOK_AGAIN: Duration = Duration::from_micros(500);
/// How long a connection waits between two links for the peer to name a key.
const KEY_WAIT: Duration = Duration::from_secs(10);

/// What became of a connection that is between two links.
enum Arrival {
    /// It goes on.
    Done,
    /// The peer has not named the key of its RMB on the new link yet.
    NoKey,
    /// It cannot go on.
    Impossible,
}

impl Group {
    /// All connections of a link go to another one.
    pub(super) fn relocate(
        self: &Arc<Self>,
        core: &mut Core,
        from: LinkKey,
        to: LinkKey,
        dead: bool,
    ) {
        let old = find(core, from).cloned();
        let in_order = old.as_ref().is_some_and(|old| !dead && self.drain(core, old, from));
        if let Some(old) = &old {
            if !in_order {
                // Nothing that is still under way there may arrive after what is written anew.
                old.stop();
            }
            // What was acknowledged before counts.
            self.shared().poll_sends(old.port().device());
        }
        let Some(new) = find(core, to).cloned() else {
            old.iter().for_each(|old| old.hold(false));
            return;
        };
        let mut moved = Vec::new();
        for (endpoint, on) in core.connections.values_mut().filter(|(_, on)| *on == from) {
            *on = to;
            moved.push(endpoint.clone());
        }
        let now = self.shared().now();
        for endpoint in &moved {
            // One that waits for a key already has no path, and waits on.
            if endpoint.depart(from) && !self.arrives(core, endpoint, to) {
                core.stranded.push((endpoint.token(), Tick(now.0 + KEY_WAIT.as_micros() as u64)));
            }
        }
        let moved = moved.len() as u32;
        if let Some(old) = old {
            old.connections().fetch_sub(moved, Ordering::Relaxed);
            // It may be kept after all.
            old.hold(false);
        }
        new.connections().fetch_add(moved, Ordering::Relaxed);
        self.failovers().fetch_add(u64::from(moved), Ordering::Relaxed);
        tracing::debug!(
            group = self.number(),
            from = from.get(),
            to = to.get(),
            moved,
            in_order,
            "connections moved"
        );
    }

    /// Has those go on for whom the peer has named the key meanwhile. `true`: somebody went.
    pub(super) fn reunite(self: &Arc<Self>, core: &mut Core) -> bool {
        if core.stranded.is_empty() {
            return false;
        }
        let now = self.shared().now();
        let stranded = std::mem::take(&mut core.stranded);
        let before = stranded.len();
        for (token, until) in stranded {
            let Some((endpoint, on)) = core.connections.get(&token).cloned() else { continue };
            if self.arrives(core, &endpoint, on) {
                continue;
            }
            if until.0 <= now.0 {
                tracing::debug!(group = self.number(), link = on.get(), "the peer named no key");
                self.lose(&endpoint);
            } else {
                core.stranded.push((token, until));
            }
        }
        core.stranded.len() != before
    }

    /// `false`: not yet. One that cannot go on is lost.
    fn arrives(&self, core: &Core, endpoint: &Arc<Endpoint>, on: LinkKey) -> bool {
        match self.arrive(core, endpoint, on) {
            Arrival::Done => true,
            Arrival::NoKey => false,
            Arrival::Impossible => {
                self.lose(endpoint);
                true
            }
        }
    }

    /// Holds a link and waits until everything that is under way on it has arrived (LG-32): whether that
    /// was within [`LAST_WRITES`].
    fn drain(&self, core: &Core, link: &Link, key: LinkKey) -> bool {
        link.hold(true);
        for (endpoint, _) in core.connections.values().filter(|(_, on)| *on == key) {
            endpoint.settle();
        }
        let end = Instant::now() + LAST_WRITES;
        loop {
            self.shared().poll_sends(link.port().device());
            if !link.has_unacknowledged() {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            // To yield would not do: a software adapter may need this processor.
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn arrive(&self, core: &Core, endpoint: &Arc<Endpoint>, on: LinkKey) -> Arrival {
        let Some((rmb, mirror)) = endpoint.between_links() else { return Arrival::Done };
        let region = core.machine.as_ref().and_then(|machine| machine.peer_region(rmb, on));
        let (Some(link), Some(region)) = (find(core, on), region) else { return Arrival::NoKey };
        let Ok(mirror) = mirror.register(on, link.pd()) else { return Arrival::Impossible };
        let link = link.clone();
        endpoint.arrive(Path { link, mirror, address: region.address, rkey: region.rkey });
        self.shared().flush(endpoint);
        Arrival::Done
    }
}
