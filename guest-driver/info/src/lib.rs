// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod connection;
mod fallback;
mod moved;
mod smcr;
mod snapshot;
mod text;

pub use connection::{ConnectionInfo, SmcdInfo};
pub use fallback::Fallback;
pub use moved::MovedCounts;
pub use smcr::{LinkGroupInfo, LinkInfo, RnicInfo, SmcrInfo};
pub use snapshot::{CarrierChanges, ConnectionSnapshot, CurrentCarrier, Cursors};
pub use text::roce_gid_text as show_gid;
