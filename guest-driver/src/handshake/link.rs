// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The handshake for new elements of a connection on TCP: the handshake of SMC-R on a stream, with its
//! messages passed through a pair of sockets into CLC records.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ism_sys::move_out_of_the_way;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use smc_core::handshake::Route;
use smc_core::wire::clc::{Kind, Peek, peek_header};

use super::smcr::{Accepting, Connecting};
use super::{Broken, ByRdma, EstablishedConn, Outcome};
use crate::reactor::PeerObserver;
use crate::smcr::{RdmaHost, SmcrConn};

/// Bytes of the longest CLC message.
const LONGEST: usize = 4096;

/// The RNICs for new elements.
pub(crate) struct RingRdma {
    /// The RNICs of the stack.
    pub(crate) host: Arc<RdmaHost>,
    /// The reactor of the RNICs.
    pub(crate) observer: Arc<dyn PeerObserver + Send + Sync>,
    /// The route of the RNICs for the connection.
    pub(crate) route: Route,
}

impl RingRdma {
    pub(super) fn by_rdma(&self) -> ByRdma<'_> {
        ByRdma { host: &self.host, observer: &*self.observer }
    }

    /// Whether one of the RNICs can carry the connection now.
    pub(super) fn is_up(&self) -> bool {
        self.route.rnic.is_some() && self.host.has_active_port()
    }
}

enum Side {
    Client(Connecting),
    Server(Accepting),
}

/// A handshake for new elements, behind its first message.
pub(crate) struct LinkHandshake {
    side: Side,
    observer: Arc<dyn PeerObserver + Send + Sync>,
    /// The end used as the stream by the handshake.
    stream: TcpStream,
    /// The other end.
    records: OwnedFd,
}

/// The result of a step.
pub(super) enum LinkStep {
    /// LLC has to continue.
    Later,
    /// This message has to be sent, and LLC continues.
    Message(Vec<u8>),
    /// The new elements, and the message to be sent before their first use, if any.
    Done(Box<SmcrConn>, Vec<u8>),
    /// There are no new elements. Has the Decline to send, if the handshake has one.
    Declined(Vec<u8>),
    /// The peer breaks the protocol.
    Violated,
}

impl LinkHandshake {
    pub(super) fn connecting(rdma: &RingRdma, side: Connecting) -> std::io::Result<LinkHandshake> {
        LinkHandshake::new(rdma, Side::Client(side))
    }

    pub(super) fn accepting(rdma: &RingRdma, side: Accepting) -> std::io::Result<LinkHandshake> {
        LinkHandshake::new(rdma, Side::Server(side))
    }

    fn new(rdma: &RingRdma, side: Side) -> std::io::Result<LinkHandshake> {
        let (unix, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let _making = ism_sys::making();
        let (stream, records) = socketpair(unix, kind, SocketFlags::CLOEXEC, None)?;
        let stream = TcpStream::from(move_out_of_the_way(stream));
        let (records, observer) = (move_out_of_the_way(records), rdma.observer.clone());
        Ok(LinkHandshake { side, observer, stream, records })
    }

    /// Continues as far as possible, without waiting. `message`: the peer's answer, if new.
    pub(super) fn advance(&mut self, message: &[u8]) -> LinkStep {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if !message.is_empty() && send(&self.records, message, flags) != Ok(message.len()) {
            return LinkStep::Declined(Vec::new());
        }
        let outcome = match &mut self.side {
            Side::Client(connecting) => connecting.advance(&self.stream),
            Side::Server(accepting) => accepting.advance(&self.stream),
        };
        let said = self.said();
        match outcome {
            Ok(Some(Outcome::Smc(EstablishedConn::R(conn)))) => LinkStep::Done(conn, said),
            Ok(Some(_)) => LinkStep::Declined(decline_in(said)),
            Err(error) => {
                tracing::debug!(%error, "no new elements");
                match error {
                    Broken::Handshake(error) if !error.is_timeout() => LinkStep::Violated,
                    _ => LinkStep::Declined(decline_in(said)),
                }
            }
            Ok(None) => {
                // LLC may have begun.
                self.observer.on_peer_added();
                match said.is_empty() {
                    true => LinkStep::Later,
                    false => LinkStep::Message(said),
                }
            }
        }
    }

    /// The message sent by the handshake: one whole message, followed by a wait for the answer.
    fn said(&self) -> Vec<u8> {
        let mut room = vec![0; LONGEST];
        let n = recv(&self.records, &mut room[..], RecvFlags::DONTWAIT).map_or(0, |(n, _)| n);
        room.truncate(n);
        room
    }
}

/// The message, if it is a Decline. An earlier message of an abandoned handshake is not sent.
fn decline_in(said: Vec<u8>) -> Vec<u8> {
    match peek_header(&said) {
        Peek::Message { kind: Kind::Decline, .. } => said,
        _ => Vec::new(),
    }
}
