//! The measured programs, written once for all transports.

mod echo;
mod round_trip;
mod short;
mod stream;

use std::io;
use std::time::{Duration, Instant};

use super::job::{Job, Outcome, Program};
use crate::transport::{Stream, Transport};

/// The server's part. `listening` is told where the client has to go.
pub(super) fn serve<T: Transport>(
    transport: &T,
    job: &Job,
    listening: impl FnOnce(&str) -> io::Result<()>,
) -> io::Result<Option<Outcome>> {
    let (listener, address) = transport.listen()?;
    listening(&address)?;
    match job.program {
        Program::Stream => stream::serve(transport, &listener, job).map(Some),
        Program::RoundTrip => round_trip::serve(transport, &listener, job).map(|()| None),
        Program::Echo => echo::serve(transport, &listener, job).map(|()| None),
        Program::Short => short::serve(transport, &listener, job).map(|()| None),
    }
}

/// The client's part.
pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<Option<Outcome>> {
    match job.program {
        Program::Stream => stream::drive(transport, job).map(|()| None),
        Program::RoundTrip => round_trip::drive(transport, job).map(Some),
        Program::Echo => echo::drive(transport, job).map(Some),
        Program::Short => short::drive(transport, job).map(Some),
    }
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
