// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names and codes of more than one message.

mod address;
mod code;
mod name;

pub use address::{Chid, DmbToken, Gid, GidV1, LinkId, Mac, PeerId};
pub use code::{Features, LinkLimits, Mtu, OsType, Psn, Qpn, Release, Rkey, SizeCode};
pub use name::{Eid, EidError, Hostname, HostnameError};
