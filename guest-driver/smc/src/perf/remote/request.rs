// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requests of clients, and their limits.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Own;
use crate::perf::job::{Job, Program, TransportKind};
use crate::perf::measure::Experiment;

/// Longest write or message, bytes.
const MAX_SIZE: usize = 16 << 20;
/// Longest run, seconds.
const MAX_SECONDS: f64 = 600.0;
/// Longest spinning, microseconds.
const MAX_SPIN_US: u64 = 1_000_000;
/// Connections at once.
const MAX_CONNECTIONS: usize = 4000;
/// Writes or messages per second, where there is a limit.
const MAX_RATE: u32 = 1_000_000;
/// Bytes of the messages in flight in an event loop.
const MAX_UNDER_WAY: usize = 256 << 20;

/// A run requested by a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    program: Program,
    transport: TransportKind,
    size: usize,
    seconds: f64,
    buffer: usize,
    spin_us: u64,
    connections: usize,
    threads: usize,
    rate: u32,
}

/// Why a run is refused.
#[derive(Clone, Debug, PartialEq, Error)]
pub(super) enum Refused {
    /// The transport does not leave this machine.
    #[error("{} does not reach another machine", .0.title())]
    TransportKind(TransportKind),
    /// Length of a message.
    #[error("a message of {0} bytes: 1 to {MAX_SIZE} are possible")]
    Size(usize),
    /// Length of a run.
    #[error("a run of {0} s: 0.01 to {MAX_SECONDS} are possible")]
    Seconds(f64),
    /// Length of a receive buffer.
    #[error("a receive buffer of {0} bytes: 16K to 1M are possible")]
    Buffer(usize),
    /// Spinning for so long.
    #[error("{0} us of spinning: {MAX_SPIN_US} are the most")]
    Spin(u64),
    /// So many connections or threads.
    #[error("{0} connections or threads: 1 to {MAX_CONNECTIONS} are possible")]
    Connections(usize),
    /// So many messages per second.
    #[error("{0} messages per second: {MAX_RATE} are the most")]
    Rate(u32),
    /// So much memory.
    #[error("{0} connections with messages of {1} bytes: {MAX_UNDER_WAY} bytes are the most")]
    UnderWay(usize, usize),
}

impl Request {
    /// One run of an experiment.
    pub(super) fn new(experiment: &Experiment, transport: TransportKind, seconds: f64) -> Request {
        Request {
            program: experiment.program,
            transport,
            size: experiment.size,
            seconds,
            buffer: experiment.buffer,
            spin_us: experiment.spin_us,
            connections: experiment.connections,
            threads: experiment.threads,
            rate: experiment.rate,
        }
    }

    /// Length of the run.
    pub(super) fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Checks the request against the limits.
    ///
    /// # Errors
    /// The first value out of bounds.
    pub(super) fn check(&self) -> Result<(), Refused> {
        if !TransportKind::BETWEEN.contains(&self.transport) {
            return Err(Refused::TransportKind(self.transport));
        }
        if !(1..=MAX_SIZE).contains(&self.size) {
            return Err(Refused::Size(self.size));
        }
        if !(0.01..=MAX_SECONDS).contains(&self.seconds) {
            return Err(Refused::Seconds(self.seconds));
        }
        if !(16 << 10..=1 << 20).contains(&self.buffer) {
            return Err(Refused::Buffer(self.buffer));
        }
        if self.spin_us > MAX_SPIN_US {
            return Err(Refused::Spin(self.spin_us));
        }
        for count in [self.connections, self.threads] {
            if !(1..=MAX_CONNECTIONS).contains(&count) {
                return Err(Refused::Connections(count));
            }
        }
        if self.rate > MAX_RATE {
            return Err(Refused::Rate(self.rate));
        }
        let under_way = self.size.saturating_mul(self.connections);
        let many = matches!(self.program, Program::Echo | Program::EchoEpoll | Program::EchoTokio);
        if many && under_way > MAX_UNDER_WAY {
            return Err(Refused::UnderWay(self.connections, self.size));
        }
        Ok(())
    }

