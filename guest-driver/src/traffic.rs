// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of the connections of each server and each listener, in memory shared by the processes of
//! one program.
//!
//! `smc run` makes the memory ([`create`]), and the descendants of the program inherit it. So a server
//! with forks, or a program with a short-lived process for each connection, learns as one process
//! would. [`smc_core::benefit`] decides whether SMC pays; its estimates are kept here. The knowledge about
//! servers also outlives the program for a while, in a file of the user (`saved`).
//!
//! The table has a fixed size. Without room left, a new endpoint replaces the one longest without a
//! connection. The estimates are guesses about benefit, and no connection depends on them: the words
//! are independent of each other, no lock guards them, and a process may find anything in them.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
pub use smc_core::benefit::{Choice, CostModel, GainsOnSmc, Observation};
use smc_core::benefit::{Estimate, LEARNED, SAMPLE_INTERVAL};

use ism_sys::{SharedMem, SharedSlice, check_sealed, sealed_memfd};

use layout::{ENTRY_SIZE, GROUPS, MAGIC, SIZE, WAYS, entry, group};
use saved::TrafficFile;

mod layout;
mod saved;

/// Lowest numbers for a descriptor to be passed on, above the usual numbers of programs. The first one
/// within the limit of the process is used.
const PASSED_FROM: [i32; 3] = [700, 100, 3];

/// Words of the header.
mod header {
    pub(super) const MAGIC: usize = 0;
    /// A random number to tell tables apart.
    pub(super) const ID: usize = 1;
    /// Connections so far, as a clock for [`super::entry::USED`].
    pub(super) const CLOCK: usize = 2;
}

/// A server, or a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "end", content = "address", rename_all = "lowercase")]
pub enum Endpoint {
    /// The server of a client's connections, by its address.
    Server(SocketAddr),
    /// A listener of this program, by the address used by its clients.
    Listener(SocketAddr),
}

/// An endpoint of one program, as a number. A key made by [`EndpointKey::from_bits`] of any number is
/// at worst another endpoint's.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointKey(u64);

impl EndpointKey {
    /// The key of [`EndpointKey::to_bits`].
    pub const fn from_bits(bits: u64) -> EndpointKey {
        EndpointKey(bits)
    }

    /// The key as a number.
    pub const fn to_bits(self) -> u64 {
        self.0
    }
}

/// The statistics of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointTraffic {
    /// The number of the table shared by processes, in the report of each of them.
    pub table: u64,
    /// The endpoint.
    #[serde(flatten)]
    pub endpoint: Endpoint,
    /// Whether connections stay on TCP.
    pub on_tcp: bool,
    /// Whether enough connections have ended for a choice.
    pub learned: bool,
    /// Whether a rule forces SMC.
    pub forced: bool,
    /// Mean gain of a connection, thousandths of the cost of SMC's set-up. Below 1,000 TCP is faster.
    pub gain: u32,
    /// Connections on SMC.
    pub smc: u64,
    /// Connections left to TCP, or without a Proposal of the client.
    pub tcp: u64,
    /// Observed connections among these.
    pub samples: u64,
    /// Mean bytes of a connection, both directions together.
    pub bytes: u64,
    /// Mean round trips.
    pub round_trips: u64,
    /// Mean lifetime, microseconds.
    pub lifetime_us: u64,
}

/// The memory for a table, as a descriptor to be inherited by programs. Its number goes to
/// [`TrafficTable::adopt`] of such a program. `saved`: the file with the knowledge of earlier programs, made
/// if missing. A file with other owners or permissions is not used.
///
/// # Errors
/// No memory or no descriptor is left.
pub fn create(saved: Option<&Path>) -> io::Result<OwnedFd> {
    let memory = sealed_memfd("smc-traffic", SIZE as u64)?;
    let mut id = [0u8; 8];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    let table = TrafficTable::map(&memory, 0)?;
    let known = saved.map(|path| TrafficFile::new(path).load()).transpose();
    let known = known.inspect_err(|error| tracing::debug!(%error, "nothing is remembered"));
    for (at, words) in known.ok().flatten().into_iter().flatten() {
        for (word, value) in words.into_iter().enumerate() {
            table.word(at, word).store(value, Ordering::Relaxed);
        }
    }
    table.header(header::ID).store(u64::from_ne_bytes(id), Ordering::Relaxed);
    table.header(header::MAGIC).store(MAGIC, Ordering::Release);
    let from = |lowest: &i32| rustix::io::fcntl_dupfd_cloexec(&memory, *lowest).ok();
    let beyond = ism_sys::duplicate_beyond_limit(&memory).ok();
    let high = beyond.or_else(|| PASSED_FROM.iter().find_map(from));
    let high = high.ok_or(rustix::io::Errno::MFILE)?;
    rustix::io::fcntl_setfd(&high, rustix::io::FdFlags::empty())?;
    Ok(high)
}

