// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's handshake on an accepted TCP stream, one step at a time and never waiting.

use std::net::TcpStream;
use std::num::NonZeroU16;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::handshake::{
    AwaitConfirm, AwaitProposal, Awaited, Candidate, Choice, ClcReader, ConfirmStep, DeclineReason,
    FallbackReason, HandshakeError, PeerDecline, PeerRnic, Route, Selection, SendDecline,
    ServerStep,
};
use smc_core::time::Tick;
use virtio_ism_abi::Gid;

use super::decline::{device_decline_reason, send_decline};
use super::first_bytes::FirstBytes;
use super::smcr::{Accepting, Refused};
use super::tcp::{fill, send};
use super::{Broken, EstablishedConn, Outcome, Params};
use crate::smcd::claim::Ends;
use crate::smcd::{AttachSlot, Fabric, OwnBuffer, Peer, SmcdConn};

/// The longest wait of the server for the rest of a Proposal already begun. A Proposal fits into one
/// segment, so only a lost packet comes between.
const REST_TIMEOUT: Duration = Duration::from_secs(2);

/// A handshake under way.
pub(crate) struct ServerHandshake {
    stage: Stage,
    deadline: Instant,
    /// The client has announced a Proposal: unsent bytes are not for the program.
    announced: bool,
}

enum Stage {
    /// The server has taken nothing from the stream: the client may not speak SMC.
    FirstBytes(FirstBytes),
    /// The next bytes have to be a CLC message, as announced by the client.
    Announced,
    Proposal(AwaitProposal, ClcReader),
    Confirm(Box<Accepted>),
    Rdma(Box<Accepting>),
    Over,
}

/// A server's state until the answer to its Accept.
pub(super) struct Accepted {
    awaiting: AwaitConfirm,
    reader: ClcReader,
    fabric: Arc<Fabric>,
    peer: Arc<Peer>,
    own: OwnBuffer,
    /// The slot for the client's DMB, which the client names when it is too late for TCP.
    slot: AttachSlot,
}

impl ServerHandshake {
    /// Begins with the known first bytes of the client. If incomplete, the handshake waits for the rest
    /// for `timeout`.
    pub(crate) fn new(first_bytes: FirstBytes, timeout: Duration) -> ServerHandshake {
        let stage = Stage::FirstBytes(first_bytes);
        ServerHandshake { stage, deadline: Instant::now() + timeout, announced: false }
    }

    /// Begins with a client after its announcement of a Proposal, possibly without knowledge of its
    /// server's answer. Other bytes, or none within `timeout`, mean a client without SMC.
    pub(crate) fn announced(timeout: Duration) -> ServerHandshake {
        let first_bytes = FirstBytes::Incomplete;
        ServerHandshake { announced: true, ..ServerHandshake::new(first_bytes, timeout) }
    }

    /// Begins with a client after its announcement of a Proposal, due within `timeout`. Other bytes
    /// break the connection, and so does silence (OPT-8, ERR-8, ERR-9).
    pub(crate) fn required(timeout: Duration) -> ServerHandshake {
        ServerHandshake { stage: Stage::Announced, ..ServerHandshake::announced(timeout) }
    }

    /// The time for [`ServerHandshake::expire`].
    pub(crate) fn deadline(&self) -> Instant {
        match &self.stage {
            Stage::Rdma(accepting) => accepting.deadline(),
            _ => self.deadline,
        }
    }

