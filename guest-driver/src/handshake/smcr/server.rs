//! The server's handshake from its choice of SMC-R on.
//!
//! Rules kept here: CLC-20, CLC-21, CLC-22, CLC-32, CLC-39, CLC-40, CLC-43, CLC-44, CLC-46,
//! CLC-47, CLC-48, CLC-50, CLC-58, CLC-64, LLC-51, LG-50, ERR-4.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::handshake::{
    AwaitConfirmR, Awaited, ClcReader, Config, ConfirmStepR, DeclineReason, FallbackReason,
    HandshakeError, PeerLink, PeerRnic, Selection,
};
use smc_core::link_group::{LinkGroup, LinkKey, Role};
use smc_core::time::Tick;
use smc_core::wire::clc::Version;

use super::super::decline::send_decline;
use super::super::tcp::{fill, send};
use super::super::{Broken, Outcome};
use super::contact::{Draft, finish, reason_of, remote_of};
use super::first::Rising;
use crate::smcr::group::{Group, Status};
use crate::smcr::host::RdmaHost;
use crate::smcr::port::{Port, Source};
use crate::sys::EventFd;

/// How long a handshake waits for the first contact of another one with the same peer, and for the
/// peer to confirm an RMB. Less than a client waits for Accept.
const LLC_PATIENCE: Duration = Duration::from_millis(4500);
/// How long a first contact may take after Confirm; the link group has its own times, which are
/// shorter.
const FIRST_PATIENCE: Duration = Duration::from_secs(20);

/// A server's handshake under way.
pub(crate) struct Accepting {
    host: Arc<RdmaHost>,
    config: Arc<Config>,
    bell: Arc<EventFd>,
    peer: PeerRnic,
    port: Arc<Port>,
    source: Source,
    direct: bool,
    buffer: u32,
    patience: Duration,
    deadline: Instant,
    stage: Stage,
}

enum Stage {
    /// Another handshake with this peer makes the group.
    Group(Box<Selection>),
    /// The peer has to confirm the own RMB.
    Rmb(Box<Selection>, Draft),
    Confirm(Box<Accepted>),
    Llc(Box<Rising>),
    Over,
}

struct Accepted {
    awaiting: AwaitConfirmR,
    reader: ClcReader,
    draft: Draft,
    first: bool,
}

/// A choice that came to nothing: another one may be tried.
pub(crate) type Refused = (Box<Selection>, DeclineReason);

impl Accepting {
    /// Takes up the choice of SMC-R with this adapter of the client. `buffer`: bytes of the own
    /// element; `patience`: how long Confirm is awaited. [`Accepting::advance`] goes on.
    ///
    /// # Errors
    /// The Selection, for another choice, and why it is not this one.
    pub(crate) fn new(
        host: &Arc<RdmaHost>,
        config: &Arc<Config>,
        selection: Selection,
        peer: PeerRnic,
        buffer: u32,
        patience: Duration,
    ) -> Result<Accepting, Refused> {
        let selection = Box::new(selection);
        let found = (|| {
            let v1 = peer.version() == Version::V1;
            let rnic = selection.route().rnic?;
            let gid = if v1 { rnic.gid_v1 } else { rnic.gid_v2 }?;
            let fits = |p: &&Arc<Port>| p.is_active() && p.source_of(gid, v1).is_some();
            let port = host.shared().ports().iter().find(fits)?.clone();
            let source = port.source_of(gid, v1)?;
            Some((port, source))
        })();
        let Some((port, source)) = found else {
            return Err((selection, DeclineReason::NoRnic));
        };
        let Ok(bell) = EventFd::new() else {
            return Err((selection, DeclineReason::NoMemory));
        };
        bell.signal();
        let direct = match source.gid.to_ipv4() {
            Some(v4) => host.subnets().is_direct(v4.into(), peer.gid()),
            None => host.subnets().is_direct(source.gid.0.into(), peer.gid()),
        };
        Ok(Accepting {
            host: host.clone(),
            config: config.clone(),
            bell: Arc::new(bell),
            peer,
            port,
            source,
            direct: direct || peer.version() == Version::V1,
            buffer,
            patience,
            deadline: Instant::now() + LLC_PATIENCE,
            stage: Stage::Group(selection),
        })
    }

