// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The measured programs, written once for all transports.

mod echo;
mod echo_tokio;
mod paced;
mod round_trip;
mod short;
mod stream;

use std::io;
use std::time::{Duration, Instant};

use super::job::{EndReport, Job, Outcome, Program};
use super::usage::{Meter, Usage};
use crate::transport::{Epoll, Stream, Transport};

/// Runs the server's end. Calls `listening` with the address for the client.
pub(super) fn serve<T: Transport>(
    transport: &T,
    job: &Job,
    listening: impl FnOnce(&str) -> io::Result<()>,
) -> io::Result<EndReport> {
    let (listener, address) = transport.listen()?;
    listening(&address)?;
    let report = match job.program {
        Program::Stream => stream::serve(transport, &listener, job)?,
        Program::RoundTrip | Program::Paced => {
            nothing(round_trip::serve(transport, &listener, job))?
        }
        Program::RoundTripThreads => nothing(round_trip::serve_threads(transport, &listener, job))?,
        Program::Echo => nothing(echo::serve(transport, transport.poll()?, &listener, job))?,
        Program::EchoEpoll => nothing(echo::serve(transport, Epoll::new()?, &listener, job))?,
        Program::EchoTokio => nothing(echo_tokio::serve(transport, &listener, job))?,
        Program::Short => nothing(short::serve(transport, &listener, job))?,
    };
    Ok(of_device(transport, report))
}

/// The report with the carrier of the connections, and the counters of their device.
fn of_device<T: Transport>(transport: &T, report: EndReport) -> EndReport {
    EndReport { smc: transport.smc_path(), device: transport.counters(), ..report }
}

fn nothing(done: io::Result<()>) -> io::Result<EndReport> {
    done.map(|()| EndReport::default())
}

/// Runs the client's end.
pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    let report = match job.program {
        Program::Stream => stream::drive(transport, job)?,
        Program::RoundTrip => round_trip::drive(transport, job)?,
        Program::Paced => paced::drive(transport, job)?,
        Program::RoundTripThreads => round_trip::drive_threads(transport, job)?,
        Program::Echo => echo::drive(transport, transport.poll()?, job)?,
        Program::EchoEpoll => echo::drive(transport, Epoll::new()?, job)?,
        Program::EchoTokio => echo_tokio::drive(transport, job)?,
        Program::Short => short::drive(transport, job)?,
    };
    Ok(of_device(transport, report))
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

    /// Does `work` with each of `all` on a separate thread. The calling thread measures the
    /// processor time between the start and the end of the measurement; each thread returns its
    /// amount of work in that time, and its own end.
    fn on_threads<A: Send>(
        &self,
        job: &Job,
        all: Vec<A>,
        work: impl Fn(A) -> io::Result<(u64, Instant)> + Sync,
    ) -> io::Result<EndReport> {
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                all.into_iter().map(|one| scope.spawn(move || work(one))).collect();
            std::thread::sleep(self.start.saturating_duration_since(Instant::now()));
            let meter = Meter::start(job.others);
            let (mut done, mut last) = (0, self.end);
            for thread in threads {
                let gone = || Err(io::Error::other("a thread panicked"));
                let (of_thread, end) = thread.join().unwrap_or_else(|_| gone())?;
                done += of_thread;
                last = last.max(end);
            }
            let usage = meter.and_then(|meter| meter.stop(done));
            Ok(measured(per_second(done, last - self.start)?, usage))
        })
    }
}

/// The report of a client.
fn measured(outcome: Outcome, usage: Option<Usage>) -> EndReport {
    EndReport { outcome: Some(outcome), usage, ..EndReport::default() }
}

/// Ends a client's connection, and waits for the server's close: the process must not end before
/// the server has read everything. Errors of the close are no part of the measurement.
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
