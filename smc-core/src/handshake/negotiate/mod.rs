//! Who may talk to whom, and on what terms: values in, values out, nothing remembered.
//!
//! - [`offer`]: what a client puts into its Proposal;
//! - [`evaluate`]: what a server makes of a Proposal, type by type;
//! - [`check_accept`]: what a client thinks of the server's choice;
//! - [`check_confirm`]: whether a client repeats what the server chose.
//!
//! The structs that await a message, such as [`AwaitAccept`](super::AwaitAccept), put these in
//! order.

mod agree;
mod agree_r;
mod limits;
mod offer;
mod select;
mod select_route;

pub use agree::{Agreed, Refusal, check_accept, check_accept_v1, check_confirm};
pub(super) use agree_r::kind_r;
pub use agree_r::{MessageR, check_accept_r, check_confirm_r};
pub use limits::{final_limits, negotiate_limits};
pub use offer::{Offer, offer};
pub use select::{Candidate, Evaluation, Refusals, SmcdMatch, evaluate};
pub use select_route::SmcrMatch;

use crate::wire::ids::{Features, Release};

/// What holds between two ends for as long as they know each other (CLCV2-50).
///
/// Agreed at first contact and kept by the caller per (CHID, GID); later handshakes do not carry
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The lower of the two releases (CLCV2-36, CLCV2-86).
    pub release: Release,
    /// The features that both ends announced (CLCV2-61).
    pub features: Features,
}

impl Terms {
    /// What SMC-D version 1 agrees on: nothing.
    pub const V1: Terms = Terms { release: Release::V2_0, features: Features::empty() };
}
