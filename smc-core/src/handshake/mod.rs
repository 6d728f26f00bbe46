// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The CLC handshake: two ends agree on SMC in three messages over TCP (RFC 7609 section 3.5).
//!
//! ```text
//!        client                                     server
//!        start ───────────── Proposal ────────────► AwaitProposal::handle
//!                                                    Selection: which device reaches the client?
//!        AwaitAccept::handle ◄──── Accept ───────── Selection::accept
//!        Accepted: register or take a DMB
//!        Accepted::confirm ─────── Confirm ────────► AwaitConfirm::handle
//!        Established                                 Established
//! ```
//!
//! One Proposal offers up to four types of SMC, and the server takes the best working one:
//!
//! | [`SmcKind`] | common to both ends | from |
//! |---|---|---|
//! | SMC-Dv2 | a fabric (CHID) and an EID | [`Config::devices`] |
//! | SMC-Dv1 | an IP subnet, and the fabric of its platform ISM devices | [`Route::ism`] |
//! | SMC-Rv2 | a user EID, and an IP route between the RDMA adapters | [`Route::rnic`] |
//! | SMC-Rv1 | an IP subnet, common to the RDMA adapters | [`Route::rnic`] |
//!
//! Parameters common to all connections are in [`Config`]; parameters of the TCP connection are a
//! [`Route`], given to [`start_on`] and [`AwaitProposal::handle_on`]. Without a route, and unless
//! [`Config::kinds`] says otherwise, only SMC-Dv2 is possible. [`Selection::choices`] has the types
//! in order of preference. The steps of SMC-R are structs of their own, because the terms differ:
//! [`Selection::accept_r`] and [`AwaitConfirmR`] at the server, [`ClientStep::OfferedR`] and
//! [`AcceptedR`] at the client, [`EstablishedR`] at both. The caller decides from its link groups
//! whether contact is the first one.
//!
//! Each awaited message has a struct, so a step out of turn does not compile; a message out of turn
//! is [`HandshakeError::OutOfTurn`]. Nothing here reads a socket, asks a device or reads a clock:
//! the caller moves the bytes (with [`ClcReader`]), answers questions, and watches the deadline.
//! Every handshake ends in one of these ways:
//!
//! | end | the caller's duty |
//! |---|---|
//! | [`Established`] | data goes through the DMBs; TCP stays open without data (CLC-63) |
//! | [`EstablishedR`] | data goes through the RMBs, at first contact once LLC has confirmed the link (ERR-46) |
//! | [`SendDecline`] | send the Decline; then [`AfterDecline`] says whether TCP takes over |
//! | [`PeerDecline`] | TCP takes over at once; the rest of the stream is data (CLC-51, CLC-56) |
//! | [`HandshakeError`] | break the TCP connection; no fallback (CLC-54, CLC-55, ERR-8) |
//!
//! ```
//! use std::sync::Arc;
//! use smc_core::handshake::*;
//! use smc_core::time::Tick;
//! use smc_core::wire::ids::{Chid, DmbToken, Eid, Gid, LinkId, PeerId, SizeCode};
//!
//! let host = |n: u8| {
//!     let mut config = Config::new(PeerId([n; 8]));
//!     config.ueids = vec![Eid::new("EXAMPLE").unwrap()];
//!     config.devices = vec![IsmDevice { chid: Chid(0xff00), gid: Gid([n; 16]) }];
//!     Arc::new(config)
//! };
//! let dmbe = |token| Dmbe { token: DmbToken(token), index: 0, size: SizeCode::MIN };
//! let now = Tick(0);
//!
//! let (client, proposal) = start(host(1), now).unwrap();
//! let server = AwaitProposal::new(host(2), now);
//! let ServerStep::Eligible(selection) = server.handle(&proposal) else { panic!() };
//! let candidate = selection.candidates()[0]; // ask the device whether it reaches candidate.peer
//! let (server, accept) = selection.accept(candidate, None, dmbe(22), LinkId([0; 4]), now);
//! let ClientStep::Offered(accepted) = client.handle(&accept, |_, _| None) else { panic!() };
//! let (here, confirm) = accepted.confirm(dmbe(11), LinkId([0; 4]));
//! let ConfirmStep::Established(there) = server.handle(&confirm) else { panic!() };
//! assert_eq!((here.peer.token, there.peer.token), (DmbToken(22), DmbToken(11)));
//! ```

mod client;
mod client_r;
mod code;
mod config;
mod decline;
mod error;
mod ism_device;
pub mod negotiate;
mod outcome;
mod peer_host;
mod reader;
mod rejected_types;
mod route;
mod send_decline;
mod server;
mod server_r;
mod smcr;

pub use client::{Accepted, AwaitAccept, ClientStep, start, start_claiming, start_on};
pub use client_r::AcceptedR;
pub use code::DeclineCode;
pub use config::{Config, DEFAULT_WAIT, Kinds, MAX_OFFERED, Tolerance, Unpaired};
pub use decline::{DeclineReason, FallbackReason, PeerDecline, SmcKind};
pub use error::{Awaited, HandshakeError};
pub use ism_device::IsmDevice;
pub use negotiate::{Candidate, Terms};
pub use outcome::{Dmbe, Established, late_decline};
pub use peer_host::PeerHost;
pub use reader::ClcReader;
pub use route::{IpSubnet, Rnic, Route};
pub use send_decline::{AfterDecline, SendDecline};
pub use server::{AwaitConfirm, AwaitProposal, Choice, ConfirmStep, Selection, ServerStep};
pub use server_r::{AwaitConfirmR, ConfirmStepR};
pub use smcr::{EstablishedR, KnownLink, LinkEnd, PeerLink, PeerRnic, Role, TermsR};
