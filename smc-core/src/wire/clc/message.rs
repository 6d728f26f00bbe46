// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Any CLC message, and the choice of the layout.

use super::accept_confirm::{TYPE_D, TYPE_R};
use super::decline::Decline;
use super::header::{EyeCatcher, Header, Kind, Version};
use super::limits::Limits;
use super::proposal::Proposal;
use super::smcd::{SmcdV1, SmcdV2};
use super::smcr::{SmcrV1, SmcrV2};
use crate::wire::WireError;

/// Any CLC message.
#[expect(
    clippy::large_enum_variant,
    reason = "one lives at a time, for as long as a handshake step"
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The client's offer.
    Proposal(Proposal),
    /// SMC-Rv1 Accept, 68 bytes.
    AcceptR1(SmcrV1),
    /// SMC-Rv2 Accept, 108 bytes, 160 with first contact extension.
    AcceptR2(SmcrV2),
    /// SMC-Dv1 Accept, 48 bytes.
    AcceptD1(SmcdV1),
    /// SMC-Dv2 Accept, 78 bytes, 114 or 130 with first contact extension.
    AcceptD2(SmcdV2),
    /// SMC-Rv1 Confirm, 68 bytes.
    ConfirmR1(SmcrV1),
    /// SMC-Rv2 Confirm, 108 bytes, 164 + 16n with first contact extension and n GIDs.
    ConfirmR2(SmcrV2),
    /// SMC-Dv1 Confirm, 48 bytes.
    ConfirmD1(SmcdV1),
    /// SMC-Dv2 Confirm, lengths as its Accept.
    ConfirmD2(SmcdV2),
    /// Refusal in place of any other message (CLC-51).
    Decline(Decline),
}

impl Message {
    /// Reads one message filling `bytes`, with the [`Limits`] of Linux.
    ///
    /// # Errors
    /// [`WireError`]; its [`reaction`](WireError::reaction) distinguishes a protocol error from
    /// a Decline.
    pub fn parse(bytes: &[u8]) -> Result<Message, WireError> {
        Message::parse_with(bytes, &Limits::default())
    }

    /// Reads one message filling `bytes`.
    ///
    /// # Errors
    /// Like [`Message::parse`].
    pub fn parse_with(bytes: &[u8], limits: &Limits) -> Result<Message, WireError> {
        let header = Header::parse(bytes)?;
        header.check_extent(bytes)?;
        // Fields end where the trailer starts.
        let body = bytes.get(..header.end()).unwrap_or(bytes);
        match header.kind {
            Kind::Proposal => Proposal::parse_body(&header, body).map(Message::Proposal),
            Kind::Accept | Kind::Confirm => parse_accept_confirm(&header, body, limits),
            Kind::Decline => Decline::parse_body(&header, body).map(Message::Decline),
        }
    }

    /// The type in the header.
    pub fn kind(&self) -> Kind {
        match self {
            Message::Proposal(_) => Kind::Proposal,
            Message::AcceptR1(_)
            | Message::AcceptR2(_)
            | Message::AcceptD1(_)
            | Message::AcceptD2(_) => Kind::Accept,
            Message::ConfirmR1(_)
            | Message::ConfirmR2(_)
            | Message::ConfirmD1(_)
            | Message::ConfirmD2(_) => Kind::Confirm,
            Message::Decline(_) => Kind::Decline,
        }
    }

    /// The bytes of the message.
    pub fn emit(&self) -> Vec<u8> {
        match self {
            Message::Proposal(proposal) => proposal.emit(),
            Message::AcceptR1(accept) => accept.emit(Kind::Accept),
            Message::AcceptR2(accept) => accept.emit(Kind::Accept),
            Message::AcceptD1(accept) => accept.emit(Kind::Accept),
            Message::AcceptD2(accept) => accept.emit(Kind::Accept),
            Message::ConfirmR1(confirm) => confirm.emit(Kind::Confirm),
            Message::ConfirmR2(confirm) => confirm.emit(Kind::Confirm),
            Message::ConfirmD1(confirm) => confirm.emit(Kind::Confirm),
            Message::ConfirmD2(confirm) => confirm.emit(Kind::Confirm),
            Message::Decline(decline) => decline.emit(),
        }
    }
}

/// The eye catcher decides between SMC-R and SMC-D; the type bits must agree, except in SMC-Rv1,
/// where RFC 7609 has them reserved.
fn parse_accept_confirm(
    header: &Header,
    body: &[u8],
    limits: &Limits,
) -> Result<Message, WireError> {
    let accept = header.kind == Kind::Accept;
    match (header.eye, header.version(), header.type_bits()) {
        (EyeCatcher::Smcr, Version::V1, _) => SmcrV1::parse_body(header, body, limits)
            .map(if accept { Message::AcceptR1 } else { Message::ConfirmR1 }),
        (EyeCatcher::Smcr, Version::V2, TYPE_R) => SmcrV2::parse_body(header, body, limits)
            .map(if accept { Message::AcceptR2 } else { Message::ConfirmR2 }),
        (EyeCatcher::Smcd, Version::V1, TYPE_D) => SmcdV1::parse_body(header, body, limits)
            .map(if accept { Message::AcceptD1 } else { Message::ConfirmD1 }),
        (EyeCatcher::Smcd, Version::V2, TYPE_D) => SmcdV2::parse_body(header, body, limits)
            .map(if accept { Message::AcceptD2 } else { Message::ConfirmD2 }),
        _ => Err(header.eye_mismatch()),
    }
}
