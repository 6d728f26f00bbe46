//! Runs experiments: two processes per run, the carriers in turn within each round.

use std::path::Path;
use std::time::Duration;

use indicatif::ProgressBar;

use super::job::{Carrier, Job, Outcome, Percentiles, Report};
use super::measure::Experiment;
use crate::error::CliError;
use crate::helper::Helper;
use crate::rig::Rig;

/// The device of servers.
pub(super) const SERVER: &str = "server";
/// The device of clients.
pub(super) const CLIENT: &str = "client";
/// How long a run may take besides its measurement.
const PATIENCE: Duration = Duration::from_secs(30);

/// What an experiment gave.
#[derive(Clone, Debug)]
pub(super) struct Results {
    pub(super) experiment: Experiment,
    /// Per carrier of the experiment, a value per round, in the experiment's unit.
    pub(super) values: Vec<(Carrier, Vec<f64>)>,
    /// Per carrier, percentiles of each round, for round trips.
    pub(super) times: Vec<(Carrier, Vec<Percentiles>)>,
}

/// How often and how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Runs of each carrier.
    pub(super) rounds: usize,
    /// Length of a run.
    pub(super) seconds: f64,
    /// Bind server and client to a processor each.
    pub(super) pin: bool,
}

/// Runs an experiment.
///
/// # Errors
/// A process failed; a connection fell back to TCP.
pub(super) fn run(
    rig: &Rig,
    experiment: &Experiment,
    plan: &Plan,
    progress: &ProgressBar,
) -> Result<Results, CliError> {
    let carriers = &experiment.carriers;
    let mut results = Results {
        experiment: experiment.clone(),
        values: carriers.iter().map(|c| (*c, Vec::new())).collect(),
        times: carriers.iter().map(|c| (*c, Vec::new())).collect(),
    };
    for round in 0..plan.rounds {
        for step in 0..carriers.len() {
            // Each carrier is first in some round.
            let index = (round + step) % carriers.len();
            let Some(carrier) = carriers.get(index) else { continue };
            progress.set_message(format!("{}: {}", experiment.title, carrier.title()));
            let value = match run_once(rig, experiment, *carrier, plan)? {
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

fn run_once(
    rig: &Rig,
    experiment: &Experiment,
    carrier: Carrier,
    plan: &Plan,
) -> Result<Outcome, CliError> {
    let device = |name| carrier.is_smc().then(|| rig.device(name));
    let mut job = Job {
        program: experiment.program,
        carrier,
        size: experiment.size,
        seconds: plan.seconds,
        buffer: experiment.buffer,
        spin_us: experiment.spin_us,
        connections: experiment.connections,
        threads: experiment.threads,
        device: device(SERVER),
        dir: Path::to_path_buf(rig.dir()),
        address: String::new(),
        pin: plan.pin,
    };
    let patience = PATIENCE + Duration::from_secs_f64(plan.seconds * 2.0);
    let server = Helper::start("server", "__serve", &job)?;
    let Report::Listening(address) = server.hear(PATIENCE)? else {
        return Err(confused("server"));
    };
    job.address = address;
    job.device = device(CLIENT);
    let client = Helper::start("client", "__drive", &job)?;
    let told_by_client = match client.hear(patience) {
        Ok(Report::Done(told)) => told,
        Ok(Report::Listening(_)) => return Err(confused("client")),
        // The server's own words say more than the client's "connection reset".
        Err(error) => {
            let cause = server.hear::<Report>(Duration::from_millis(300)).err();
            return Err(cause.filter(is_told).unwrap_or(error));
        }
    };
    let Report::Done(told_by_server) = server.hear(patience)? else {
        return Err(confused("server"));
    };
    told_by_client.or(told_by_server).ok_or_else(|| confused("client"))
}

fn is_told(error: &CliError) -> bool {
    matches!(error, CliError::Helper { problem, .. } if problem.starts_with("failed"))
}

fn confused(name: &str) -> CliError {
    CliError::Helper { name: name.into(), problem: "did not report what was expected".into() }
}
