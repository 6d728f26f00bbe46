// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rules of agreement between two ends: pure functions without state.
//!
//! - [`offer`]: the contents of a client's Proposal;
//! - [`evaluate`]: a server's evaluation of a Proposal, type by type;
//! - [`check_accept`]: a client's check of the server's choice;
//! - [`check_confirm`]: a server's check that the client repeats the choice.
//!
//! The structs for awaited messages, such as [`AwaitAccept`](super::AwaitAccept), call these in
//! order.

mod agree;
mod agree_r;
mod limits;
mod matches;
mod offer;
mod refusal;
mod select;
mod select_route;
mod terms;

pub use super::rejected_types::RejectedTypes;
pub use agree::{Agreed, check_accept, check_accept_v1, check_confirm};
pub(super) use agree_r::kind_r;
pub use agree_r::{MessageR, check_accept_r, check_confirm_r};
pub use limits::{final_limits, negotiate_limits};
pub use matches::{Candidate, SmcdMatch, SmcrMatch};
pub use offer::{Offer, offer};
pub use refusal::Refusal;
pub use select::{Evaluation, evaluate};
pub use terms::Terms;
