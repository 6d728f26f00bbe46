// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two processes of a run.

use std::io;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::Duration;

use guest_driver::{DataPath, Rnics};
use smc_core::wire::ids::Eid;

use super::job::{EndReport, Job, RunMessage, TransportKind};
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
        // Two spinning processes on one processor would measure the scheduler, or the cache of the
        // processor, and not the exchange between two processors through memory.
        if job.pin || job.transport == TransportKind::Ring {
            pin(side)?;
        }
        if let Some(namespace) = &job.namespace {
            enter(namespace).map_err(CliError::io(namespace.display().to_string()))?;
        }
        if let Some(cgroup) = &job.cgroup {
            let members = cgroup.join("cgroup.procs");
            std::fs::write(&members, "0").map_err(CliError::io(members.display().to_string()))?;
        }
        let done = match job.transport {
            TransportKind::Smc => over(&smc(&job, DataPath::Auto, Path::Any)?, &job, side),
            TransportKind::Window | TransportKind::Bound => {
                over(&smc(&job, DataPath::Window, Path::Window)?, &job, side)
            }
            TransportKind::Move => over(&smc(&job, DataPath::Move, Path::Move)?, &job, side),
            TransportKind::Tcp | TransportKind::Veth | TransportKind::Sockmap => {
                over(&Tcp::on(job.bind), &job, side)
            }
            TransportKind::FastOpen => over(&Tcp::with_fast_open(job.bind), &job, side),
            // The server listens on any CID; the client knows the server's from its option.
            TransportKind::Vsock => over(&Vsock { cid: ANY_CID }, &job, side),
            TransportKind::Unix => over(&Unix { dir: job.dir.clone() }, &job, side),
            TransportKind::Ring => over(&Ring, &job, side),
        };
        let report = done.map_err(CliError::io(job.transport.title()))?;
        helper::send(&RunMessage::Done(Box::new(report))).map_err(CliError::io("report"))
    })
}

/// Binds this process (its threads are made later) to one processor, if more than one is usable.
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

/// Moves this thread, and the threads made later, into a network namespace.
fn enter(namespace: &std::path::Path) -> io::Result<()> {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    let file = std::fs::File::open(namespace)?;
    Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?)
}

fn over<T: Transport>(transport: &T, job: &Job, side: Side) -> io::Result<EndReport> {
    match side {
        Side::Server => programs::serve(transport, job, |address| {
            helper::send(&RunMessage::Listening(address.into()))
        }),
        Side::Client => programs::drive(transport, job),
    }
}

/// How long a slow machine may take for a message of the handshake.
const REMOTE_CLC_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a server waits for the first message. No ordinary TCP client is expected.
const REMOTE_DETECT_TIMEOUT: Duration = Duration::from_secs(10);

fn smc(job: &Job, path: DataPath, expected: Path) -> Result<Smc, CliError> {
    let device = job.device.clone().unwrap_or_default();
    let mut config = stack::of_device(&device);
    if !stack::is_none(&device) {
        config.rnics = Rnics::None;
    }
    config.recv_buffer = job.buffer;
    config.spin = Duration::from_micros(job.spin_us);
    config.path = path;
    config.outlive_device = job.transport != TransportKind::Bound;
    for name in &job.eids {
        config = config.eid(eid(name)?);
    }
    if job.remote {
        config.clc_timeout = REMOTE_CLC_TIMEOUT;
        config.detect_timeout = REMOTE_DETECT_TIMEOUT;
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
