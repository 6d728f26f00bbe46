// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes the outputs of a link group's state machine.

use std::sync::Arc;

use smc_core::link_group::{
    Cause, Ending, LinkKey, Output, PeerRmbId, Prepared, Reason, RemoteEnd, RnicId,
};

use super::group::{Core, Group, Status};
use super::inbox::Input;
use super::link::Link;
use super::shared::DeferredClose;
use smc_verbs::VerbsError;

impl Group {
    /// Executes the outputs of the state machine in order. The caller holds the lock of the group's
    /// state.
    pub(super) fn apply_outputs(self: &Arc<Self>, core: &mut Core) {
        let mut any = false;
        while let Some(output) = core.machine.as_mut().and_then(|machine| machine.poll_output()) {
            tracing::trace!(group = self.number(), ?output, "order");
            any = true;
            self.execute(core, output);
        }
        any |= self.retry_awaiting_rkey(core);
        if any {
            self.shared().timers_changed();
        }
    }

    fn execute(self: &Arc<Self>, core: &mut Core, output: Output) {
        match output {
            Output::PostLlc { link, bytes, receipt } => {
                if let Some(link) = find(core, link) {
                    link.post_llc(bytes, receipt);
                }
            }
            Output::PrepareLink { link, rnic, .. } => {
                if let Err(error) = self.prepare(core, link, rnic) {
                    self.refuse(core, link, &error);
                }
            }
            Output::ConnectLink { link, remote, mtu } => {
                self.connect(core, link, RemoteEnd { mtu, ..remote });
            }
            // A queue pair is brought to RTS as soon as its peer is known (LLC-13).
            Output::ActivateLink { .. } => {}
            Output::LinkUsable { link } => {
                tracing::debug!(group = self.number(), link = link.get(), "link usable");
                self.notify_watchers();
            }
            Output::GroupUsable => {
                tracing::debug!(group = self.number(), "link group usable");
                self.set_status(Status::Usable);
            }
            Output::RmbConfirmed { rmb } => {
                core.confirmed.insert(rmb);
                self.notify_watchers();
            }
            Output::RmbRefused { rmb } => {
                core.refused.insert(rmb);
                core.buffers.remove(rmb);
                self.notify_watchers();
            }
            Output::RmbDeleted { rmb } => {
                core.confirmed.remove(&rmb);
                core.buffers.remove(rmb);
            }
            Output::PeerRmbDeleted { rmb } => self.peer_rmb_deleted(core, rmb),
            Output::MoveConnections { from, to, dead } => {
                self.move_connections(core, from, to, dead)
            }
            Output::DestroyLink { link } => self.destroy(core, link),
            Output::Terminated { reason, ending } => {
                tracing::debug!(group = self.number(), ?reason, ?ending, "link group over");
                self.set_ending(reason, ending);
                self.end(core, ending);
            }
        }
    }

    fn refuse(&self, core: &mut Core, link: LinkKey, error: &VerbsError) {
        tracing::debug!(group = self.number(), link = link.get(), %error, "no link");
        let now = self.shared().now();
        if let Some(machine) = &mut core.machine {
            machine.handle_link_failed(link, Cause::Setup, now);
        }
    }

    fn prepare(
        self: &Arc<Self>,
        core: &mut Core,
        key: LinkKey,
        rnic: RnicId,
    ) -> Result<(), VerbsError> {
        let gone = || VerbsError::Gone(format!("port {}", rnic.0));
        let Some(machine) = &mut core.machine else { return Err(gone()) };
        let gid = machine.link(key).map(|link| link.rnic.gid).ok_or_else(gone)?;
        let port = self.shared().port(rnic).ok_or_else(gone)?;
        let v1 = self.version() == smc_core::wire::clc::Version::V1;
        let source = port.source_of(gid, v1).ok_or_else(gone)?;
        let group = (self.number(), self.inputs());
        let link = Link::new(key, group, &port, (source.index, source.gid), self.version())?;
        self.shared().add_link(&link)?;
        let mut regions = Vec::new();
        // Every link has every RMB (LG-2), with a key of its own (LG-19).
        for rmb in core.buffers.all() {
            rmb.buffer().register(key, link.pd())?;
            regions.extend(rmb.buffer().region(key).map(|region| (rmb.id(), region)));
        }
        let prepared = Prepared { qpn: link.qpn(), psn: link.psn(), regions };
        core.links.push(link);
        machine.handle_link_prepared(key, prepared, self.shared().now());
        Ok(())
    }

