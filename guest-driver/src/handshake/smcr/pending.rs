// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection under construction, and code shared by both ends of a handshake.

use std::sync::Arc;
use std::time::Duration;

use smc_core::handshake::{DeclineReason, EstablishedR, LinkEnd, PeerHost, TermsR};
use smc_core::link_group::{
    EyeCatcher, FirstLink, Generation, LinkKey, Params, PeerProfile, Reason, Region, RemoteEnd,
    Rnic, Role, Timers,
};
use smc_core::wire::clc::{SmcrLink, Version};
use smc_core::wire::ids::{Mac, Mtu, SizeCode};

use super::super::{Broken, EstablishedConn, Outcome};
use crate::smcr::SmcrOptions;
use crate::smcr::alternates::alternates;
use crate::smcr::buffers::Rmb;
use crate::smcr::conn::SmcrConn;
use crate::smcr::endpoint::{Endpoint, Target};
use crate::smcr::group::{Group, JoinError, Status};
use crate::smcr::groups::LinkGroups;
use crate::smcr::link::Link;
use crate::smcr::shared::link_end;
use smc_verbs::VerbsError;

/// Length of an element for a requested receive buffer of `buffer` bytes: twice as much, as far as
/// there is a size code (CLC-30, RMB-34). There is no send buffer beside the element: it alone holds
/// the bytes under way, where other stacks have both a send and a receive buffer. Half of it is filled
/// while the other half is read.
fn element_len(buffer: u32) -> u32 {
    buffer.max(buffer.saturating_mul(2).min(SizeCode::RFC_MAX.bytes()))
}

/// A connection being made: taken back when dropped, unless finished as an [`SmcrConn`].
pub(super) struct PendingConn {
    groups: Arc<LinkGroups>,
    pub(super) group: Arc<Group>,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) link: Arc<Link>,
    rmb: Option<Arc<Rmb>>,
    /// The RMB was announced to the peer, which may write from then on.
    announced: bool,
}

impl PendingConn {
    /// An RMB for a receive buffer of this many bytes, and a token.
    pub(super) fn new(
        groups: &Arc<LinkGroups>,
        group: &Arc<Group>,
        link: &Arc<Link>,
        buffer: u32,
    ) -> Result<PendingConn, JoinError> {
        let rmb = group.take_rmb(element_len(buffer), link.key())?;
        let (number, start) = (group.number(), group.shared().options.ring_start());
        let made = group.shared().tokens.insert(|token| Endpoint::new(token, number, start));
        let endpoint = made.map_err(|source| VerbsError::Call { call: "getrandom", source })?;
        let key = link.key();
        let (groups, group, link) = (groups.clone(), group.clone(), link.clone());
        let pending =
            PendingConn { groups, group, endpoint, link, rmb: Some(rmb), announced: false };
        // Dropping `pending` releases the resources taken.
        pending.group.reserve(&pending.endpoint, key)?;
        Ok(pending)
    }

    /// Whether the peer has confirmed the RMB; `None`: the peer has refused it, or the group is over.
    pub(super) fn is_confirmed(&self) -> Option<bool> {
        self.group.is_confirmed(self.rmb.as_ref()?)
    }

    /// The reason for an RMB that the peer will not confirm.
    pub(super) fn refusal(&self) -> DeclineReason {
        match self.group.status() {
            Status::Over => DeclineReason::NoActiveLink,
            Status::Forming | Status::Usable => DeclineReason::Registration,
        }
    }

    /// The next message announces the RMB to the peer. The RMB was zeroed before (RMB-10).
    pub(super) fn mark_announced(&mut self) {
        self.announced = true;
    }

    /// This end, for Accept or Confirm.
    pub(super) fn end(&self, direct: bool) -> Option<LinkEnd> {
        let rmb = self.rmb.as_ref()?;
        let region = rmb.buffer().region(self.link.key())?;
        Some(LinkEnd {
            rkey: region.rkey,
            address: region.address,
            token: self.endpoint.token(),
            size: SizeCode::at_least(u64::from(rmb.buffer().len()))?,
            ..link_end(&self.link, direct)
        })
    }

    /// LLC of a first contact begins.
    pub(super) fn start(&self, role: Role, established: &EstablishedR) {
        let Some(rmb) = &self.rmb else { return };
        let Some(region) = rmb.buffer().region(self.link.key()) else { return };
        let params = params(&self.group, role, &self.link, established);
        let first = FirstLink {
            rnic: rnic_of(&self.link, established.direct),
            qpn: self.link.qpn(),
            remote: remote_of(&established.peer, established.mtu),
            rmb: rmb.id(),
            region,
            peer_region: region_of(&established.peer),
        };
        self.group.start(established.terms, params, first);
    }

    /// The connection writes into the peer's element from now on, over the link `on`.
    pub(super) fn join(&self, peer: &SmcrLink, on: LinkKey) -> Result<(), JoinError> {
        let size = peer.size.bytes();
        let ring = self.group.shared().options.ring(size);
        // RMB-4.
        let offset = u64::from(peer.index.saturating_sub(1)) * u64::from(size);
        let token = peer.token;
        let target = |rmb| Target { rmb, offset, ring, token };
        self.group.join(&self.endpoint, on, region_of(peer), target)
    }

    /// Makes the established connection.
    pub(super) fn finish(mut self, established: EstablishedR) -> Option<SmcrConn> {
        let rmb = self.rmb.take()?;
        Some(SmcrConn::new(
            self.groups.clone(),
            self.group.clone(),
            self.endpoint.clone(),
            rmb,
            established,
        ))
    }
}

