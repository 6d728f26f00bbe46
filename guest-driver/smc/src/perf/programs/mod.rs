//! The measured programs, written once for all transports.

mod echo;
mod round_trip;
mod short;
mod stream;

use std::io;
use std::time::{Duration, Instant};

use super::job::{EndReport, Job, Outcome, Program};
use crate::transport::{Stream, Transport};

/// Runs the server's end. It calls `listening` with the address for the client.
pub(super) fn serve<T: Transport>(
    transport: &T,
    job: &Job,
    listening: impl FnOnce(&str) -> io::Result<()>,
) -> io::Result<EndReport> {
    let (listener, address) = transport.listen()?;
    listening(&address)?;
    let report = match job.program {
        Program::Stream => stream::serve(transport, &listener, job)?,
        Program::RoundTrip => nothing(round_trip::serve(transport, &listener, job))?,
        Program::Echo => nothing(echo::serve(transport, &listener, job))?,
        Program::Short => nothing(short::serve(transport, &listener, job))?,
    };
    Ok(EndReport { smc: transport.smc_path(), ..report })
}

fn nothing(done: io::Result<()>) -> io::Result<EndReport> {
    done.map(|()| EndReport::default())
}

/// Runs the client's end.
pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    let report = match job.program {
        Program::Stream => stream::drive(transport, job)?,
        Program::RoundTrip => round_trip::drive(transport, job)?.into(),
        Program::Echo => echo::drive(transport, job)?.into(),
        Program::Short => short::drive(transport, job)?.into(),
    };
    Ok(EndReport { smc: transport.smc_path(), ..report })
}

/// The times of a run: warm-up, then measurement.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    start: Instant,
    end: Instant,
}

impl Schedule {
    fn from_now(job: &Job) -> Schedule {
        let start = Instant::now() + job.warm_up();
        Schedule { start, end: start + job.length() }
    }
}

/// Ends a client's connection: its process must not end before the server has read everything, and
/// the server closes then. What is wrong with that close is no part of the measurement.
fn end(mut stream: impl Stream) {
    let _ = stream.finish();
    let mut sink = [0u8; 4096];
    while matches!(stream.read(&mut sink), Ok(n) if n > 0) {}
}

/// Events per second.
fn per_second(events: u64, time: Duration) -> io::Result<Outcome> {
    if events == 0 || time.is_zero() {
        return Err(io::Error::other("nothing was measured: allow more --seconds"));
    }
    Ok(Outcome::PerSecond(events as f64 / time.as_secs_f64()))
}

#[cfg(test)]
mod tests;
