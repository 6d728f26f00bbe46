// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's handshake from a server's Accept of SMC-R on.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::handshake::{
    AcceptedR, Config, DeclineReason, EstablishedR, KnownLink, PeerLink, SendDecline,
};
use smc_core::link_group::Role;

use super::super::decline::send_decline;
use super::super::tcp::send;
use super::super::{Broken, Outcome};
use super::bring_up::LinkBringUp;
use super::pending::{PendingConn, finish_established, reason_of, remote_of};
use crate::smcr::alternates::alternate_gids;
use crate::smcr::group::{Group, Status};
use crate::smcr::host::RdmaHost;
use ism_sys::EventFd;
use smc_verbs::VerbsError;

/// The longest duration of a handshake's LLC part; the link group's own times are shorter.
const LLC_TIMEOUT: Duration = Duration::from_secs(20);

/// A client's handshake under way.
pub(crate) struct Connecting {
    host: Arc<RdmaHost>,
    config: Arc<Config>,
    notifier: Arc<EventFd>,
    deadline: Instant,
    buffer: u32,
    stage: Stage,
}

enum Stage {
    /// The group's first contact is not over at this end.
    Group(Box<AcceptedR>, Arc<Group>),
    /// The peer has to confirm the own RMB (CLC-48, LLC-51).
    Rmb(Box<AcceptedR>, PendingConn),
    /// The server offers a first contact.
    Offered(Box<AcceptedR>),
    /// A first contact: LLC confirms the link.
    Llc(Box<LinkBringUp>),
    Over,
}

impl RdmaHost {
    /// Whether this host has the link named by a server at a subsequent contact.
    pub(crate) fn known_link(&self, peer: &PeerLink) -> KnownLink {
        match self.link_groups().to_server(peer) {
            None => KnownLink::NoGroup,
            Some((_, None)) => KnownLink::NoLink,
            Some((group, Some(_))) => group.terms().map_or(KnownLink::NoLink, KnownLink::Link),
        }
    }
}

impl Connecting {
    /// Takes up a server's offer, with an own element of `buffer` bytes. [`Connecting::advance`]
    /// continues.
    ///
    /// # Errors
    /// The Decline to send.
    pub(crate) fn new(
        host: &Arc<RdmaHost>,
        config: &Arc<Config>,
        accepted: AcceptedR,
        buffer: u32,
    ) -> Result<Connecting, SendDecline> {
        let Ok(notifier) = EventFd::new() else {
            return Err(accepted.decline(DeclineReason::NoMemory));
        };
        // Readable at once, so the first call of `advance` carries out steps without an answer.
        notifier.signal();
        let notifier = Arc::new(notifier);
        let stage = if accepted.first_contact() {
            Stage::Offered(Box::new(accepted))
        } else {
            let Some((group, _)) = host.link_groups().to_server(&accepted.peer_link()) else {
                return Err(accepted.decline(DeclineReason::NoActiveLink));
            };
            group.watch(&notifier);
            Stage::Group(Box::new(accepted), group)
        };
        let (host, config, deadline) = (host.clone(), config.clone(), Instant::now() + LLC_TIMEOUT);
        Ok(Connecting { host, config, notifier, deadline, buffer, stage })
    }

    /// Readable when [`Connecting::advance`] has something to do; so is TCP's descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }

