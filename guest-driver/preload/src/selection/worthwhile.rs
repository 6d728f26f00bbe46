// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether SMC is worthwhile for a connection that both ends could put on SMC, judged by earlier
//! connections of the program's processes ([`guest_driver::traffic`]).
//!
//! The client decides: without a client's question neither end spends anything on SMC. A server
//! learns as well, for `smc stat`, and accepts any Proposal of its clients.
//!
//! Of the connections left to TCP, one of 64 is a sample. When the program closes a sample, the
//! library asks the kernel for the figures of the connection. A sample has no entry in the table of
//! descriptors, and the kernel does everything else. So a close unseen by the library loses the
//! sample, and its place is used again.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use guest_driver::traffic::{Choice, Endpoint, EndpointKey, GainsOnSmc, Observation, TrafficTable};
use guest_driver::{ConnectionInfo, SmcStream};
use ism_sys::OnceBox;

use crate::sys::{borrowed, raw};
use crate::{config, fork};

/// The table of earlier connections, for the life of the process.
static MEMORY: OnceBox<Option<Arc<TrafficTable>>> = OnceBox::new();

/// A sample on TCP. A signal handler of the program may close the sample, so there is no lock.
struct Sample {
    /// The descriptor; [`NONE`] or [`CHANGING`].
    fd: AtomicI32,
    /// The kernel's number of the socket: the descriptor may have become another socket's.
    cookie: AtomicU64,
    server: AtomicU64,
    /// Microseconds of the clock.
    begun: AtomicU64,
}

const NONE: c_int = -1;
/// A thread writes the other words.
const CHANGING: c_int = -2;

static SAMPLES: [Sample; 16] = [const {
    Sample {
        fd: AtomicI32::new(NONE),
        cookie: AtomicU64::new(0),
        server: AtomicU64::new(0),
        begun: AtomicU64::new(0),
    }
}; 16];
/// Number of samples so far. Modulo the number of places it is the place of the next sample.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The gains of SMC left to TCP until this process has a device.
static LEFT: GainsOnSmc = GainsOnSmc::new();

/// The table of earlier connections; the first call adopts the table.
fn learned() -> Option<&'static Arc<TrafficTable>> {
    match MEMORY.get() {
        Some(memory) => memory.as_ref(),
        None => adopt(),
    }
}

#[cold]
fn adopt() -> Option<&'static Arc<TrafficTable>> {
    let config = config::get()?;
    if fork::shares_memory() {
        return None;
    }
    let adopt = |fd| {
        let program = std::env::current_exe().unwrap_or_default();
        // If the program's parent has closed the descriptor, the number may be another file's.
        TrafficTable::adopt(borrowed(fd), &program, config.learned.as_deref()).ok()
    };
    MEMORY.get_or_init(|| config.traffic.and_then(adopt)).as_ref()
}

/// The table of earlier connections, for reports.
pub(super) fn table() -> Option<Arc<TrafficTable>> {
    learned().cloned()
}

/// A connection left to TCP.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlainConnection {
    sampled: Option<EndpointKey>,
    /// Whether the server's program did not speak SMC the last time, although the option was
    /// answered.
    pub(super) by_server: bool,
}

/// Notes a server's answer to a Proposal other than a message of the handshake.
pub(super) fn note_plain(server: &SocketAddr) {
    if let Some(table) = learned() {
        table.note_plain(&Endpoint::Server(*server), raw::monotonic_micros());
    }
}

