// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc perf scale`: how measures change with the number of connections and of devices.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use ism_sys::read_text;
use serde::{Deserialize, Serialize};

use super::job::TransportKind;
use super::measure;
use super::memory::{IdleMessage, Task, unexpected_report};
use super::plot::curves::{Curve, Panel};
use super::process_status::{memory_of, status_number};
use super::report::{human, median, number, rounded, table, times, to_line};
use super::run::{self, CLIENT, Plan, Results, SERVER};
use super::usage::Setup;
use crate::error::CliError;
use crate::helper::Helper;
use crate::output;
use crate::temporary_fabric::TemporaryFabric;

/// Numbers of connections.
const CONNECTIONS: [usize; 6] = [1, 10, 100, 1_000, 3_000, 10_000];
/// Numbers of devices.
const DEVICES: [usize; 4] = [1, 10, 100, 1_000];
/// How long a process may take to open a device.
const PER_DEVICE: Duration = Duration::from_millis(200);
/// Additional time for a process, independent of the number of devices.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A point of the curves, one JSON line. Values are medians over the rounds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Point {
    measure: String,
    /// Connections between two processes, or devices of the daemon.
    n: usize,
    runs: usize,
    /// Echoes of 4 KiB per second with a message under way on each connection.
    echoes_smc: Option<f64>,
    echoes_tcp: Option<f64>,
    /// Median of the ratios within the rounds.
    ratio: Option<f64>,
    /// Processor time of both ends and the daemon per echo, microseconds.
    cpu_smc: Option<f64>,
    cpu_tcp: Option<f64>,
    /// Round trip of 64 B on one connection while the others, or the other devices, are idle; both ends
    /// sleep in between. Microseconds.
    wake_smc: Option<f64>,
    wake_tcp: Option<f64>,
    /// Processor time of the round trip, microseconds.
    wake_cpu_smc: Option<f64>,
    wake_cpu_tcp: Option<f64>,
    /// Private memory of client, server and daemon for a connection, bytes.
    memory_client: Option<f64>,
    memory_server: Option<f64>,
    memory_daemon: Option<f64>,
    /// Memory of the daemon for a device, bytes, and its threads.
    memory_device: Option<f64>,
    daemon_threads: Option<f64>,
    /// Time to set up a connection, or to open a device, microseconds.
    setup_smc: Option<f64>,
    setup_tcp: Option<f64>,
    /// The share of the processors' time used by other processes.
    others: Option<f64>,
}

/// The points of both curves.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    points: Vec<Point>,
    problems: Vec<String>,
}

/// How many runs [`measure()`] makes.
pub(super) fn steps(plan: &Plan) -> u64 {
    (CONNECTIONS.len() * 4 * plan.rounds + DEVICES.len() * 2 * plan.rounds) as u64
}

/// Measures. A failed point is reported, and the others are kept.
pub(super) fn measure(plan: &Plan, progress: &ProgressBar) -> Scale {
    let mut scale = Scale { points: Vec::new(), problems: Vec::new() };
    let connections = CONNECTIONS.map(|n| ("connections", n));
    let devices = DEVICES.map(|n| ("devices", n));
    for (what, n) in connections.into_iter().chain(devices) {
        let point = match what {
            "connections" => with_connections(n, plan, progress),
            _ => with_devices(n, plan, progress),
        };
        match point {
            Ok(point) => scale.points.push(point),
            Err(error) => scale.problems.push(format!("{n} {what}: {error}")),
        }
    }
    scale
}

fn with_connections(n: usize, plan: &Plan, progress: &ProgressBar) -> Result<Point, CliError> {
    let mut fabric = TemporaryFabric::start(&[SERVER, CLIENT])?;
    let echo = run::run(&mut fabric, &measure::echo_of(n, 0), plan, progress)?;
    let mut point = woken(n, &mut fabric, plan, progress)?;
    let per_connection = |transport, of: fn(&Setup) -> f64| {
        let setups = echo.setups.iter().find(|(known, _)| *known == transport)?;
        // The first connection is not counted, unless alone.
        let counted = (n - 1).max(1) as f64;
        median(setups.1.iter().map(of)).map(|value| rounded(value / counted))
    };
    let (window, tcp) = (TransportKind::Window, TransportKind::Tcp);
    point.measure = "connections".into();
    point.echoes_smc = echo.median(window).map(rounded);
    point.echoes_tcp = echo.median(tcp).map(rounded);
    point.ratio = echo.ratio(window, tcp).map(rounded);
    point.cpu_smc = echo.processor_time(window).map(rounded);
    point.cpu_tcp = echo.processor_time(tcp).map(rounded);
    point.setup_smc = per_connection(window, |setup| setup.seconds * 1e6);
    point.setup_tcp = per_connection(tcp, |setup| setup.seconds * 1e6);
    if n > 1 {
        point.memory_client = per_connection(window, |setup| setup.memory[0]);
        point.memory_server = per_connection(window, |setup| setup.memory[1]);
        point.memory_daemon = per_connection(window, |setup| setup.memory[2]);
    }
    point.others = median([echo.others(), point.others].into_iter().flatten());
    Ok(point)
}

