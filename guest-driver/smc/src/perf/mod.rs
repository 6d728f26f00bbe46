// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc perf`: measures SMC next to the alternatives.

mod job;
mod measure;
mod memory;
mod peer;
mod plot;
mod process_status;
mod programs;
mod remote;
mod report;
mod run;
mod run_settings;
mod scale;
mod usage;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use memory::idle;
pub(crate) use peer::{drive, serve};

use crate::error::CliError;
use crate::paths;
use crate::stack::{PathArg, parse_size};
use crate::temporary_fabric::TemporaryFabric;
use job::TransportKind;
use measure::{Experiment, Overrides};

/// Help of `smc perf`.
pub(crate) const LONG_ABOUT: &str = "\
Measures SMC-D (by the window, where stores go straight into the peer's buffer, and by moves, where
the device copies) next to TCP on the loopback interface, Unix stream sockets, and the raw
shared-memory ring that is the limit of what two processes can do.

How: a daemon of its own, and for every run a fresh server process and a fresh client process, which
run the same program over each transport. Within a round the transports take turns; the value of a
transport is the median over the rounds, and a ratio is the median of the ratios within the rounds.
A fifth of a run's time comes before the measurement. If SMC falls back to TCP the run fails.
With each measure comes the processor time of both ends and the daemon, in their own code and in the
kernel. A warning says if other processes were busy meanwhile.

  latency_1k, latency_10k
         one connection; 64 B to and fro, 1,000 or 10,000 messages a second on an absolute
         schedule. A message that is late because the thread still waits for an answer counts from
         when it was due (a stack that stalls is not asked less often), and one that is late because
         of its timer from when the timer came. TCP_NODELAY. Median, and p99 as a measure of its own.
  rr_threads
         16 threads at each end, each blocking on a connection of its own; 64 B to and fro.
         TCP_NODELAY.
  echo_epoll
         as echo, but with epoll for SMC, too: each connection's readiness descriptor is in an epoll
         set of the program, as a program under \"smc run\" has it.
  short_conn_1
         as conn, by one client thread.
  cpu_1g
         processor time of a stream of 1 GB/s (10^9 bytes); what is due is written every millisecond.
  bulk   one connection; the client writes, the server reads into 64 KiB and measures. TCP and Unix
         sockets have the kernel's default buffers.
  rtt    one connection; 64 B to and fro, one at a time, TCP_NODELAY; every round trip is measured
         and the value is the median (p90, p99 and more are shown with a single measure).
  rate   as bulk with 100 B writes (TCP may coalesce them: no TCP_NODELAY).
  echo   one thread with an event loop on each side: epoll for TCP and Unix sockets, the library's
         Poller for SMC. Each connection has one message under way. TCP_NODELAY.
  conn   4 client threads connect, send 1 KiB, read 1 KiB, close; the server is one thread that
         takes a connection, answers and closes. TCP_NODELAY.
  raw    two rings of 1 MiB in a memory file, positions in atomic words, both sides spin, each on a
         processor of its own; no handshake, no wake-up, no checks. This is the limit of what two
         processors can do through memory. It has no event loop and no connections.
  scale  curves: 1, 10, 100, 1,000, 3,000 and 10,000 connections between two processes (echo, a round
         trip on one while the others are idle, set-up, private memory of client, server and
         daemon), and 1, 10, 100, 1,000 idle devices beside a pair of processes.
  memory
         resident memory of the daemon with 100 devices whose processes are idle; per idle
         connection private memory of daemon, server and client, shared memory (slabs), and
         descriptors; threads of server and client.

Between two machines (two VMs of one host, say): \"smc perf --serve PORT\" runs on one machine.
\"smc perf --to HOST:PORT\" on the other one requests the runs from it, one after the other. Each end has a device of
its own. The measures are bulk, rtt_spin, rtt_sleep, rate_100b, short_conn (these are the suite) and
echo_200, over SMC-D, TCP on the network between the two, and virtio sockets if --vsock names the
server's CID (in writes of 3.5 KiB at most, since what carries them between guests loses longer
packets). With bulk, round trips and connections come kicks, wakes and commands: how often, per MiB,
round trip or connection, the drivers of both ends kicked their devices (in a guest, exits), the
devices woke the drivers (interrupts), and drivers sent a control command. The table shows how the
bytes of SMC travelled. Servers of runs listen on ports that the system chooses.";

