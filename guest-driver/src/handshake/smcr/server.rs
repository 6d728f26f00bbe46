// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's handshake from its choice of SMC-R on.

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
use super::bring_up::LinkBringUp;
use super::pending::{PendingConn, finish_established, reason_of, remote_of};
use crate::smcr::group::{Group, Status};
use crate::smcr::host::RdmaHost;
use crate::smcr::port::{Port, Source};
use ism_sys::EventFd;

/// The longest wait of a handshake for another first contact with the same peer, and for the peer to
/// confirm an RMB. Less than a client waits for Accept.
const LLC_TIMEOUT: Duration = Duration::from_millis(4500);
/// The longest duration of a first contact after Confirm; the link group's own times are shorter.
const FIRST_CONTACT_TIMEOUT: Duration = Duration::from_secs(20);

/// A server's handshake under way.
pub(crate) struct Accepting {
    host: Arc<RdmaHost>,
    config: Arc<Config>,
    notifier: Arc<EventFd>,
    peer: PeerRnic,
    port: Arc<Port>,
    source: Source,
    direct: bool,
    buffer: u32,
    confirm_timeout: Duration,
    deadline: Instant,
    stage: Stage,
}

enum Stage {
    /// Another handshake with this peer makes the group.
    Group(Box<Selection>),
    /// The peer has to confirm the own RMB (CLC-48, LLC-51).
    Rmb(Box<Selection>, PendingConn),
    Confirm(Box<Accepted>),
    Llc(Box<LinkBringUp>),
    Over,
}

struct Accepted {
    awaiting: AwaitConfirmR,
    reader: ClcReader,
    pending: PendingConn,
    first: bool,
}

/// A failed choice: the handshake may try another one.
pub(crate) type Refused = (Box<Selection>, DeclineReason);

impl Accepting {
    /// Takes up the choice of SMC-R with this adapter of the client. `buffer`: bytes of the own
    /// element; `confirm_timeout`: the longest wait for Confirm. [`Accepting::advance`] continues.
    ///
    /// # Errors
    /// The Selection, for another choice, and the reason against this one.
    pub(crate) fn new(
        host: &Arc<RdmaHost>,
        config: &Arc<Config>,
        selection: Selection,
        peer: PeerRnic,
        buffer: u32,
        confirm_timeout: Duration,
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
        let Ok(notifier) = EventFd::new() else {
            return Err((selection, DeclineReason::NoMemory));
        };
        notifier.signal();
        let direct = match source.gid.to_ipv4() {
            Some(v4) => host.subnets().is_direct(v4.into(), peer.gid()),
            None => host.subnets().is_direct(source.gid.0.into(), peer.gid()),
        };
        Ok(Accepting {
            host: host.clone(),
            config: config.clone(),
            notifier: Arc::new(notifier),
            peer,
            port,
            source,
            direct: direct || peer.version() == Version::V1,
            buffer,
            confirm_timeout,
            deadline: Instant::now() + LLC_TIMEOUT,
            stage: Stage::Group(selection),
        })
    }

    /// Readable when [`Accepting::advance`] has something to do; so is TCP's descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }

