// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc stat`: shows a daemon's counters, and the SMC connections of processes.

mod claims;
mod columns;
mod daemon;
mod endpoints;
mod filter;
mod host;
mod look;
mod metrics;
pub(crate) mod processes;
mod requests;
mod sums;
pub(crate) mod table;
mod tables;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use ism_sys::connect_unix;
use serde::Serialize;
use vhost_device_ism::management::{Client, ClientError, Guest};

use crate::error::CliError;
use crate::{output, paths};
pub(crate) use host::{Holding, Scope};
use processes::Processes;
pub(crate) use processes::sockets;
pub(crate) use requests::{ReportRequest, has_socket};

/// Help of `smc stat`.
pub(crate) const LONG_ABOUT: &str = "\
Shows which connections use SMC, and why the others do not. It reads the counters of a daemon from
its management socket, and the connections of processes from these and from the kernel: those of
this user, and for root those of all users and containers. If XDG_RUNTIME_DIR is no directory below
/run/user, only processes that have their sockets there are shown, unless --all is given.

  overview      the daemon's guests, and a line per process
  fabric        the daemon's guests only
  connections   type, state, addresses, bytes, buffers; why it is TCP. With --details also cursors,
                GIDs, tokens and keys. A narrow terminal gets fewer columns; -o wide shows all. Of
                a TCP connection that the program has to itself the kernel counts the bytes (ss -ti)
  groups        link groups of SMC-R, and their links
  rnics         RNICs that processes use
  endpoints     servers and listeners: what their connections are like, and whether a client leaves
                them to TCP because SMC would be slower
  totals        results of handshakes, with the reasons of TCP counted by code; bytes by SMC
  metrics       the same for Prometheus, by program and service; with --by process also by process;
                in a container it shows the container's processes

Of a daemon:
  DMBs        registered buffers and their bytes; attached: buffers of peers it may write
  slabs       shared memory that holds the buffers of one pair of guests
  moves       copies by the device; the daemon does not see stores through the window
  signals     requests to wake the owner of a buffer; saved: it was awake, so nothing was done;
              wakes: records that were posted
  refused     commands and moves that were refused, by reason
  faults      violations of the protocol by a front end or driver
Counters of a guest start anew with each connection of its front end.

Of an endpoint: all but the counts are means of connections that were observed: those on SMC, and
one of 64 on TCP. The gain is what SMC saves, in percent of what its set-up costs: below 100 % TCP is
faster. A listener accepts what its clients propose.

Of a connection: unread are bytes that this end / the peer has not read, those in the send queue
included; buffer is the receive buffer of this end / of the peer. Bytes sent of a TCP connection are those that the peer's kernel has acknowledged.";

/// End of the help of `smc stat`.
pub(crate) const AFTER: &str = "\
Examples:
  smc stat
  smc stat connections --watch --sort sent
  smc stat connections --by service
  smc stat connections --carrier tcp -o process,peer,reason
  smc stat --json | jq '.processes[].connections[] | {peer, kind, reason: .reason.says}'";

/// Options of `smc stat`.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    /// The table to show.
    #[arg(value_enum, default_value_t = What::Overview)]
    what: What,

    /// Management socket of the daemon [default: that of /etc/smc/smc.toml, or the
    /// first that this user may ask of the packaged service and the user's own "smc fabric"].
    #[arg(long, value_name = "SOCKET", env = "SMC_MANAGEMENT")]
    management: Option<PathBuf>,

    /// Print JSON, always of everything: an object with a list of fabrics (null without a daemon) and
    /// a list of processes; with --watch one a line.
    #[arg(long)]
    json: bool,

    /// Look for the processes of all users that this one may look into, whatever XDG_RUNTIME_DIR says.
    #[arg(long, short)]
    all: bool,

    #[command(flatten)]
    filter: filter::Filter,

    #[command(flatten)]
    view: tables::View,

    /// A further label of each metric, such as the name of the container; repeat it for more.
    #[arg(long, value_name = "NAME=VALUE")]
    label: Vec<metrics::Label>,

    /// Repeat every SECONDS seconds.
    #[arg(long, short, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=86400))]
    watch: Option<u32>,
}

/// The view to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    Overview,
    Fabric,
    Connections,
    Groups,
    Rnics,
    Endpoints,
    Totals,
    Metrics,
}

impl What {
    /// Whether the view needs data of the daemon.
    fn asks_daemon(self) -> bool {
        matches!(self, What::Overview | What::Fabric)
    }
}

/// The state at one moment.
#[derive(Debug)]
struct Snapshot {
    at: Instant,
    /// Guests of the daemon, or why there is no answer.
    guests: Result<Vec<Guest>, CliError>,
    processes: Processes,
    /// Whether there are processes, but no fitting connection.
    fits_none: bool,
}

#[derive(Serialize)]
struct JsonSnapshot<'a> {
    fabrics: Option<Vec<daemon::Fabric<'a>>>,
    #[serde(flatten)]
    processes: &'a Processes,
}

