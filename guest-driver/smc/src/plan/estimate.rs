// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The gain of SMC for connections observed on TCP, by the model that `smc run` uses itself.

use std::time::Duration;

use serde::Serialize;
use smc_core::benefit::{CostModel, Observation};

/// Less saved time per second than this is not worth a change, nanoseconds.
const LITTLE: f64 = 1e6;

/// The traffic of the connections from one service to one server, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Traffic {
    /// Open connections.
    pub(super) connections: u64,
    /// Bytes since the connections began, both directions.
    pub(super) bytes: u64,
    /// Bytes per second, both directions.
    pub(super) bytes_per_second: f64,
    /// Round trips per second, at most.
    pub(super) round_trips_per_second: f64,
    /// Ended connections per second.
    pub(super) ended_per_second: f64,
}

/// A judgement about the connections from one service to one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// SMC saves time.
    Gains,
    /// There is hardly any traffic.
    Little,
    /// The connections are too short: `smc run` leaves them on TCP.
    Short,
}

impl Traffic {
    /// Average lifetime of a connection, if connections end at all (Little's law).
    pub(super) fn lifetime(&self) -> Option<Duration> {
        let open = self.connections as f64;
        (self.ended_per_second > 0.0).then(|| {
            Duration::try_from_secs_f64(open / self.ended_per_second).unwrap_or(Duration::MAX)
        })
    }

    /// Time saved by SMC per second, nanoseconds, less the cost of its set-ups.
    pub(super) fn saved(&self) -> f64 {
        let CostModel { setup, round_trip, kibibyte } = CostModel::HOST;
        self.bytes_per_second / 1024.0 * kibibyte as f64
            + self.round_trips_per_second * round_trip as f64
            - self.ended_per_second * setup as f64
    }

    /// The judgement about these connections.
    pub(super) fn verdict(&self) -> Verdict {
        let each = |per_second: f64| (per_second / self.ended_per_second.max(1e-9)) as u64;
        let seen = Observation {
            bytes: each(self.bytes_per_second),
            round_trips: each(self.round_trips_per_second),
            lifetime: self.lifetime().unwrap_or(Duration::MAX),
        };
        let pays =
            self.ended_per_second <= 0.0 || CostModel::HOST.gain(&seen).thousandths() >= 1000;
        match (pays, self.saved() >= LITTLE) {
            (false, _) => Verdict::Short,
            (true, true) => Verdict::Gains,
            (true, false) => Verdict::Little,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_connections_gain_idle_ones_little_and_short_ones_lose() {
        let table = [
            ("a cache", 50, 20e6, 20_000.0, 0.0, Verdict::Gains),
            ("a pool that idles", 50, 100.0, 1.0, 0.01, Verdict::Little),
            ("a request for each connection", 1, 200e3, 200.0, 200.0, Verdict::Short),
            ("bulk for each connection", 1, 400e6, 10.0, 10.0, Verdict::Gains),
            ("connections unseen while open", 0, 0.0, 0.0, 50.0, Verdict::Short),
        ];
        for (what, connections, bytes, trips, ended, verdict) in table {
            let traffic = Traffic {
                connections,
                bytes: 0,
                bytes_per_second: bytes,
                round_trips_per_second: trips,
                ended_per_second: ended,
            };
            assert_eq!(traffic.verdict(), verdict, "{what}: {}", traffic.saved());
        }
        let traffic = Traffic { connections: 10, ended_per_second: 2.0, ..Traffic::default() };
        assert_eq!(traffic.lifetime(), Some(Duration::from_secs(5)));
        assert_eq!(Traffic::default().lifetime(), None);
    }
}
