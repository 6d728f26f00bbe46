//! Executes smc-core over the device and TCP: whom we know, and how the handshake's bytes move.

pub(crate) mod client;
pub(crate) mod fabric;
pub(crate) mod facts;
pub(crate) mod peer;
pub(crate) mod plain;
pub(crate) mod rdma;
pub(crate) mod server;
pub(crate) mod source;
mod tcp;

pub(crate) use fabric::{Fabric, Fabrics};
pub(crate) use peer::{OwnBuffer, Peer, PeerBuffer};
pub(crate) use tcp::{acknowledge_lazily, connect, reset};

use smc_core::handshake::{DeclineCode, Established, FallbackReason};
use thiserror::Error;

/// Why a connection is TCP.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fallback {
    /// The handshake ended so.
    #[error(transparent)]
    Handshake(#[from] FallbackReason),
    /// No device is open.
    #[error("no virtio-ism device: {0}")]
    NoDevice(String),
    /// The application asked for TCP.
    #[error("TCP was asked for")]
    Asked,
    /// The policy does not let SMC happen with this peer.
    #[error("the policy says TCP")]
    Policy,
    /// The server has declined several times in a row because it had no device; it is spared for a while.
    #[error("the server has lately declined several times in a row for want of a device")]
    DeclinedBefore,
    /// TCP option 254 is required and cannot be had.
    #[error("no TCP option 254: {0}")]
    NoRendezvous(String),
}

impl Fallback {
    /// Linux's number for the reason, which its tools print in words.
    pub fn code(&self) -> DeclineCode {
        match self {
            Fallback::Handshake(reason) => reason.code(),
            Fallback::Asked | Fallback::Policy | Fallback::NoRendezvous(_) => {
                DeclineCode::PeerNoSmc
            }
            Fallback::NoDevice(_) => DeclineCode::NoSmcDevice,
            Fallback::DeclinedBefore => DeclineCode::NoIsm2Support,
        }
    }
}

/// What a handshake needs for SMC-R.
#[derive(Clone, Copy)]
pub(crate) struct ByRdma<'a> {
    pub(crate) host: &'a std::sync::Arc<rdma::RdmaHost>,
    pub(crate) listeners: &'a dyn Attend,
}

/// Those who listen to the RNICs.
pub(crate) trait Attend {
    /// There is a peer from now on that has to be listened to, whatever the threads of the handshake
    /// do.
    fn attend(&self);
}

impl ByRdma<'_> {
    /// What there is for a connection.
    fn route(&self, tcp: &std::net::TcpStream) -> smc_core::handshake::Route {
        // A connection without an address is about to fail anyway.
        tcp.local_addr().map(|local| self.host.route(local.ip())).unwrap_or_default()
    }
}

/// What a handshake ended in.
pub(crate) enum Outcome {
    /// SMC carries the connection.
    Smc(Link),
    /// TCP carries the connection.
    Tcp(Fallback),
}

/// An established SMC connection.
pub(crate) enum Link {
    /// SMC-D carries it.
    D(Box<LinkD>),
    /// SMC-R carries it.
    R(Box<rdma::Element>),
}

/// The parts of an established SMC-D connection.
pub(crate) struct LinkD {
    pub(crate) fabric: std::sync::Arc<Fabric>,
    pub(crate) peer: std::sync::Arc<Peer>,
    pub(crate) own: OwnBuffer,
    pub(crate) theirs: std::sync::Arc<PeerBuffer>,
    pub(crate) established: Established,
}

/// A handshake that broke the connection.
#[derive(Debug, Error)]
pub(crate) enum Broken {
    /// The peer, or the network, broke the handshake.
    #[error(transparent)]
    Handshake(#[from] smc_core::handshake::HandshakeError),
    /// TCP failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The connection had to be ended after the point of no return.
    #[error("{0}")]
    Late(smc_core::handshake::DeclineReason),
}

impl From<Broken> for std::io::Error {
    fn from(broken: Broken) -> std::io::Error {
        use std::io::ErrorKind;
        match broken {
            Broken::Io(error) => error,
            Broken::Handshake(error) if error.is_timeout() => {
                std::io::Error::new(ErrorKind::TimedOut, error)
            }
            // The kind that stands for EPROTO is not stable; the text tells it all.
            Broken::Handshake(error) => std::io::Error::new(ErrorKind::InvalidData, error),
            Broken::Late(reason) => {
                std::io::Error::new(ErrorKind::ConnectionReset, reason.to_string())
            }
        }
    }
}
