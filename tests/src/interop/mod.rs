// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two ends, each of this project's sockets, the kernel's AF_SMC, or TCP: programs for tests of
//! interoperability.
//!
//! ```text
//! smc-test-peer interop serve WHO ADDRESS    listens; says "ready", then a report per connection
//! smc-test-peer interop talk WHO ADDRESS     reads its orders, a line each; answers with a report
//! smc-test-peer interop echo WHO ADDRESS     listens; says "ready"; echoes each connection
//! smc-test-peer interop call WHO ADDRESS     connects, echoes, and connects again
//! ```
//!
//! WHO is `tcp`, `linux` or `rust`, the last one with options: `rust:v1,links=1` (see [`Net::new`]).
//! An order is the name of a cell, see `cells`, a number of bytes, and a seed of their pattern. For an
//! order the client opens a connection, tells the server the order, and both do their halves. Reports
//! are [`Report`]s as JSON lines.

mod cells;
mod echo;
mod net;
mod programs;
mod report;

pub use cells::{CELLS, ENOUGH};
pub use echo::{call, echo};
pub use net::{Door, Line, Net};
pub use programs::{serve, talk};
pub use report::{Carrier, Digest, Report};
