//! The two processes of a run.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use guest_driver::{DataPath, Rnics};
use smc_core::wire::ids::Eid;

use super::job::{Carrier, Job, Report, Told};
use super::programs;
use crate::error::CliError;
use crate::helper;
use crate::stack;
use crate::transport::{ANY_CID, Path, Ring, Smc, Tcp, Transport, Unix, Vsock};

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
        // Two spinning processes on one processor would measure the scheduler, or the cache of that
        // processor, and not what two processors can do through memory.
        if job.pin || job.carrier == Carrier::Ring {
            pin(side)?;
        }
        let done = match job.carrier {
            Carrier::Smc => over(&smc(&job, DataPath::Auto, Path::Any)?, &job, side),
            Carrier::Window => over(&smc(&job, DataPath::Window, Path::Window)?, &job, side),
            Carrier::Move => over(&smc(&job, DataPath::Move, Path::Move)?, &job, side),
            Carrier::Tcp => over(&Tcp(job.bind), &job, side),
            // Whoever asks for a measure knows the CID.
            Carrier::Vsock => over(&Vsock { cid: ANY_CID }, &job, side),
            Carrier::Unix => over(&Unix { dir: job.dir.clone() }, &job, side),
            Carrier::Ring => over(&Ring, &job, side),
        };
        let told = done.map_err(CliError::io(job.carrier.title()))?;
        helper::say(&Report::Done(told)).map_err(CliError::io("report"))
    })
}

/// Binds this process (its threads are made later) to one processor, if it may use more than one.
fn pin(side: Side) -> Result<(), CliError> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let failed = |error: rustix::io::Errno| CliError::io("processors")(error.into());
    let allowed = sched_getaffinity(None).map_err(failed)?;
    let mut usable = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (Some(first), Some(second)) = (usable.next(), usable.next()) else { return Ok(()) };
    let mut own = CpuSet::new();
    own.set(match side {
        Side::Server => first,
        Side::Client => second,
    });
    sched_setaffinity(None, &own).map_err(failed)
}

fn over<T: Transport>(transport: &T, job: &Job, side: Side) -> io::Result<Told> {
    match side {
        Side::Server => programs::serve(transport, job, |address| {
            helper::say(&Report::Listening(address.into()))
        }),
        Side::Client => programs::drive(transport, job),
    }
}

/// How long a slow machine may take for a message of the handshake.
const FAR_CLC: Duration = Duration::from_secs(30);
/// How long a server waits for the first of them: no ordinary TCP client is expected.
const FAR_DETECT: Duration = Duration::from_secs(10);

fn smc(job: &Job, path: DataPath, expected: Path) -> Result<Smc, CliError> {
    let device = job.device.clone().unwrap_or_default();
    let mut config = stack::of_device(&device);
    if !stack::is_none(&device) {
        config.rnics = Rnics::None;
    }
    config.recv_buffer = job.buffer;
    config.spin = Duration::from_micros(job.spin_us);
    config.path = path;
    for name in &job.eids {
        config = config.eid(eid(name)?);
    }
    if job.far {
        config.clc_timeout = FAR_CLC;
        config.detect_timeout = FAR_DETECT;
    }
    Ok(Smc::bound(stack::open(config, &device)?, expected, job.bind))
}

/// Reads a user EID.
///
/// # Errors
/// [`CliError::Eid`].
pub(super) fn eid(name: &str) -> Result<Eid, CliError> {
    Eid::new(name).map_err(|why| CliError::Eid { name: name.into(), why: why.to_string() })
}
