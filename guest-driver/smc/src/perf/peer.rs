//! The two processes of a run.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use guest_driver::{Config, DataPath};

use super::job::{Carrier, Job, Outcome, Report};
use super::programs;
use crate::error::CliError;
use crate::helper;
use crate::stack;
use crate::transport::{self, Ring, Smc, Tcp, Transport, Unix};

/// The server process.
pub(crate) fn serve(task: &str) -> ExitCode {
    run(task, Side::Server)
}

/// The client process.
pub(crate) fn drive(task: &str) -> ExitCode {
    run(task, Side::Client)
}

#[derive(Clone, Copy)]
enum Side {
    Server,
    Client,
}

fn run(task: &str, side: Side) -> ExitCode {
    helper::run(task, |job: Job| {
        helper::raise_descriptor_limit();
        let done = match job.carrier {
            Carrier::Window => {
                over(&smc(&job, DataPath::Window, transport::Path::Window)?, &job, side)
            }
            Carrier::Move => over(&smc(&job, DataPath::Move, transport::Path::Move)?, &job, side),
            Carrier::Tcp => over(&Tcp, &job, side),
            Carrier::Unix => over(&Unix { dir: job.dir.clone() }, &job, side),
            Carrier::Ring => over(&Ring, &job, side),
        };
        let outcome = done.map_err(CliError::io(job.carrier.title()))?;
        helper::say(&Report::Done(outcome)).map_err(CliError::io("report"))
    })
}

fn over<T: Transport>(transport: &T, job: &Job, side: Side) -> io::Result<Option<Outcome>> {
    match side {
        Side::Server => programs::serve(transport, job, |address| {
            helper::say(&Report::Listening(address.into()))
        }),
        Side::Client => programs::drive(transport, job),
    }
}

fn smc(job: &Job, path: DataPath, expected: transport::Path) -> Result<Smc, CliError> {
    let device = job.device.clone().unwrap_or_default();
    let mut config = Config::new(&device);
    config.recv_buffer = job.buffer;
    config.spin = Duration::from_micros(job.spin_us);
    config.path = path;
    Ok(Smc { stack: stack::open(config, &device)?, path: expected })
}
