// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's wait for a Confirm of SMC-R.

use std::sync::Arc;

use super::config::Config;
use super::decline::{DeclineReason, PeerDecline};
use super::error::{Awaited, HandshakeError};
use super::negotiate::{Refusal, SmcrMatch, check_confirm_r};
use super::outcome::{Received, message_r, parse, vendor_of};
use super::peer_host::PeerHost;
use super::reader::ClcReader;
use super::send_decline::{AfterDecline, SendDecline};
use super::smcr::{AnswerR, EstablishedR, LinkEnd, PeerLink, Role, TermsR, common_mtu};
use crate::time::Tick;
use crate::wire::WireError;
use crate::wire::clc::SmcrLink;

/// The server has sent an Accept of SMC-R.
#[derive(Clone, Debug)]
pub struct AwaitConfirmR {
    config: Arc<Config>,
    found: SmcrMatch,
    own: SmcrLink,
    direct: bool,
    first_contact: bool,
    deadline: Tick,
}

/// The caller's next step after the client's last message.
#[expect(
    clippy::large_enum_variant,
    reason = "one lives at a time, for as long as a handshake step"
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfirmStepR {
    /// The connection is SMC-R; at first contact once LLC has confirmed the link.
    Established(EstablishedR),
    /// Send this Decline, then go on as TCP: first contact only, because no data can have come over
    /// the new link yet (ERR-2).
    Decline(SendDecline),
    /// The client declined: go on as TCP. If the peer is out of sync, drop the link group (CLC-50).
    PeerDeclined(PeerDecline),
    /// Break the TCP connection.
    Fail(HandshakeError),
}

/// Accepts: returns the bytes to send, and the state waiting for Confirm.
///
/// The extension of a first contact states the server's own features, not only the common ones
/// (CLCV2-61, EISM-23), and the final limits (CLCV2-42, CLCV2-57 to CLCV2-59).
pub(super) fn accept(
    config: Arc<Config>,
    mut found: SmcrMatch,
    known: Option<TermsR>,
    own: LinkEnd,
    deadline: Tick,
) -> (AwaitConfirmR, Vec<u8>) {
    let first_contact = known.is_none();
    let link = own.link(config.peer_id);
    let mut stated = found.terms;
    if stated.release.has_v2_1_fields() {
        stated.features = config.stated_features();
    }
    let answer = AnswerR {
        config: &config,
        link,
        terms: stated,
        first_contact,
        eid: found.eid,
        direct: own.direct,
        vendor: vendor_of(stated.carriers),
        gids: None,
    };
    let bytes = answer.accept().emit();
    found.terms = known.unwrap_or(found.terms);
    let direct = own.direct;
    (AwaitConfirmR { config, found, own: link, direct, first_contact, deadline }, bytes)
}

impl AwaitConfirmR {
    /// A reader for the awaited message.
    pub fn reader(&self) -> ClcReader {
        ClcReader::new(Awaited::Confirm)
    }

    /// When waiting ends.
    pub fn deadline(&self) -> Tick {
        self.deadline
    }

    /// The error to end with if the deadline has passed: the server closes the connection and
    /// nothing falls back (ERR-7, ERR-8).
    pub fn timed_out(&self, now: Tick) -> Option<HandshakeError> {
        let awaited = Awaited::Confirm;
        self.deadline.has_passed(now).then_some(HandshakeError::TimedOut { awaited })
    }

    /// Takes the client's answer, a whole message.
    ///
    /// At a subsequent contact `is_link` returns whether an active link of the group ends at the
    /// peer's link end (CLC-46). The client may have written already, so any error then breaks the
    /// connection (CLC-53, CLC-64).
    pub fn handle(self, message: &[u8], is_link: impl FnOnce(&PeerLink) -> bool) -> ConfirmStepR {
        let awaited = Awaited::Confirm;
        let version = self.found.terms.version;
        let decline = |reason| {
            let then = AfterDecline::FallBack;
            ConfirmStepR::Decline(SendDecline::plain(&self.config, version, reason, then))
        };
        let parsed = match parse(message, awaited, &self.config.tolerance.sizes) {
            Ok(parsed) => parsed,
            Err(Received::Decline(peer)) => return ConfirmStepR::PeerDeclined(peer),
            Err(Received::Reserved(reason)) if self.first_contact => return decline(reason),
            Err(Received::Reserved(reason)) => {
                return ConfirmStepR::Fail(HandshakeError::TooLate(reason));
            }
            Err(Received::Fail(error)) => return ConfirmStepR::Fail(error),
        };
        let confirm = match message_r(&parsed) {
            Some(confirm) if confirm.version == version => confirm,
            _ => return ConfirmStepR::Fail(HandshakeError::ConfirmType),
        };
        // A version 1 Confirm has no first-contact flag, so the parser cannot check the MTU
        // (CLC-28, CLC-29).
        if let (true, Err(WireError::ReservedValue { field, value })) =
            (self.first_contact, confirm.link.mtu.bytes())
        {
            return decline(DeclineReason::ReservedValue { field, value });
        }
        match check_confirm_r(&self.found, self.first_contact, &confirm, is_link) {
            Ok(()) => {}
            Err(Refusal::Decline(reason)) => return decline(reason),
            Err(Refusal::Fail(error)) => return ConfirmStepR::Fail(error),
        }
        let extension = confirm.extension;
        ConfirmStepR::Established(EstablishedR {
            role: Role::Server,
            terms: self.found.terms,
            first_contact: self.first_contact,
            eid: self.found.eid,
            own: self.own,
            peer: confirm.link,
            peer_rnic: self.found.peer,
            mtu: common_mtu(self.own.mtu, confirm.link.mtu),
            direct: self.direct,
            peer_direct: extension.map_or(self.direct, |extension| extension.direct),
            peer_gids: extension.and_then(|extension| extension.gids),
            peer_host: extension.as_ref().map(|extension| PeerHost::from(&extension.common)),
        })
    }
}