    /// Connects a link on a thread of its own: address resolution may take about a second if the peer's
    /// port does not answer. LLC messages for the link wait until then; connections use the other links
    /// (LG-27).
    fn connect(self: &Arc<Self>, core: &Core, key: LinkKey, remote: RemoteEnd) {
        let machine = core.machine.as_ref();
        let direct = machine.and_then(|machine| machine.link(key)).is_none_or(|l| l.rnic.direct);
        let Some(link) = find(core, key).cloned() else { return };
        let group = self.clone();
        let connect = move || match link.connect(remote, direct) {
            Ok(()) => link.send_llc(),
            Err(error) => {
                tracing::debug!(group = group.number(), link = key.get(), %error, "no link");
                group.put(Input::Failed(key, Cause::Setup));
            }
        };
        if let Err(error) = ism_sys::start_thread("smc-link", ism_sys::USUAL_STACK, connect) {
            tracing::debug!(%error, "no thread");
            self.put(Input::Failed(key, Cause::Setup));
        }
    }

    /// The peer may reuse this key for other memory at any time, so connections still using the key
    /// fail.
    fn peer_rmb_deleted(&self, core: &Core, rmb: PeerRmbId) {
        for (endpoint, _) in core.connections.values() {
            if endpoint.target().is_some_and(|(target, _)| target == rmb) {
                self.fail_connection(endpoint);
            }
        }
    }

    /// Ends the links, and thereby every connection (LG-56, LLC-44, CLOSE-34, CLOSE-37).
    fn end(self: &Arc<Self>, core: &mut Core, ending: Ending) {
        let mut links = Vec::new();
        while let Some(key) = core.links.last().map(|link| link.key()) {
            links.extend(take_link(core, key));
        }
        let lost = match ending {
            Ending::Quiet => Vec::new(),
            _ => core.connections.values().map(|(endpoint, _)| endpoint.clone()).collect(),
        };
        // Any other end is a fault of one of both ends, with unreliable words.
        let may_go_on = match self.ending() {
            Some((Reason::LastLinkLost(_) | Reason::PeerDeletedAll(_), _)) => {
                self.terms().is_some_and(|terms| terms.carriers.is_some())
            }
            _ => false,
        };
        self.shared().defer_close(DeferredClose { links, lost, may_go_on });
        self.set_status(Status::Over);
        // The next work removes the group from the list.
        self.shared().signal().post();
    }

    /// Frees a link after its end, or refused by the peer (LG-24).
    fn destroy(&self, core: &mut Core, key: LinkKey) {
        let links = take_link(core, key).into_iter().collect();
        self.shared().defer_close(DeferredClose { links, lost: Vec::new(), may_go_on: false });
    }
}

pub(super) fn find(core: &Core, key: LinkKey) -> Option<&Arc<Link>> {
    core.links.iter().find(|link| link.key() == key)
}

/// Removes a link from the group. The link keeps the registrations needed until the end of its queue
/// pair.
fn take_link(core: &mut Core, key: LinkKey) -> Option<Arc<Link>> {
    let at = core.links.iter().position(|link| link.key() == key)?;
    let link = core.links.swap_remove(at);
    let mut keys = core.buffers.remove_link(key);
    keys.extend(core.connections.values().filter_map(|(endpoint, _)| endpoint.remove_link(key)));
    link.keep(keys);
    Some(link)
}
