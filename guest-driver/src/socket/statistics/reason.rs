// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why connections are TCP.

use serde::{Deserialize, Serialize};
use smc_core::handshake::{DeclineCode, FallbackReason};

use smc_info::Fallback;

/// Why connections are TCP, with their count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// Linux's number, or one of this project if Linux has none. 0: several reasons, because a report
    /// counts only a limited number of different ones.
    pub code: u32,
    /// The short name of the reason.
    pub name: String,
    /// The meaning, and advice.
    pub advice: String,
    /// "here" or "peer": the end that refused SMC, or was unable to.
    pub side: String,
    /// The reason in this end's words.
    pub says: String,
    /// Connections.
    pub count: u64,
}

/// The end that made a connection TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Here,
    Peer,
}

impl Side {
    pub(super) fn of(why: &Fallback) -> Side {
        match why {
            Fallback::Handshake(FallbackReason::DeclinedByPeer(_) | FallbackReason::PeerNotSmc) => {
                Side::Peer
            }
            _ => Side::Here,
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Side::Here => "here",
            Side::Peer => "peer",
        }
    }
}

impl Reason {
    pub(super) fn new(code: u32, side: &str, says: &str, count: u64) -> Reason {
        let known = DeclineCode::from(code);
        Reason {
            code,
            name: known.name().to_owned(),
            advice: known.advice().to_owned(),
            side: side.to_owned(),
            says: says.to_owned(),
            count,
        }
    }

    /// A reason reported by another process. Its number selects one of the few known reasons.
    #[must_use]
    pub fn of_other(&self) -> Reason {
        let side = if self.side == Side::Peer.word() { Side::Peer } else { Side::Here };
        Reason::new(self.code, side.word(), &self.says, self.count)
    }

    /// A connection of the process without a noted reason for TCP.
    pub fn unnoted() -> Reason {
        let says = "none noted: it is not decided yet, or a program without the library made the \
                    connection";
        Reason {
            name: "none".into(),
            side: Side::Here.word().into(),
            says: says.into(),
            count: 1,
            ..Reason::default()
        }
    }

    /// The reason of one connection.
    pub fn of(why: &Fallback) -> Reason {
        let side = Side::of(why).word();
        Reason::new(why.code().value(), side, &why.to_string(), 1)
    }
}
