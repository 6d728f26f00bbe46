// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connection Layer Control: the messages on the TCP connection before any data (RFC 7609 s3.2).

mod accept_confirm;
mod carrier_options;
mod decline;
mod gid_chid;
mod header;
mod limits;
mod message;
mod proposal;
mod smcd;
mod smcr;

pub use accept_confirm::Fce;
pub use carrier_options::{CarrierFeatures, CarrierOptions};
pub use decline::{Decline, Diagnosis, TypeReasons};
pub use gid_chid::{GidChid, IsmOffer, IsmOffers};
pub use header::{
    EyeCatcher, Guess, HEADER_LEN, Kind, MAX_LEN, Peek, TRAILER_LEN, Version, looks_like_clc,
    peek_header,
};
pub use limits::{Limits, MAX_ENTRIES};
pub use message::Message;
pub use proposal::{
    AssociatedIsm, IpPrefix, OfferV1, OfferV2, Proposal, SmcTypes, SmcdV2Offer, Subnet, VendorOffer,
};
pub use smcd::{SmcdV1, SmcdV2};
pub use smcr::{GidList, SmcrFce, SmcrLink, SmcrV1, SmcrV2};