    /// The descriptor, readable when LLC lets [`ServerHandshake::advance`] continue.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Stage::Rdma(accepting) => Some(accepting.fd()),
            _ => None,
        }
    }

    /// Whether the handshake waits for the client's answer to Accept, and so for TCP's descriptor only.
    pub(crate) fn awaits_confirm(&self) -> bool {
        matches!(self.stage, Stage::Confirm(_))
    }

    /// Whether the handshake has accepted the Proposal, and waits for the client to confirm.
    pub(crate) fn has_accepted(&self) -> bool {
        matches!(self.stage, Stage::Confirm(_) | Stage::Rdma(_))
    }

    /// Continues as far as the received bytes allow. `None`: more bytes have to come.
    ///
    /// With `drain`, the call reads until the stream is empty, for callers woken by epoll on edges.
    /// Without, the call does not try to read Confirm right after its own Accept.
    pub(crate) fn advance(
        &mut self,
        tcp: &TcpStream,
        params: &Params<'_>,
        drain: bool,
    ) -> Result<Option<Outcome>, Broken> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::FirstBytes(mut first_bytes) => {
                    if first_bytes == FirstBytes::Incomplete {
                        first_bytes = FirstBytes::peek(tcp)?;
                    }
                    let opening = match first_bytes {
                        FirstBytes::Smc(opening) => opening,
                        FirstBytes::Other => return Ok(Some(peer_not_smc())),
                        FirstBytes::Incomplete => {
                            self.stage = Stage::FirstBytes(FirstBytes::Incomplete);
                            return Ok(None);
                        }
                    };
                    let awaiting = AwaitProposal::new(params.config.clone(), Tick(0));
                    let mut reader = awaiting.reader();
                    reader.peeked(opening.bytes())?;
                    let rest = params.message_timeout.min(REST_TIMEOUT);
                    self.deadline = Instant::now() + rest;
                    self.stage = Stage::Proposal(awaiting, reader);
                }
                Stage::Announced => {
                    let awaiting = AwaitProposal::new(params.config.clone(), Tick(0));
                    let reader = awaiting.reader();
                    self.stage = Stage::Proposal(awaiting, reader);
                }
                Stage::Proposal(awaiting, mut reader) => {
                    if !fill(tcp, &mut reader)? {
                        self.stage = Stage::Proposal(awaiting, reader);
                        return Ok(None);
                    }
                    let route = || params.rdma.map_or_else(Route::default, |rdma| rdma.route(tcp));
                    match awaiting.handle_on(reader.message().unwrap_or_default(), route) {
                        ServerStep::Eligible(selection) => {
                            let claim = selection.claim();
                            match accept(params, selection) {
                                Ok((stage, message)) => {
                                    let stage = match take_claim(tcp, stage, claim) {
                                        Ok(conn) => {
                                            let message = message.unwrap_or_default();
                                            return complete_claim(tcp, conn, &message).map(Some);
                                        }
                                        Err(stage) => stage,
                                    };
                                    if let Some(message) = message {
                                        send(tcp, &message)?;
                                    }
                                    self.deadline = Instant::now() + params.message_timeout;
                                    self.stage = stage;
                                    // No client answers so soon. But the stream may have ended already, and
                                    // epoll does not report this edge again.
                                    if !drain && self.awaits_confirm() {
                                        return Ok(None);
                                    }
                                }
                                Err(decline) => return send_decline(tcp, decline).map(Some),
                            }
                        }
                        ServerStep::Decline(decline) => {
                            return send_decline(tcp, decline).map(Some);
                        }
                        ServerStep::PeerDeclined(peer) => {
                            return Ok(Some(Outcome::Tcp(
                                FallbackReason::DeclinedByPeer(peer).into(),
                            )));
                        }
                        ServerStep::Fail(error) => return Err(error.into()),
                    }
                }
                Stage::Confirm(mut accepted) => {
                    if !fill(tcp, &mut accepted.reader)? {
                        self.stage = Stage::Confirm(accepted);
                        return Ok(None);
                    }
                    return complete(tcp, *accepted).map(Some);
                }
                Stage::Rdma(mut accepting) => {
                    let outcome = accepting.advance(tcp)?;
                    if outcome.is_none() {
                        // LLC may have begun.
                        if let Some(rdma) = params.rdma {
                            rdma.observer.on_peer_added();
                        }
                        self.stage = Stage::Rdma(accepting);
                    }
                    return Ok(outcome);
                }
                Stage::Over => return Err(Broken::Io(std::io::ErrorKind::NotConnected.into())),
            }
        }
    }

    /// Ends the handshake before its deadline, since others need its place. A client without an
    /// announced or begun Proposal does not speak SMC.
    pub(crate) fn evict(&mut self) -> Result<Outcome, Broken> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::FirstBytes(_) if !self.announced => Ok(peer_not_smc()),
            _ => Err(Broken::Evicted),
        }
    }

    /// Ends the handshake after its deadline: the client does not speak SMC, or the connection is
    /// broken. `None`: there is a new deadline.
    pub(crate) fn expire(
        &mut self,
        tcp: &TcpStream,
        params: &Params<'_>,
    ) -> Result<Option<Outcome>, Broken> {
        let awaited = match &self.stage {
            Stage::FirstBytes(_) => return Ok(Some(peer_not_smc())),
            Stage::Announced | Stage::Proposal(..) => Awaited::Proposal,
            Stage::Rdma(_) => {
                let outcome = self.advance(tcp, params, true)?;
                if outcome.is_some() || self.deadline() > Instant::now() {
                    return Ok(outcome);
                }
                Awaited::Confirm
            }
            Stage::Confirm(..) | Stage::Over => Awaited::Confirm,
        };
        Err(HandshakeError::TimedOut { awaited }.into())
    }
}