/// End of the help of `smc perf`.
pub(crate) const AFTER: &str = "\
Examples:
  smc perf                          the suite as a table (about four minutes)
  smc perf --suite --json           the same, a JSON object a line
  smc perf rtt --size 1K --runs 9   one measure, other parameters
  smc perf bulk rtt --plot perf.svg a picture
  smc perf conn --beside veth --beside fast-open   beside what containers have
  smc perf scale --plot scale.svg   curves with logarithmic axes
  smc perf --serve 7000             between two machines: on one of them
  smc perf --to 10.0.0.2:7000       on the other: the suite

JSON lines have the keys measure, unit, runs, smc, tcp, unix, limit, ratio: medians, null where one
does not apply. samples has the value of each run by transport. A run that fails is left out, and
the command then exits with 1. The ratio is smc over tcp, for times tcp over smc: more is better. ratio_low and
ratio_high are the ends of the middle half of the rounds' ratios. cpu_smc, cpu_tcp and cpu_unix are
processor time in cpu_unit, cpu_ratio is tcp over smc; others is the share of all processors' time
that other processes used, 0 to 1. With --beside, beside has for each peer value, ratio (smc over the
peer), cpu, cpu_ratio and samples. With --bound, bound is that of connections bound to their device,
and bound_ratio smc over bound. With --to the keys are measure, unit, runs, path, smc, tcp, vsock, ratio, vsock_ratio.";

/// Heading of options.
const BETWEEN: &str = "Between two machines";

/// Options of `smc perf`.
#[derive(Args, Debug)]
pub(crate) struct PerfArgs {
    /// Measures; without any, the suite.
    #[arg(value_name = "MEASURE", value_parser = PossibleValuesParser::new(names()))]
    measures: Vec<String>,

    /// The same as a MEASURE; can be repeated.
    #[arg(long = "measure", value_name = "MEASURE", hide_possible_values = true,
          value_parser = PossibleValuesParser::new(names()))]
    more: Vec<String>,

    /// Measure latency_1k, latency_10k, rr_threads, echo_epoll, short_conn, short_conn_1, cpu_1g;
    /// then bulk_window, bulk_move, rtt_spin, rtt_sleep, rate_100b and echo_200.
    #[arg(long, conflicts_with_all = ["measures", "more", "size", "buffer", "spin_us",
                                      "connections", "threads"])]
    suite: bool,

    /// Serve runs for "smc perf --to" of other machines (see above) until Ctrl-C.
    ///
    /// Anyone who can reach the port can keep this machine busy.
    #[arg(long, value_name = "[ADDR:]PORT", help_heading = BETWEEN, group = "between",
          conflicts_with_all = ["measures", "more", "suite", "runs", "seconds", "size", "buffer",
                                "spin_us", "connections", "threads", "pin", "json", "plot", "vsock",
                                "path"])]
    serve: Option<String>,

    /// Measure with the "smc perf --serve" of another machine.
    #[arg(long, value_name = "HOST:PORT", help_heading = BETWEEN, group = "between",
          conflicts_with = "pin")]
    to: Option<String>,

    /// Measure virtio sockets too; the CID is that of the server's machine.
    #[arg(long, value_name = "CID", help_heading = BETWEEN, requires = "to",
          value_parser = clap::value_parser!(u32).range(1..0xffff_ffff))]
    vsock: Option<u32>,

    /// How the bytes of SMC must travel; a measure fails if they do not [default: auto].
    #[arg(long, value_enum, value_name = "PATH", help_heading = BETWEEN, requires = "to")]
    path: Option<PathArg>,

    /// Device of this machine: a socket, or "pci", or a PCI address [default: $SMC_DEVICE; else the
    /// default of "smc listen" or "smc connect"].
    #[arg(long, value_name = "DEVICE", help_heading = BETWEEN, requires = "between")]
    device: Option<PathBuf>,

    /// User EID; both ends need one in common [default: $SMC_EID, else VIRTIO-ISM].
    #[arg(long = "eid", value_name = "EID", help_heading = BETWEEN, requires = "between",
          value_delimiter = ',')]
    eids: Vec<String>,

    /// Rounds: runs of each transport.
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Length of a run.
    #[arg(long, value_name = "S", default_value_t = 0.7, value_parser = parse_seconds)]
    seconds: f64,

    /// Bytes of a write or message, with an optional suffix K or M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<usize>,

    /// SMC receive buffer (DMB) of a connection, bytes: 16K to 1M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    buffer: Option<usize>,

    /// How long a waiting SMC call spins before it sleeps, microseconds.
    #[arg(long, value_name = "US")]
    spin_us: Option<u64>,

    /// Connections of echo.
    #[arg(long, value_name = "N", value_parser = parse_count)]
    connections: Option<usize>,

    /// Client threads of conn.
    #[arg(long, value_name = "N", value_parser = parse_count)]
    threads: Option<usize>,

    /// Keep the server on one processor and the client on another.
    ///
    /// Programs are usually not bound like that. But on a busy machine it keeps the scheduler's
    /// choices out of the result.
    #[arg(long)]
    pin: bool,

    /// Measure connections that are bound to their device as well.
    ///
    /// These end with their device, as with "--outlive-device=false". The table then shows what it
    /// costs to outlive the device.
    #[arg(long, conflicts_with_all = ["between"])]
    bound: bool,

    /// Measure beside another peer; can be repeated. Needs root.
    ///
    /// veth: TCP by a pair of veth devices between two network namespaces, as containers have.
    /// sockmap: TCP whose messages an eBPF program puts straight into the peer's queue. fast-open:
    /// TCP Fast Open, with short connections only.
    #[arg(long, value_name = "PEER", conflicts_with = "between",
          value_parser = PossibleValuesParser::new(TransportKind::PEERS.map(|(name, _)| name)))]
    beside: Vec<String>,

    /// Print a JSON object per measure instead of a table.
    #[arg(long)]
    json: bool,

    /// Draw the results into this SVG file.
    ///
    /// Its name ends in .svg.
    #[arg(long, value_name = "FILE", value_parser = parse_plot)]
    plot: Option<PathBuf>,

    /// Draw what an earlier "smc perf scale --json" has printed into this file beside the curves.
    #[arg(long, value_name = "FILE", requires = "plot")]
    before: Option<PathBuf>,
}

