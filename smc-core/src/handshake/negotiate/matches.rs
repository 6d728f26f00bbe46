// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a server can choose from: the matches between a Proposal and this host.

use super::terms::Terms;
use crate::handshake::smcr::{PeerRnic, TermsR};
use crate::wire::ids::{Chid, Eid, Gid, Mac};

/// A pair of devices that may reach each other; whether they do, the local device has to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// The fabric both are on (EISM-29).
    pub chid: Chid,
    /// The server's device.
    pub local: Gid,
    /// The client's device. With the CHID it names the peer (EISM-21, CLCV2-49).
    pub peer: Gid,
}

/// SMC-D version 2 is possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmcdMatch {
    /// Pairs of devices in the client's order of preference (EISM-17); at least one.
    pub candidates: Vec<Candidate>,
    /// The EID that goes into Accept (EID-15).
    pub eid: Eid,
    /// Release and features that a first contact agrees on.
    pub terms: Terms,
}

/// SMC-R is possible in one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrMatch {
    /// The client's adapter: key to a link group (CLC-19).
    pub peer: PeerRnic,
    /// The client's adapter to the letter: what its Confirm has to repeat (CLCV2-55).
    pub proposed: (Gid, Mac),
    /// The EID that goes into Accept; `None` in version 1.
    pub eid: Option<Eid>,
    /// What a first contact agrees on: the final limits among it (CLCV2-57, CLCV2-58).
    pub terms: TermsR,
}
