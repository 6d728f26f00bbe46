// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ends that are here or elsewhere: what conformance tests use instead of stacks, listeners and
//! streams, so that the same test runs in one process, between two, and between two machines.
//!
//! Each has the calls of what it stands for. If it is elsewhere, the call goes there (see
//! [`crate::agent`]) and its result, bytes and errors come back.

mod host;
mod site;
mod stream;

pub use host::{Host, Listener, Pair};
pub use site::{Place, Role, Site, run};
pub use stream::End;

pub use crate::agent::wire::{How, Nature};
