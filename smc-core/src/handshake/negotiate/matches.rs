// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server's choices: the matches between a Proposal and this host.

use super::terms::Terms;
use crate::handshake::smcr::{PeerRnic, TermsR};
use crate::wire::ids::{Chid, Eid, Gid, Mac};

/// A pair of devices that may reach each other; the local device has to be asked for certainty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// The fabric of both (EISM-29).
    pub chid: Chid,
    /// The server's device.
    pub local: Gid,
    /// The client's device. CHID and GID together identify the peer (EISM-21, CLCV2-49).
    pub peer: Gid,
}

/// SMC-D version 2 is possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmcdMatch {
    /// Pairs of devices in the client's order of preference (EISM-17); at least one.
    pub candidates: Vec<Candidate>,
    /// The EID for Accept (EID-15).
    pub eid: Eid,
    /// Release and features agreed at a first contact.
    pub terms: Terms,
}

/// SMC-R is possible in one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmcrMatch {
    /// The client's adapter: key to a link group (CLC-19).
    pub peer: PeerRnic,
    /// The client's adapter to the letter, to be repeated by its Confirm (CLCV2-55).
    pub proposed: (Gid, Mac),
    /// The EID for Accept; `None` in version 1.
    pub eid: Option<Eid>,
    /// The terms agreed at a first contact, final limits included (CLCV2-57, CLCV2-58).
    pub terms: TermsR,
}
