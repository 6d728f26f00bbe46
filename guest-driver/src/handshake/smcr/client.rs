//! The client's handshake from a server's Accept of SMC-R on.
//!
//! Rules kept here: CLC-38, CLC-40, CLC-41, CLC-42, CLC-48, LLC-51.

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
use super::contact::{Draft, finish, reason_of, remote_of};
use super::first::Rising;
use crate::smcr::alternates::alternate_gids;
use crate::smcr::group::{Group, Status};
use crate::smcr::host::RdmaHost;
use crate::sys::EventFd;
use crate::verbs::VerbsError;

/// How long the LLC side of a handshake may take; the link group has its own times, which are
/// shorter.
const PATIENCE: Duration = Duration::from_secs(20);

/// A client's handshake under way.
pub(crate) struct Connecting {
    host: Arc<RdmaHost>,
    config: Arc<Config>,
    bell: Arc<EventFd>,
    deadline: Instant,
    buffer: u32,
    stage: Stage,
}

enum Stage {
    /// The group's first contact is not over at this end.
    Group(Box<AcceptedR>, Arc<Group>),
    /// The peer has to confirm the own RMB.
    Rmb(Box<AcceptedR>, Draft),
    /// The server offers a first contact.
    Offered(Box<AcceptedR>),
    /// A first contact: LLC confirms the link.
    Llc(Box<Rising>),
    Over,
}

impl RdmaHost {
    /// What there is of the link that a server names at a subsequent contact.
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
    /// goes on.
    ///
    /// # Errors
    /// The Decline to send.
    pub(crate) fn new(
        host: &Arc<RdmaHost>,
        config: &Arc<Config>,
        accepted: AcceptedR,
        buffer: u32,
    ) -> Result<Connecting, SendDecline> {
        let Ok(bell) = EventFd::new() else {
            return Err(accepted.decline(DeclineReason::NoMemory));
        };
        // Whatever can be done at once is done by the first call of `advance`.
        bell.signal();
        let bell = Arc::new(bell);
        let stage = if accepted.first_contact() {
            Stage::Offered(Box::new(accepted))
        } else {
            let Some((group, _)) = host.link_groups().to_server(&accepted.peer_link()) else {
                return Err(accepted.decline(DeclineReason::NoActiveLink));
            };
            group.watch(&bell);
            Stage::Group(Box::new(accepted), group)
        };
        let (host, config, deadline) = (host.clone(), config.clone(), Instant::now() + PATIENCE);
        Ok(Connecting { host, config, bell, deadline, buffer, stage })
    }

    /// Readable when [`Connecting::advance`] has something to do; so is it when TCP is.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// When [`Connecting::advance`] is to be called at the latest.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Goes on as far as it can. `None`: the peer has to answer. Never waits.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn advance(&mut self, tcp: &TcpStream) -> Result<Option<Outcome>, Broken> {
        self.bell.clear();
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
                        Ok(draft) => self.stage = Stage::Rmb(accepted, draft),
                        Err(reason) => {
                            return send_decline(tcp, accepted.decline(reason)).map(Some);
                        }
                    },
                    Status::Over => {
                        let decline = accepted.decline(DeclineReason::NoActiveLink);
                        return send_decline(tcp, decline).map(Some);
                    }
                },
                Stage::Rmb(accepted, draft) => match draft.is_confirmed() {
                    Some(true) => return self.confirm(tcp, *accepted, draft).map(Some),
                    Some(false) => {
                        self.stage = Stage::Rmb(accepted, draft);
                        return Ok(None);
                    }
                    None => {
                        let decline = accepted.decline(DeclineReason::Registration);
                        return send_decline(tcp, decline).map(Some);
                    }
                },
                Stage::Offered(accepted) => match self.begin(*accepted) {
                    Ok((mut draft, established, confirm)) => {
                        draft.tell();
                        send(tcp, &confirm)?;
                        let rising = Rising::new(draft, established, self.config.clone());
                        self.stage = Stage::Llc(Box::new(rising));
                    }
                    Err(decline) => return send_decline(tcp, decline).map(Some),
                },
                Stage::Llc(mut rising) => {
                    let outcome = rising.advance(tcp)?;
                    if outcome.is_none() {
                        self.stage = Stage::Llc(rising);
                    }
                    return Ok(outcome);
                }
                Stage::Over => return Err(Broken::Io(std::io::ErrorKind::NotConnected.into())),
            }
        }
    }

    fn take(&self, accepted: &AcceptedR, group: &Arc<Group>) -> Result<Draft, DeclineReason> {
        let peer = accepted.peer_link();
        let named = self.host.link_groups().to_server(&peer);
        let Some((found, Some(key))) = named else {
            return Err(DeclineReason::UnknownLink(peer.qpn));
        };
        let link = found.link(key).ok_or(DeclineReason::UnknownLink(peer.qpn))?;
        if !Arc::ptr_eq(&found, group) {
            found.watch(&self.bell);
        }
        Draft::new(self.host.link_groups(), &found, &link, self.buffer)
            .map_err(|error| reason_of(&error))
    }

    /// A subsequent contact: the connection is ready before the server knows.
    fn confirm(
        &self,
        tcp: &TcpStream,
        accepted: AcceptedR,
        mut draft: Draft,
    ) -> Result<Outcome, Broken> {
        let Some(own) = draft.end(accepted.direct()) else {
            return send_decline(tcp, accepted.decline(DeclineReason::NoActiveLink));
        };
        if let Err(error) = draft.join(accepted.peer(), draft.link.key()) {
            return send_decline(tcp, accepted.decline(reason_of(&error)));
        }
        let (established, confirm) = accepted.confirm(own, &[]);
        draft.tell();
        send(tcp, &confirm)?;
        finish(draft, established)
    }

    /// A first contact: the queue pair can receive before the server knows of it.
    fn begin(&self, accepted: AcceptedR) -> Result<(Draft, EstablishedR, Vec<u8>), SendDecline> {
        let made = self.make(&accepted);
        let (draft, direct) = match made {
            Ok(made) => made,
            Err(reason) => return Err(accepted.decline(reason)),
        };
        let Some(own) = draft.end(direct) else {
            draft.group.abandon();
            return Err(accepted.decline(DeclineReason::LinkNotReady));
        };
        let version = accepted.version();
        let alternates = alternate_gids(self.host.shared(), &draft.link, version);
        let (established, confirm) = accepted.confirm(own, &alternates);
        draft.start(Role::Client, &established);
        Ok((draft, established, confirm))
    }

    fn make(&self, accepted: &AcceptedR) -> Result<(Draft, bool), DeclineReason> {
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
        let link = group.begin(port, source).map_err(not_ready)?;
        group.watch(&self.bell);
        let made = || {
            let draft = Draft::new(self.host.link_groups(), &group, &link, self.buffer)
                .map_err(|e| reason_of(&e))?;
            let own = port.view().mtu;
            let remote = accepted.peer();
            let mtu = if own.code() < remote.mtu.code() { own } else { remote.mtu };
            link.connect(remote_of(remote, mtu), direct).map_err(not_ready)?;
            Ok(draft)
        };
        match made() {
            Ok(draft) => {
                self.host.link_groups().enter(group.clone());
                Ok((draft, direct))
            }
            Err(reason) => {
                group.abandon();
                Err(reason)
            }
        }
    }
}
