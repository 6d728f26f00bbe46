// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ends here or elsewhere. Conformance tests use them instead of stacks, listeners and streams, so the
//! same test runs in one process, between two, and between two machines.
//!
//! Each type has the calls of its counterpart in the library. For an end elsewhere, the call goes over
//! (see [`crate::agent`]), and its result, bytes and errors come back.

mod host;
mod site;
mod stream;

pub use host::{Host, Listener, Pair};
pub use site::{Place, Role, Site, run};
pub use stream::End;

pub use crate::agent::wire::{How, Nature};