fn names() -> impl Iterator<Item = clap::builder::PossibleValue> {
    measure::NAMES.iter().map(|(name, help)| clap::builder::PossibleValue::new(*name).help(*help))
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if (0.01..=3600.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("expected 0.01 to 3600 seconds".into())
    }
}

fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=10_000) => Ok(n),
        _ => Err("expected 1 to 10000".into()),
    }
}

fn parse_plot(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    // Found out now, and not after minutes of measurements.
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    match directory.filter(|directory| !directory.is_dir()) {
        Some(missing) => Err(format!("there is no directory {}", missing.display())),
        None if !plot::is_drawable(&path) => Err("expected a name that ends in .svg".into()),
        None => Ok(path),
    }
}

/// Measures and reports.
///
/// # Errors
/// A measure cannot be taken.
pub(crate) fn run(args: &PerfArgs) -> Result<(), CliError> {
    // Before anything is measured.
    let plot = args.plot.as_deref().map(plot::PlotFile::create).transpose()?;
    if let Some(address) = &args.serve {
        return remote::serve(
            address,
            &remote::Own::of(args.device.as_ref(), &args.eids, paths::SERVER)?,
        );
    }
    let names: Vec<&str> = args.measures.iter().chain(&args.more).map(String::as_str).collect();
    let overrides = Overrides {
        size: args.size,
        buffer: args.buffer,
        spin_us: args.spin_us,
        connections: args.connections,
        threads: args.threads,
    };
    if let Some(server) = &args.to {
        return between(args, plot, server, &names, &overrides);
    }
    let experiments: Vec<Experiment> = match names.is_empty() {
        true => measure::suite(&overrides),
        false => names.iter().filter_map(|name| measure::by_name(name, &overrides)).collect(),
    };
    let experiments: Vec<Experiment> = match args.bound {
        true => experiments.into_iter().map(Experiment::and_bound).collect(),
        false => experiments,
    };
    let is_wanted = |(name, _): &&(&str, _)| args.beside.iter().any(|wanted| wanted == name);
    let peers: Vec<_> =
        TransportKind::PEERS.iter().filter(is_wanted).map(|(_, peer)| *peer).collect();
    let experiments: Vec<_> = experiments.into_iter().map(|e| e.beside(&peers)).collect();
    let runs = args.runs as usize;
    let plan = run::Plan { rounds: runs, seconds: args.seconds, pin: args.pin };
    if names.contains(&"scale") {
        return match names.len() {
            1 => scale(args, plot, &plan),
            _ => Err(CliError::Usage("scale is measured alone".into())),
        };
    }
    let mut fabric = TemporaryFabric::start(&[run::SERVER, run::CLIENT])?;
    let progress = progress_bar(steps(&experiments, runs));
    let mut all = Vec::new();
    // Earlier results are shown despite a failure.
    let mut failed = None;
    for experiment in &experiments {
        let results = match run::run(&mut fabric, experiment, &plan, &progress) {
            Ok(results) => results,
            Err(error) => {
                failed = Some(error);
                break;
            }
        };
        if args.json {
            progress.suspend(|| report::print_json(&results))?;
        }
        all.push(results);
    }
    progress.finish_and_clear();
    drop(fabric);
    let memory = (failed.is_none() && names.contains(&"memory"))
        .then(|| memory::measure(args.connections, args.bound));
    let memory = memory.transpose()?;
    report::load_warning(&all).into_iter().for_each(|warning| crate::output::note(&warning));
    match args.json {
        true => report::print_memory_json(memory.as_ref())?,
        false => report::print_tables(&all, memory.as_ref(), &plan)?,
    }
    if let Some(plot) = plot.filter(|_| !all.is_empty()) {
        plot.draw(&all)?;
    }
    failed.map_or_else(|| failure_of(&all), Err)
}

