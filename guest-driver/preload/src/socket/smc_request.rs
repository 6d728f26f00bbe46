// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a client asks its server for SMC.

use std::net::SocketAddr;

use smc_rendezvous::OptionRequest;

/// How a client asks its server for SMC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SmcRequest {
    /// The server.
    pub(crate) server: SocketAddr,
    /// The question of TCP option 254. `None`: the server has declined several times in a row, so
    /// the client does not ask.
    pub(crate) asked: Option<OptionRequest>,
    /// The settings list the server as a speaker of SMC.
    pub(crate) listed: bool,
    /// The answer of TCP option 254, once TCP is connected: whether the server waits for a message.
    pub(crate) awaited: Option<bool>,
}
