// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client's handshake on a connected TCP stream, one step at a time and never waiting.

use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::handshake::{
    Accepted, AcceptedR, AwaitAccept, Awaited, ClcReader, ClientStep, Config, DeclineReason,
    FallbackReason, HandshakeError, KnownLink, PeerLink, Route, SendDecline, start_claiming,
    start_on,
};
use smc_core::time::Tick;
use virtio_ism_abi::Gid;

use super::decline::{device_decline_reason, send_decline};
use super::smcr::Connecting;
use super::tcp::{fill, send};
use super::{Broken, ByRdma, EstablishedConn, Outcome, Params};
use crate::smcd::SmcdConn;
use crate::smcd::claim::{ClaimWord, Ends, OpenClaim};

/// A handshake under way.
pub(crate) struct ClientHandshake {
    stage: Stage,
    deadline: Instant,
    /// The server has sent a CLC message.
    answered: bool,
    /// The ends of the TCP connection, known once the Proposal is sent.
    ends: Option<Ends>,
    /// The DMB claimed by the Proposal.
    claim: Option<Box<OpenClaim>>,
}

enum Stage {
    /// The client has sent nothing.
    Proposal {
        /// The server has answered TCP option 254, so it waits for a message: a Proposal or a Decline.
        awaited: bool,
    },
    Accept(Box<AwaitAccept>, ClcReader),
    Rdma(Box<Connecting>),
    Over,
}

impl ClientHandshake {
    /// Begins. `awaited`: the server has answered TCP option 254, and waits for a message.
    pub(crate) fn new(awaited: bool) -> ClientHandshake {
        let deadline = Instant::now();
        let stage = Stage::Proposal { awaited };
        ClientHandshake { stage, deadline, answered: false, ends: None, claim: None }
    }

    /// The time for [`ClientHandshake::expire`].
    pub(crate) fn deadline(&self) -> Instant {
        match &self.stage {
            Stage::Rdma(connecting) => connecting.deadline(),
            _ => self.deadline,
        }
    }

