// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why a connection is TCP.

use smc_core::handshake::{DeclineCode, FallbackReason};
use thiserror::Error;

use smc_rendezvous::{PeerDiscovery, TcpReason};

/// Why a connection is TCP.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fallback {
    /// The result of the handshake.
    #[error(transparent)]
    Handshake(#[from] FallbackReason),
    /// No device is open.
    #[error("no virtio-ism device: {0}")]
    NoDevice(String),
    /// The application asked for TCP.
    #[error("TCP was asked for")]
    Asked,
    /// The policy does not allow SMC with this peer.
    #[error("the policy says TCP")]
    Policy,
    /// The rule of the policy is for a share of connections, without this one.
    #[error("the connection is outside of the share that the policy gives to SMC")]
    OutsideShare,
    /// The server has declined several times in a row, so the client does not
    /// propose for a while.
    #[error("the server has lately declined several times in a row")]
    DeclinedBefore,
    /// Connections to this server have been too short for SMC to be faster.
    #[error("connections to this server are too short to be faster on SMC")]
    TooShort,
    /// TCP option 254 is required but not available.
    #[error("no TCP option 254: {0}")]
    NoRendezvous(String),
    /// No rule asks for SMC with this peer, and none is found by TCP option 254.
    #[error("no rule (--peer, --accept) names this peer, and TCP option 254 is not in use")]
    NoRule,
    /// The server is the same process, unable to wait for itself.
    #[error("client and server are one process")]
    SameProcess,
    /// The process has few descriptors left, or no thread for the handshake.
    #[error("descriptors are short (ulimit -n), or no thread can be made")]
    NoResources,
    /// A filter of system calls forbids this one, needed by a device.
    #[error("a filter of system calls (seccomp) forbids {0}")]
    Filtered(String),
    /// The program makes system calls unseen by the library.
    #[error("the program makes system calls that the library does not see")]
    OwnCalls,
    /// The device takes on no new connections.
    #[error("the device takes on no new connections: it is drained, or about to go")]
    Drained,
}

impl Fallback {
    /// Why a client uses TCP after the verdict of peer discovery.
    pub fn from_discovery(reason: TcpReason, discovery: &PeerDiscovery) -> Fallback {
        match reason {
            TcpReason::NotAnswered => FallbackReason::PeerNotSmc.into(),
            TcpReason::Policy => Fallback::Policy,
            TcpReason::Unavailable => {
                let why = discovery.unavailable().map(ToString::to_string);
                let why = why.unwrap_or_else(|| "the kernel refused the socket".into());
                Fallback::NoRendezvous(why)
            }
        }
    }

    /// The number of the reason: Linux's, or one of this project if Linux has none.
    pub fn code(&self) -> DeclineCode {
        match self {
            Fallback::Handshake(reason) => reason.code(),
            Fallback::NoDevice(_) => DeclineCode::NoSmcDevice,
            Fallback::Asked => DeclineCode::TcpWanted,
            Fallback::Policy => DeclineCode::Policy,
            Fallback::OutsideShare => DeclineCode::OutsideShare,
            Fallback::DeclinedBefore => DeclineCode::DeclinedBefore,
            Fallback::TooShort => DeclineCode::TooShort,
            Fallback::NoRendezvous(_) => DeclineCode::NoOption,
            Fallback::NoRule => DeclineCode::NoRule,
            Fallback::SameProcess => DeclineCode::SameProcess,
            Fallback::NoResources => DeclineCode::NoDescriptor,
            Fallback::Filtered(_) => DeclineCode::Filtered,
            Fallback::OwnCalls => DeclineCode::OwnCalls,
            Fallback::Drained => DeclineCode::Drained,
        }
    }
}
