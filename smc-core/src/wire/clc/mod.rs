//! Connection Layer Control: the messages on the TCP connection before any data (RFC 7609 s3.2).

mod accept_confirm;
mod decline;
mod gid_chid;
mod header;
mod limits;
mod proposal;
mod smcd;
mod smcr;

pub use accept_confirm::Fce;
pub use decline::{Decline, Diagnosis, TypeReasons};
pub use gid_chid::{GidChid, IsmOffer, IsmOffers};
pub use header::{
    Guess, HEADER_LEN, Kind, MAX_LEN, Peek, TRAILER_LEN, looks_like_opening, looks_like_proposal,
    peek_header,
};
pub use limits::Limits;
pub use proposal::{
    AssociatedIsm, IpPrefix, OfferV1, OfferV2, Proposal, SmcTypes, SmcdV2Offer, Subnet, VendorOffer,
};
pub use smcd::{SmcdV1, SmcdV2};
pub use smcr::{GidList, SmcrFce, SmcrLink, SmcrV1, SmcrV2};

use super::WireError;
use header::Header;

/// Most EIDs, GID-CHID entries, IPv6 prefixes and GID list entries in a message.
pub const MAX_ENTRIES: usize = 8;

/// SMC version of a CLC message.
///
/// Version nibbles above 2 are read as 2 where a later version may appear (CLC-6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// RFC 7609.
    V1,
    /// SMCv2.0 and v2.1; which of them is said by the release.
    V2,
}

impl Version {
    /// The number in the version nibble.
    pub const fn number(self) -> u8 {
        match self {
            Version::V1 => 1,
            Version::V2 => 2,
        }
    }
}

/// The two eye catchers, in EBCDIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EyeCatcher {
    /// "SMCR": all messages but SMC-D Accept and Confirm.
    #[default]
    Smcr,
    /// "SMCD": SMC-D Accept and Confirm; allowed in Decline (CLCV2-78).
    Smcd,
}

impl EyeCatcher {
    /// The four bytes.
    pub const fn bytes(self) -> [u8; 4] {
        match self {
            EyeCatcher::Smcr => [0xe2, 0xd4, 0xc3, 0xd9],
            EyeCatcher::Smcd => [0xe2, 0xd4, 0xc3, 0xc4],
        }
    }
}

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
    /// Reads one message that fills `bytes`, with the [`Limits`] of Linux.
    ///
    /// # Errors
    /// [`WireError`]; its [`reaction`](WireError::reaction) tells a protocol error from a Decline.
    pub fn parse(bytes: &[u8]) -> Result<Message, WireError> {
        Message::parse_with(bytes, &Limits::default())
    }

    /// Reads one message that fills `bytes`.
    ///
    /// # Errors
    /// As [`Message::parse`].
    pub fn parse_with(bytes: &[u8], limits: &Limits) -> Result<Message, WireError> {
        let header = Header::parse(bytes)?;
        header.check_extent(bytes)?;
        // Fields end where the trailer starts.
        let body = bytes.get(..header.end()).unwrap_or(bytes);
        match header.kind {
            Kind::Proposal => Proposal::parse_body(&header, body).map(Message::Proposal),
            Kind::Accept | Kind::Confirm => accept_confirm::parse_body(&header, body, limits),
            Kind::Decline => Decline::parse_body(&header, body).map(Message::Decline),
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
