// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared Memory Communications (RFC 7609 and SMCv2.1) without IO.
//!
//! SMC keeps TCP's sockets and replaces the path: after an ordinary TCP connect both ends exchange
//! three CLC messages, and from then on bytes move through buffers writable by the peer. This crate
//! contains the rules of the protocol and no access to the outside: no socket, no thread, no clock
//! (`now` is an argument) and no `unsafe`. Bytes and events go in, bytes and decisions come out;
//! the owner of the socket and the device executes them.
//!
//! | module | contents |
//! |---|---|
//! | [`wire`] | layout of bytes: CLC, LLC, CDC, ids, cursors; strict parsing with an error per kind of fault |
//! | [`handshake`] | the CLC exchange: one struct per awaited message, pure negotiation, the decline table |
//! | [`connection`] | one socket: cursors, window, ring spans, urgent data, close states |
//! | [`carrier`] | one connection: from its ring to TCP and to a new ring, by records on TCP |
//! | [`stream`] | one end of a connection as two values, on its ring, between, or on TCP |
//! | [`link_group`] | the LLC exchanges: links, keys of buffers, failover, the life of a link group of SMC-R |
//! | [`benefit`] | whether SMC pays for the connections of an endpoint |
//! | [`time`] | moments as plain numbers of microseconds |
//! | `testing` | builders and a fabric in memory with faults and a seed (feature `testing`) |
//!
//! `handshake`, `connection`, `carrier` and `link_group` use `wire` and `time`, but not each other.
//! `stream` uses `connection` and `carrier`. `wire` and `time` use no other module.
#![forbid(unsafe_code)]

pub mod benefit;
pub mod carrier;
pub mod connection;
pub mod handshake;
pub mod link_group;
pub mod stream;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod time;
pub mod wire;

// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