    /// The descriptor, readable when LLC lets [`ClientHandshake::advance`] continue.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Stage::Rdma(connecting) => Some(connecting.fd()),
            _ => None,
        }
    }

    /// Whether the client has sent its Proposal.
    pub(crate) fn has_proposed(&self) -> bool {
        !matches!(self.stage, Stage::Proposal { .. })
    }

    /// Whether the server has sent a CLC message, so it speaks SMC.
    pub(crate) fn is_answered(&self) -> bool {
        self.answered
    }

    /// The claim of the Proposal, for a thread that hands the handshake to another process.
    pub(crate) fn claim(&self) -> Option<ClaimWord> {
        self.claim.as_deref().map(OpenClaim::word)
    }

    /// Whether the Proposal is sent, with no byte of the answer taken.
    pub(crate) fn only_waits(&self) -> bool {
        matches!(&self.stage, Stage::Accept(_, reader) if reader.is_empty())
    }

    /// Continues as far as the received bytes allow; the first call sends the Proposal. `None`: more
    /// bytes have to come.
    pub(crate) fn advance(
        &mut self,
        tcp: &TcpStream,
        params: &Params<'_>,
    ) -> Result<Option<Outcome>, Broken> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Proposal { awaited } => {
                    let route = params.rdma.map_or_else(Route::default, |rdma| rdma.route(tcp));
                    // A tick of smc-core counts microseconds from any start; here from now.
                    self.claim = self.open_claim(tcp, params).map(Box::new);
                    let number = self.claim.as_ref().map(|claim| claim.claim().number());
                    let config = params.config.clone();
                    let (await_accept, proposal) =
                        match start_claiming(config, route, number, Tick(0)) {
                            Ok(begun) => begun,
                            Err(nothing) if awaited => {
                                return send_decline(tcp, nothing).map(Some);
                            }
                            // Without TCP option 254 the server does not wait for a message, so the
                            // client sends none.
                            Err(nothing) => {
                                return Ok(Some(Outcome::Tcp(nothing.fallback().into())));
                            }
                        };
                    send(tcp, &proposal)?;
                    let timeout = Duration::from_micros(await_accept.deadline().0);
                    self.deadline = Instant::now() + timeout;
                    let reader = await_accept.reader();
                    self.stage = Stage::Accept(Box::new(await_accept), reader);
                    // No server answers so soon.
                    return Ok(None);
                }
                Stage::Accept(await_accept, mut reader) => {
                    if !fill(tcp, &mut reader)? {
                        self.stage = Stage::Accept(await_accept, reader);
                        return Ok(None);
                    }
                    self.answered = true;
                    let message = reader.message().unwrap_or_default();
                    let claim = self.claim.take();
                    let missed = claim.is_some().then_some(false);
                    if let Some(claim) = claim.filter(|claim| claim.is_taken()) {
                        let (conn, ends) = (finish(*claim, *await_accept, message)?, self.ends);
                        note_server(&conn, ends, Some(true));
                        return Ok(Some(Outcome::Smc(EstablishedConn::D(conn))));
                    }
                    let known = |chid, gid| params.fabrics.terms(chid, gid);
                    let known_link = |peer: &_| known_link(params.rdma, peer);
                    match await_accept.handle_with(message, known, known_link) {
                        ClientStep::Offered(accepted) => {
                            let outcome = confirm(tcp, params, accepted)?;
                            if let Outcome::Smc(EstablishedConn::D(conn)) = &outcome {
                                note_server(conn, self.ends, missed);
                            }
                            return Ok(Some(outcome));
                        }
                        ClientStep::OfferedR(accepted) => match connect(params, accepted) {
                            Ok(connecting) => self.stage = Stage::Rdma(Box::new(connecting)),
                            Err(decline) => return send_decline(tcp, decline).map(Some),
                        },
                        ClientStep::Decline(decline) => {
                            return send_decline(tcp, decline).map(Some);
                        }
                        ClientStep::PeerDeclined(peer) => {
                            let why = FallbackReason::DeclinedByPeer(peer);
                            return Ok(Some(Outcome::Tcp(why.into())));
                        }
                        ClientStep::Fail(error) => return Err(error.into()),
                    }
                }
                Stage::Rdma(mut connecting) => {
                    let outcome = connecting.advance(tcp)?;
                    if outcome.is_none() {
                        // LLC may have begun.
                        if let Some(rdma) = params.rdma {
                            rdma.observer.on_peer_added();
                        }
                        self.stage = Stage::Rdma(connecting);
                    }
                    return Ok(outcome);
                }
                Stage::Over => return Err(Broken::Io(std::io::ErrorKind::NotConnected.into())),
            }
        }
    }

    /// Claims a DMB for the connection, if its server takes claims.
    fn open_claim(&mut self, tcp: &TcpStream, params: &Params<'_>) -> Option<OpenClaim> {
        if params.config.carriers.is_none() || params.fabrics.0.is_empty() {
            return None;
        }
        self.ends = Ends::of_client(tcp);
        OpenClaim::open(params.fabrics, self.ends.as_ref()?, params.buffer)
    }

    /// Ends the handshake after its deadline. `None`: there is a new deadline.
    pub(crate) fn expire(
        &mut self,
        tcp: &TcpStream,
        params: &Params<'_>,
    ) -> Result<Option<Outcome>, Broken> {
        if let Stage::Rdma(_) = &self.stage {
            let outcome = self.advance(tcp, params)?;
            if outcome.is_some() || self.deadline() > Instant::now() {
                return Ok(outcome);
            }
        }
        Err(self.give_up())
    }

    /// Ends the handshake at a time limit of the application.
    pub(crate) fn give_up(&mut self) -> Broken {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Rdma(_) => Broken::Io(std::io::ErrorKind::TimedOut.into()),
            _ => HandshakeError::TimedOut { awaited: Awaited::Accept }.into(),
        }
    }
}

/// Ends a handshake on TCP after a Proposal by another process, and declines the server's answer.
pub(crate) struct DeclineAnswer {
    awaiting: AwaitAccept,
    reader: ClcReader,
    end: Instant,
}

impl DeclineAnswer {
    /// Begins. `None`: with this configuration there was nothing to propose.
    pub(crate) fn new(config: &Arc<Config>) -> Option<DeclineAnswer> {
        let (awaiting, _) = start_on(config.clone(), Route::default(), Tick(0)).ok()?;
        let end = Instant::now() + Duration::from_micros(awaiting.deadline().0);
        Some(DeclineAnswer { reader: awaiting.reader(), awaiting, end })
    }

    /// Continues as far as the server's bytes allow. `true`: TCP carries the connection from here on.
    pub(crate) fn advance(&mut self, tcp: &TcpStream) -> Result<bool, Broken> {
        if !fill(tcp, &mut self.reader)? {
            return match Instant::now() >= self.end {
                true => Err(HandshakeError::TimedOut { awaited: Awaited::Accept }.into()),
                false => Ok(false),
            };
        }
        let message = self.reader.message().unwrap_or_default();
        let decline = match self.awaiting.clone().handle(message, |_, _| None) {
            ClientStep::Offered(accepted) => accepted.decline(DeclineReason::NoDevice),
            ClientStep::OfferedR(accepted) => accepted.decline(DeclineReason::NoDevice),
            ClientStep::Decline(decline) => decline,
            ClientStep::PeerDeclined(_) => return Ok(true),
            ClientStep::Fail(error) => return Err(error.into()),
        };
        send_decline(tcp, decline).map(|_| true)
    }
}

