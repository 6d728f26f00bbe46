// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The measures by name, and their components.

use super::job::{Program, TransportKind};

/// The unit of a measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// 2^20 bytes per second.
    MebibytesPerSecond,
    /// Messages of the given size per second.
    MessagesPerSecond,
    /// Messages to and fro per second, over all connections.
    EchoesPerSecond,
    /// Connections per second.
    ConnectionsPerSecond,
    /// Microseconds.
    Microseconds,
    /// Messages to and fro per second, by all threads.
    RoundTripsPerSecond,
    /// Seconds of processor time per [`GIGABYTE`].
    ProcessorPerGigabyte,
}

/// Bytes of the unit of processor time.
pub(super) const GIGABYTE: f64 = 1e9;

impl Unit {
    /// Name of the unit in tables and JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Unit::MebibytesPerSecond => "MiB/s",
            Unit::MessagesPerSecond => "messages/s",
            Unit::EchoesPerSecond => "echoes/s",
            Unit::ConnectionsPerSecond => "connections/s",
            Unit::Microseconds => "us",
            Unit::RoundTripsPerSecond => "round trips/s",
            Unit::ProcessorPerGigabyte => "s/GB",
        }
    }

    /// Whether less is better.
    pub(super) fn is_time(self) -> bool {
        matches!(self, Unit::Microseconds | Unit::ProcessorPerGigabyte)
    }

    /// The unit of processor time, and the factor for seconds per byte or message.
    pub(super) fn processor_time(self, size: usize) -> (&'static str, f64) {
        match self {
            Unit::MebibytesPerSecond | Unit::ProcessorPerGigabyte => ("s/GB", GIGABYTE),
            Unit::MessagesPerSecond => ("us/message", size as f64 * 1e6),
            Unit::ConnectionsPerSecond => ("us/connection", 1e6),
            Unit::EchoesPerSecond => ("us/echo", 1e6),
            Unit::Microseconds | Unit::RoundTripsPerSecond => ("us/round trip", 1e6),
        }
    }

    /// Converts a program's count per second into this unit.
    pub(super) fn scale(self, per_second: f64, size: usize) -> f64 {
        match self {
            Unit::MebibytesPerSecond => per_second / f64::from(1 << 20),
            Unit::MessagesPerSecond => per_second / size as f64,
            _ => per_second,
        }
    }
}

/// A program with its parameters, run over several transports in turn.
#[derive(Clone, Debug)]
pub(super) struct Experiment {
    /// Name of the experiment in tables.
    pub(super) title: String,
    pub(super) program: Program,
    pub(super) unit: Unit,
    /// Bytes of a write or message.
    pub(super) size: usize,
    /// Bytes of SMC receive buffers.
    pub(super) buffer: usize,
    /// How long SMC spins, microseconds.
    pub(super) spin_us: u64,
    /// Connections of an event loop.
    pub(super) connections: usize,
    /// How many of these are idle.
    pub(super) idle: usize,
    /// Client threads of short connections; threads of each end for round trips.
    pub(super) threads: usize,
    /// Writes or messages per second; 0: as many as possible.
    pub(super) rate: u32,
    /// Transports of the runs.
    pub(super) transports: Vec<TransportKind>,
    /// The resulting measures: name, and kind of SMC-D.
    pub(super) rows: Vec<(String, TransportKind)>,
}

/// Parameters for options to change.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Overrides {
    pub(super) size: Option<usize>,
    pub(super) buffer: Option<usize>,
    pub(super) spin_us: Option<u64>,
    pub(super) connections: Option<usize>,
    pub(super) threads: Option<usize>,
}

/// How long SMC spins by default, microseconds: the library's default.
const SPIN_US: u64 = 50;

fn experiment(title: &str, program: Program, unit: Unit, size: usize) -> Experiment {
    let ring = matches!(program, Program::Stream | Program::RoundTrip);
    let mut transports = vec![TransportKind::Window, TransportKind::Tcp, TransportKind::Unix];
    transports.extend(ring.then_some(TransportKind::Ring));
    Experiment {
        title: title.into(),
        program,
        unit,
        size,
        buffer: 64 << 10,
        spin_us: SPIN_US,
        connections: 200,
        idle: 0,
        threads: 4,
        rate: 0,
        transports,
        rows: Vec::new(),
    }
}

impl Experiment {
    fn row(mut self, name: &str, transport: TransportKind) -> Self {
        if !self.transports.contains(&transport) {
            self.transports.push(transport);
            self.transports.sort_unstable();
        }
        self.rows.push((name.into(), transport));
        self
    }

    /// Measures connections bound to their device as well, beside the window.
    pub(super) fn and_bound(mut self) -> Self {
        if self.transports.contains(&TransportKind::Window) {
            self.transports.push(TransportKind::Bound);
            self.transports.sort_unstable();
        }
        self
    }

