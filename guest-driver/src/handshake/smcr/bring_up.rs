// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A first contact while LLC brings its link up.

use std::net::TcpStream;
use std::sync::Arc;

use smc_core::handshake::{
    Config, DeclineReason, EstablishedR, FallbackReason, PeerDecline, late_decline,
};
use smc_core::link_group::{Ending, Reason};

use super::super::decline::send_decline;
use super::super::tcp::peek;
use super::super::{Broken, Outcome};
use super::pending::{PendingConn, finish_established, reason_of, reason_of_end};
use crate::smcr::group::Status;

/// Bytes of the longest Decline.
const DECLINE: usize = 44;

/// Either side of a first contact: CLC is complete, and LLC confirms the link.
pub(super) struct LinkBringUp {
    pending: Option<PendingConn>,
    established: EstablishedR,
    config: Arc<Config>,
    declined: Option<PeerDecline>,
}

impl LinkBringUp {
    pub(super) fn new(
        pending: PendingConn,
        established: EstablishedR,
        config: Arc<Config>,
    ) -> LinkBringUp {
        LinkBringUp { pending: Some(pending), established, config, declined: None }
    }

    /// The outcome; `None`: the peer has to answer.
    pub(super) fn advance(&mut self, tcp: &TcpStream) -> Result<Option<Outcome>, Broken> {
        let Some(pending) = &self.pending else {
            return Err(Broken::Io(std::io::ErrorKind::NotConnected.into()));
        };
        let group = pending.group.clone();
        if group.status() == Status::Forming && self.declined.is_none() {
            self.declined = take_decline(tcp)?;
            if self.declined.is_some() {
                group.with(|machine, now| machine.handle_decline(now));
            }
        }
        match group.status() {
            Status::Forming => return Ok(None),
            Status::Usable => {}
            Status::Over => return self.ended(tcp, group.ending()).map(Some),
        }
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let on = pending.link.key();
        match pending.join(&self.established.peer, on) {
            Ok(()) => finish_established(pending, self.established).map(Some),
            // For the peer the connection is on SMC already (CLC-63, ERR-5).
            Err(error) => Err(Broken::Late(reason_of(&error))),
        }
    }

    fn ended(
        &mut self,
        tcp: &TcpStream,
        ending: Option<(Reason, Ending)>,
    ) -> Result<Outcome, Broken> {
        self.pending = None;
        let (reason, ending) = ending.unwrap_or((Reason::NoConfirmLink, Ending::Reset));
        let reason = reason_of_end(reason);
        match (ending, self.declined) {
            (Ending::Fallback, Some(peer)) => {
                Ok(Outcome::Tcp(FallbackReason::DeclinedByPeer(peer).into()))
            }
            // This end has not confirmed the link: LLC could not be sent, or brought no answer, as
            // where UDP port 4791 is closed (ERR-2, ERR-15, ERR-16, SEC-12).
            (Ending::Fallback, None) => match self.established.decline(&self.config, reason) {
                Some(decline) => send_decline(tcp, decline),
                None => Err(Broken::Late(reason)),
            },
            _ => Err(Broken::Late(reason)),
        }
    }
}

/// Takes a Decline in the place of LLC messages (ERR-46). Anything else is data, forbidden to a peer
/// here.
fn take_decline(tcp: &TcpStream) -> Result<Option<PeerDecline>, Broken> {
    let mut bytes = [0u8; DECLINE];
    let n = match peek(tcp, &mut bytes)? {
        None => return Ok(None),
        Some(0) => return Err(Broken::Io(std::io::ErrorKind::UnexpectedEof.into())),
        Some(n) => n,
    };
    // The length is in the header; TCP may bring the message in pieces.
    let (Some(&high), Some(&low)) = (bytes.get(5), bytes.get(6)) else { return Ok(None) };
    let len = usize::from(u16::from_be_bytes([high, low]));
    if !(8..=DECLINE).contains(&len) {
        return Err(Broken::Late(DeclineReason::Internal));
    }
    if n < len {
        return Ok(None);
    }
    let message = bytes.get(..len).unwrap_or_default();
    let Some(decline) = late_decline(message) else {
        return Err(Broken::Late(DeclineReason::Internal));
    };
    let mut taken = vec![0u8; len];
    rustix::net::recv(tcp, &mut taken[..], rustix::net::RecvFlags::DONTWAIT)
        .map_err(std::io::Error::from)?;
    Ok(Some(decline))
}
