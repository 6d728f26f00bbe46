// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Moves of connections to another link.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smc_core::link_group::LinkKey;
use smc_core::time::Tick;

use super::effects::find;
use super::endpoint::Endpoint;
use super::group::{Core, Group};
use super::link::{Link, Path};

/// The longest wait for writes under way in a failover from a working link.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval of a failover's checks for the arrival of such writes.
const RECHECK_INTERVAL: Duration = Duration::from_micros(500);
/// The longest wait of a connection between two links for the peer's rkey.
const RKEY_TIMEOUT: Duration = Duration::from_secs(10);

/// The result of attaching a connection to its new link.
enum Attached {
    /// The connection sends again.
    Done,
    /// The peer has not sent the rkey of its RMB on the new link yet.
    NoRkey,
    /// The connection cannot go on.
    Impossible,
}

impl Group {
    /// Moves the connections of a link to another one (LG-30).
    pub(super) fn move_connections(
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
                // No old write may arrive after the bytes are written again.
                old.stop();
            }
            // Messages acknowledged earlier count.
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
            // A connection already waiting for an rkey has no path, and keeps waiting.
            if endpoint.detach_path(from) && !self.try_attach(core, endpoint, to) {
                core.awaiting_rkey
                    .push((endpoint.token(), Tick(now.0 + RKEY_TIMEOUT.as_micros() as u64)));
            }
        }
        let moved = moved.len() as u32;
        if let Some(old) = old {
            old.connections().fetch_sub(moved, Ordering::Relaxed);
            // The old link may be kept after all.
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

    /// Attaches the connections with an rkey received meanwhile, and fails connections after too long a
    /// wait. `true`: at least one was waiting.
    pub(super) fn retry_awaiting_rkey(self: &Arc<Self>, core: &mut Core) -> bool {
        if core.awaiting_rkey.is_empty() {
            return false;
        }
        let now = self.shared().now();
        let awaiting_rkey = std::mem::take(&mut core.awaiting_rkey);
        let before = awaiting_rkey.len();
        for (token, until) in awaiting_rkey {
            let Some((endpoint, on)) = core.connections.get(&token).cloned() else { continue };
            if self.try_attach(core, &endpoint, on) {
                continue;
            }
            if until.0 <= now.0 {
                tracing::debug!(group = self.number(), link = on.get(), "the peer named no key");
                self.fail_connection(&endpoint);
            } else {
                core.awaiting_rkey.push((token, until));
            }
        }
        core.awaiting_rkey.len() != before
    }

    /// Attaches a connection to the link `on`, or fails it. `false`: the rkey is still missing.
    fn try_attach(&self, core: &Core, endpoint: &Arc<Endpoint>, on: LinkKey) -> bool {
        match self.attach(core, endpoint, on) {
            Attached::Done => true,
            Attached::NoRkey => false,
            Attached::Impossible => {
                self.fail_connection(endpoint);
                true
            }
        }
    }

    /// Holds a link and waits for the arrival of the writes under way on it (LG-32). `true`: done
    /// within [`DRAIN_TIMEOUT`].
    fn drain(&self, core: &Core, link: &Link, key: LinkKey) -> bool {
        link.hold(true);
        for (endpoint, _) in core.connections.values().filter(|(_, on)| *on == key) {
            endpoint.barrier();
        }
        let end = Instant::now() + DRAIN_TIMEOUT;
        loop {
            self.shared().poll_sends(link.port().device());
            if !link.has_unacknowledged() {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            // Sleeps, because a software adapter may need this processor.
            std::thread::sleep(RECHECK_INTERVAL);
        }
    }

    fn attach(&self, core: &Core, endpoint: &Arc<Endpoint>, on: LinkKey) -> Attached {
        let Some((rmb, send_buffer)) = endpoint.between_links() else { return Attached::Done };
        let region = core.machine.as_ref().and_then(|machine| machine.peer_region(rmb, on));
        let (Some(link), Some(region)) = (find(core, on), region) else { return Attached::NoRkey };
        let Ok(send_buffer) = send_buffer.register(on, link.pd()) else {
            return Attached::Impossible;
        };
        let link = link.clone();
        endpoint.attach_path(Path {
            link,
            send_buffer,
            address: region.address,
            rkey: region.rkey,
        });
        self.shared().flush(endpoint);
        Attached::Done
    }
}
