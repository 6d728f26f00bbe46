// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of one connection and of its two halves.

use std::collections::VecDeque;

use crate::connection::{Connection, Outbound, Ring, Sequence, State};
use crate::link_group::{LinkKey, PeerRmbId, Region, RmbId};
use crate::wire::ids::{Gid, Qpn};

/// The fate of the own element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Release {
    Reuse,
    Withdraw,
}

#[derive(Debug)]
pub(super) struct Half {
    pub(super) connection: Connection,
    /// The messages sent, and sent again after a failover: the driver's own code.
    pub(super) outbound: Outbound,
    /// Messages without acknowledgement: queue pair and number.
    pub(super) in_flight: Vec<(usize, u16)>,
    /// The half has no use for another link, and posts nothing any more.
    pub(super) abandoned: bool,
    pub(super) seen: Sequence,
    /// Queue pairs with received messages, each but the first with a validation first.
    pub(super) paths_used: Vec<usize>,
    /// A validation is being judged.
    pub(super) validating: bool,
    /// Own memory.
    pub(super) rmb: RmbId,
    /// The peer's, known after the handshake.
    pub(super) peer_rmb: Option<PeerRmbId>,
    /// Bytes of the peer's element, each at its place there.
    pub(super) element: Vec<u8>,
    /// The link with the count of this half.
    pub(super) link: LinkKey,
    /// The queue pair for posts; none between two links.
    pub(super) path: Option<usize>,
    pub(super) region: Region,
    /// The half waits for its last writes on the path before leaving.
    pub(super) leaving: bool,
    /// The half was on another path before.
    pub(super) moved: bool,
    /// Time since which the half has no path.
    pub(super) parked: u64,
    pub(super) timer: Option<u64>,
    pub(super) release: Option<Release>,
    /// Stream bytes still to be sent by the application.
    pub(super) budget: u32,
    /// Stream bytes written and read.
    pub(super) written: u64,
    pub(super) read: u64,
    pub(super) failed: bool,
    pub(super) saw_end: bool,
    pub(super) shut: bool,
    pub(super) closed: bool,
    pub(super) scheduled: bool,
    /// A slow reader.
    pub(super) slow: bool,
}

impl Half {
    pub(super) fn new(
        now: u64,
        [own, peer]: [Ring; 2],
        lens: u32,
        token: u32,
        rmb: RmbId,
        link: LinkKey,
    ) -> Half {
        Half {
            connection: Connection::new(peer, own),
            outbound: Outbound::new(peer, token),
            in_flight: Vec::new(),
            abandoned: false,
            seen: Sequence::new(),
            paths_used: Vec::new(),
            validating: false,
            rmb,
            peer_rmb: None,
            element: vec![0; lens as usize],
            link,
            path: None,
            region: Region { rkey: crate::wire::ids::Rkey(0), address: 0 },
            leaving: false,
            moved: false,
            parked: now,
            timer: None,
            release: None,
            budget: 0,
            written: 0,
            read: 0,
            failed: false,
            saw_end: false,
            shut: false,
            closed: false,
            scheduled: false,
            slow: false,
        }
    }

    /// Whether the peer's adapter has acknowledged every message.
    pub(super) fn said_all(&self) -> bool {
        self.abandoned || (self.in_flight.is_empty() && !self.outbound.has_pending())
    }

    pub(super) fn state(&self) -> State {
        self.connection.close.state()
    }
}

/// A message of one end to the other over TCP.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tcp {
    /// SMC Confirm of a first contact.
    FirstConfirm {
        rnics: [usize; 2],
        regions: [Region; 2],
    },
    /// SMC Decline of a failed first contact.
    FirstDecline,
    Accept {
        qpn: Qpn,
        gid: Gid,
        region: Region,
    },
    Confirm {
        region: Region,
    },
    Decline,
    Reset,
}

#[derive(Debug)]
pub(super) struct Conn {
    pub(super) halves: [Option<Half>; 2],
    /// Messages on their way to an end.
    pub(super) lanes: [VecDeque<Tcp>; 2],
    /// Length of each end's own element.
    pub(super) lens: [u32; 2],
    pub(super) budgets: [u32; 2],
    pub(super) accept: Option<(Qpn, Gid, Region)>,
    /// The link named by Accept, at the server.
    pub(super) named: Option<LinkKey>,
    /// The connection was never established.
    pub(super) declined: bool,
    /// There is a reason for a permitted reset.
    pub(super) excuse: bool,
    /// A lie about a memory address has put foreign bytes into this connection's memory.
    pub(super) spoiled: bool,
    pub(super) reset: bool,
    /// A half has left a path.
    pub(super) moved: bool,
    pub(super) written: [u64; 2],
    pub(super) ended: [bool; 2],
    pub(super) complete: [bool; 2],
}

impl Conn {
    pub(super) fn new(lens: [u32; 2], budgets: [u32; 2]) -> Conn {
        Conn {
            halves: [None, None],
            lanes: [VecDeque::new(), VecDeque::new()],
            lens,
            budgets,
            accept: None,
            named: None,
            declined: false,
            excuse: false,
            spoiled: false,
            reset: false,
            moved: false,
            written: [0; 2],
            ended: [false; 2],
            complete: [false; 2],
        }
    }
}
