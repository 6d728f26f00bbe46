//! Runs experiments: two processes per run, the carriers in turn within each round.

use std::time::Duration;

use indicatif::ProgressBar;

use super::job::{Carrier, Job, Outcome, Percentiles, Report, Told};
use super::measure::Experiment;
use crate::error::CliError;
use crate::helper::Helper;
use crate::rig::Rig;
use crate::transport::{Carried, Tcp};

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
    /// Of streams over SMC, a value per round.
    pub(super) kicks: Vec<Kicks>,
    /// What SMC made of the connections of each round.
    pub(super) carried: Vec<Both>,
}

/// How often the devices of both ends were needed, per 2^20 bytes that streamed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kicks {
    /// Drivers to devices.
    pub(super) kicks: f64,
    /// Devices to drivers.
    pub(super) wakes: f64,
}

/// What SMC made of a connection, at its two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Both {
    pub(super) client: Carried,
    pub(super) server: Carried,
}

/// What both ends of a run told.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    pub(super) client: Told,
    pub(super) server: Told,
}

impl Ends {
    fn kicks(&self) -> Option<Kicks> {
        let (client, server) = (self.client.device?, self.server.device?);
        let mebibytes = self.server.bytes as f64 / f64::from(1 << 20);
        (mebibytes > 0.0).then(|| Kicks {
            kicks: (client.moves.saturating_add(server.moves)) as f64 / mebibytes,
            wakes: (client.wakes.saturating_add(server.wakes)) as f64 / mebibytes,
        })
    }

    fn carried(&self) -> Option<Both> {
        Some(Both { client: self.client.smc.clone()?, server: self.server.smc.clone()? })
    }
}

/// Where runs happen.
pub(super) trait Runner {
    /// Runs a program once over a carrier.
    ///
    /// # Errors
    /// A process failed; a connection fell back to TCP.
    fn once(
        &mut self,
        experiment: &Experiment,
        carrier: Carrier,
        plan: &Plan,
    ) -> Result<Ends, CliError>;
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
    runner: &mut impl Runner,
    experiment: &Experiment,
    plan: &Plan,
    progress: &ProgressBar,
) -> Result<Results, CliError> {
    let carriers = &experiment.carriers;
    let mut results = Results {
        experiment: experiment.clone(),
        values: carriers.iter().map(|c| (*c, Vec::new())).collect(),
        times: carriers.iter().map(|c| (*c, Vec::new())).collect(),
        kicks: Vec::new(),
        carried: Vec::new(),
    };
    for round in 0..plan.rounds {
        for step in 0..carriers.len() {
            // Each carrier is first in some round.
            let index = (round + step) % carriers.len();
            let Some(carrier) = carriers.get(index) else { continue };
            progress.set_message(format!("{}: {}", experiment.title, carrier.title()));
            let ends = runner.once(experiment, *carrier, plan)?;
            results.kicks.extend(ends.kicks());
            results.carried.extend(ends.carried());
            let outcome = ends.client.outcome.or(ends.server.outcome);
            let value = match outcome.ok_or_else(|| confused("client"))? {
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

/// Two processes of this machine, on the devices of a rig.
impl Runner for Rig {
    fn once(
        &mut self,
        experiment: &Experiment,
        carrier: Carrier,
        plan: &Plan,
    ) -> Result<Ends, CliError> {
        let device = |name| carrier.is_smc().then(|| self.device(name));
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
            eids: Vec::new(),
            far: false,
            bind: Tcp::LOOPBACK.0,
            dir: self.dir().to_path_buf(),
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
        Ok(Ends { client: told_by_client, server: told_by_server })
    }
}

fn is_told(error: &CliError) -> bool {
    matches!(error, CliError::Helper { problem, .. } if problem.starts_with("failed"))
}

/// A process said something else than it had to.
pub(super) fn confused(name: &str) -> CliError {
    CliError::Helper { name: name.into(), problem: "did not report what was expected".into() }
}