    /// The latest time for [`Accepting::advance`].
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Continues as far as possible. `None`: more has to come. Never waits.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn advance(&mut self, tcp: &TcpStream) -> Result<Option<Outcome>, Broken> {
        self.notifier.clear();
        let late = Instant::now() >= self.deadline;
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Group(selection) => match self.find(late) {
                    None => {
                        self.stage = Stage::Group(selection);
                        return Ok(None);
                    }
                    Some(Ok(pending)) => self.stage = Stage::Rmb(selection, pending),
                    Some(Err(reason)) => {
                        return send_decline(tcp, selection.decline(reason)).map(Some);
                    }
                },
                Stage::Rmb(selection, pending) => match pending.is_confirmed() {
                    // In a first contact, Accept itself announces the RMB to the peer.
                    _ if pending.group.terms().is_none() => {
                        self.accept(tcp, *selection, pending)?
                    }
                    Some(true) => self.accept(tcp, *selection, pending)?,
                    Some(false) if !late => {
                        self.stage = Stage::Rmb(selection, pending);
                        return Ok(None);
                    }
                    // Another group may be there, or made.
                    _ if !late && pending.group.status() == Status::Over => {
                        self.stage = Stage::Group(selection);
                    }
                    confirmed => {
                        let in_time = || pending.refusal();
                        let reason = confirmed.map_or_else(in_time, |_| DeclineReason::NoAnswer);
                        let decline = selection.decline(reason);
                        return send_decline(tcp, decline).map(Some);
                    }
                },
                Stage::Confirm(mut accepted) => {
                    if !fill(tcp, &mut accepted.reader)? {
                        // Accept has just gone, or the client has had its time.
                        if Instant::now() >= self.deadline {
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
                Stage::Llc(mut bring_up) => {
                    if let Some(outcome) = bring_up.advance(tcp)? {
                        return Ok(Some(outcome));
                    }
                    if late {
                        return Err(Broken::Late(DeclineReason::LinkNotReady));
                    }
                    self.stage = Stage::Llc(bring_up);
                    return Ok(None);
                }
                Stage::Over => return Err(Broken::Io(std::io::ErrorKind::NotConnected.into())),
            }
        }
    }

    /// A pending connection on a link of an existing group, or of a new one (CLC-20). `None`:
    /// another handshake is making the group.
    fn find(&self, late: bool) -> Option<Result<PendingConn, DeclineReason>> {
        if let Some(group) = self.host.link_groups().for_client(&self.peer) {
            if group.status() == Status::Usable {
                return Some(self.join(&group));
            }
            if !late {
                group.watch(&self.notifier);
                // The group may have become usable just before.
                if group.status() == Status::Forming {
                    return None;
                }
                return self.find(true);
            }
        }
        Some(self.start_first_contact())
    }

    /// Takes the link picked by the group, regardless of the client's preference (CLC-47).
    fn join(&self, group: &Arc<Group>) -> Result<PendingConn, DeclineReason> {
        let key = group.with(|machine, _| machine.pick_link()).flatten();
        let link = key.and_then(|key| group.link(key)).ok_or(DeclineReason::NoActiveLink)?;
        group.watch(&self.notifier);
        PendingConn::new(self.host.link_groups(), group, &link, self.buffer)
            .map_err(|error| reason_of(&error))
    }

    /// Makes a group with its queue pair and RMB, before Accept (CLC-21). A full group with the client
    /// also leads to a new group with a first contact of its own (LG-50).
    fn start_first_contact(&self) -> Result<PendingConn, DeclineReason> {
        let shared = self.host.shared();
        let group = Group::new(shared.next_number(), Role::Server, self.peer, shared);
        let link = group.add_first_link(&self.port, self.source).map_err(|error| {
            tracing::debug!(%error, "no first link");
            DeclineReason::LinkNotReady
        })?;
        group.watch(&self.notifier);
        self.host.link_groups().add(group.clone());
        PendingConn::new(self.host.link_groups(), &group, &link, self.buffer).map_err(|error| {
            group.fail_first_contact();
            reason_of(&error)
        })
    }

    fn accept(
        &mut self,
        tcp: &TcpStream,
        selection: Selection,
        mut pending: PendingConn,
    ) -> Result<(), Broken> {
        let known = pending.group.terms();
        let own = pending.end(self.direct);
        let offered =
            own.and_then(|own| selection.accept_r(self.peer.version(), known, own, Tick(0)));
        let Some((awaiting, message)) = offered else {
            pending.group.fail_first_contact();
            return Err(Broken::Late(DeclineReason::Internal));
        };
        pending.mark_announced();
        let first = known.is_none();
        if let Err(error) = send(tcp, &message) {
            pending.group.fail_first_contact();
            return Err(error.into());
        }
        let reader = awaiting.reader();
        self.deadline = Instant::now() + self.confirm_timeout;
        self.stage = Stage::Confirm(Box::new(Accepted { awaiting, reader, pending, first }));
        Ok(())
    }

    /// Ends the group of a failed first contact (CLC-58).
    fn drop_first(&self, accepted: &Accepted) {
        if accepted.first {
            accepted.pending.group.fail_first_contact();
        }
    }

    fn confirmed(
        &mut self,
        tcp: &TcpStream,
        accepted: Accepted,
    ) -> Result<Option<Outcome>, Broken> {
        let Accepted { awaiting, reader, pending, first } = accepted;
        let group = pending.group.clone();
        let is_link = |peer: &PeerLink| link_to(&group, peer).is_some();
        let message = reader.message().unwrap_or_default();
        let fail_first_contact = || {
            if first {
                group.fail_first_contact()
            }
        };
        let established = match awaiting.handle(message, is_link) {
            ConfirmStepR::Established(established) => established,
            ConfirmStepR::Decline(decline) => {
                fail_first_contact();
                return send_decline(tcp, decline).map(Some);
            }
            ConfirmStepR::PeerDeclined(declined) => {
                fail_first_contact();
                // CLC-50.
                if declined.out_of_sync && !first {
                    let reason = smc_core::wire::llc::DeleteReason::LOST_PATH;
                    group.with(|machine, now| machine.terminate(reason, now));
                }
                return Ok(Some(Outcome::Tcp(FallbackReason::DeclinedByPeer(declined).into())));
            }
            ConfirmStepR::Fail(error) => {
                fail_first_contact();
                return Err(error.into());
            }
        };
        if !first {
            // A link is there, and needs no LLC (CLC-40). The link has the address in Confirm, not the
            // proposed address: the client may prefer another link (CLC-46), and queue pairs of two
            // RNICs may have the same number.
            let peer = &established.peer;
            let find = |machine: &mut LinkGroup, _| machine.link_to(peer.qpn, peer.gid);
            let on = group.with(find).flatten();
            let joined = on.map(|on| pending.join(&established.peer, on));
            return match joined {
                Some(Ok(())) => finish_established(pending, established).map(Some),
                // Too late for TCP: the client may have written already (CLC-53, ERR-4).
                Some(Err(error)) => Err(Broken::Late(reason_of(&error))),
                // CLC-64.
                None => Err(Broken::Late(DeclineReason::NoActiveLink)),
            };
        }
        // From here on the queue pair can send (CLC-39).
        let remote = remote_of(&established.peer, established.mtu);
        if let Err(error) = pending.link.connect(remote, self.direct) {
            tracing::debug!(%error, "no first link");
            fail_first_contact();
            return match established.decline(&self.config, DeclineReason::LinkNotReady) {
                Some(decline) => send_decline(tcp, decline).map(Some),
                None => Err(Broken::Late(DeclineReason::LinkNotReady)),
            };
        }
        pending.start(Role::Server, &established);
        self.deadline = Instant::now() + FIRST_CONTACT_TIMEOUT;
        let bring_up = LinkBringUp::new(pending, established, self.config.clone());
        self.stage = Stage::Llc(Box::new(bring_up));
        Ok(None)
    }
}

fn link_to(group: &Arc<Group>, peer: &PeerLink) -> Option<LinkKey> {
    let (qpn, gid) = (peer.qpn, peer.rnic.gid());
    group.with(|machine, _| machine.link_to(qpn, gid)).flatten()
}

impl Drop for Accepting {
    fn drop(&mut self) {
        // The owner dropped the handshake: TCP broke, or the listener was closed.
        if let Stage::Confirm(accepted) = &self.stage {
            self.drop_first(accepted);
        }
    }
}