    /// Measures these transports as well, each where it differs from TCP.
    pub(super) fn beside(mut self, peers: &[TransportKind]) -> Self {
        let of_program = |peer: &TransportKind| {
            *peer != TransportKind::FastOpen || self.program == Program::Short
        };
        let peers: Vec<_> = peers.iter().copied().filter(of_program).collect();
        self.transports.extend(peers);
        self.transports.sort_unstable();
        self.transports.dedup();
        self
    }

    /// Removes the transports of SMC not needed by any row.
    fn only_what_rows_need(mut self) -> Self {
        let rows = &self.rows;
        self.transports.retain(|c| !c.is_smc() || rows.iter().any(|(_, needed)| needed == c));
        self
    }

    fn with(mut self, overrides: &Overrides) -> Self {
        self.size = overrides.size.unwrap_or(self.size);
        self.buffer = overrides.buffer.unwrap_or(self.buffer);
        self.spin_us = overrides.spin_us.unwrap_or(self.spin_us);
        self.connections = overrides.connections.unwrap_or(self.connections);
        self.threads = overrides.threads.unwrap_or(self.threads);
        self.title = match self.program {
            Program::Stream if self.unit == Unit::ProcessorPerGigabyte => {
                let gigabytes = self.size as f64 * f64::from(self.rate) / GIGABYTE;
                format!("processor time at {gigabytes:.2} GB/s, {} writes", bytes(self.size))
            }
            Program::Stream if self.unit == Unit::MebibytesPerSecond => {
                format!("throughput, {} writes", bytes(self.size))
            }
            Program::Stream => format!("messages one way, {}", bytes(self.size)),
            Program::RoundTrip if self.spin_us == 0 => {
                format!("round trip, {}, never spinning", bytes(self.size))
            }
            Program::RoundTrip => format!("round trip, {}", bytes(self.size)),
            Program::Paced => {
                format!("latency at {} messages/s, {}", self.rate, bytes(self.size))
            }
            Program::RoundTripThreads => {
                format!("round trips of {} threads, {}", self.threads, bytes(self.size))
            }
            Program::Echo => {
                format!("echo on {} connections, {}", self.connections, bytes(self.size))
            }
            Program::EchoEpoll => {
                format!("echo by epoll on {} connections, {}", self.connections, bytes(self.size))
            }
            Program::EchoTokio => {
                format!("echo by tokio on {} connections, {}", self.connections, bytes(self.size))
            }
            Program::Short => {
                format!("short connections of {}, {} each way", threads(self.threads), {
                    bytes(self.size)
                })
            }
        };
        self
    }
}

fn threads(n: usize) -> String {
    if n == 1 { "1 thread".into() } else { format!("{n} threads") }
}

/// A number of bytes with a unit.
pub(super) fn bytes(n: usize) -> String {
    match n {
        n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        n if n >= 1 << 10 && n.is_multiple_of(1 << 10) => format!("{} KiB", n >> 10),
        n => format!("{n} B"),
    }
}

/// Names of `smc perf`, with a sentence each.
pub(super) const NAMES: [(&str, &str); 21] = [
    ("latency_1k", "64 B to and fro, 1,000 messages/s on an absolute schedule; median and p99"),
    ("latency_10k", "the same, 10,000 messages/s"),
    ("rr_threads", "64 B to and fro by 16 threads, each blocking on a connection of its own"),
    ("echo_epoll", "4 KiB to and fro on 200 connections at once, both ends by epoll"),
    ("echo_tokio", "the same, both ends by tokio on one thread each"),
    ("short_conn_1", "as short_conn, by 1 client thread"),
    ("cpu_1g", "processor time of a stream of 1 GB/s in 64 KiB writes"),
    ("bulk", "throughput of one connection, 64 KiB writes, 1 MiB receive buffer; window and move"),
    ("bulk_window", "the same, SMC-D by stores into the peer's buffer only"),
    ("bulk_move", "the same, SMC-D by copies of the device only"),
    ("rtt", "round trip of 64 B on one connection; window and move"),
    ("rtt_spin", "the same, window, waiting calls spin 50 us before they sleep (the default)"),
    ("rtt_sleep", "the same, window, waiting calls never spin"),
    ("rate", "100 B messages one way on one connection; window and move"),
    ("rate_100b", "the same, window only"),
    ("echo", "4 KiB to and fro on 200 connections at once; window and move"),
    ("echo_200", "the same, window only"),
    ("conn", "connect, 1 KiB request, 1 KiB reply, close, by 4 client threads; window and move"),
    ("short_conn", "the same, window only"),
    ("memory", "memory of the daemon with 100 idle devices, and of idle connections"),
    ("scale", "curves from 1 to 10,000 connections and from 1 to 1,000 devices"),
];

