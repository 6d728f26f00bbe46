// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc plan`: the running services of this host that would gain by SMC.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use crate::error::CliError;
use crate::output;
use crate::stat::table::{Table, row, size, table};
use estimate::{Traffic, Verdict};
use services::{Service, ServiceName, ServiceTable};
use sockets::{Pair, Server, SocketSnapshot};

mod estimate;
mod services;
mod sockets;

/// Help of `smc plan`.
pub(crate) const LONG_ABOUT: &str = "\
Looks at the TCP connections between the processes of this host, twice, and estimates what SMC would
be for them. It changes nothing: SMC need not be set up.

A line is the connections from one service to one server. A service is the processes with the same
program, user and cgroup (a unit of systemd, a container).

  gains   SMC saves time: \"saved\" is the share of one processor, by the model that smc run uses
  little  SMC would work, but there is hardly any traffic
  short   the connections are too short: smc run would leave them on TCP after the first eight
  TCP     one of both programs stays on TCP; the reasons are below the table

As root it sees the processes of all users and the connections between containers; others see their
own. It counts round trips by segments: a reply in several segments counts more than once.";

/// Examples and the reading of the results.
pub(crate) const AFTER: &str = "\
Examples:
  sudo smc plan                  five seconds of this host
  sudo smc plan --seconds 60     a better average
  sudo smc plan --json | jq '.connections[] | select(.verdict == \"gains\")'

docs/rollout.md describes the way from there.";

/// Options of `smc plan`.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    /// Seconds between the two looks.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,

    /// Print JSON: an object with a list of connections and a list of services.
    #[arg(long)]
    json: bool,
}

/// The connections from one service to one server.
#[derive(Clone, Debug, Serialize)]
struct Line {
    /// `None`: all observed connections have ended.
    client: Option<ServiceName>,
    server: ServiceName,
    port: u16,
    /// The ends are in different network namespaces.
    crosses_namespaces: bool,
    #[serde(flatten)]
    traffic: Traffic,
    /// Average lifetime, seconds; `None`: none has ended.
    lifetime: Option<f64>,
    /// Share of one processor saved by SMC.
    saved: f64,
    verdict: Verdict,
    /// Both programs can be on SMC under `smc run`.
    possible: bool,
}

/// The result.
#[derive(Debug, Serialize)]
struct Plan {
    seconds: f64,
    connections: Vec<Line>,
    services: Vec<Judged>,
    /// Connections to other hosts, or to sockets that cannot be seen, are not listed.
    unseen: Unseen,
}

/// A service with its obstacles.
#[derive(Debug, Serialize)]
struct Judged {
    #[serde(flatten)]
    name: ServiceName,
    #[serde(flatten)]
    service: Service,
}

/// Parts of the host that could not be looked at.
#[derive(Debug, Default, Serialize)]
struct Unseen {
    processes: usize,
    network_namespaces: usize,
    connections: u64,
}

/// Prints the plan.
///
/// # Errors
/// The kernel shows no TCP sockets, or standard output cannot be written.
pub(crate) fn run(args: &PlanArgs) -> Result<(), CliError> {
    let plan = observe(Duration::from_secs(args.seconds.into()))?;
    match args.json {
        true => output::print(&output::json(&plan)?),
        false => output::print(&as_text(&plan)),
    }
}

/// A line's key: the client, if any of its sockets is open, and the server.
type Key = (Option<ServiceName>, Server);

fn observe(time: Duration) -> Result<Plan, CliError> {
    let namespaces = sockets::namespaces(&services::pids());
    let take =
        || SocketSnapshot::take(&namespaces).map_err(CliError::io("the table of TCP sockets"));
    let begin = Instant::now();
    let before = take()?;
    std::thread::sleep(time.saturating_sub(begin.elapsed()));
    let (seconds, now) = (begin.elapsed().as_secs_f64(), take()?);

    let (earlier, pairs) = (before.pairs(), now.pairs());
    let ended = ended(&earlier, &pairs, now.ended(), seconds);
    let earlier: HashMap<u64, Pair> =
        earlier.into_iter().map(|pair| (pair.client.cookie, pair)).collect();
    let listeners = ended.keys().filter_map(|server| now.listener(*server));
    let ends = pairs.iter().flat_map(|pair| [pair.client.inode, pair.server.inode]);
    let services = ServiceTable::of(&ends.chain(listeners).collect::<HashSet<_>>());

    let mut found: BTreeMap<Key, (ServiceName, bool, Traffic)> = BTreeMap::new();
    let mut open: HashMap<Server, u64> = HashMap::new();
    for pair in &pairs {
        let key = (Some(services.owner(pair.client.inode)), pair.at);
        let line = || (services.owner(pair.server.inode), pair.crosses, Traffic::default());
        let (_, _, traffic) = found.entry(key).or_insert_with(line);
        traffic.add(pair, earlier.get(&pair.client.cookie), seconds);
        *open.entry(pair.at).or_default() += 1;
    }
    for (at, per_second) in ended {
        match open.get(&at) {
            Some(all) => {
                for ((_, server), (_, _, traffic)) in &mut found {
                    if *server == at {
                        traffic.ended_per_second +=
                            per_second * traffic.connections as f64 / *all as f64;
                    }
                }
            }
            None => {
                let server = services.owner(now.listener(at).unwrap_or_default());
                let traffic = Traffic { ended_per_second: per_second, ..Traffic::default() };
                found.insert((None, at), (server, false, traffic));
            }
        }
    }
    let unseen = Unseen {
        processes: services.hidden,
        network_namespaces: now.closed,
        connections: now.beyond,
    };
    Ok(plan(found, services, unseen, seconds))
}

