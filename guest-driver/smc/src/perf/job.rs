// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The description of one run, for both processes, and the processes' reports.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::usage::{RunProcesses, Setup, Usage};
use crate::transport::{Counters, SmcPath};

/// The dialogue of server and client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Program {
    /// One connection, the client writes, the server reads.
    Stream,
    /// One connection, one message to and fro at a time.
    RoundTrip,
    /// Like [`Program::RoundTrip`], each message at a given time.
    Paced,
    /// Like [`Program::RoundTrip`], several connections with a thread each at both ends.
    RoundTripThreads,
    /// Many connections, one message to and fro at a time on each; an event loop on either side.
    Echo,
    /// Like [`Program::Echo`], with epoll on every transport.
    EchoEpoll,
    /// Like [`Program::Echo`], by tokio: a task for each connection, on one thread at either side.
    EchoTokio,
    /// Connect, request, reply, close, again and again.
    Short,
}

/// The transport of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TransportKind {
    /// SMC-D by the device's own path: the window, or else moves.
    Smc,
    /// SMC-D, stores into the peer's DMB.
    Window,
    /// The path of [`TransportKind::Window`], for connections bound to their device.
    Bound,
    /// SMC-D, the device copies.
    Move,
    /// TCP.
    Tcp,
    /// TCP between two network namespaces, by a pair of veth devices.
    Veth,
    /// TCP with a map of sockets in the kernel: a message goes straight to the peer's queue.
    Sockmap,
    /// TCP whose SYN carries the first bytes.
    FastOpen,
    /// A virtio socket.
    Vsock,
    /// A Unix stream socket.
    Unix,
    /// A bare ring in shared memory.
    Ring,
}

impl TransportKind {
    /// Every transport, in the order of tables.
    pub(super) const ALL: [TransportKind; 11] = {
        use TransportKind::{
            Bound, FastOpen, Move, Ring, Smc, Sockmap, Tcp, Unix, Veth, Vsock, Window,
        };
        [Smc, Window, Bound, Move, Tcp, Veth, Sockmap, FastOpen, Vsock, Unix, Ring]
    };

    /// Transports between processes of one machine.
    pub(super) const LOCAL: [TransportKind; 9] = {
        use TransportKind::{Bound, FastOpen, Move, Ring, Sockmap, Tcp, Unix, Veth, Window};
        [Window, Bound, Move, Tcp, Veth, Sockmap, FastOpen, Unix, Ring]
    };

    /// Transports between machines.
    pub(super) const BETWEEN: [TransportKind; 5] = {
        use TransportKind::{Move, Smc, Tcp, Vsock, Window};
        [Smc, Window, Move, Tcp, Vsock]
    };

    /// Transports measured only if asked for, by name.
    pub(super) const PEERS: [(&str, TransportKind); 3] = [
        ("veth", TransportKind::Veth),
        ("sockmap", TransportKind::Sockmap),
        ("fast-open", TransportKind::FastOpen),
    ];

    /// Name of the transport in tables.
    pub(super) fn title(self) -> &'static str {
        match self {
            TransportKind::Smc => "SMC-D",
            TransportKind::Window => "SMC-D window",
            TransportKind::Bound => "SMC-D bound",
            TransportKind::Move => "SMC-D move",
            TransportKind::Tcp => "TCP",
            TransportKind::Veth => "TCP by veth",
            TransportKind::Sockmap => "TCP by sockmap",
            TransportKind::FastOpen => "TCP Fast Open",
            TransportKind::Vsock => "vsock",
            TransportKind::Unix => "Unix socket",
            TransportKind::Ring => "raw shared memory",
        }
    }

    /// Whether the transport is SMC.
    pub(super) fn is_smc(self) -> bool {
        use TransportKind::{Bound, Move, Smc, Window};
        matches!(self, Smc | Window | Bound | Move)
    }
}

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) program: Program,
    pub(super) transport: TransportKind,
    /// Bytes of a write or message.
    pub(super) size: usize,
    /// Length of the measurement. An unmeasured warm-up of a fifth of this time precedes.
    pub(super) seconds: f64,
    /// Bytes of SMC receive buffers.
    pub(super) buffer: usize,
    /// How long SMC spins before it sleeps, microseconds.
    pub(super) spin_us: u64,
    /// Connections of [`Program::Echo`], [`Program::EchoEpoll`] and [`Program::EchoTokio`].
    pub(super) connections: usize,
    /// How many of these have no message under way.
    pub(super) idle: usize,
    /// Client threads of [`Program::Short`]; threads of each end of [`Program::RoundTripThreads`].
    pub(super) threads: usize,
    /// Writes or messages per second; 0: as many as possible.
    pub(super) rate: u32,
    /// Device of the process, for SMC.
    pub(super) device: Option<PathBuf>,
    /// User EIDs of SMC; none: the default.
    pub(super) eids: Vec<String>,
    /// The other end is another machine, perhaps a slow one: SMC has longer timeouts.
    pub(super) remote: bool,
    /// Where TCP and SMC servers listen.
    pub(super) bind: SocketAddr,
    /// Where Unix sockets are made.
    pub(super) dir: PathBuf,
    /// Where the server listens; none in the server's own job.
    pub(super) address: String,
    /// The network namespace of the process, if not the usual one.
    pub(super) namespace: Option<PathBuf>,
    /// The cgroup of the process, if not the usual one.
    pub(super) cgroup: Option<PathBuf>,
    /// Bind the process to one processor: the first for servers, the second for clients.
    pub(super) pin: bool,
    /// The other processes of the run, if the client shall ask for their processor time.
    pub(super) others: Option<RunProcesses>,
}

impl Job {
    /// Length of the measurement.
    pub(super) fn length(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Time of unmeasured work before the measurement.
    pub(super) fn warm_up(&self) -> Duration {
        self.length() / 5
    }
}

/// A message of a process of a run.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RunMessage {
    /// The server listens there.
    Listening(String),
    /// The process has done its part.
    Done(Box<EndReport>),
}

/// The report of one end of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct EndReport {
    /// The result, reported by one side of each program.
    pub(super) outcome: Option<Outcome>,
    /// Received bytes of a stream, or the round trips or connections of a client, including the warm-up.
    pub(super) work: u64,
    /// How the SMC connection travelled.
    pub(super) smc: Option<SmcPath>,
    /// Counters of the device since its process opened it.
    pub(super) device: Option<Counters>,
    /// Resource usage of the run, as seen by the client.
    pub(super) usage: Option<Usage>,
    /// Time and memory for setting up the connections of an event loop, as seen by the client.
    pub(super) setup: Option<Setup>,
}

impl From<Outcome> for EndReport {
    fn from(outcome: Outcome) -> EndReport {
        EndReport { outcome: Some(outcome), ..EndReport::default() }
    }
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// Bytes, echoes or connections per second.
    PerSecond(f64),
    /// Round-trip times.
    Times(Percentiles),
}

/// Percentiles of round-trip times, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Percentiles {
    /// Median.
    pub(super) p50: f64,
    /// Nine of ten are at most this.
    pub(super) p90: f64,
    /// 99 of 100 are at most this.
    pub(super) p99: f64,
    /// 999 of 1000 are at most this.
    pub(super) p999: f64,
    /// The longest.
    pub(super) max: f64,
}