/// The table.
#[derive(Debug)]
pub struct TrafficTable {
    memory: SharedSlice,
    /// A hash of the program. Other programs of the same user have entries of their own.
    program: u64,
    /// The file for later programs.
    saved: Option<TrafficFile>,
    /// Whether this process has left a connection to TCP.
    leaves: AtomicBool,
    /// The word for an impossible index.
    none: AtomicU64,
}

#[doc(hidden)]
impl TrafficTable {
    /// Adopts memory inherited by a process. `program`: the path of its executable. `saved`: the file given
    /// to [`create`].
    ///
    /// # Errors
    /// The descriptor was not made by [`create`].
    pub fn adopt(
        memory: impl AsFd,
        program: &Path,
        saved: Option<&Path>,
    ) -> io::Result<Arc<TrafficTable>> {
        check_sealed(memory.as_fd(), SIZE as u64)?;
        let mut table = Self::map(memory, hash(program))?;
        table.saved = saved.map(TrafficFile::new);
        if table.header(header::MAGIC).load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Arc::new(table))
    }

    fn map(memory: impl AsFd, program: u64) -> io::Result<TrafficTable> {
        let memory = SharedMem::from_fd(memory, SIZE)?;
        let memory = memory.slice(0, SIZE).map_err(io::Error::other)?;
        let (leaves, none) = (AtomicBool::new(false), AtomicU64::new(0));
        Ok(TrafficTable { memory, program, saved: None, leaves, none })
    }

    /// Notes that a server has not answered a Proposal with a CLC message: the server does not speak
    /// SMC, regardless of an answer to TCP option 254. For a while [`TrafficTable::is_plain`] returns
    /// `true`, each time twice as long. `now`: microseconds of the monotonic clock.
    pub fn note_plain(&self, server: &Endpoint, now: u64) {
        let EndpointKey(hash) = self.key(server);
        let at = self.find(hash).unwrap_or_else(|| self.make(hash, server));
        let word = self.word(at, entry::PLAIN);
        let before = PlainPause::from_bits(word.load(Ordering::Relaxed));
        word.store(before.next(now).to_bits(), Ordering::Relaxed);
        self.note_use(at);
        self.save(at);
    }

    /// Whether [`TrafficTable::note_plain`] was called for a server a short time ago. `now`: as there.
    pub fn is_plain(&self, server: EndpointKey, now: impl FnOnce() -> u64) -> bool {
        self.find(server.0).is_some_and(|at| {
            let word = self.word(at, entry::PLAIN).load(Ordering::Relaxed);
            word != 0 && PlainPause::from_bits(word).holds(now())
        })
    }

    /// The carrier for the next connection of a client to a server. `missed`: of a process without a
    /// device.
    pub fn choose(&self, server: EndpointKey, missed: Option<&GainsOnSmc>) -> Choice {
        let Some(at) = self.find(server.0) else { return Choice::Smc };
        let get = |word| self.word(at, word).load(Ordering::Relaxed);
        let known = Estimate::from_bits(get(entry::ESTIMATE));
        let lifetime = Duration::from_micros(get(entry::AVERAGES + 2));
        let without_device = !known.is_on_tcp()
            && missed.is_some_and(|missed| known.is_below_opening(lifetime, missed));
        let choice = self.update(at, |estimate| estimate.choose(without_device));
        match choice {
            Choice::Smc => return choice,
            Choice::Tcp => {}
            Choice::Sample => {
                self.word(at, entry::SAMPLES).fetch_add(1, Ordering::Relaxed);
            }
        }
        self.word(at, entry::TCP).fetch_add(1, Ordering::Relaxed);
        self.note_use(at);
        // Programs with one connection each would otherwise never come to a sample.
        if !self.leaves.swap(true, Ordering::Relaxed) {
            self.save(at);
        }
        choice
    }

    /// The key of an endpoint for the other calls.
    pub fn key(&self, endpoint: &Endpoint) -> EndpointKey {
        EndpointKey(hash((self.program, endpoint)))
    }

    /// Adds a sample, or the present state of one.
    pub fn add_sample(&self, endpoint: EndpointKey, seen: &Observation) {
        if let Some(at) = self.find(endpoint.0) {
            let model = match self.word(at, entry::GUEST).load(Ordering::Relaxed) {
                0 => &CostModel::HOST,
                _ => &CostModel::GUEST,
            };
            self.ended(at, seen, model);
        }
    }

    /// Counts a connection to a listener on TCP.
    pub fn count_tcp(&self, listener: EndpointKey) {
        if let Some(at) = self.find(listener.0) {
            self.word(at, entry::TCP).fetch_add(1, Ordering::Relaxed);
            self.note_use(at);
        }
    }

    /// Begins to observe a connection on SMC. `forced`: by a rule.
    pub fn observe(self: &Arc<Self>, endpoint: &Endpoint, forced: bool) -> ConnectionObserver {
        let EndpointKey(hash) = self.key(endpoint);
        let at = self.find(hash).unwrap_or_else(|| self.make(hash, endpoint));
        self.word(at, entry::SMC).fetch_add(1, Ordering::Relaxed);
        self.word(at, entry::PLAIN).store(0, Ordering::Relaxed);
        self.word(at, entry::FORCED).store(forced.into(), Ordering::Relaxed);
        self.note_use(at);
        ConnectionObserver { table: self.clone(), at, hash, begun: Instant::now() }
    }

    /// The statistics of the endpoints of this program.
    pub fn endpoints(&self) -> Vec<EndpointTraffic> {
        (0..GROUPS * WAYS).filter_map(|at| self.describe(at)).collect()
    }

    fn describe(&self, at: usize) -> Option<EndpointTraffic> {
        let get = |word| self.word(at, word).load(Ordering::Relaxed);
        if get(entry::HASH) == 0 || get(entry::PROGRAM) != self.program {
            return None;
        }
        let port = get(entry::PORT);
        let address = u128::from(get(entry::ADDRESS)) << 64 | u128::from(get(entry::ADDRESS + 1));
        let ip = Ipv6Addr::from_bits(address);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let address = SocketAddr::new(ip, port as u16);
        let endpoint = match port >> 16 {
            SERVER => Endpoint::Server(address),
            LISTENER => Endpoint::Listener(address),
            _ => return None,
        };
        let estimate = Estimate::from_bits(get(entry::ESTIMATE));
        Some(EndpointTraffic {
            table: self.header(header::ID).load(Ordering::Relaxed),
            endpoint,
            on_tcp: estimate.is_on_tcp(),
            learned: estimate.has_learned(),
            forced: get(entry::FORCED) != 0,
            gain: estimate.mean().thousandths(),
            smc: get(entry::SMC),
            tcp: get(entry::TCP),
            samples: get(entry::SAMPLES),
            bytes: get(entry::AVERAGES),
            round_trips: get(entry::AVERAGES + 1),
            lifetime_us: get(entry::AVERAGES + 2),
        })
    }

    /// The entry with a hash.
    fn find(&self, hash: u64) -> Option<usize> {
        group(hash).find(|&at| self.word(at, entry::HASH).load(Ordering::Acquire) == hash)
    }

    /// Makes an entry: in the place of an unused one, or of the least recently used one.
    fn make(&self, hash: u64, endpoint: &Endpoint) -> usize {
        let used = |at: &usize| match self.word(*at, entry::HASH).load(Ordering::Relaxed) {
            0 => 0,
            _ => self.word(*at, entry::USED).load(Ordering::Relaxed).max(1),
        };
        let at = group(hash).min_by_key(used).unwrap_or(0);
        // Another process may make an entry here now. One of the two then has the other's words.
        for word in entry::ESTIMATE..ENTRY_SIZE / 8 {
            self.word(at, word).store(0, Ordering::Relaxed);
        }
        let (end, address) = match endpoint {
            Endpoint::Server(address) => (SERVER, address),
            Endpoint::Listener(address) => (LISTENER, address),
        };
        let bits = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let set = |word, value| self.word(at, word).store(value, Ordering::Relaxed);
        set(entry::PROGRAM, self.program);
        set(entry::PORT, end << 16 | u64::from(address.port()));
        set(entry::ADDRESS, (bits >> 64) as u64);
        set(entry::ADDRESS + 1, bits as u64);
        self.word(at, entry::HASH).store(hash, Ordering::Release);
        at
    }

    /// Replaces an estimate. Returns the result of `change` beside the new estimate.
    fn update<T>(&self, at: usize, change: impl Fn(Estimate) -> (T, Estimate)) -> T {
        let word = self.word(at, entry::ESTIMATE);
        let mut old = word.load(Ordering::Relaxed);
        loop {
            let (result, new) = change(Estimate::from_bits(old));
            let new = new.to_bits();
            if new == old {
                return result;
            }
            match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return result,
                Err(other) => old = other,
            }
        }
    }

    /// Adds an ended connection.
    fn ended(&self, at: usize, seen: &Observation, model: &CostModel) {
        let gain = model.gain(seen);
        let estimate = self.word(at, entry::ESTIMATE);
        let was_on_tcp = Estimate::from_bits(estimate.load(Ordering::Relaxed)).is_on_tcp();
        self.update(at, |old| ((), old.ended(gain)));
        let before = self.word(at, entry::ENDED).fetch_add(1, Ordering::Relaxed);
        let weight = before.saturating_add(1).min(LEARNED.into()).max(1);
        let micros = u64::try_from(seen.lifetime.as_micros()).unwrap_or(u64::MAX);
        for (n, value) in [seen.bytes, seen.round_trips, micros].into_iter().enumerate() {
            let word = self.word(at, entry::AVERAGES + n);
            let old = word.load(Ordering::Relaxed);
            let new = match value >= old {
                true => old + (value - old) / weight,
                false => old - (old - value) / weight,
            };
            word.store(new, Ordering::Relaxed);
        }
        let is_on_tcp = Estimate::from_bits(estimate.load(Ordering::Relaxed)).is_on_tcp();
        if is_on_tcp != was_on_tcp || before % u64::from(SAMPLE_INTERVAL) < LEARNED.into() {
            self.save(at);
        }
    }

    /// Writes what was learned about a server into the file.
    fn save(&self, at: usize) {
        let Some(saved) = &self.saved else { return };
        if self.word(at, entry::PORT).load(Ordering::Relaxed) >> 16 == SERVER {
            let words = std::array::from_fn(|word| self.word(at, word).load(Ordering::Relaxed));
            saved.save(at, words);
        }
    }

    fn note_use(&self, at: usize) {
        let now = self.header(header::CLOCK).fetch_add(1, Ordering::Relaxed);
        self.word(at, entry::USED).store(now, Ordering::Relaxed);
    }

    fn header(&self, word: usize) -> &AtomicU64 {
        self.memory.atomic_u64(word * 8).unwrap_or(&self.none)
    }

    fn word(&self, at: usize, word: usize) -> &AtomicU64 {
        self.memory.atomic_u64((1 + at) * ENTRY_SIZE + word * 8).unwrap_or(&self.none)
    }
}

