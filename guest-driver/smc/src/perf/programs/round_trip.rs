//! One connection, one message to and fro at a time.

use std::io::{self, Read, Write};
use std::time::Instant;

use hdrhistogram::Histogram;

use super::{Schedule, end};
use crate::perf::job::{Job, Outcome, Percentiles};
use crate::transport::{Stream, Transport};

pub(super) fn serve<T: Transport>(
    transport: &T,
    listener: &T::Listener,
    job: &Job,
) -> io::Result<()> {
    let mut stream = transport.accept(listener)?;
    stream.send_at_once()?;
    let mut message = vec![0u8; job.size];
    loop {
        match stream.read_exact(&mut message) {
            Ok(()) => stream.write_all(&message)?,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<Outcome> {
    let mut stream = transport.connect(&job.address)?;
    stream.send_at_once()?;
    let mut message = vec![0x5a; job.size];
    // Nanoseconds up to a minute, in three digits.
    let mut times =
        Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3).map_err(io::Error::other)?;
    let schedule = Schedule::from_now(job);
    let mut sent = Instant::now();
    while sent < schedule.end || times.is_empty() {
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
        let back = Instant::now();
        if sent >= schedule.start {
            let time = u64::try_from((back - sent).as_nanos()).unwrap_or(u64::MAX);
            times.saturating_record(time);
        }
        sent = back;
    }
    end(stream);
    let us = |nanos: u64| nanos as f64 / 1000.0;
    let at = |percent: f64| us(times.value_at_percentile(percent));
    Ok(Outcome::Times(Percentiles {
        p50: at(50.0),
        p90: at(90.0),
        p99: at(99.0),
        p999: at(99.9),
        max: us(times.max()),
    }))
}