impl Drop for PendingConn {
    fn drop(&mut self) {
        let Some(rmb) = self.rmb.take() else { return };
        self.endpoint.fail();
        self.group.shared().tokens.remove(self.endpoint.token());
        self.group.remove_connection(&self.endpoint);
        // The peer's writes may still come if the RMB was announced.
        self.group.release_rmb(&rmb, (!self.announced).then_some(0));
    }
}

/// The key and the address of the peer's RMB.
pub(super) fn region_of(peer: &SmcrLink) -> Region {
    Region { rkey: peer.rkey, address: peer.address }
}

/// The peer's queue pair.
pub(super) fn remote_of(peer: &SmcrLink, mtu: Mtu) -> RemoteEnd {
    RemoteEnd { gid: peer.gid, mac: peer.mac, qpn: peer.qpn, psn: peer.psn, mtu }
}

fn rnic_of(link: &Link, direct: bool) -> Rnic {
    let port = link.port();
    let mac = port.mac().unwrap_or(Mac::NONE);
    Rnic { id: port.id(), gid: link.gid(), mac, mtu: port.view().mtu, direct }
}

fn generation(terms: &TermsR, max_links: u8) -> Generation {
    match terms.version {
        Version::V1 => Generation::V1 { max_links },
        Version::V2 if terms.release.has_v2_1_fields() => Generation::V21(terms.limits),
        Version::V2 => Generation::V2,
    }
}

/// The LLC profile of a peer. Only the first contact of version 2 names the peer's host.
fn profile(host: Option<&PeerHost>, options: &SmcrOptions) -> PeerProfile {
    PeerProfile::of(host.map_or(options.v1_peer_os, |host| host.os))
}

fn params(group: &Group, role: Role, link: &Link, established: &EstablishedR) -> Params {
    let shared = group.shared();
    let options = &shared.options;
    let generation = generation(&established.terms, options.max_links);
    let profile = profile(established.peer_host.as_ref(), options);
    let mut params = Params::new(role, generation, profile);
    if options.eye_catcher {
        params.eye_catcher = EyeCatcher::On;
    }
    let test = options.test_link;
    params.timers = Timers {
        test_link: (!test.is_zero()).then_some(test),
        idle: options.idle_group,
        // Only AF_SMC takes long.
        deletion: if profile == PeerProfile::LINUX {
            params.timers.deletion
        } else {
            Duration::ZERO
        },
        ..params.timers
    };
    params.number = group.number();
    params.rnics = alternates(shared, link, group.version(), established.direct);
    params.peer_gids = established.peer_gids.iter().flat_map(|list| list.iter()).collect();
    params
}

/// The reason in a Decline for an error (ERR-1).
pub(super) fn reason_of(error: &JoinError) -> DeclineReason {
    tracing::debug!(%error, "no link for a connection");
    match error {
        JoinError::Verbs(VerbsError::Memory { .. } | VerbsError::Pin { .. }) => {
            DeclineReason::NoMemory
        }
        JoinError::Verbs(_) => DeclineReason::LinkNotReady,
        JoinError::Use(smc_core::link_group::UseError::TooManyRmbs) => DeclineReason::TooManyRkeys,
        JoinError::Use(_) | JoinError::Gone => DeclineReason::NoActiveLink,
    }
}

/// The reason in a Decline for the end of a first contact.
pub(super) fn reason_of_end(reason: Reason) -> DeclineReason {
    match reason {
        Reason::NoConfirmLink => DeclineReason::ConfirmLinkTimeout,
        Reason::NoAddLink | Reason::NoAddLinkReply => DeclineReason::AddLinkTimeout,
        Reason::EyeCatcher => DeclineReason::RmbEyeCatcher,
        _ => DeclineReason::LinkNotReady,
    }
}

/// Finishes a handshake with an SMC-R connection.
pub(super) fn finish_established(
    pending: PendingConn,
    established: EstablishedR,
) -> Result<Outcome, Broken> {
    match pending.finish(established) {
        Some(element) => Ok(Outcome::Smc(EstablishedConn::R(Box::new(element)))),
        None => Err(Broken::Late(DeclineReason::Internal)),
    }
}

#[cfg(test)]
mod tests {
    use smc_core::wire::ids::{Hostname, OsType};

    use super::*;

    // Shows: CLC-30.
    #[test]
    fn an_element_is_twice_the_buffer_as_far_as_there_is_a_code() {
        for (buffer, len) in [(16, 32), (64, 128), (256, 512), (512, 512), (1024, 1024)] {
            assert_eq!(element_len(buffer << 10), len << 10, "{buffer} KiB");
        }
        assert_eq!(element_len(u32::MAX), u32::MAX);
    }

    // Shows: CLCV2-53, LLCV2-3.
    #[test]
    fn only_a_linux_is_talked_to_as_one() {
        let mut options = SmcrOptions::default();
        for (os, wanted) in [
            (OsType::ZOS, PeerProfile::SPEC),
            (OsType::LINUX, PeerProfile::LINUX),
            (OsType::AIX, PeerProfile::SPEC),
            (OsType::UNKNOWN, PeerProfile::SPEC),
        ] {
            let host = PeerHost { os, hostname: Hostname::BLANK, vendor: [0; 4] };
            assert_eq!(profile(Some(&host), &options), wanted, "{os}");
        }
        // A version 1 peer does not name its system.
        assert_eq!(profile(None, &options), PeerProfile::LINUX);
        options.v1_peer_os = OsType::ZOS;
        assert_eq!(profile(None, &options), PeerProfile::SPEC);
    }
}