/// The end of a server's pause without SMC, and the number of such pauses in a row.
#[derive(Clone, Copy, Debug)]
struct PlainPause {
    /// Seconds of the monotonic clock.
    until: u64,
    times: u32,
}

impl PlainPause {
    /// The length of the first pause, and the most doublings: to about half an hour.
    const FIRST: u64 = 2;
    const DOUBLINGS: u32 = 10;

    fn from_bits(bits: u64) -> PlainPause {
        PlainPause { until: bits >> 8, times: (bits & 0xff) as u32 }
    }

    fn to_bits(self) -> u64 {
        self.until << 8 | u64::from(self.times)
    }

    /// The pause after one more failure.
    fn next(self, now: u64) -> PlainPause {
        let length = Self::FIRST << self.times.min(Self::DOUBLINGS);
        let until = now / 1_000_000 + length;
        PlainPause { until, times: (self.times + 1).min(Self::DOUBLINGS) }
    }

    fn holds(self, now: u64) -> bool {
        let left = self.until.saturating_sub(now / 1_000_000);
        // Another process may have written anything.
        left > 0 && left <= Self::FIRST << Self::DOUBLINGS
    }
}

/// [`Endpoint::Server`] in the word of the port.
const SERVER: u64 = 1;
/// [`Endpoint::Listener`] in the word of the port.
const LISTENER: u64 = 2;

/// A hash, the same in every process, and never 0.
fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish() | 1
}

/// A connection on SMC, for the estimate of its endpoint.
#[doc(hidden)]
pub struct ConnectionObserver {
    table: Arc<TrafficTable>,
    at: usize,
    hash: u64,
    begun: Instant,
}

impl ConnectionObserver {
    /// The connection has ended, with these counts.
    pub(crate) fn ended(self, (bytes, round_trips): (u64, u64), model: &CostModel) {
        let seen = Observation { bytes, round_trips, lifetime: self.begun.elapsed() };
        // The entry may have become another endpoint's.
        if self.table.word(self.at, entry::HASH).load(Ordering::Relaxed) == self.hash {
            let is_guest = *model == CostModel::GUEST;
            self.table.word(self.at, entry::GUEST).store(is_guest.into(), Ordering::Relaxed);
            self.table.ended(self.at, &seen, model);
        }
    }
}

impl fmt::Debug for ConnectionObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionObserver").field("at", &self.at).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod saved_tests;
#[cfg(test)]
mod tests;