/// Measures the cost of a wake-up on one of `n` connections.
fn woken(
    n: usize,
    fabric: &mut TemporaryFabric,
    plan: &Plan,
    progress: &ProgressBar,
) -> Result<Point, CliError> {
    let (window, tcp) = (TransportKind::Window, TransportKind::Tcp);
    let mut one = measure::echo_of(n, n - 1);
    (one.size, one.spin_us) = (64, 0);
    let one = run::run(fabric, &one, plan, progress)?;
    let time = |results: &Results, transport| {
        results.median(transport).map(|per_second| rounded(1e6 / per_second))
    };
    Ok(Point {
        n,
        runs: plan.rounds,
        wake_smc: time(&one, window),
        wake_tcp: time(&one, tcp),
        wake_cpu_smc: one.processor_time(window).map(rounded),
        wake_cpu_tcp: one.processor_time(tcp).map(rounded),
        others: one.others().map(rounded),
        ..Point::default()
    })
}

/// Measures the same beside `n` idle devices, opened by one process.
fn with_devices(n: usize, plan: &Plan, progress: &ProgressBar) -> Result<Point, CliError> {
    let names: Vec<String> = (0..n).map(|i| format!("d{i}")).collect();
    let all: Vec<&str> = names.iter().map(String::as_str).chain([SERVER, CLIENT]).collect();
    let mut fabric = TemporaryFabric::start(&all)?;
    let daemon = fabric.daemon_pid();
    let before = memory_of(daemon, "VmRSS:")?;
    let sockets = names.iter().map(|name| fabric.device(name)).collect();
    let begun = Instant::now();
    let holder = Helper::start("idle devices", "__idle", &Task::Devices(sockets))?;
    let IdleMessage::Ready { .. } = holder.receive(TIMEOUT + PER_DEVICE * n as u32)? else {
        return Err(unexpected_report());
    };
    let setup = begun.elapsed();
    let grown = memory_of(daemon, "VmRSS:")?.saturating_sub(before);
    let threads = status_number(daemon, "Threads:")?;
    let point = woken(1, &mut fabric, plan, progress)?;
    Ok(Point {
        measure: "devices".into(),
        n,
        memory_device: Some(rounded(grown as f64 / n as f64)),
        daemon_threads: Some(threads as f64),
        setup_smc: Some(rounded(setup.as_secs_f64() * 1e6 / n as f64)),
        ..point
    })
}

/// Limit of a file of results, in bytes.
const MAX_FILE: u64 = 64 << 20;

impl Scale {
    /// Reads the output of an earlier `smc perf scale --json`.
    ///
    /// # Errors
    /// The file cannot be read, or a line is no point.
    pub(super) fn read(path: &Path) -> Result<Scale, CliError> {
        let cannot = || CliError::io(format!("cannot read {}", path.display()));
        let text = read_text(path, MAX_FILE).map_err(cannot())?;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let points = lines.map(|line| serde_json::from_str(line).map_err(|e| cannot()(e.into())));
        Ok(Scale { points: points.collect::<Result<_, _>>()?, problems: Vec::new() })
    }

    /// The points without a measurement, with the reasons.
    pub(super) fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Prints a JSON object for each point.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(super) fn print_json(&self) -> Result<(), CliError> {
        self.points.iter().try_for_each(|point| output::print(&to_line(point)?))
    }