/// Leaves the next connection to a server to TCP, if SMC would be slower, or a device for it while
/// the process has none, or if the server does not speak SMC.
pub(super) fn choose_tcp(server: &SocketAddr, has_device: bool) -> Option<PlainConnection> {
    let (table, config) = (learned()?, config::get()?);
    let key = table.key(&Endpoint::Server(*server));
    if table.is_plain(key, raw::monotonic_micros) {
        return Some(PlainConnection { sampled: None, by_server: true });
    }
    let is_free = has_device || config.forces(server);
    match table.choose(key, Some(&LEFT).filter(|_| !is_free)) {
        _ if config.forces(server) => None,
        Choice::Smc => None,
        Choice::Tcp => Some(PlainConnection { sampled: None, by_server: false }),
        Choice::Sample => {
            // Samples still open may have become long by now.
            let open = |sample: &&Sample| sample.server.load(Ordering::Relaxed) == key.to_bits();
            SAMPLES.iter().filter(open).for_each(|sample| {
                sample.observe(sample.fd.load(Ordering::Acquire));
            });
            Some(PlainConnection { sampled: Some(key), by_server: false })
        }
    }
}

impl PlainConnection {
    /// The connection is made, or about to be.
    pub(super) fn connected(self, fd: c_int) {
        let Some(server) = self.sampled else { return };
        let place = NEXT.fetch_add(1, Ordering::Relaxed) % SAMPLES.len();
        let Some(sample) = SAMPLES.get(place) else { return };
        if sample.fd.swap(CHANGING, Ordering::Acquire) == CHANGING {
            // Another thread takes the place.
            return;
        }
        sample.cookie.store(cookie(fd), Ordering::Relaxed);
        sample.server.store(server.to_bits(), Ordering::Relaxed);
        sample.begun.store(raw::monotonic_micros(), Ordering::Relaxed);
        sample.fd.store(fd, Ordering::Release);
    }
}

/// The kernel's number of a socket; 0: not a socket.
fn cookie(fd: c_int) -> u64 {
    rustix::net::sockopt::socket_cookie(borrowed(fd)).unwrap_or(0)
}

impl Sample {
    /// Records the figures of the connection so far.
    fn observe(&self, fd: c_int) {
        if fd < 0 || cookie(fd) != self.cookie.load(Ordering::Relaxed) {
            return;
        }
        if let (Some(table), Some((bytes, round_trips))) = (learned(), raw::tcp_traffic(fd)) {
            let begun = self.begun.load(Ordering::Relaxed);
            let lifetime = Duration::from_micros(raw::monotonic_micros().saturating_sub(begun));
            let server = EndpointKey::from_bits(self.server.load(Ordering::Relaxed));
            table.add_sample(server, &Observation { bytes, round_trips, lifetime });
        }
    }

    /// The connection ends.
    fn end(&self, fd: c_int) {
        if self.fd.load(Ordering::Relaxed) != fd {
            return;
        }
        let ours = self.fd.compare_exchange(fd, CHANGING, Ordering::Acquire, Ordering::Relaxed);
        if ours.is_ok() {
            self.observe(fd);
            self.fd.store(NONE, Ordering::Release);
        }
    }
}

/// The program closes a descriptor without an entry.
#[inline]
pub(crate) fn note_close(fd: c_int) {
    if NEXT.load(Ordering::Relaxed) != 0 && fd >= 0 {
        SAMPLES.iter().for_each(|sample| sample.end(fd));
    }
}

/// The process ends.
pub(crate) fn note_exit() {
    SAMPLES.iter().for_each(|sample| sample.end(sample.fd.load(Ordering::Relaxed).max(0)));
}

/// Counts a connection accepted at this address from a client without a Proposal.
pub(super) fn count_tcp(local: &SocketAddr) {
    if let Some(table) = learned() {
        table.count_tcp(table.key(&Endpoint::Listener(*local)));
    }
}

/// Observes a connection on SMC. The cost and gain of SMC-R are not measured, so nothing is learned
/// from SMC-R.
pub(super) fn observe(stream: &SmcStream, info: &ConnectionInfo, endpoint: Endpoint) {
    let (Some(table), ConnectionInfo::Smcd(_)) = (learned(), info) else { return };
    let forced = match &endpoint {
        Endpoint::Server(server) => config::get().is_some_and(|config| config.forces(server)),
        Endpoint::Listener(_) => false,
    };
    stream.observe(table.observe(&endpoint, forced));
}