/// The measures of `--suite` that look like programs. These come first.
const LIKE_PROGRAMS: [&str; 7] = [
    "latency_1k",
    "latency_10k",
    "rr_threads",
    "echo_epoll",
    "short_conn",
    "short_conn_1",
    "cpu_1g",
];
/// Measures showing the limit of each part, after `bulk`.
const LIMITS: [&str; 4] = ["rtt_spin", "rtt_sleep", "rate_100b", "echo_200"];

/// The measures of `--suite`.
pub(super) fn suite(overrides: &Overrides) -> Vec<Experiment> {
    let both =
        bulk().row("bulk_window", TransportKind::Window).row("bulk_move", TransportKind::Move);
    let named = |name: &&str| by_name(name, overrides);
    let mut all: Vec<_> = LIKE_PROGRAMS.iter().filter_map(named).collect();
    all.push(both.only_what_rows_need().with(overrides));
    all.extend(LIMITS.iter().filter_map(named));
    all
}

fn bulk() -> Experiment {
    let mut bulk = experiment("", Program::Stream, Unit::MebibytesPerSecond, 64 << 10);
    bulk.buffer = 1 << 20;
    bulk
}

/// The experiment of a point of `scale`: echoes on `connections` connections, `idle` of them idle.
pub(super) fn echo_of(connections: usize, idle: usize) -> Experiment {
    let mut echo = experiment("", Program::Echo, Unit::EchoesPerSecond, 4096);
    if idle > 0 {
        // Measure the cost of a wake-up alone.
        (echo.size, echo.spin_us) = (64, 0);
    }
    (echo.connections, echo.idle) = (connections, idle);
    echo.transports = vec![TransportKind::Window, TransportKind::Tcp];
    echo.rows = vec![("scale".into(), TransportKind::Window)];
    echo.with(&Overrides::default())
}

/// The experiment of a name; none if there is no such name, or for `memory` and `scale`.
pub(super) fn by_name(name: &str, overrides: &Overrides) -> Option<Experiment> {
    let rtt = || experiment("", Program::RoundTrip, Unit::Microseconds, 64);
    let rate = || {
        let mut rate = experiment("", Program::Stream, Unit::MessagesPerSecond, 100);
        rate.buffer = 1 << 20;
        rate
    };
    let paced = |per_second| {
        let mut paced = experiment("", Program::Paced, Unit::Microseconds, 64);
        paced.rate = per_second;
        paced
    };
    let echo = || experiment("", Program::Echo, Unit::EchoesPerSecond, 4096);
    let conn = || experiment("", Program::Short, Unit::ConnectionsPerSecond, 1024);
    let both = |base: Experiment| {
        base.row(&format!("{name}_window"), TransportKind::Window)
            .row(&format!("{name}_move"), TransportKind::Move)
    };
    let made = match name {
        "latency_1k" => paced(1_000).row(name, TransportKind::Window),
        "latency_10k" => paced(10_000).row(name, TransportKind::Window),
        "rr_threads" => {
            let unit = Unit::RoundTripsPerSecond;
            let mut threads = experiment("", Program::RoundTripThreads, unit, 64);
            threads.threads = 16;
            threads.row(name, TransportKind::Window)
        }
        "echo_epoll" => {
            let echo = experiment("", Program::EchoEpoll, Unit::EchoesPerSecond, 4096);
            echo.row(name, TransportKind::Window)
        }
        "echo_tokio" => {
            let echo = experiment("", Program::EchoTokio, Unit::EchoesPerSecond, 4096);
            echo.row(name, TransportKind::Window)
        }
        "short_conn_1" => {
            let mut one = conn();
            one.threads = 1;
            one.row(name, TransportKind::Window)
        }
        "cpu_1g" => {
            let mut paced = bulk();
            paced.unit = Unit::ProcessorPerGigabyte;
            paced.rate = (GIGABYTE / paced.size as f64) as u32;
            // The raw ring works only by spinning.
            paced.transports.retain(|transport| *transport != TransportKind::Ring);
            paced.row(name, TransportKind::Window)
        }
        "bulk" => both(bulk()),
        "bulk_window" => bulk().row(name, TransportKind::Window),
        "bulk_move" => bulk().row(name, TransportKind::Move),
        "rtt" => both(rtt()),
        "rtt_spin" => rtt().row(name, TransportKind::Window),
        "rtt_sleep" => {
            let mut sleep = rtt();
            sleep.spin_us = 0;
            // The raw ring works only by spinning.
            sleep.transports.retain(|transport| *transport != TransportKind::Ring);
            sleep.row(name, TransportKind::Window)
        }
        "rate" => both(rate()),
        "rate_100b" => rate().row(name, TransportKind::Window),
        "echo" => both(echo()),
        "echo_200" => echo().row(name, TransportKind::Window),
        "conn" => both(conn()),
        "short_conn" => conn().row(name, TransportKind::Window),
        _ => return None,
    };
    Some(made.only_what_rows_need().with(overrides))
}