    /// The latest time for [`Connecting::advance`].
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Continues as far as possible. `None`: the peer has to answer. Never waits.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn advance(&mut self, tcp: &TcpStream) -> Result<Option<Outcome>, Broken> {
        self.notifier.clear();
        if Instant::now() >= self.deadline {
            // The link group ought to have given up by itself.
            return Err(Broken::Late(DeclineReason::LinkNotReady));
        }
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Group(accepted, group) => match group.status() {
                    Status::Forming => {
                        self.stage = Stage::Group(accepted, group);
                        return Ok(None);
                    }
                    Status::Usable => match self.take(&accepted, &group) {
                        Ok(pending) => self.stage = Stage::Rmb(accepted, pending),
                        Err(reason) => {
                            return send_decline(tcp, accepted.decline(reason)).map(Some);
                        }
                    },
                    Status::Over => {
                        let decline = accepted.decline(DeclineReason::NoActiveLink);
                        return send_decline(tcp, decline).map(Some);
                    }
                },
                Stage::Rmb(accepted, pending) => match pending.is_confirmed() {
                    Some(true) => return self.confirm(tcp, *accepted, pending).map(Some),
                    Some(false) => {
                        self.stage = Stage::Rmb(accepted, pending);
                        return Ok(None);
                    }
                    None => {
                        let decline = accepted.decline(pending.refusal());
                        return send_decline(tcp, decline).map(Some);
                    }
                },
                Stage::Offered(accepted) => match self.start_first_contact(*accepted) {
                    Ok((mut pending, established, confirm)) => {
                        pending.mark_announced();
                        send(tcp, &confirm)?;
                        let bring_up = LinkBringUp::new(pending, established, self.config.clone());
                        self.stage = Stage::Llc(Box::new(bring_up));
                    }
                    Err(decline) => return send_decline(tcp, decline).map(Some),
                },
                Stage::Llc(mut bring_up) => {
                    let outcome = bring_up.advance(tcp)?;
                    if outcome.is_none() {
                        self.stage = Stage::Llc(bring_up);
                    }
                    return Ok(outcome);
                }
                Stage::Over => return Err(Broken::Io(std::io::ErrorKind::NotConnected.into())),
            }
        }
    }

    fn take(&self, accepted: &AcceptedR, group: &Arc<Group>) -> Result<PendingConn, DeclineReason> {
        let peer = accepted.peer_link();
        let named = self.host.link_groups().to_server(&peer);
        let Some((found, Some(key))) = named else {
            return Err(DeclineReason::UnknownLink(peer.qpn));
        };
        let link = found.link(key).ok_or(DeclineReason::UnknownLink(peer.qpn))?;
        if !Arc::ptr_eq(&found, group) {
            found.watch(&self.notifier);
        }
        PendingConn::new(self.host.link_groups(), &found, &link, self.buffer)
            .map_err(|error| reason_of(&error))
    }

    /// A subsequent contact, without work for LLC (CLC-40): the connection is ready before the server
    /// knows (CLC-42).
    fn confirm(
        &self,
        tcp: &TcpStream,
        accepted: AcceptedR,
        mut pending: PendingConn,
    ) -> Result<Outcome, Broken> {
        let Some(own) = pending.end(accepted.direct()) else {
            return send_decline(tcp, accepted.decline(DeclineReason::NoActiveLink));
        };
        if let Err(error) = pending.join(accepted.peer(), pending.link.key()) {
            return send_decline(tcp, accepted.decline(reason_of(&error)));
        }
        let (established, confirm) = accepted.confirm(own, &[]);
        pending.mark_announced();
        send(tcp, &confirm)?;
        finish_established(pending, established)
    }

    /// A first contact: the queue pair can receive before the server learns of it (CLC-38).
    fn start_first_contact(
        &self,
        accepted: AcceptedR,
    ) -> Result<(PendingConn, EstablishedR, Vec<u8>), SendDecline> {
        let made = self.make(&accepted);
        let (pending, direct) = match made {
            Ok(made) => made,
            Err(reason) => return Err(accepted.decline(reason)),
        };
        let Some(own) = pending.end(direct) else {
            pending.group.fail_first_contact();
            return Err(accepted.decline(DeclineReason::LinkNotReady));
        };
        let version = accepted.version();
        let alternates = alternate_gids(self.host.shared(), &pending.link, version);
        let (established, confirm) = accepted.confirm(own, &alternates);
        pending.start(Role::Client, &established);
        Ok((pending, established, confirm))
    }

    fn make(&self, accepted: &AcceptedR) -> Result<(PendingConn, bool), DeclineReason> {
        let shared = self.host.shared();
        let peer = accepted.peer_link();
        let v1 = accepted.version() == smc_core::wire::clc::Version::V1;
        let rnic = accepted.route().rnic.ok_or(DeclineReason::NoRnic)?;
        let gid = if v1 { rnic.gid_v1 } else { rnic.gid_v2 }.ok_or(DeclineReason::NoRnic)?;
        let port = shared.ports().iter().find(|p| p.is_active() && p.source_of(gid, v1).is_some());
        let port = port.ok_or(DeclineReason::NoRnic)?;
        let source = port.source_of(gid, v1).ok_or(DeclineReason::NoRnic)?;
        let direct = accepted.direct();
        let number = shared.next_number();
        let group = Group::new(number, Role::Client, peer.rnic, shared);
        let not_ready = |error: VerbsError| {
            tracing::debug!(%error, "no first link");
            DeclineReason::LinkNotReady
        };
        let link = group.add_first_link(port, source).map_err(not_ready)?;
        group.watch(&self.notifier);
        let made = || {
            let pending = PendingConn::new(self.host.link_groups(), &group, &link, self.buffer)
                .map_err(|e| reason_of(&e))?;
            let own = port.view().mtu;
            let remote = accepted.peer();
            let mtu = if own.code() < remote.mtu.code() { own } else { remote.mtu };
            link.connect(remote_of(remote, mtu), direct).map_err(not_ready)?;
            Ok(pending)
        };
        match made() {
            Ok(pending) => {
                self.host.link_groups().add(group.clone());
                Ok((pending, direct))
            }
            Err(reason) => {
                group.fail_first_contact();
                Err(reason)
            }
        }
    }
}