/// Ended connections per second of each server: those gone between two snapshots, or the recently ended ones
/// that the kernel remembers, whichever are more.
fn ended(
    before: &[Pair],
    now: &[Pair],
    remembered: HashMap<Server, f64>,
    seconds: f64,
) -> HashMap<Server, f64> {
    let open: HashSet<u64> = now.iter().map(|pair| pair.client.cookie).collect();
    let mut gone: HashMap<Server, f64> = HashMap::new();
    for pair in before.iter().filter(|pair| !open.contains(&pair.client.cookie)) {
        *gone.entry(pair.at).or_default() += 1.0 / seconds;
    }
    for (at, per_second) in remembered {
        let most = gone.entry(at).or_default();
        *most = most.max(per_second);
    }
    gone
}

fn plan(
    found: BTreeMap<Key, (ServiceName, bool, Traffic)>,
    services: ServiceTable,
    unseen: Unseen,
    seconds: f64,
) -> Plan {
    let is_possible = |name: &ServiceName| {
        services.all.get(name).is_none_or(|service| service.obstacles.is_empty())
    };
    let mut connections: Vec<Line> = found
        .into_iter()
        .map(|((client, (_, port)), (server, crosses_namespaces, traffic))| Line {
            possible: is_possible(&server) && client.as_ref().is_none_or(is_possible),
            client,
            server,
            port,
            crosses_namespaces,
            lifetime: traffic.lifetime().map(|time| time.as_secs_f64()),
            saved: traffic.saved() / 1e9,
            verdict: traffic.verdict(),
            traffic,
        })
        .collect();
    connections.sort_by(|one, other| other.saved.total_cmp(&one.saved));
    let judged = |(name, service)| Judged { name, service };
    let services = services.all.into_iter().map(judged).collect();
    Plan { seconds, connections, services, unseen }
}

fn as_text(plan: &Plan) -> String {
    let mut lines: Table =
        table(&["client", "server", "open", "bytes", "bytes/s", "trips/s", "life", "saved", "SMC"]);
    for line in &plan.connections {
        let Traffic { connections, bytes, bytes_per_second, round_trips_per_second, .. } =
            line.traffic;
        let client = line.client.as_ref().map_or("(ended)".into(), ToString::to_string);
        let verdict = match (line.possible, line.verdict) {
            (false, _) => "TCP",
            (true, Verdict::Gains) => "gains",
            (true, Verdict::Little) => "little",
            (true, Verdict::Short) => "short",
        };
        let cells = [
            format!("{}:{}", line.server, line.port),
            connections.to_string(),
            size(bytes),
            size(bytes_per_second as u64),
            format!("{round_trips_per_second:.0}"),
            line.lifetime.map_or("-".into(), |seconds| format!("{seconds:.1} s")),
            // The sum turns the -0.0 of a small loss into 0.0.
            format!("{:.1} %", (1000.0 * line.saved).round() / 10.0 + 0.0),
            verdict.into(),
        ];
        row(&mut lines, &client, cells);
    }
    let mut text = match plan.connections.is_empty() {
        true => "no connections within this host are seen\n".to_owned(),
        false => format!("{lines}\n"),
    };
    for Judged { name, service } in &plan.services {
        let library = service.has_library.then_some("has the library of smc run already");
        let says = |kind: &str, says: &str| output::hanging(&format!("{kind:<6}  {name}: "), says);
        text.extend(service.obstacles.iter().map(|why| says("TCP", why)));
        text.extend(service.notes.iter().map(|note| says("note", note)));
        text.extend(library.map(|library| says("note", library)));
    }
    let Unseen { processes, network_namespaces, connections } = plan.unseen;
    for (count, what) in [
        (processes as u64, "processes of other users, whose connections have \"?\" for a name"),
        (network_namespaces as u64, "network namespaces"),
        (connections, "connections beyond the limit of 250,000"),
    ] {
        if count > 0 {
            text += &format!("unseen  {count} {what}\n");
        }
    }
    text
}

impl Traffic {
    /// Adds a connection, with its state at the earlier snapshot.
    fn add(&mut self, now: &Pair, before: Option<&Pair>, seconds: f64) {
        let [now, before] = [Some(now), before].map(|pair| {
            let counts = pair.map(|pair| pair.client.counts).unwrap_or_default();
            let trips = counts.segments_out.min(counts.segments_in);
            (counts.sent.saturating_add(counts.received), u64::from(trips))
        });
        self.connections += 1;
        self.bytes = self.bytes.saturating_add(now.0);
        self.bytes_per_second += now.0.saturating_sub(before.0) as f64 / seconds;
        self.round_trips_per_second += now.1.saturating_sub(before.1) as f64 / seconds;
    }
}