    /// Readable when [`Accepting::advance`] has something to do; so is it when TCP is.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// When [`Accepting::advance`] is to be called at the latest.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Goes on as far as it can. `None`: more has to come. Never waits.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn advance(&mut self, tcp: &TcpStream) -> Result<Option<Outcome>, Broken> {
        self.bell.clear();
        let late = Instant::now() >= self.deadline;
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Group(selection) => match self.find(late) {
                    None => {
                        self.stage = Stage::Group(selection);
                        return Ok(None);
                    }
                    Some(Ok(draft)) => self.stage = Stage::Rmb(selection, draft),
                    Some(Err(reason)) => {
                        return send_decline(tcp, selection.decline(reason)).map(Some);
                    }
                },
                Stage::Rmb(selection, draft) => match draft.is_confirmed() {
                    // Of a first contact, Accept itself tells the peer of the RMB.
                    _ if draft.group.terms().is_none() => self.accept(tcp, *selection, draft)?,
                    Some(true) => self.accept(tcp, *selection, draft)?,
                    Some(false) if !late => {
                        self.stage = Stage::Rmb(selection, draft);
                        return Ok(None);
                    }
                    // Another group may be there, or made.
                    _ if !late && draft.group.status() == Status::Over => {
                        self.stage = Stage::Group(selection);
                    }
                    _ => {
                        let decline = selection.decline(DeclineReason::Registration);
                        return send_decline(tcp, decline).map(Some);
                    }
                },
                Stage::Confirm(mut accepted) => {
                    if !fill(tcp, &mut accepted.reader)? {
                        if late {
                            let awaited = Awaited::Confirm;
                            self.drop_first(&accepted);
                            return Err(HandshakeError::TimedOut { awaited }.into());
                        }
                        self.stage = Stage::Confirm(accepted);
                        return Ok(None);
                    }
                    if let Some(outcome) = self.confirmed(tcp, *accepted)? {
                        return Ok(Some(outcome));
                    }
                }
                Stage::Llc(mut rising) => {
                    if let Some(outcome) = rising.advance(tcp)? {
                        return Ok(Some(outcome));
                    }
                    if late {
                        return Err(Broken::Late(DeclineReason::LinkNotReady));
                    }
                    self.stage = Stage::Llc(rising);
                    return Ok(None);
                }
                Stage::Over => return Err(Broken::Io(std::io::ErrorKind::NotConnected.into())),
            }
        }
    }

    /// A link of a group that is there, or of one that begins. `None`: the group is about to be
    /// there.
    fn find(&self, late: bool) -> Option<Result<Draft, DeclineReason>> {
        if let Some(group) = self.host.link_groups().for_client(&self.peer) {
            if group.status() == Status::Usable {
                return Some(self.join(&group));
            }
            if !late {
                group.watch(&self.bell);
                // It may have become usable just before.
                if group.status() == Status::Forming {
                    return None;
                }
                return self.find(true);
            }
        }
        Some(self.begin())
    }

    fn join(&self, group: &Arc<Group>) -> Result<Draft, DeclineReason> {
        let key = group.with(|machine, _| machine.pick_link()).flatten();
        let link = key.and_then(|key| group.link(key)).ok_or(DeclineReason::NoActiveLink)?;
        group.watch(&self.bell);
        Draft::new(self.host.link_groups(), group, &link, self.buffer)
            .map_err(|error| reason_of(&error))
    }

    fn begin(&self) -> Result<Draft, DeclineReason> {
        let shared = self.host.shared();
        let group = Group::new(shared.next_number(), Role::Server, self.peer, shared);
        let link = group.begin(&self.port, self.source).map_err(|error| {
            tracing::debug!(%error, "no first link");
            DeclineReason::LinkNotReady
        })?;
        group.watch(&self.bell);
        self.host.link_groups().enter(group.clone());
        Draft::new(self.host.link_groups(), &group, &link, self.buffer).map_err(|error| {
            group.abandon();
            reason_of(&error)
        })
    }

    fn accept(
        &mut self,
        tcp: &TcpStream,
        selection: Selection,
        mut draft: Draft,
    ) -> Result<(), Broken> {
        let known = draft.group.terms();
        let own = draft.end(self.direct);
        let offered =
            own.and_then(|own| selection.accept_r(self.peer.version(), known, own, Tick(0)));
        let Some((awaiting, message)) = offered else {
            draft.group.abandon();
            return Err(Broken::Late(DeclineReason::Internal));
        };
        draft.tell();
        let first = known.is_none();
        if let Err(error) = send(tcp, &message) {
            draft.group.abandon();
            return Err(error.into());
        }
        let reader = awaiting.reader();
        self.deadline = Instant::now() + self.patience;
        self.stage = Stage::Confirm(Box::new(Accepted { awaiting, reader, draft, first }));
        Ok(())
    }

    /// A first contact that comes to nothing takes its group with it.
    fn drop_first(&self, accepted: &Accepted) {
        if accepted.first {
            accepted.draft.group.abandon();
        }
    }

    fn confirmed(
        &mut self,
        tcp: &TcpStream,
        accepted: Accepted,
    ) -> Result<Option<Outcome>, Broken> {
        let Accepted { awaiting, reader, draft, first } = accepted;
        let group = draft.group.clone();
        let is_link = |peer: &PeerLink| link_to(&group, peer).is_some();
        let message = reader.message().unwrap_or_default();
        let abandon = || {
            if first {
                group.abandon()
            }
        };
        let established = match awaiting.handle(message, is_link) {
            ConfirmStepR::Established(established) => established,
            ConfirmStepR::Decline(decline) => {
                abandon();
                return send_decline(tcp, decline).map(Some);
            }
            ConfirmStepR::PeerDeclined(declined) => {
                abandon();
                if declined.out_of_sync && !first {
                    let reason = smc_core::wire::llc::DeleteReason::LOST_PATH;
                    group.with(|machine, now| machine.terminate(reason, now));
                }
                return Ok(Some(Outcome::Tcp(FallbackReason::DeclinedByPeer(declined).into())));
            }
            ConfirmStepR::Fail(error) => {
                abandon();
                return Err(error.into());
            }
        };
        if !first {
            // The address in Confirm, not the proposed one: the client may prefer another link, and
            // queue pairs of two RNICs may have the same number.
            let peer = &established.peer;
            let find = |machine: &mut LinkGroup, _| machine.link_to(peer.qpn, peer.gid);
            let on = group.with(find).flatten();
            let joined = on.map(|on| draft.join(&established.peer, on));
            return match joined {
                Some(Ok(())) => finish(draft, established).map(Some),
                // Too late for TCP: the client may have written already (CLC-53).
                Some(Err(error)) => Err(Broken::Late(reason_of(&error))),
                None => Err(Broken::Late(DeclineReason::NoActiveLink)),
            };
        }
        let remote = remote_of(&established.peer, established.mtu);
        if let Err(error) = draft.link.connect(remote, self.direct) {
            tracing::debug!(%error, "no first link");
            abandon();
            return match established.decline(&self.config, DeclineReason::LinkNotReady) {
                Some(decline) => send_decline(tcp, decline).map(Some),
                None => Err(Broken::Late(DeclineReason::LinkNotReady)),
            };
        }
        draft.start(Role::Server, &established);
        self.deadline = Instant::now() + FIRST_PATIENCE;
        let rising = Rising::new(draft, established, self.config.clone());
        self.stage = Stage::Llc(Box::new(rising));
        Ok(None)
    }
}

fn link_to(group: &Arc<Group>, peer: &PeerLink) -> Option<LinkKey> {
    let (qpn, gid) = (peer.qpn, peer.rnic.gid());
    group.with(|machine, _| machine.link_to(qpn, gid)).flatten()
}

impl Drop for Accepting {
    fn drop(&mut self) {
        // Given up by its owner: TCP broke, or the listener was closed.
        if let Stage::Confirm(accepted) = &self.stage {
            self.drop_first(accepted);
        }
    }
}
