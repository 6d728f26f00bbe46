//! The server's handshake on an accepted TCP stream, one step at a time and never waiting.
//!
//! Rules kept here: CLC-32, CLC-43, CLC-44.

use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::handshake::{
    AfterDecline, AwaitConfirm, AwaitProposal, Awaited, Candidate, Choice, ClcReader, Config,
    ConfirmStep, DeclineReason, FallbackReason, HandshakeError, PeerRnic, Route, Selection,
    SendDecline, ServerStep,
};
use smc_core::time::Tick;
use smc_core::wire::clc::{Guess, looks_like_opening};
use virtio_ism_abi::Gid;

use super::client::reason_of;
use super::smcr::{Accepting, Refused};
use super::tcp::{fill, peek, send};
use super::{Broken, ByRdma, EstablishedConn, Outcome};
use crate::rendezvous::PROPOSAL_TIMEOUT;
use crate::smcd::{Fabric, Fabrics, OwnBuffer, Peer, SmcdConn};

/// What a server needs for each handshake.
pub(crate) struct Terms<'a> {
    pub(crate) config: &'a Arc<Config>,
    pub(crate) fabrics: &'a Fabrics,
    pub(crate) rdma: Option<ByRdma<'a>>,
    /// Bytes of the own DMB or RMB element.
    pub(crate) buffer: u32,
    /// How long a client may stay silent before it is taken for one that does not speak SMC.
    pub(crate) detect: Duration,
    /// How long a message may take.
    pub(crate) patience: Duration,
}

/// A handshake under way.
pub(crate) struct Handshake {
    stage: Stage,
    deadline: Instant,
}

enum Stage {
    /// Nothing but a peek so far: the client may be an ordinary one.
    Detect,
    Proposal(AwaitProposal, ClcReader),
    Confirm(Box<Accepted>),
    Rdma(Box<Accepting>),
    Over,
}

struct Accepted {
    awaiting: AwaitConfirm,
    reader: ClcReader,
    fabric: Arc<Fabric>,
    peer: Arc<Peer>,
    own: OwnBuffer,
}

impl Handshake {
    /// Begins to wait for the client's first bytes.
    pub(crate) fn new(terms: &Terms<'_>) -> Handshake {
        Handshake { stage: Stage::Detect, deadline: Instant::now() + terms.detect }
    }

    /// Begins to wait for the first bytes of a client that has been told to send a Proposal.
    pub(crate) fn awaited(terms: &Terms<'_>) -> Handshake {
        let patience = PROPOSAL_TIMEOUT.min(terms.patience);
        Handshake { stage: Stage::Detect, deadline: Instant::now() + patience }
    }

    /// When [`Handshake::expire`] is due.
    pub(crate) fn deadline(&self) -> Instant {
        match &self.stage {
            Stage::Rdma(accepting) => accepting.deadline(),
            _ => self.deadline,
        }
    }

