//! The client's handshake on a connected TCP stream.
//!
//! Rules kept here: CLC-41, CLC-42.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_core::handshake::{
    Accepted, AcceptedR, AwaitAccept, Awaited, ClcReader, ClientStep, Config, DeclineReason,
    FallbackReason, HandshakeError, KnownLink, Route, start_on,
};
use smc_core::time::Tick;
use virtio_ism_abi::Gid;

use super::decline::{device_decline_reason, send_decline};
use super::smcr::Connecting;
use super::tcp::{fill, is_readable, send, wait_either, wait_readable};
use super::{Broken, ByRdma, EstablishedConn, Outcome};
use crate::smcd::{Fabrics, SmcdConn};

/// What a client uses for one handshake.
pub(crate) struct ClientParams<'a> {
    /// What the client may propose.
    pub(crate) config: &'a Arc<Config>,
    /// The fabrics of its virtio-ism devices.
    pub(crate) fabrics: &'a Fabrics,
    /// Its RNICs, if it has any.
    pub(crate) rdma: Option<ByRdma<'a>>,
    /// Bytes of the own DMB or RMB element.
    pub(crate) buffer: u32,
    /// Calls a condition until it is true, for as long as spinning is worthwhile. Returns whether it
    /// became true.
    pub(crate) spin: &'a dyn Fn(&mut dyn FnMut() -> bool) -> bool,
    /// The server has answered TCP option 254, so it waits for a message: a Proposal or a Decline.
    pub(crate) awaited: bool,
    /// When the call of the application times out, if it does.
    pub(crate) deadline: Option<Instant>,
    /// Learns how far the handshake is.
    pub(crate) progress: &'a dyn ProposalObserver,
}

/// Learns how far a client's handshake is. Between the two calls the handshake only waits, so
/// another process may go on with it by a `PendingDecline`.
pub trait ProposalObserver {
    /// The Proposal is sent.
    fn sent(&self) {}
    /// The server's answer is there, and is taken from the stream when this returns.
    fn answered(&self) {}
}

impl ProposalObserver for () {}

/// Proposes SMC to the server.
pub(crate) fn propose(tcp: &TcpStream, params: &ClientParams<'_>) -> Result<Outcome, Broken> {
    // A tick of smc-core counts microseconds from any start; here from now.
    let route = params.rdma.map_or_else(Route::default, |rdma| rdma.route(tcp));
    let (await_accept, proposal) = match start_on(params.config.clone(), route, Tick(0)) {
        Ok(begun) => begun,
        Err(nothing) if params.awaited => return send_decline(tcp, nothing),
        // Without TCP option 254 the server does not wait for a message, so the client sends none.
        Err(nothing) => return Ok(Outcome::Tcp(nothing.fallback().into())),
    };
    send(tcp, &proposal)?;
    params.progress.sent();
    let mut reader = await_accept.reader();
    let clc_deadline = Instant::now() + Duration::from_micros(await_accept.deadline().0);
    let end = params.deadline.map_or(clc_deadline, |deadline| deadline.min(clc_deadline));
    let mut answered = (params.spin)(&mut || is_readable(tcp));
    while !answered {
        check_deadline(end)?;
        wait_readable(tcp, end)?;
        answered = is_readable(tcp);
    }
    params.progress.answered();
    while !fill(tcp, &mut reader)? {
        check_deadline(end)?;
        wait_readable(tcp, end)?;
    }
    let message = reader.message().unwrap_or_default();
    let known = |chid, gid| params.fabrics.terms(chid, gid);
    let known_link =
        |peer: &_| params.rdma.map_or(KnownLink::NoGroup, |rdma| rdma.host.known_link(peer));
    match await_accept.handle_with(message, known, known_link) {
        ClientStep::Offered(accepted) => confirm(tcp, params, accepted),
        ClientStep::OfferedR(accepted) => connect(tcp, params, accepted),
        ClientStep::Decline(decline) => send_decline(tcp, decline),
        ClientStep::PeerDeclined(peer) => {
            Ok(Outcome::Tcp(FallbackReason::DeclinedByPeer(peer).into()))
        }
        ClientStep::Fail(error) => Err(error.into()),
    }
}

