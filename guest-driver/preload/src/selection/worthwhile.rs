// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether SMC is worthwhile for a connection that both ends could put on it, as far as earlier
//! connections of the program's processes tell ([`guest_driver::traffic`]).
//!
//! The client decides: if it does not ask for SMC, neither end does anything for it. A server learns
//! as well, for `smc stat`, and accepts whatever its clients propose.
//!
//! Of the connections that stay on TCP, one of 64 is a sample. The kernel knows what it was like, and
//! is asked when the program closes it. All else of it is the kernel's, as of the others: it has no
//! entry in the table of descriptors. So a close that the library does not see loses a sample, and
//! its place is used again.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use guest_driver::traffic::{Choice, Endpoint, EndpointKey, Observation, TrafficTable};
use guest_driver::{ConnectionInfo, SmcStream};

use crate::sys::{borrowed, leaked, publish, raw};
use crate::{config, fork};

/// It lives as long as the process.
static MEMORY: AtomicPtr<Memory> = AtomicPtr::new(std::ptr::null_mut());

/// A sample on TCP. A signal handler of the program may close it, so there is no lock.
struct Sample {
    /// The descriptor; [`NONE`] or [`CHANGING`].
    fd: AtomicI32,
    /// The kernel's number of the socket: the descriptor may have become another's.
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
/// The place that the next sample takes, plus the number of places once there was one.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The memory that `smc run` passed on.
struct Memory(Option<Arc<TrafficTable>>);

/// What was learned; the first call adopts it.
fn learned() -> Option<&'static Arc<TrafficTable>> {
    let adopted = || leaked(MEMORY.load(Ordering::Acquire));
    if adopted().is_none() {
        adopt();
    }
    adopted()?.0.as_ref()
}

#[cold]
fn adopt() {
    let Some(config) = config::get() else { return };
    if fork::shares_memory() {
        return;
    }
    let adopt = |fd| {
        let program = std::env::current_exe().unwrap_or_default();
        // If the program's parent has closed it, the number may be another file's.
        TrafficTable::adopt(borrowed(fd), &program).ok()
    };
    publish(&MEMORY, Memory(config.traffic.and_then(adopt)));
}

/// What was learned, for reports.
pub(super) fn table() -> Option<Arc<TrafficTable>> {
    learned().cloned()
}

/// A connection that is left to TCP.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlainConnection {
    sampled: Option<EndpointKey>,
    /// Whether the server has not spoken SMC the last time, although something answered for it.
    pub(super) by_server: bool,
}

/// Notes that a server has not answered a Proposal by a message of the handshake.
pub(super) fn note_plain(server: &SocketAddr) {
    if let Some(table) = learned() {
        table.note_plain(&Endpoint::Server(*server), raw::monotonic_micros());
    }
}

/// Leaves the next connection to a server to TCP, if SMC would be slower or the server does not speak
/// it.
pub(super) fn choose_tcp(server: &SocketAddr) -> Option<PlainConnection> {
    let (table, config) = (learned()?, config::get()?);
    let key = table.key(&Endpoint::Server(*server));
    if table.is_plain(key, raw::monotonic_micros) {
        return Some(PlainConnection { sampled: None, by_server: true });
    }
    match table.choose(key) {
        _ if config.forces(server) => None,
        Choice::Smc => None,
        Choice::Tcp => Some(PlainConnection { sampled: None, by_server: false }),
        Choice::Sample => {
            // Those that are still open may have become long by now.
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
            // It is the other thread's.
            return;
        }
        sample.cookie.store(cookie(fd), Ordering::Relaxed);
        sample.server.store(server.to_bits(), Ordering::Relaxed);
        sample.begun.store(raw::monotonic_micros(), Ordering::Relaxed);
        sample.fd.store(fd, Ordering::Release);
    }
}

/// The kernel's number of a socket; 0: it is none.
fn cookie(fd: c_int) -> u64 {
    rustix::net::sockopt::socket_cookie(borrowed(fd)).unwrap_or(0)
}

impl Sample {
    /// Tells what the connection is like so far.
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

/// The program closes a descriptor that the library does not know.
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

/// Counts a connection that was accepted at this address and whose client has not proposed SMC.
pub(super) fn count_tcp(local: &SocketAddr) {
    if let Some(table) = learned() {
        table.count_tcp(table.key(&Endpoint::Listener(*local)));
    }
}

/// Observes a connection that has come to SMC. Nobody has measured what SMC-R costs and gains, so
/// nothing is learned from it.
pub(super) fn observe(stream: &SmcStream, info: &ConnectionInfo, endpoint: Endpoint) {
    let (Some(table), ConnectionInfo::Smcd(_)) = (learned(), info) else { return };
    let forced = match &endpoint {
        Endpoint::Server(server) => config::get().is_some_and(|config| config.forces(server)),
        Endpoint::Listener(_) => false,
    };
    stream.observe(table.observe(&endpoint, forced));
}