/// The client does not speak SMC.
fn peer_not_smc() -> Outcome {
    Outcome::Tcp(FallbackReason::PeerNotSmc.into())
}

/// Accepts with the first working choice: a device with access to the client and a free DMB, or an
/// RNIC. Returns the Accept to send, if the next stage does not send it; without a working choice, the
/// Decline to send.
fn accept(
    params: &Params<'_>,
    mut selection: Selection,
) -> Result<(Stage, Option<Vec<u8>>), SendDecline> {
    let mut reason = DeclineReason::NoIsmDevice;
    for at in 0.. {
        let choice = selection.choices().nth(at);
        let Some(choice) = choice else { break };
        reason = match choice {
            Choice::D(_, candidate) => match offer(params, candidate) {
                Ok(Offered { fabric, peer, own, slot }) => {
                    // The processes on a loopback fabric share one GID (EISM-25). So known terms for
                    // this GID may be another process's.
                    let known = if candidate.chid.is_loopback() { None } else { peer.terms() };
                    let (awaiting, message) =
                        selection.accept(candidate, known, own.dmbe(), peer.link(), Tick(0));
                    let reader = awaiting.reader();
                    let accepted = Accepted { awaiting, reader, fabric, peer, own, slot };
                    return Ok((Stage::Confirm(Box::new(accepted)), Some(message)));
                }
                Err(because) => because,
            },
            Choice::R(peer) => match offer_r(params, selection, peer) {
                Ok(accepting) => return Ok((Stage::Rdma(Box::new(accepting)), None)),
                Err((back, because)) => {
                    selection = *back;
                    because
                }
            },
        };
        selection.refuse(choice.kind(), reason);
    }
    Err(selection.decline(reason))
}

/// The carrier of a server's Accept.
pub(super) enum AcceptStep {
    /// A device: the Accept to send.
    D(Box<Accepted>, Vec<u8>),
    /// An RNIC, for which the Accept has to wait for LLC.
    R(Box<Accepting>),
}

/// Accepts as [`accept`] does.
pub(super) fn take(params: &Params<'_>, selection: Selection) -> Result<AcceptStep, SendDecline> {
    match accept(params, selection)? {
        (Stage::Confirm(accepted), Some(message)) => Ok(AcceptStep::D(accepted, message)),
        (Stage::Rdma(accepting), None) => Ok(AcceptStep::R(accepting)),
        // Nothing else comes.
        _ => Err(SendDecline::opening(params.config, DeclineReason::NoIsmDevice)),
    }
}

fn offer_r(
    params: &Params<'_>,
    selection: Selection,
    peer: PeerRnic,
) -> Result<Accepting, Refused> {
    let Some(rdma) = params.rdma else {
        return Err((Box::new(selection), DeclineReason::NoRnic));
    };
    Accepting::new(rdma.host, params.config, selection, peer, params.buffer, params.message_timeout)
}

/// The parts for an Accept of SMC-D.
struct Offered {
    fabric: Arc<Fabric>,
    peer: Arc<Peer>,
    own: OwnBuffer,
    slot: AttachSlot,
}

fn offer(params: &Params<'_>, candidate: Candidate) -> Result<Offered, DeclineReason> {
    let fabric = params.fabrics.of(candidate).ok_or(DeclineReason::NoIsmDevice)?;
    let gid = Gid(candidate.peer.0);
    // A known peer was reachable, and the device reports when a peer leaves.
    let peer = match fabric.known(gid) {
        Some(peer) => peer,
        None => match fabric.device().query_gid(gid) {
            Ok(Some(_)) => fabric.peer(gid),
            Ok(None) => return Err(DeclineReason::Unreachable),
            Err(error) => return Err(device_decline_reason(&error)),
        },
    };
    let slot = peer.attach_slot().ok_or(DeclineReason::NoDmb)?;
    let own = peer.take(params.buffer).map_err(|error| device_decline_reason(&error))?;
    Ok(Offered { fabric: fabric.clone(), peer, own, slot })
}

