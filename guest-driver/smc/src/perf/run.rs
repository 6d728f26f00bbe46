// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs experiments: two processes per run, the transports in turn within each round.

use std::time::Duration;

use indicatif::ProgressBar;

use super::job::{EndReport, Job, Outcome, Percentiles, RunMessage, TransportKind};
use super::measure::{Experiment, GIGABYTE, Unit};
use super::run_settings::RunSettings;
use super::usage::{RunProcesses, Setup, Usage};
use crate::error::CliError;
use crate::helper::Helper;
use crate::temporary_fabric::TemporaryFabric;
use crate::transport::SmcPath;

/// The device of servers.
pub(super) const SERVER: &str = "server";
/// The device of clients.
pub(super) const CLIENT: &str = "client";
/// How long a run may take besides its measurement.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection may take to be set up.
const SETUP: Duration = Duration::from_millis(10);

/// The results of an experiment.
#[derive(Clone, Debug)]
pub(super) struct Results {
    pub(super) experiment: Experiment,
    /// Per transport of the experiment, a value per round, in the experiment's unit.
    pub(super) values: Vec<(TransportKind, Vec<f64>)>,
    /// Per transport, percentiles of each round, for round trips.
    pub(super) times: Vec<(TransportKind, Vec<Percentiles>)>,
    /// Per transport, the usage of each round, if both ends run on this machine.
    pub(super) usages: Vec<(TransportKind, Vec<Usage>)>,
    /// Per transport, the cost of set-up in each round, for event loops.
    pub(super) setups: Vec<(TransportKind, Vec<Setup>)>,
    /// Of streams, round trips and short connections over SMC, a value per round.
    pub(super) kicks: Vec<Kicks>,
    /// How the SMC connections of each round travelled.
    pub(super) smc_paths: Vec<SmcPaths>,
    /// The failed runs, with the reasons.
    pub(super) failures: Vec<String>,
}

impl Results {
    /// Results with these values and nothing else.
    pub(super) fn empty(experiment: Experiment, values: Vec<(TransportKind, Vec<f64>)>) -> Results {
        Results {
            experiment,
            values,
            times: Vec::new(),
            usages: Vec::new(),
            setups: Vec::new(),
            kicks: Vec::new(),
            smc_paths: Vec::new(),
            failures: Vec::new(),
        }
    }
}

/// Kicks, wakes and commands of both ends, per 2^20 bytes of a stream, per round trip or per connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kicks {
    /// Kicks of devices by their drivers.
    pub(super) kicks: f64,
    /// Wake-ups of drivers by their devices.
    pub(super) wakes: f64,
    /// Control commands of drivers.
    pub(super) commands: f64,
}

/// The path of an SMC connection, as reported by its two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SmcPaths {
    pub(super) client: SmcPath,
    pub(super) server: SmcPath,
}

/// The reports of both ends of a run.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    pub(super) client: EndReport,
    pub(super) server: EndReport,
}

impl Ends {
    fn kicks(&self, unit: Unit) -> Option<Kicks> {
        let (client, server) = (self.client.device?, self.server.device?);
        // One of the two ends counts.
        let work = unit.scale(self.client.work.saturating_add(self.server.work) as f64, 1);
        let per_work = |one: u64, other: u64| one.saturating_add(other) as f64 / work;
        (work > 0.0).then(|| Kicks {
            kicks: per_work(client.moves, server.moves),
            wakes: per_work(client.wakes, server.wakes),
            commands: per_work(client.commands, server.commands),
        })
    }

    fn smc_paths(&self) -> Option<SmcPaths> {
        Some(SmcPaths { client: self.client.smc.clone()?, server: self.server.smc.clone()? })
    }
}

/// Runs the processes of a run.
pub(super) trait Runner {
    /// Runs a program once over a transport.
    ///
    /// # Errors
    /// A process failed; a connection fell back to TCP.
    fn once(
        &mut self,
        experiment: &Experiment,
        transport: TransportKind,
        plan: &Plan,
    ) -> Result<Ends, CliError>;
}

/// How often and how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Runs of each transport.
    pub(super) rounds: usize,
    /// Length of a run.
    pub(super) seconds: f64,
    /// Bind server and client to a processor each.
    pub(super) pin: bool,
}