/// The measures of `--suite` between machines.
pub(super) const BETWEEN: [&str; 5] = ["bulk", "rtt_spin", "rtt_sleep", "rate_100b", "short_conn"];

/// The experiment of a name between machines, over these transports, SMC first; none if there is no
/// such measure.
pub(super) fn between(
    name: &str,
    overrides: &Overrides,
    transports: &[TransportKind],
) -> Option<Experiment> {
    // Between machines the path is an option, and not part of the name.
    let base = match name {
        "bulk" => "bulk_window",
        "rtt" | "rtt_spin" => "rtt_spin",
        "rate" | "rate_100b" => "rate_100b",
        "echo" | "echo_200" => "echo_200",
        "conn" | "short_conn" => "short_conn",
        "rtt_sleep" | "latency_1k" | "latency_10k" | "rr_threads" | "echo_epoll" | "echo_tokio"
        | "short_conn_1" => name,
        _ => return None,
    };
    let mut experiment = by_name(base, overrides)?;
    experiment.transports = transports.to_vec();
    experiment.rows = transports.first().map(|smc| (name.into(), *smc)).into_iter().collect();
    Some(experiment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_machines_a_measure_runs_over_what_reaches_them() {
        let transports = [TransportKind::Smc, TransportKind::Tcp];
        for name in
            BETWEEN.into_iter().chain(["rtt", "rate", "echo", "conn", "latency_1k", "rr_threads"])
        {
            let experiment = between(name, &Overrides::default(), &transports).unwrap();
            assert_eq!(experiment.transports, transports, "{name}");
            assert_eq!(experiment.rows, [(name.to_owned(), TransportKind::Smc)]);
        }
        let sleep = between("rtt_sleep", &Overrides::default(), &transports).unwrap();
        assert_eq!(sleep.spin_us, 0);
        for name in ["bulk_window", "bulk_move", "cpu_1g", "memory"] {
            assert!(between(name, &Overrides::default(), &transports).is_none(), "{name}");
        }
    }

    #[test]
    fn every_name_is_an_experiment() {
        for (name, _) in NAMES.iter().filter(|(name, _)| !["memory", "scale"].contains(name)) {
            let experiment = by_name(name, &Overrides::default()).unwrap();
            assert!(!experiment.rows.is_empty() && !experiment.title.is_empty(), "{name}");
            for (_, transport) in &experiment.rows {
                assert!(experiment.transports.contains(transport), "{name}");
            }
            assert!(experiment.transports.contains(&TransportKind::Tcp), "{name}");
        }
        assert!(by_name("paint", &Overrides::default()).is_none());
    }

    #[test]
    fn the_suite_begins_with_what_looks_like_programs() {
        let suite = suite(&Overrides::default());
        let names: Vec<_> = suite.iter().flat_map(|e| e.rows.iter().map(|(n, _)| n)).collect();
        let expected = [
            "latency_1k",
            "latency_10k",
            "rr_threads",
            "echo_epoll",
            "short_conn",
            "short_conn_1",
            "cpu_1g",
            "bulk_window",
            "bulk_move",
            "rtt_spin",
            "rtt_sleep",
            "rate_100b",
            "echo_200",
        ];
        assert_eq!(names, expected.iter().collect::<Vec<_>>());
    }

    #[test]
    fn a_measure_of_moves_does_not_run_the_window() {
        let experiment = by_name("bulk_move", &Overrides::default()).unwrap();
        assert!(!experiment.transports.contains(&TransportKind::Window));
    }

    #[test]
    fn units_scale_what_programs_count() {
        assert_eq!(Unit::MebibytesPerSecond.scale(2097152.0, 1), 2.0);
        assert_eq!(Unit::MessagesPerSecond.scale(1000.0, 100), 10.0);
        assert_eq!(Unit::EchoesPerSecond.scale(1000.0, 100), 1000.0);
        // A microsecond per byte.
        assert_eq!(Unit::MessagesPerSecond.processor_time(100), ("us/message", 1e8));
        assert_eq!(Unit::MebibytesPerSecond.processor_time(100), ("s/GB", 1e9));
        let cpu = by_name("cpu_1g", &Overrides::default()).unwrap();
        assert!((cpu.rate as usize * cpu.size).abs_diff(1_000_000_000) < cpu.size);
    }
}
