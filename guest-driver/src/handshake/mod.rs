// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The handshake: CLC over TCP, both ends, SMC-D and SMC-R.

pub(crate) mod client;
mod decline;
mod first_bytes;
pub(crate) mod link;
pub(crate) mod ring;
pub(crate) mod server;
mod smcr;
mod tcp;

pub use first_bytes::{ClcPrefix, FirstBytes};
pub(crate) use tcp::{acknowledge_lazily, connect};

use std::sync::Arc;
use std::time::Duration;

use smc_core::handshake::Config;
use thiserror::Error;

use crate::reactor::PeerObserver;
use crate::smcd::{Fabrics, SmcdConn};
use crate::smcr::{RdmaHost, SmcrConn};
use smc_info::Fallback;

/// The resources of a handshake for SMC-R.
#[derive(Clone, Copy)]
pub(crate) struct ByRdma<'a> {
    /// The RNICs of the stack.
    pub(crate) host: &'a Arc<RdmaHost>,
    /// The reactor of the RNICs, to be informed of new peers by the handshake.
    pub(crate) observer: &'a dyn PeerObserver,
}

impl ByRdma<'_> {
    /// The RNICs able to carry this connection.
    fn route(&self, tcp: &std::net::TcpStream) -> smc_core::handshake::Route {
        // A connection without an address is about to fail anyway.
        tcp.local_addr().map(|local| self.host.route(local.ip())).unwrap_or_default()
    }
}

/// The resources of this end for each step of a handshake.
pub struct Params<'a> {
    /// The configuration for Proposals, or for accepting them.
    pub(crate) config: &'a Arc<Config>,
    /// The fabrics of the virtio-ism devices.
    pub(crate) fabrics: &'a Fabrics,
    /// The RNICs, if there are any.
    pub(crate) rdma: Option<ByRdma<'a>>,
    /// Bytes of the own DMB or RMB element.
    pub(crate) buffer: u32,
    /// The longest wait of a server for a message after the first bytes.
    pub(crate) message_timeout: Duration,
}

/// The result of a handshake.
pub enum Outcome {
    /// SMC carries the connection.
    Smc(EstablishedConn),
    /// TCP carries the connection.
    Tcp(Fallback),
}

/// An established SMC connection.
pub enum EstablishedConn {
    /// An SMC-D connection.
    D(Box<SmcdConn>),
    /// An SMC-R connection.
    R(Box<SmcrConn>),
}

/// A handshake that broke the connection.
#[derive(Debug, Error)]
pub enum Broken {
    /// The peer, or the network, broke the handshake.
    #[error(transparent)]
    Handshake(#[from] smc_core::handshake::HandshakeError),
    /// TCP failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// This end failed after its last message with a fallback to TCP.
    #[error("{0}")]
    Late(smc_core::handshake::DeclineReason),
    /// The same, reported to the peer by a Decline.
    #[error("{0}")]
    Declined(smc_core::handshake::DeclineReason),
    /// This end has too many handshakes under way.
    #[error("evicted: too many handshakes are under way")]
    Evicted,
}

impl Broken {
    /// Whether a client has ended TCP instead of answering Accept, as a client ending meanwhile does.
    /// Nothing is broken then.
    pub(crate) fn is_departure(&self) -> bool {
        use smc_core::handshake::{Awaited, HandshakeError};
        let Broken::Handshake(error) = self else { return false };
        matches!(error, HandshakeError::Closed { awaited: Awaited::Confirm, received: 0 })
    }

    /// Whether the peer has ended TCP in order, between two messages.
    pub(crate) fn is_end(&self) -> bool {
        use smc_core::handshake::HandshakeError;
        match self {
            Broken::Handshake(error) => matches!(error, HandshakeError::Closed { received: 0, .. }),
            Broken::Io(error) => error.kind() == std::io::ErrorKind::UnexpectedEof,
            _ => false,
        }
    }
}

impl From<Broken> for std::io::Error {
    fn from(broken: Broken) -> std::io::Error {
        use std::io::ErrorKind;
        match broken {
            Broken::Io(error) => error,
            Broken::Handshake(error) if error.is_timeout() => {
                std::io::Error::new(ErrorKind::TimedOut, error)
            }
            // The kind for EPROTO is not stable, so the text has the reason.
            Broken::Handshake(error) => std::io::Error::new(ErrorKind::InvalidData, error),
            Broken::Late(_) | Broken::Declined(_) | Broken::Evicted => {
                std::io::Error::new(ErrorKind::ConnectionReset, broken.to_string())
            }
        }
    }
}