/// This host's part of the link named by a server.
pub(super) fn known_link(rdma: Option<ByRdma<'_>>, peer: &PeerLink) -> KnownLink {
    rdma.map_or(KnownLink::NoGroup, |rdma| rdma.host.known_link(peer))
}

/// Accepts an offer of SMC-R. Both ends may have to exchange LLC messages for this. On failure, returns
/// the Decline to send.
fn connect(params: &Params<'_>, accepted: AcceptedR) -> Result<Connecting, SendDecline> {
    let Some(rdma) = params.rdma else { return Err(accepted.decline(DeclineReason::NoRnic)) };
    Connecting::new(rdma.host, params.config, accepted, params.buffer)
}

/// Notes the process behind the server's address. `is_taken`: whether it has taken a claim.
fn note_server(conn: &SmcdConn, ends: Option<Ends>, is_taken: Option<bool>) {
    if let Some(ends) = ends {
        conn.fabric.note_server(ends.server, conn.peer.gid(), is_taken);
    }
}

/// Goes on with a claim taken by the server: the server's program has its connection already, so each
/// failure breaks the connection.
fn finish(
    claim: OpenClaim,
    await_accept: AwaitAccept,
    message: &[u8],
) -> Result<Box<SmcdConn>, Broken> {
    let terms = claim.terms();
    let accepted = match await_accept.handle(message, |_, _| Some(terms)) {
        ClientStep::Offered(accepted) => accepted,
        ClientStep::Fail(error) => return Err(error.into()),
        ClientStep::Decline(decline) => return Err(Broken::Late(decline.reason)),
        ClientStep::PeerDeclined(_) | ClientStep::OfferedR(_) => {
            return Err(Broken::Late(DeclineReason::OutOfSync));
        }
    };
    if accepted.first_contact() || !claim.is_between(accepted.devices()) {
        return Err(Broken::Late(DeclineReason::OutOfSync));
    }
    let (fabric, peer) = (claim.fabric.clone(), claim.peer.clone());
    let (own, theirs, slot) = match claim.finish(accepted.peer()) {
        Ok(Some(parts)) => parts,
        Ok(None) => return Err(Broken::Late(DeclineReason::DmbInUse)),
        Err(error) => return Err(Broken::Late(device_decline_reason(&error))),
    };
    let established = accepted.without_confirm(own.dmbe(), peer.link());
    let conn = SmcdConn { fabric, peer, own, theirs, slot, established };
    conn.note_terms();
    Ok(Box::new(conn))
}

/// Takes an own buffer, attaches the server's and sends Confirm. If one of them fails, sends a Decline,
/// at the last moment allowed to a client (CLC-52). Behind Confirm data may flow at once (CLC-41,
/// CLC-42).
fn confirm(tcp: &TcpStream, params: &Params<'_>, accepted: Accepted) -> Result<Outcome, Broken> {
    let (conn, confirm) = match prepare(params, accepted) {
        Ok(prepared) => prepared,
        Err(decline) => return send_decline(tcp, decline),
    };
    // Ahead of Confirm: with Confirm the server reuses the link for this process's next handshakes.
    conn.note_terms();
    if let Err(error) = send(tcp, &confirm) {
        conn.theirs.release();
        return Err(error.into());
    }
    Ok(Outcome::Smc(EstablishedConn::D(conn)))
}

/// Takes an own buffer and attaches the server's. Returns the connection and the Confirm, to be sent
/// before the first use of the connection; or a Decline.
pub(super) fn prepare(
    params: &Params<'_>,
    accepted: Accepted,
) -> Result<(Box<SmcdConn>, Vec<u8>), SendDecline> {
    let Some(fabric) = params.fabrics.of(accepted.devices()) else {
        return Err(accepted.decline(DeclineReason::NoIsmDevice));
    };
    let peer = fabric.peer(Gid(accepted.devices().peer.0));
    let Some(slot) = peer.attach_slot() else {
        return Err(accepted.decline(DeclineReason::NoDmb));
    };
    let theirs = match fabric.attach(&peer, accepted.peer(), &slot) {
        Ok(Some(theirs)) => theirs,
        Ok(None) => return Err(accepted.decline(DeclineReason::DmbInUse)),
        Err(error) => return Err(accepted.decline(device_decline_reason(&error))),
    };
    let own = match peer.take(params.buffer) {
        Ok(own) => own,
        Err(error) => {
            theirs.release();
            return Err(accepted.decline(device_decline_reason(&error)));
        }
    };
    let (established, confirm) = accepted.confirm(own.dmbe(), peer.link());
    let conn = SmcdConn { fabric: fabric.clone(), peer, own, theirs, slot, established };
    Ok((Box::new(conn), confirm))
}