/// Runs an experiment. A transport with a failed run is left out from then on, and noted in
/// [`Results::failures`].
///
/// # Errors
/// A process reported something else than a result.
pub(super) fn run(
    runner: &mut impl Runner,
    experiment: &Experiment,
    plan: &Plan,
    progress: &ProgressBar,
) -> Result<Results, CliError> {
    let transports = &experiment.transports;
    let values = transports.iter().map(|c| (*c, Vec::new())).collect();
    let mut results = Results::empty(experiment.clone(), values);
    results.times = transports.iter().map(|c| (*c, Vec::new())).collect();
    results.usages = transports.iter().map(|c| (*c, Vec::new())).collect();
    results.setups = transports.iter().map(|c| (*c, Vec::new())).collect();
    let mut failed = Vec::new();
    for round in 0..plan.rounds {
        for step in 0..transports.len() {
            // Each transport is first in some round.
            let index = (round + step) % transports.len();
            let Some(transport) = transports.get(index) else { continue };
            if failed.contains(transport) {
                progress.inc(1);
                continue;
            }
            progress.set_message(format!("{}: {}", experiment.title, transport.title()));
            let ends = match runner.once(experiment, *transport, plan) {
                Ok(ends) => ends,
                Err(error) => {
                    let title = format!("{}, {}", experiment.title, transport.title());
                    results.failures.push(format!("{title}: {error}"));
                    // The values of the first rounds stay: the other transports have the same
                    // rounds.
                    failed.push(*transport);
                    progress.inc(1);
                    continue;
                }
            };
            results.kicks.extend(ends.kicks(experiment.unit));
            results.smc_paths.extend(ends.smc_paths());
            let outcome = ends.client.outcome.or(ends.server.outcome);
            if let (Some(usage), Some((_, list))) =
                (ends.client.usage, results.usages.get_mut(index))
            {
                list.push(usage);
            }
            if let (Some(setup), Some((_, list))) =
                (ends.client.setup, results.setups.get_mut(index))
            {
                list.push(setup);
            }
            let value = match outcome.ok_or_else(|| unexpected_report("client"))? {
                // The rate is given: the cost is the result.
                Outcome::PerSecond(_) if experiment.unit == Unit::ProcessorPerGigabyte => {
                    let usage = ends.client.usage.ok_or_else(|| unexpected_report("client"))?;
                    usage.per_work() * GIGABYTE
                }
                Outcome::PerSecond(rate) => experiment.unit.scale(rate, experiment.size),
                Outcome::Times(times) => {
                    if let Some((_, list)) = results.times.get_mut(index) {
                        list.push(times);
                    }
                    times.p50
                }
            };
            if let Some((_, list)) = results.values.get_mut(index) {
                list.push(value);
            }
            progress.inc(1);
        }
    }
    Ok(results)
}

/// Two processes of this machine, on the devices of a temporary fabric.
impl Runner for TemporaryFabric {
    fn once(
        &mut self,
        experiment: &Experiment,
        transport: TransportKind,
        plan: &Plan,
    ) -> Result<Ends, CliError> {
        let settings = RunSettings::of(transport)?;
        let device = |name| transport.is_smc().then(|| self.device(name));
        let mut job = Job {
            program: experiment.program,
            transport,
            size: experiment.size,
            seconds: plan.seconds,
            buffer: experiment.buffer,
            spin_us: experiment.spin_us,
            connections: experiment.connections,
            idle: experiment.idle,
            threads: experiment.threads,
            rate: experiment.rate,
            device: device(SERVER),
            eids: Vec::new(),
            remote: false,
            bind: settings.bind(),
            dir: self.dir().to_path_buf(),
            address: String::new(),
            namespace: settings.of_server(),
            cgroup: settings.cgroup(),
            pin: plan.pin,
            others: None,
        };
        let setup = SETUP * experiment.connections as u32;
        let timeout = TIMEOUT + Duration::from_secs_f64(plan.seconds * 2.0) + setup;
        let server = Helper::start("server", "__serve", &job)?;
        let RunMessage::Listening(address) = server.receive(TIMEOUT)? else {
            return Err(unexpected_report("server"));
        };
        job.address = address;
        job.device = device(CLIENT);
        job.namespace = settings.of_client();
        let daemon = transport.is_smc().then(|| self.daemon_pid());
        job.others = Some(RunProcesses { server: server.pid(), daemon });
        let client = Helper::start("client", "__drive", &job)?;
        let client_report = match client.receive(timeout) {
            Ok(RunMessage::Done(report)) => report,
            Ok(RunMessage::Listening(_)) => return Err(unexpected_report("client")),
            // The server's error is more specific than the client's "connection reset".
            Err(error) => {
                let cause = server.receive::<RunMessage>(Duration::from_millis(300)).err();
                return Err(cause.filter(is_reported_failure).unwrap_or(error));
            }
        };
        let RunMessage::Done(server_report) = server.receive(timeout)? else {
            return Err(unexpected_report("server"));
        };
        Ok(Ends { client: *client_report, server: *server_report })
    }
}

fn is_reported_failure(error: &CliError) -> bool {
    matches!(error, CliError::Helper { problem, .. } if problem.starts_with("failed"))
}

/// A process sent another message than the expected one.
pub(super) fn unexpected_report(name: &str) -> CliError {
    CliError::Helper { name: name.into(), problem: "did not report what was expected".into() }
}