/// The failed runs, if any. Successful measurements are printed all the same.
fn failure_of(all: &[run::Results]) -> Result<(), CliError> {
    let failed: Vec<_> = all.iter().flat_map(|results| results.failures.clone()).collect();
    if failed.is_empty() { Ok(()) } else { Err(CliError::Runs(failed)) }
}

/// Measures curves.
fn scale(args: &PerfArgs, plot: Option<plot::PlotFile>, plan: &run::Plan) -> Result<(), CliError> {
    let before = args.before.as_deref().map(scale::Scale::read).transpose()?;
    let progress = progress_bar(scale::steps(plan));
    let scale = scale::measure(plan, &progress);
    progress.finish_and_clear();
    match args.json {
        true => scale.print_json()?,
        false => scale.print_tables(plan)?,
    }
    if let Some(plot) = plot {
        plot.draw_curves(&scale.panels(before.as_ref()), plan.rounds)?;
    }
    match scale.problems() {
        [] => Ok(()),
        problems => Err(CliError::Runs(problems.to_vec())),
    }
}

/// Measures with another machine.
fn between(
    args: &PerfArgs,
    plot: Option<plot::PlotFile>,
    server: &str,
    names: &[&str],
    overrides: &Overrides,
) -> Result<(), CliError> {
    let smc = match args.path {
        None | Some(PathArg::Auto) => TransportKind::Smc,
        Some(PathArg::Window) => TransportKind::Window,
        Some(PathArg::Move) => TransportKind::Move,
    };
    let mut transports = vec![smc, TransportKind::Tcp];
    transports.extend(args.vsock.map(|_| TransportKind::Vsock));
    let names = if names.is_empty() { &measure::BETWEEN[..] } else { names };
    let none = |name| {
        CliError::Usage(format!(
            "{name} is not measured between machines (--path says how SMC must travel)"
        ))
    };
    let experiments: Vec<Experiment> = names
        .iter()
        .map(|name| measure::between(name, overrides, &transports).ok_or_else(|| none(*name)))
        .collect::<Result<_, _>>()?;
    let runs = args.runs as usize;
    let plan = run::Plan { rounds: runs, seconds: args.seconds, pin: false };
    let own = remote::Own::of(args.device.as_ref(), &args.eids, paths::CLIENT)?;
    let target = remote::Target { server, vsock: args.vsock };
    let progress = progress_bar(steps(&experiments, runs));
    let all = remote::measure(&target, own, &experiments, &plan, args.json, &progress)?;
    if let Some(plot) = plot.filter(|_| !all.is_empty()) {
        plot.draw(&all)?;
    }
    failure_of(&all)
}

/// How many runs all experiments make.
fn steps(experiments: &[Experiment], runs: usize) -> u64 {
    experiments.iter().map(|e| e.transports.len() * runs).sum::<usize>() as u64
}

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} (ends in {eta})") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}
