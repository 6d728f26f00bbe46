// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages to and fro, one at a time on each connection: on one connection, or on many, each with a
//! thread of its own at both ends.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::{Schedule, end, measured};
use crate::perf::job::{EndReport, Job, Outcome, Percentiles};
use crate::perf::usage::Meter;
use crate::transport::{Stream, Transport};

/// Durations of round trips.
pub(super) struct LatencyHistogram(Histogram<u64>);

impl LatencyHistogram {
    pub(super) fn new() -> io::Result<LatencyHistogram> {
        // Nanoseconds up to a minute, in three digits.
        let times = Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(io::Error::other)?;
        Ok(LatencyHistogram(times))
    }

    pub(super) fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> u64 {
        self.0.len()
    }

    pub(super) fn outcome(&self) -> Outcome {
        let us = |nanos: u64| nanos as f64 / 1000.0;
        let at = |percent: f64| us(self.0.value_at_percentile(percent));
        Outcome::Times(Percentiles {
            p50: at(50.0),
            p90: at(90.0),
            p99: at(99.0),
            p999: at(99.9),
            max: us(self.0.max()),
        })
    }
}

pub(super) fn serve<T: Transport>(
    transport: &T,
    listener: &T::Listener,
    job: &Job,
) -> io::Result<()> {
    answer(transport.accept(listener)?, job.size)
}

fn answer(mut stream: impl Stream, size: usize) -> io::Result<()> {
    stream.send_at_once()?;
    let mut message = vec![0u8; size];
    loop {
        match stream.read_exact(&mut message) {
            Ok(()) => stream.write_all(&message)?,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    let mut stream = transport.connect(&job.address)?;
    stream.send_at_once()?;
    let mut message = vec![0x5a; job.size];
    let mut times = LatencyHistogram::new()?;
    let schedule = Schedule::from_now(job);
    let mut meter = None;
    let mut started = false;
    let mut early = 0;
    let mut sent = Instant::now();
    while sent < schedule.end || times.is_empty() {
        if !started && sent >= schedule.start {
            started = true;
            meter = Meter::start(job.others);
            sent = Instant::now();
        }
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
        let back = Instant::now();
        if started {
            times.record(back - sent);
        } else {
            early += 1;
        }
        sent = back;
    }
    let usage = meter.and_then(|meter| meter.stop(times.len()));
    end(stream);
    Ok(EndReport { work: early + times.len(), ..measured(times.outcome(), usage) })
}

/// Accepts the connections of all threads, and answers each on a thread of its own.
pub(super) fn serve_threads<T: Transport>(
    transport: &T,
    listener: &T::Listener,
    job: &Job,
) -> io::Result<()> {
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(job.threads);
        for _ in 0..job.threads {
            let stream = transport.accept(listener)?;
            threads.push(scope.spawn(move || answer(stream, job.size)));
        }
        threads.into_iter().try_for_each(joined)
    })
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, io::Result<T>>) -> io::Result<T> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
}

/// Like [`drive`], by several threads with a connection each; counts the round trips of every
/// thread.
pub(super) fn drive_threads<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    let mut streams = Vec::with_capacity(job.threads);
    for _ in 0..job.threads {
        let stream = transport.connect(&job.address)?;
        stream.send_at_once()?;
        streams.push(stream);
    }
    let schedule = Schedule::from_now(job);
    schedule.on_threads(job, streams, |mut stream| {
        let mut message = vec![0x5a; job.size];
        let mut done = 0u64;
        loop {
            stream.write_all(&message)?;
            stream.read_exact(&mut message)?;
            let now = Instant::now();
            done += u64::from(now >= schedule.start);
            // A busy machine may have come to nothing so far.
            if now >= schedule.end && done > 0 {
                end(stream);
                return Ok((done, now));
            }
        }
    })
}