    /// The job of one end: with the listening address of the servers, or the address for the
    /// client.
    ///
    /// # Errors
    /// Errors of [`Request::check`].
    pub(super) fn job(&self, own: &Own, bind: SocketAddr, address: String) -> Result<Job, Refused> {
        self.check()?;
        Ok(Job {
            program: self.program,
            transport: self.transport,
            size: self.size,
            seconds: self.seconds,
            buffer: self.buffer,
            spin_us: self.spin_us,
            connections: self.connections,
            idle: 0,
            threads: self.threads,
            rate: self.rate,
            device: self.transport.is_smc().then(|| own.device.clone()),
            eids: own.eids.clone(),
            remote: true,
            bind,
            // No Unix sockets are made.
            dir: std::env::temp_dir(),
            address,
            namespace: None,
            cgroup: None,
            pin: false,
            others: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::measure::{Overrides, by_name};

    fn request(name: &str) -> Request {
        let experiment = by_name(name, &Overrides::default()).unwrap();
        Request::new(&experiment, TransportKind::Smc, 0.7)
    }

    #[test]
    fn every_measure_can_be_asked_for() {
        for name in
            ["bulk", "rtt_spin", "latency_10k", "rr_threads", "echo_epoll", "rate", "echo", "conn"]
        {
            assert_eq!(request(name).check(), Ok(()), "{name}");
        }
    }

    #[test]
    fn refuses_what_would_take_too_much_or_makes_no_sense() {
        let bulk = request("bulk");
        let echo = request("echo");
        for (request, why) in [
            (
                Request { transport: TransportKind::Unix, ..bulk.clone() },
                Refused::TransportKind(TransportKind::Unix),
            ),
            (
                Request { transport: TransportKind::Ring, ..bulk.clone() },
                Refused::TransportKind(TransportKind::Ring),
            ),
            (Request { size: 0, ..bulk.clone() }, Refused::Size(0)),
            (Request { size: MAX_SIZE + 1, ..bulk.clone() }, Refused::Size(MAX_SIZE + 1)),
            (Request { seconds: 0.0, ..bulk.clone() }, Refused::Seconds(0.0)),
            (Request { seconds: -1.0, ..bulk.clone() }, Refused::Seconds(-1.0)),
            (Request { seconds: 601.0, ..bulk.clone() }, Refused::Seconds(601.0)),
            (Request { buffer: 16383, ..bulk.clone() }, Refused::Buffer(16383)),
            (Request { buffer: 2 << 20, ..bulk.clone() }, Refused::Buffer(2 << 20)),
            (Request { spin_us: 1_000_001, ..bulk.clone() }, Refused::Spin(1_000_001)),
            (Request { connections: 0, ..bulk.clone() }, Refused::Connections(0)),
            (Request { threads: 4001, ..bulk.clone() }, Refused::Connections(4001)),
            (Request { rate: 1_000_001, ..bulk }, Refused::Rate(1_000_001)),
            (Request { size: 2 << 20, ..echo }, Refused::UnderWay(200, 2 << 20)),
        ] {
            assert_eq!(request.check(), Err(why));
        }
        let not_a_number = Request { seconds: f64::NAN, ..request("rtt") };
        assert!(matches!(not_a_number.check(), Err(Refused::Seconds(_))));
    }

    #[test]
    fn a_request_with_more_than_is_known_is_none() {
        let mut text = serde_json::to_string(&request("rtt")).unwrap();
        assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), request("rtt"));
        text.insert_str(1, "\"device\":\"/etc/passwd\",");
        assert!(serde_json::from_str::<Request>(&text).is_err());
    }

    #[test]
    fn only_smc_opens_the_device() {
        let own = Own { device: "d.sock".into(), eids: Vec::new() };
        let bind = ([127, 0, 0, 1], 0).into();
        let smc = request("bulk").job(&own, bind, String::new()).unwrap();
        assert_eq!(smc.device, Some("d.sock".into()));
        let tcp = Request { transport: TransportKind::Tcp, ..request("bulk") };
        assert_eq!(tcp.job(&own, bind, String::new()).unwrap().device, None);
    }
}