    /// What else than TCP tells that [`Handshake::advance`] can go on: LLC has a descriptor of its
    /// own.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Stage::Rdma(accepting) => Some(accepting.fd()),
            _ => None,
        }
    }

    /// Whether the client's answer to Accept is all that is missing, so that TCP's descriptor tells when
    /// there is something to take.
    pub(crate) fn awaits_confirm(&self) -> bool {
        matches!(self.stage, Stage::Confirm(_))
    }

    /// Goes on as far as the bytes allow. `None`: more has to come.
    ///
    /// With `drain` it looks until there is nothing left, for callers that are told of news only; without,
    /// it spares itself a look that comes too early.
    pub(crate) fn advance(
        &mut self,
        tcp: &TcpStream,
        terms: &Terms<'_>,
        drain: bool,
    ) -> Result<Option<Outcome>, Broken> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Detect => match detect(tcp, &mut [0u8; 8])? {
                    (Guess::No, _) => return Ok(Some(plain())),
                    (Guess::NeedMore, _) => {
                        self.stage = Stage::Detect;
                        return Ok(None);
                    }
                    (Guess::Yes, prefix) => {
                        let awaiting = AwaitProposal::new(terms.config.clone(), Tick(0));
                        let mut reader = awaiting.reader();
                        reader.peeked(prefix)?;
                        self.deadline = Instant::now() + terms.patience;
                        self.stage = Stage::Proposal(awaiting, reader);
                    }
                },
                Stage::Proposal(awaiting, mut reader) => {
                    if !fill(tcp, &mut reader)? {
                        self.stage = Stage::Proposal(awaiting, reader);
                        return Ok(None);
                    }
                    let route = || terms.rdma.map_or_else(Route::default, |rdma| rdma.route(tcp));
                    match awaiting.handle_on(reader.message().unwrap_or_default(), route) {
                        ServerStep::Eligible(selection) => match accept(tcp, terms, selection)? {
                            Ok(stage) => {
                                self.deadline = Instant::now() + terms.patience;
                                self.stage = stage;
                                // No client answers so soon. But the end of the stream may be there
                                // already, of which nobody would be told any more.
                                if !drain && self.awaits_confirm() {
                                    return Ok(None);
                                }
                            }
                            Err(decline) => return give_up(tcp, decline).map(Some),
                        },
                        ServerStep::Decline(decline) => return give_up(tcp, decline).map(Some),
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
                        if let Some(rdma) = terms.rdma {
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

    /// The deadline has passed: an ordinary client, or a broken one. `None`: there is a new
    /// deadline.
    pub(crate) fn expire(
        &mut self,
        tcp: &TcpStream,
        terms: &Terms<'_>,
    ) -> Result<Option<Outcome>, Broken> {
        let awaited = match &self.stage {
            Stage::Detect => return Ok(Some(plain())),
            Stage::Proposal(..) => Awaited::Proposal,
            Stage::Rdma(_) => {
                let outcome = self.advance(tcp, terms, true)?;
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

/// A client that does not speak SMC.
fn plain() -> Outcome {
    Outcome::Tcp(FallbackReason::PeerNotSmc.into())
}

/// Looks at the first bytes without taking them; what they say, and those that are there.
fn detect<'a>(tcp: &TcpStream, bytes: &'a mut [u8; 8]) -> Result<(Guess, &'a [u8]), Broken> {
    Ok(match peek(tcp, bytes)? {
        None => (Guess::NeedMore, &[]),
        // The client closed without a word: an ordinary connection.
        Some(0) => (Guess::No, &[]),
        Some(n) => {
            let prefix = bytes.get(..n).unwrap_or_default();
            (looks_like_opening(prefix), prefix)
        }
    })
}

/// Accepts with the first choice that works: a device that reaches the client and has a DMB, or
/// else an RNIC; else the Decline to send.
fn accept(
    tcp: &TcpStream,
    terms: &Terms<'_>,
    mut selection: Selection,
) -> Result<Result<Stage, SendDecline>, Broken> {
    let mut reason = DeclineReason::NoIsmDevice;
    for at in 0.. {
        let choice = selection.choices().nth(at);
        let Some(choice) = choice else { break };
        reason = match choice {
            Choice::D(_, candidate) => match offer(terms, candidate) {
                Ok((fabric, peer, own)) => {
                    // All processes on a loopback fabric share one GID (EISM-25): that one of them
                    // was here before says nothing of the one that asks now.
                    let known = if candidate.chid.is_loopback() { None } else { peer.terms() };
                    let (awaiting, message) =
                        selection.accept(candidate, known, own.dmbe(), peer.link(), Tick(0));
                    send(tcp, &message)?;
                    let reader = awaiting.reader();
                    let accepted = Accepted { awaiting, reader, fabric, peer, own };
                    return Ok(Ok(Stage::Confirm(Box::new(accepted))));
                }
                Err(because) => because,
            },
            Choice::R(peer) => match offer_r(terms, selection, peer) {
                Ok(accepting) => return Ok(Ok(Stage::Rdma(Box::new(accepting)))),
                Err((back, because)) => {
                    selection = *back;
                    because
                }
            },
        };
        selection.refuse(choice.kind(), reason);
    }
    Ok(Err(selection.decline(reason)))
}

fn offer_r(terms: &Terms<'_>, selection: Selection, peer: PeerRnic) -> Result<Accepting, Refused> {
    let Some(rdma) = terms.rdma else {
        return Err((Box::new(selection), DeclineReason::NoRnic));
    };
    Accepting::new(rdma.host, terms.config, selection, peer, terms.buffer, terms.patience)
}

fn offer(
    terms: &Terms<'_>,
    candidate: Candidate,
) -> Result<(Arc<Fabric>, Arc<Peer>, OwnBuffer), DeclineReason> {
    let fabric = terms.fabrics.of(candidate).ok_or(DeclineReason::NoIsmDevice)?;
    let gid = Gid(candidate.peer.0);
    // A peer that is known was reachable, and its departure would have been told.
    let peer = match fabric.known(gid) {
        Some(peer) => peer,
        None => match fabric.device().query_gid(gid) {
            Ok(Some(_)) => fabric.peer(gid),
            Ok(None) => return Err(DeclineReason::Unreachable),
            Err(error) => return Err(reason_of(&error)),
        },
    };
    let own = peer.take(terms.buffer).map_err(|error| reason_of(&error))?;
    Ok((fabric.clone(), peer, own))
}

/// Takes Confirm and attaches the client's buffer.
fn complete(tcp: &TcpStream, accepted: Accepted) -> Result<Outcome, Broken> {
    let Accepted { awaiting, reader, fabric, peer, mut own } = accepted;
    let dirty = own.dmb().memory().len();
    match awaiting.handle(reader.message().unwrap_or_default()) {
        ConfirmStep::Established(established) => match peer.attach(established.peer) {
            Ok(Some(theirs)) => {
                peer.established(established.terms, established.peer_link);
                let link = SmcdConn { fabric, peer, own, theirs, established };
                Ok(Outcome::Smc(EstablishedConn::D(Box::new(link))))
            }
            // Too late for TCP: the client may have written already (CLC-63).
            Ok(None) => Err(Broken::Late(DeclineReason::Registration)),
            Err(error) => Err(Broken::Late(reason_of(&error))),
        },
        ConfirmStep::Decline(decline) => give_up(tcp, decline),
        ConfirmStep::PeerDeclined(declined) => {
            // Nobody wrote into it, and nobody will.
            own.allow_reuse(dirty);
            if declined.out_of_sync {
                peer.reset_link();
            }
            Ok(Outcome::Tcp(FallbackReason::DeclinedByPeer(declined).into()))
        }
        ConfirmStep::Fail(error) => Err(error.into()),
    }
}

fn give_up(tcp: &TcpStream, decline: SendDecline) -> Result<Outcome, Broken> {
    send(tcp, &decline.message)?;
    match decline.then {
        AfterDecline::FallBack => Ok(Outcome::Tcp(decline.fallback().into())),
        AfterDecline::Break => Err(Broken::Late(decline.reason)),
    }
}