/// Prints once, or again and again.
///
/// # Errors
/// There is neither a daemon nor a process to ask, or the named daemon does not answer.
pub(crate) fn run(args: &StatArgs) -> Result<(), CliError> {
    let mut source = Source { args, client: None };
    let mut before: Option<Snapshot> = None;
    loop {
        let mut snapshot = source.look();
        // With --watch, an empty snapshot is an error only at the start.
        if before.is_none() {
            snapshot = snapshot.check(args)?;
        }
        snapshot.choose(&args.filter);
        match args.json {
            true => output::print(&snapshot.json()?)?,
            false if args.watch.is_some() => {
                output::print_page(&snapshot.text(args, before.as_ref()))?;
            }
            false => output::print(&snapshot.text(args, before.as_ref()))?,
        }
        let Some(seconds) = args.watch else { return Ok(()) };
        before = Some(snapshot);
        std::thread::sleep(Duration::from_secs(seconds.into()));
    }
}

/// Where snapshots come from.
struct Source<'a> {
    args: &'a StatArgs,
    /// The connection to the daemon, if there is one.
    client: Option<Client>,
}

impl Source<'_> {
    fn look(&mut self) -> Snapshot {
        let scope = if self.args.all { Scope::Host } else { Scope::of_environment() };
        Snapshot {
            at: Instant::now(),
            guests: guests(self.args, &mut self.client),
            processes: processes::of(&scope),
            fits_none: false,
        }
    }
}

/// How long the daemon may take to accept a connection to its management socket.
const MANAGEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks the daemon, over the connection of the last call if there is one.
fn guests(args: &StatArgs, client: &mut Option<Client>) -> Result<Vec<Guest>, CliError> {
    let socket = args.management.clone();
    let socket = socket.map_or_else(paths::management, Ok)?;
    let failed = |source| CliError::Management { socket: socket.clone(), source };
    let mut connected = match client.take() {
        Some(client) => client,
        // Checks the listener in the default directory.
        None => connect_unix(&socket, MANAGEMENT_TIMEOUT)
            .map_err(ClientError::from)
            .and_then(|stream| Client::over(stream.into()))
            .map_err(failed)?,
    };
    let guests = connected.list().map_err(failed)?;
    *client = Some(connected);
    Ok(guests)
}

impl Snapshot {
    /// Fails if there is nothing to show. For readers of JSON or metrics, an empty snapshot is
    /// valid.
    fn check(self, args: &StatArgs) -> Result<Snapshot, CliError> {
        let named = args.management.is_some() || args.what == What::Fabric;
        match self.guests {
            Err(error) if named && args.what.asks_daemon() => Err(error),
            _ if args.json || args.what == What::Metrics => Ok(self),
            Err(CliError::Management { socket, .. })
                if self.processes.is_empty() && !socket.exists() =>
            {
                Err(CliError::NothingRuns { socket })
            }
            Err(error) if self.processes.is_empty() => Err(error),
            _ => Ok(self),
        }
    }

    /// Keeps the connections accepted by a filter.
    fn choose(&mut self, filter: &filter::Filter) {
        let was_empty = self.processes.list.is_empty();
        filter.apply(&mut self.processes);
        self.fits_none = !was_empty && self.processes.list.is_empty();
    }

    fn json(&self) -> Result<String, CliError> {
        let fabrics = self.guests.as_ref().ok().map(|guests| daemon::by_fabric(guests));
        output::json(&JsonSnapshot { fabrics, processes: &self.processes })
    }

    fn text(&self, args: &StatArgs, before: Option<&Snapshot>) -> String {
        let since = before.map(|before| self.at - before.at);
        let old = before.map(|before| &before.processes).zip(since);
        let processes = &self.processes;
        match args.what {
            What::Fabric => output::wrapped(&self.fabric(before)),
            What::Overview => {
                let fabric = self.fabric(before);
                let text = format!("{}\n{}", fabric.trim_end(), tables::overview(processes));
                output::wrapped(&text)
            }
            What::Connections if self.fits_none => "No connection fits.\n".to_owned(),
            What::Connections => tables::connections(processes, old, &args.view, output::columns()),
            What::Groups => output::wrapped(&tables::groups(processes)),
            What::Rnics => output::wrapped(&tables::rnics(processes)),
            What::Endpoints => output::wrapped(&endpoints::table_of(processes)),
            What::Totals => output::wrapped(&tables::totals(processes)),
            What::Metrics => {
                let text = metrics::text(processes, &args.label, args.view.by);
                let silent = tables::silent(processes);
                text + &silent.lines().map(|line| format!("# {line}\n")).collect::<String>()
            }
        }
    }

    fn fabric(&self, before: Option<&Snapshot>) -> String {
        match &self.guests {
            Ok(guests) => {
                let old = before.and_then(|before| Some((before, before.guests.as_ref().ok()?)));
                let rates = old.map(|(before, old)| (self.at - before.at, old.as_slice()));
                daemon::render(guests, rates)
            }
            Err(error) => format!("No daemon here: {error}.\n"),
        }
    }
}
