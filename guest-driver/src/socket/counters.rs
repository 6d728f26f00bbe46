// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connections of a stack since its start, by their carrier.

use std::sync::atomic::{AtomicU64, Ordering};

use super::statistics::TcpConnections;
use crate::handshake::EstablishedConn;
use smc_info::Fallback;

/// Counts of connections, and the connections on TCP.
#[derive(Default)]
pub(super) struct Counters {
    smc: AtomicU64,
    smc_r: AtomicU64,
    tcp: AtomicU64,
    broken: AtomicU64,
    tcp_connections: TcpConnections,
}

impl Counters {
    /// Counts a connection on SMC.
    pub(super) fn count_smc(&self, established: &EstablishedConn) {
        self.smc.fetch_add(1, Ordering::Relaxed);
        if matches!(established, EstablishedConn::R(_)) {
            self.smc_r.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a connection on TCP.
    pub(super) fn count_tcp(&self, why: &Fallback) {
        self.tcp.fetch_add(1, Ordering::Relaxed);
        self.tcp_connections.count(why);
    }

    /// Counts a handshake that broke the connection.
    pub(super) fn count_broken(&self) {
        self.broken.fetch_add(1, Ordering::Relaxed);
    }

    /// Connections on SMC, those on SMC-R among them, connections on TCP, and broken ones.
    pub(super) fn totals(&self) -> [u64; 4] {
        [&self.smc, &self.smc_r, &self.tcp, &self.broken].map(|count| count.load(Ordering::Relaxed))
    }

    /// The connections on TCP.
    pub(super) fn tcp_connections(&self) -> &TcpConnections {
        &self.tcp_connections
    }
}
