//! The client's handshake on a connected TCP stream.
//!
//! Rules kept here: CLC-41, CLC-42.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::handshake::{
    Accepted, AcceptedR, AfterDecline, ClientStep, Config, DeclineReason, FallbackReason,
    HandshakeError, KnownLink, Route, SendDecline, start_on,
};
use smc_core::time::Tick;
use virtio_ism_abi::Gid;

use super::smcr::Connecting;
use super::tcp::{fill, send, wait_either, wait_readable};
use super::{Broken, ByRdma, EstablishedConn, Outcome};
use crate::ism::IsmError;
use crate::smcd::{Fabrics, SmcdConn};

/// How this client shakes hands.
pub(crate) struct Terms<'a> {
    pub(crate) config: &'a Arc<Config>,
    pub(crate) fabrics: &'a Fabrics,
    pub(crate) rdma: Option<ByRdma<'a>>,
    /// Bytes of the own DMB or RMB element.
    pub(crate) buffer: u32,
    /// Looks again and again for as long as that is worth it, or never; says whether it was.
    pub(crate) spin: &'a dyn Fn(&mut dyn FnMut() -> bool) -> bool,
    /// The server has answered TCP option 254, and awaits a message whatever it is.
    pub(crate) awaited: bool,
    /// When the application's patience ends, if it does.
    pub(crate) deadline: Option<Instant>,
}

/// Proposes SMC to the server.
pub(crate) fn propose(tcp: &TcpStream, terms: &Terms<'_>) -> Result<Outcome, Broken> {
    // smc-core counts microseconds from whatever start the caller likes.
    let route = terms.rdma.map_or_else(Route::default, |rdma| rdma.route(tcp));
    let (await_accept, proposal) = match start_on(terms.config.clone(), route, Tick(0)) {
        Ok(begun) => begun,
        Err(nothing) if terms.awaited => return give_up(tcp, nothing),
        // Without TCP option 254 the server expects nothing: no message, just TCP.
        Err(nothing) => return Ok(Outcome::Tcp(nothing.fallback().into())),
    };
    send(tcp, &proposal)?;
    let mut reader = await_accept.reader();
    let patience = Instant::now() + Duration::from_micros(await_accept.deadline().0);
    let end = terms.deadline.map_or(patience, |deadline| deadline.min(patience));
    let mut filled = Ok(false);
    (terms.spin)(&mut || {
        filled = fill(tcp, &mut reader);
        !matches!(filled, Ok(false))
    });
    while !filled? {
        if Instant::now() >= end {
            let error = HandshakeError::TimedOut { awaited: smc_core::handshake::Awaited::Accept };
            return Err(error.into());
        }
        wait_readable(tcp, end)?;
        filled = fill(tcp, &mut reader);
    }
    let message = reader.message().unwrap_or_default();
    let known = |chid, gid| terms.fabrics.terms(chid, gid);
    let known_link =
        |peer: &_| terms.rdma.map_or(KnownLink::NoGroup, |rdma| rdma.host.known_link(peer));
    match await_accept.handle_with(message, known, known_link) {
        ClientStep::Offered(accepted) => confirm(tcp, terms, accepted),
        ClientStep::OfferedR(accepted) => connect(tcp, terms, accepted),
        ClientStep::Decline(decline) => give_up(tcp, decline),
        ClientStep::PeerDeclined(peer) => {
            Ok(Outcome::Tcp(FallbackReason::DeclinedByPeer(peer).into()))
        }
        ClientStep::Fail(error) => Err(error.into()),
    }
}

/// Takes up an offer of SMC-R, which may take LLC messages to and fro.
fn connect(tcp: &TcpStream, terms: &Terms<'_>, accepted: AcceptedR) -> Result<Outcome, Broken> {
    let Some(rdma) = terms.rdma else {
        return give_up(tcp, accepted.decline(DeclineReason::NoRnic));
    };
    let mut connecting = match Connecting::new(rdma.host, terms.config, accepted, terms.buffer) {
        Ok(connecting) => connecting,
        Err(decline) => return give_up(tcp, decline),
    };
    loop {
        if let Some(outcome) = connecting.advance(tcp)? {
            return Ok(outcome);
        }
        rdma.observer.on_peer_added();
        let end = connecting.deadline();
        let end = terms.deadline.map_or(end, |deadline| deadline.min(end));
        if terms.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Broken::Io(std::io::ErrorKind::TimedOut.into()));
        }
        wait_either(tcp, connecting.fd(), end)?;
    }
}

/// Brings the buffers and confirms, or declines: the last moment at which a client may (CLC-52).
fn confirm(tcp: &TcpStream, terms: &Terms<'_>, accepted: Accepted) -> Result<Outcome, Broken> {
    let Some(fabric) = terms.fabrics.of(accepted.devices()) else {
        return give_up(tcp, accepted.decline(DeclineReason::NoIsmDevice));
    };
    let peer = fabric.peer(Gid(accepted.devices().peer.0));
    let theirs = match peer.attach(accepted.peer()) {
        Ok(Some(theirs)) => theirs,
        Ok(None) => return give_up(tcp, accepted.decline(DeclineReason::Registration)),
        Err(error) => return give_up(tcp, accepted.decline(reason_of(&error))),
    };
    let own = match peer.take(terms.buffer) {
        Ok(own) => own,
        Err(error) => {
            theirs.release();
            return give_up(tcp, accepted.decline(reason_of(&error)));
        }
    };
    let (established, confirm) = accepted.confirm(own.dmbe(), peer.link());
    if let Err(error) = send(tcp, &confirm) {
        theirs.release();
        return Err(error.into());
    }
    peer.established(established.terms, established.peer_link);
    let link = SmcdConn { fabric: fabric.clone(), peer, own, theirs, established };
    Ok(Outcome::Smc(EstablishedConn::D(Box::new(link))))
}

fn give_up(tcp: &TcpStream, decline: SendDecline) -> Result<Outcome, Broken> {
    send(tcp, &decline.message)?;
    match decline.then {
        AfterDecline::FallBack => Ok(Outcome::Tcp(decline.fallback().into())),
        AfterDecline::Break => Err(Broken::Late(decline.reason)),
    }
}

/// What a failure of the device means to the peer.
pub(super) fn reason_of(error: &IsmError) -> DeclineReason {
    use virtio_ism_abi::Status;
    tracing::debug!(%error, "no buffer for a connection");
    match error {
        IsmError::NoIndex { .. } => DeclineReason::NoDmb,
        IsmError::Refused { status: Status::Enospc, .. } => DeclineReason::NoDmb,
        IsmError::Refused { status: Status::Enomem, .. } => DeclineReason::NoMemory,
        IsmError::Refused { status: Status::Enodev, .. } => DeclineReason::Unreachable,
        error if error.is_out_of_memory() => DeclineReason::NoMemory,
        _ => DeclineReason::Registration,
    }
}
