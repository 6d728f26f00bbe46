// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults of front ends and drivers: counted per guest, shown in metrics, logged at a limited rate.

use std::io::ErrorKind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vhost::vhost_user::Error as VhostUserError;

/// Ways for a front end or a driver to break the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A descriptor chain with a loop, an index out of range, or an unreadable table.
    BadChain,
    /// A queue closed because of its content.
    BrokenRing,
    /// A chain without room for its reply.
    NoRoom,
    /// An unusable kick or call descriptor: neither an eventfd nor, for calls, a socket of a pair; or a
    /// semaphore eventfd as kick.
    NotEventfd,
    /// A memory table the daemon refuses to map.
    RefusedMemory,
    /// The daemon touched a lost page of guest memory.
    LostMemory,
    /// Absent guest memory beyond the quota.
    SparseMemory,
    /// A peer had to wait for pages of guest memory.
    SlowMemory,
    /// A mapping not acknowledged in time.
    NoAck,
    /// A mapping refused by the front end.
    MapRefused,
    /// A connection refused because of too many hanging threads of earlier connections.
    RefusedConnection,
    /// A connection ended by an illegal vhost-user message.
    BadMessage,
    /// A device ended because of rings stopped for too long.
    StoppedTooLong,
}

/// Whether a channel's error means only the end of the front end, which is no fault: a killed front end
/// leaves messages unread and answers untaken.
pub(super) fn is_end_of_front_end(error: &VhostUserError) -> bool {
    match error {
        VhostUserError::Disconnected | VhostUserError::PartialMessage => true,
        VhostUserError::SocketBroken(error) => {
            matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
        }
        _ => false,
    }
}

/// Every fault, in the order of its counter.
pub const FAULTS: [Fault; 13] = [
    Fault::BadChain,
    Fault::BrokenRing,
    Fault::NoRoom,
    Fault::NotEventfd,
    Fault::RefusedMemory,
    Fault::LostMemory,
    Fault::SparseMemory,
    Fault::SlowMemory,
    Fault::NoAck,
    Fault::MapRefused,
    Fault::RefusedConnection,
    Fault::BadMessage,
    Fault::StoppedTooLong,
];

impl Fault {
    /// Short name, for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Fault::BadChain => "bad_chain",
            Fault::BrokenRing => "broken_ring",
            Fault::NoRoom => "no_room",
            Fault::NotEventfd => "not_eventfd",
            Fault::RefusedMemory => "refused_memory",
            Fault::LostMemory => "lost_memory",
            Fault::SparseMemory => "sparse_memory",
            Fault::SlowMemory => "slow_memory",
            Fault::NoAck => "no_ack",
            Fault::MapRefused => "map_refused",
            Fault::RefusedConnection => "refused_connection",
            Fault::BadMessage => "bad_message",
            Fault::StoppedTooLong => "stopped_too_long",
        }
    }
}

/// Log lines per [`LOG_PERIOD`] and guest.
const LOG_BURST: u32 = 10;
/// See [`LOG_BURST`].
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// Counters of one guest, over all its connections.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    counts: [AtomicU64; FAULTS.len()],
    log: Mutex<LogBudget>,
    /// Budget for lines about connections coming and going.
    connections: Mutex<LogBudget>,
    waits: Mutex<WaitBudget>,
}

/// Number of forgiven waits of peers for one guest's memory.
const WAITS: u32 = 2;
/// Interval for forgiving one more wait.
const FORGIVE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct WaitBudget {
    used: u32,
    since: Option<Instant>,
}

impl WaitBudget {
    /// `false`: too many waits.
    fn take(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        let forgiven = now.duration_since(since).as_secs() / FORGIVE.as_secs();
        self.used = self.used.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX));
        if forgiven > 0 || self.used == 0 {
            self.since = Some(now);
        }
        if self.used == WAITS {
            return false;
        }
        self.used += 1;
        true
    }
}

#[derive(Debug, Default)]
struct LogBudget {
    since: Option<Instant>,
    used: u32,
    withheld: u64,
}

impl LogBudget {
    /// `Some(withheld before)` if a line may be written now.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.duration_since(since) >= LOG_PERIOD) {
            self.since = Some(now);
            self.used = 0;
        }
        if self.used == LOG_BURST {
            self.withheld += 1;
            return None;
        }
        self.used += 1;
        Some(std::mem::take(&mut self.withheld))
    }
}

impl Faults {
    /// Counts a fault of this guest and logs the fault within the guest's budget. `detail` must hold no guest
    /// bytes.
    pub(super) fn record(&self, guest: &str, fault: Fault, detail: std::fmt::Arguments<'_>) {
        if let Some(count) = self.counts.get(fault as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let Ok(mut log) = self.log.lock() else { return };
        let Some(withheld) = log.take(Instant::now()) else { return };
        drop(log);
        if withheld == 0 {
            tracing::warn!(guest, fault = fault.name(), "{detail}");
        } else {
            tracing::warn!(guest, fault = fault.name(), withheld, "{detail}");
        }
    }

    /// Calls `log` for a connection's begin or end, within a budget for guests connecting all the time. `log`
    /// gets the number of lines withheld before.
    pub(super) fn log_connection(&self, log: impl FnOnce(u64)) {
        let withheld = self.connections.lock().ok().and_then(|mut log| log.take(Instant::now()));
        if let Some(withheld) = withheld {
            log(withheld);
        }
    }

    /// Counts a peer's wait for this guest's memory. `false`: one wait too many.
    pub(super) fn forgive_wait(&self, now: Instant) -> bool {
        self.waits.lock().is_ok_and(|mut waits| waits.take(now))
    }

    /// The counters, in the order of [`FAULTS`].
    pub(crate) fn snapshot(&self) -> [u64; FAULTS.len()] {
        std::array::from_fn(|i| self.counts.get(i).map_or(0, |c| c.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_has_its_counter_and_name() {
        let faults = Faults::default();
        for (i, fault) in FAULTS.into_iter().enumerate() {
            assert_eq!(fault as usize, i);
            faults.record("test", fault, format_args!("x"));
            assert_eq!(faults.snapshot()[i], 1);
        }
    }

    #[test]
    fn two_waits_are_forgiven_and_one_more_each_minute() {
        let faults = Faults::default();
        let start = Instant::now();
        let forgiven = |seconds| faults.forgive_wait(start + Duration::from_secs(seconds));
        assert!(forgiven(0) && forgiven(1));
        assert!(!forgiven(2) && !forgiven(59), "over all connections of the guest");
        assert!(forgiven(61));
        assert!(!forgiven(62));
        assert!(forgiven(600) && forgiven(600));
        assert!(!forgiven(601));
    }

    #[test]
    fn the_log_is_limited_in_rate_and_says_what_it_withheld() {
        let mut log = LogBudget::default();
        let start = Instant::now();
        for _ in 0..LOG_BURST {
            assert_eq!(log.take(start), Some(0));
        }
        assert_eq!(log.take(start), None);
        assert_eq!(log.take(start), None);
        assert_eq!(log.take(start + LOG_PERIOD), Some(2));
        assert_eq!(log.take(start + LOG_PERIOD), Some(0));
    }
}
