// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks of the other side's answer: the client's of Accept, the server's of Confirm.

use super::matches::Candidate;
use super::refusal::Refusal;
use super::select::may_use;
use super::terms::{Terms, answered_carriers, check_vendor};
use crate::handshake::config::Config;
use crate::handshake::decline::{DeclineReason, SmcKind};
use crate::handshake::error::HandshakeError;
use crate::handshake::ism_device::IsmDevice;
use crate::wire::clc::{SmcdV1, SmcdV2};
use crate::wire::ids::{Chid, Eid, Gid, GidV1};

/// The agreement of both ends after an Accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The two devices, seen from the client: `local` is the client's.
    pub devices: Candidate,
    /// The EID; zero in version 1.
    pub eid: Eid,
    /// Release and features: new ones at first contact, else the known ones.
    pub terms: Terms,
}

/// A client's check of an SMC-Dv2 Accept, given the `offered` devices.
///
/// - CHID and EID must be offered ones; others are protocol errors (CLCV2-64, EID-15). Linux breaks
///   the connection for a CHID too, but does not check the EID.
/// - The release is not above the proposed one (CLCV2-36). Features are the common ones (CLCV2-61).
/// - An emulated device needs the feature at both ends (EISM-3, EISM-22), the loopback device only
///   reaches itself (EISM-25).
/// - Without the first-contact flag the peer has to be `known`, else the ends are out of sync
///   (CLC-35, ERR-6). With the flag, earlier knowledge is void (CLC-34, CLCV2-48, CLCV2-87).
///
/// # Errors
///
/// [`Refusal`] says whether to decline or to break the connection.
pub fn check_accept(
    config: &Config,
    offered: &[IsmDevice],
    accept: &SmcdV2,
    known: impl FnOnce(Chid, Gid) -> Option<Terms>,
) -> Result<Agreed, Refusal> {
    let Some(device) = offered.iter().find(|device| device.chid == accept.chid) else {
        return Err(HandshakeError::ChidNotOffered(accept.chid).into());
    };
    let eid = accept.eid;
    if !config.offered_ueids().contains(&eid) && config.system_eid() != Some(eid) {
        return Err(HandshakeError::EidNotOffered(eid).into());
    }
    let terms = match &accept.first_contact {
        Some(fce) => {
            let agreed = config.stated_release();
            if fce.release > agreed {
                return Err(DeclineReason::Release { agreed, got: fce.release }.into());
            }
            Terms {
                release: fce.release,
                features: fce.features & config.stated_features(),
                carriers: answered_carriers(config, fce.release, fce.vendor)?,
            }
        }
        None => known(accept.chid, accept.gid).ok_or(DeclineReason::OutOfSync)?,
    };
    may_use(accept.chid, device.gid, accept.gid, terms)?;
    let devices = Candidate { chid: device.chid, local: device.gid, peer: accept.gid };
    Ok(Agreed { devices, eid, terms })
}

/// A client's check of an SMC-Dv1 Accept, given the device it `offered`. Version 1 has neither EID
/// nor extension; the other rules are as in [`check_accept`].
///
/// # Errors
///
/// The reason to decline.
pub fn check_accept_v1(
    offered: Option<IsmDevice>,
    accept: &SmcdV1,
    known: impl FnOnce(Chid, Gid) -> Option<Terms>,
) -> Result<Agreed, DeclineReason> {
    let device = offered.ok_or(DeclineReason::NotOffered(SmcKind::SmcdV1))?;
    let peer = Gid::from_parts(accept.gid, GidV1::NONE);
    let terms = match accept.first_contact {
        true => Terms::V1,
        false => known(device.chid, peer).ok_or(DeclineReason::OutOfSync)?,
    };
    if peer.is_none() {
        return Err(DeclineReason::Unreachable);
    }
    let devices = Candidate { chid: device.chid, local: device.gid, peer };
    Ok(Agreed { devices, eid: Eid::ZERO, terms })
}

/// A server's check that a client's SMC-Dv2 Confirm repeats the server's `accept` and the proposed
/// `peer`.
///
/// CHID and EID are Accept's, and the GID is the proposed one (CLCV2-64, EISM-19), and the
/// first-contact flag is the same (CLCV2-44): the DMB was registered for that GID, so anything else
/// breaks the connection. Linux checks none of these rules; its own Confirm satisfies all of them.
/// Another release or feature mask is answered by a late Decline (CLCV2-60), and so are other
/// vendor options if any were accepted (CLCV2-17, B-12).
///
/// # Errors
///
/// [`Refusal`] says whether to decline or to break the connection.
pub fn check_confirm(
    accept: &SmcdV2,
    peer: Gid,
    terms: Terms,
    confirm: &SmcdV2,
) -> Result<(), Refusal> {
    if confirm.chid != accept.chid {
        return Err(HandshakeError::ConfirmChid { accepted: accept.chid, got: confirm.chid }.into());
    }
    if confirm.eid != accept.eid {
        return Err(HandshakeError::ConfirmEid { accepted: accept.eid, got: confirm.eid }.into());
    }
    if confirm.gid != peer {
        return Err(HandshakeError::ConfirmGid { proposed: peer, got: confirm.gid }.into());
    }
    let (accepted, got) = (accept.first_contact.is_some(), confirm.first_contact.is_some());
    if accepted != got {
        return Err(HandshakeError::ConfirmContact { accepted, got }.into());
    }
    if let Some(fce) = &confirm.first_contact {
        if fce.release != terms.release {
            return Err(DeclineReason::Release { agreed: terms.release, got: fce.release }.into());
        }
        if fce.features != terms.features {
            return Err(
                DeclineReason::Features { agreed: terms.features, got: fce.features }.into()
            );
        }
        check_vendor(terms.carriers, fce.vendor)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