/// Takes the client's claim, if there is one for this TCP connection: the server need not wait for
/// Confirm.
fn take_claim(
    tcp: &TcpStream,
    stage: Stage,
    number: Option<NonZeroU16>,
) -> Result<Box<SmcdConn>, Stage> {
    let Stage::Confirm(accepted) = stage else { return Err(stage) };
    let taken = number.filter(|_| accepted.awaiting.claim_terms().is_some()).and_then(|number| {
        let (peer_link, ends) = (accepted.peer.peer_link()?, Ends::of_server(tcp)?);
        let theirs = accepted.peer.take_claim(&ends.claim(number))?;
        let established = accepted.awaiting.without_confirm(theirs.dmbe(), peer_link)?;
        Some((theirs, established))
    });
    let Some((theirs, established)) = taken else { return Err(Stage::Confirm(accepted)) };
    let Accepted { fabric, peer, own, slot, .. } = *accepted;
    Ok(Box::new(SmcdConn { fabric, peer, own, theirs, slot, established }))
}

/// Sends the Accept of a connection without Confirm.
fn complete_claim(tcp: &TcpStream, conn: Box<SmcdConn>, accept: &[u8]) -> Result<Outcome, Broken> {
    conn.note_terms();
    if let Err(error) = send(tcp, accept) {
        conn.theirs.release();
        return Err(error.into());
    }
    Ok(Outcome::Smc(EstablishedConn::D(conn)))
}

/// Handles the answer to Accept. After a Confirm, attaches the client's buffer. Only then there is a
/// stream: early data waits (CLC-43), and then the server may speak first (CLC-44).
fn complete(tcp: &TcpStream, accepted: Accepted) -> Result<Outcome, Broken> {
    let message = accepted.reader.message().unwrap_or_default().to_vec();
    match attach(accepted, &message) {
        AcceptOutcome::Smc(conn) => Ok(Outcome::Smc(EstablishedConn::D(conn))),
        // Too late for TCP: the client may have written already (CLC-63).
        AcceptOutcome::NotAttached(reason) => Err(Broken::Late(reason)),
        AcceptOutcome::Decline(decline) => send_decline(tcp, decline),
        AcceptOutcome::PeerDeclined(declined) => {
            Ok(Outcome::Tcp(FallbackReason::DeclinedByPeer(declined).into()))
        }
        AcceptOutcome::Fail(error) => Err(error.into()),
    }
}

/// The result of an Accept.
pub(super) enum AcceptOutcome {
    /// Both ends have the buffer of the other.
    Smc(Box<SmcdConn>),
    /// The client has confirmed, and its buffer cannot be attached.
    NotAttached(DeclineReason),
    /// Confirm cannot be used.
    Decline(SendDecline),
    /// The client has declined.
    PeerDeclined(PeerDecline),
    /// The client breaks the protocol.
    Fail(HandshakeError),
}

/// Takes the answer to Accept. After a Confirm, attaches the client's buffer.
pub(super) fn attach(accepted: Accepted, message: &[u8]) -> AcceptOutcome {
    let Accepted { awaiting, reader: _, fabric, peer, own, slot } = accepted;
    let dirty = own.dmb().memory().len();
    match awaiting.handle(message) {
        ConfirmStep::Established(established) => {
            match fabric.attach_or_gone(&peer, established.peer, &slot) {
                Ok(Some(theirs)) => {
                    let conn = SmcdConn { fabric, peer, own, theirs, slot, established };
                    conn.note_terms();
                    AcceptOutcome::Smc(Box::new(conn))
                }
                Ok(None) => AcceptOutcome::NotAttached(DeclineReason::DmbInUse),
                Err(error) => AcceptOutcome::NotAttached(device_decline_reason(&error)),
            }
        }
        ConfirmStep::Decline(decline) => AcceptOutcome::Decline(decline),
        ConfirmStep::PeerDeclined(declined) => {
            // No peer has written into the buffer, and none will.
            own.allow_reuse(dirty);
            if declined.out_of_sync {
                peer.reset_link();
            }
            AcceptOutcome::PeerDeclined(declined)
        }
        ConfirmStep::Fail(error) => AcceptOutcome::Fail(error),
    }
}