    /// Prints two tables.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(super) fn print_tables(&self, plan: &Plan) -> Result<(), CliError> {
        let mut connections = table(&[
            "connec-\ntions",
            "echoes/s\nSMC-D",
            "echoes/s\nTCP",
            "against\nTCP",
            "cpu us\nSMC-D",
            "cpu us\nTCP",
            "woken us\nSMC-D",
            "woken us\nTCP",
            "set-up us\nSMC-D",
            "set-up us\nTCP",
            "bytes: client,\nserver, daemon",
        ]);
        for p in self.of("connections") {
            let memory = [p.memory_client, p.memory_server, p.memory_daemon];
            let memory = memory.map(|bytes| bytes.map_or_else(|| "-".into(), human)).join(", ");
            let mut row = vec![number(Some(p.n as f64)), number(p.echoes_smc)];
            row.extend([number(p.echoes_tcp), times(p.ratio)]);
            row.extend([p.cpu_smc, p.cpu_tcp, p.wake_smc, p.wake_tcp].map(number));
            row.extend([p.setup_smc, p.setup_tcp].map(number));
            row.push(memory.into());
            connections.add_row(row);
        }
        let mut devices = table(&[
            "idle\ndevices",
            "woken\nus",
            "cpu\nus",
            "opened in\nus each",
            "daemon, KiB\neach",
            "daemon's\nthreads",
        ]);
        for p in self.of("devices") {
            let kib = p.memory_device.map(|bytes| bytes / 1024.0);
            let values = [p.wake_smc, p.wake_cpu_smc, p.setup_smc, kib, p.daemon_threads];
            let mut row = vec![number(Some(p.n as f64))];
            row.extend(values.map(number));
            devices.add_row(row);
        }
        let mut text = format!("{connections}\n");
        let _ = writeln!(
            text,
            "Medians of {} runs of {} s. Echoes: 4 KiB, a message under way on each connection, an\n\
             event loop at each end. Woken: round trip of 64 B on one while the others are idle, never\n\
             spinning. cpu: processor time of both ends and daemon per echo.\n\n{devices}",
            plan.rounds, plan.seconds
        );
        output::print(&text)
    }

    fn of<'a>(&'a self, measure: &'a str) -> impl Iterator<Item = &'a Point> {
        self.points.iter().filter(move |point| point.measure == measure)
    }

    fn curve(
        &self,
        name: &str,
        transport: TransportKind,
        measure: &str,
        of: fn(&Point) -> Option<f64>,
    ) -> Curve {
        let points = self.of(measure).filter_map(|point| Some((point.n as f64, of(point)?)));
        let points = points.filter(|(_, value)| *value > 0.0).collect();
        Curve { name: name.into(), transport, points }
    }

    /// The curves, with earlier results beside the curves of SMC-D.
    pub(super) fn panels(&self, before: Option<&Scale>) -> Vec<Panel> {
        type Shown<'a> = (&'a str, TransportKind, fn(&Point) -> Option<f64>);
        let (smc, tcp) = (TransportKind::Window, TransportKind::Tcp);
        let panel = |title: &str, unit: &str, x: &str, shown: &[Shown<'_>]| {
            let ours = shown.iter().filter(|(_, transport, _)| *transport == smc);
            let earlier = before.iter().flat_map(|before| {
                let of_smc = ours.clone();
                of_smc.map(|(_, _, of)| before.curve("before", TransportKind::Vsock, x, *of))
            });
            let earlier = earlier.filter(|curve| !curve.points.is_empty());
            let now =
                shown.iter().map(|(name, transport, of)| self.curve(name, *transport, x, *of));
            let curves = now.chain(earlier).collect();
            Panel { title: title.into(), unit: unit.into(), x: x.into(), curves }
        };
        let (n, d) = ("connections", "devices");
        vec![
            panel(
                "echo of 4 KiB on all of them",
                "echoes/s, more is better",
                n,
                &[("SMC-D", smc, |p| p.echoes_smc), ("TCP", tcp, |p| p.echoes_tcp)],
            ),
            panel(
                "processor time of an echo",
                "us, less is better",
                n,
                &[("SMC-D", smc, |p| p.cpu_smc), ("TCP", tcp, |p| p.cpu_tcp)],
            ),
            panel(
                "round trip on one, others idle",
                "us, less is better",
                n,
                &[("SMC-D", smc, |p| p.wake_smc), ("TCP", tcp, |p| p.wake_tcp)],
            ),
            panel(
                "processor time of that",
                "us, less is better",
                n,
                &[("SMC-D", smc, |p| p.wake_cpu_smc), ("TCP", tcp, |p| p.wake_cpu_tcp)],
            ),
            panel(
                "set-up of a connection",
                "us, less is better",
                n,
                &[("SMC-D", smc, |p| p.setup_smc), ("TCP", tcp, |p| p.setup_tcp)],
            ),
            panel(
                "memory of a connection",
                "bytes, less is better",
                n,
                &[
                    ("client", smc, |p| p.memory_client),
                    ("server", TransportKind::Move, |p| p.memory_server),
                    ("daemon", TransportKind::Ring, |p| p.memory_daemon),
                ],
            ),
            panel(
                "round trip beside idle devices",
                "us, less is better",
                d,
                &[
                    ("time", smc, |p| p.wake_smc),
                    ("processor time", TransportKind::Move, |p| p.wake_cpu_smc),
                ],
            ),
            panel(
                "a device in the daemon",
                "less is better",
                d,
                &[
                    ("opened in us", smc, |p| p.setup_smc),
                    ("bytes", TransportKind::Ring, |p| p.memory_device),
                ],
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_a_line_of_json_and_curves_leave_out_what_was_not_measured() {
        let point = |measure: &str, n| Point {
            measure: measure.into(),
            n,
            runs: 3,
            echoes_smc: Some(1e6),
            echoes_tcp: (n > 1).then_some(1e5),
            ..Point::default()
        };
        let points = vec![point("connections", 1), point("connections", 10), point("devices", 1)];
        let line = to_line(&points[0]).unwrap();
        let start = "{\"measure\":\"connections\",\"n\":1,\"runs\":3,\"echoes_smc\":1000000.0,\
                     \"echoes_tcp\":null,";
        assert!(line.starts_with(start), "{line}");
        let scale = Scale { points, problems: Vec::new() };
        let panels = scale.panels(Some(&scale));
        assert_eq!(panels[0].curves[2].points, panels[0].curves[0].points);
        assert_eq!(panels[0].curves[0].points, [(1.0, 1e6), (10.0, 1e6)]);
        assert_eq!(panels[0].curves[1].points, [(10.0, 1e5)]);
    }
}