/// An error if the wait for the server's answer is over.
fn check_deadline(end: Instant) -> Result<(), Broken> {
    match Instant::now() >= end {
        true => Err(HandshakeError::TimedOut { awaited: Awaited::Accept }.into()),
        false => Ok(()),
    }
}

/// Ends a handshake on TCP whose Proposal another process has sent: it declines what the server
/// answers.
pub(crate) struct AwaitAnswer {
    awaiting: AwaitAccept,
    reader: ClcReader,
    end: Instant,
}

impl AwaitAnswer {
    /// Begins. `None`: with this configuration there was nothing to propose.
    pub(crate) fn new(config: &Arc<Config>) -> Option<AwaitAnswer> {
        let (awaiting, _) = start_on(config.clone(), Route::default(), Tick(0)).ok()?;
        let end = Instant::now() + Duration::from_micros(awaiting.deadline().0);
        Some(AwaitAnswer { reader: awaiting.reader(), awaiting, end })
    }

    /// Goes on as far as the server's bytes allow. `true`: TCP carries the connection from here on.
    pub(crate) fn advance(&mut self, tcp: &TcpStream) -> Result<bool, Broken> {
        if !fill(tcp, &mut self.reader)? {
            check_deadline(self.end)?;
            return Ok(false);
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

/// Accepts an offer of SMC-R. Both ends may have to exchange LLC messages for it.
fn connect(
    tcp: &TcpStream,
    params: &ClientParams<'_>,
    accepted: AcceptedR,
) -> Result<Outcome, Broken> {
    let Some(rdma) = params.rdma else {
        return send_decline(tcp, accepted.decline(DeclineReason::NoRnic));
    };
    let mut connecting = match Connecting::new(rdma.host, params.config, accepted, params.buffer) {
        Ok(connecting) => connecting,
        Err(decline) => return send_decline(tcp, decline),
    };
    loop {
        if let Some(outcome) = connecting.advance(tcp)? {
            return Ok(outcome);
        }
        rdma.observer.on_peer_added();
        let end = connecting.deadline();
        let end = params.deadline.map_or(end, |deadline| deadline.min(end));
        if params.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Broken::Io(std::io::ErrorKind::TimedOut.into()));
        }
        wait_either(tcp, connecting.fd(), end)?;
    }
}

/// Takes an own buffer, attaches the server's and sends Confirm. If one of them fails, sends a
/// Decline: this is the last moment at which a client may (CLC-52).
fn confirm(
    tcp: &TcpStream,
    params: &ClientParams<'_>,
    accepted: Accepted,
) -> Result<Outcome, Broken> {
    let Some(fabric) = params.fabrics.of(accepted.devices()) else {
        return send_decline(tcp, accepted.decline(DeclineReason::NoIsmDevice));
    };
    let peer = fabric.peer(Gid(accepted.devices().peer.0));
    let theirs = match peer.attach(accepted.peer()) {
        Ok(Some(theirs)) => theirs,
        Ok(None) => return send_decline(tcp, accepted.decline(DeclineReason::Registration)),
        Err(error) => return send_decline(tcp, accepted.decline(device_decline_reason(&error))),
    };
    let own = match peer.take(params.buffer) {
        Ok(own) => own,
        Err(error) => {
            theirs.release();
            return send_decline(tcp, accepted.decline(device_decline_reason(&error)));
        }
    };
    let (established, confirm) = accepted.confirm(own.dmbe(), peer.link());
    if let Err(error) = send(tcp, &confirm) {
        theirs.release();
        return Err(error.into());
    }
    peer.established(established.terms, established.peer_link);
    let conn = SmcdConn { fabric: fabric.clone(), peer, own, theirs, established };
    Ok(Outcome::Smc(EstablishedConn::D(Box::new(conn))))
}
