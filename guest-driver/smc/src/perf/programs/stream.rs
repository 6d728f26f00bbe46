// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One connection, one direction. The receiver measures, from the end of the warm-up to the last
//! byte.
//!
//! The receiver answers the first bytes with [`STARTED`]. So the sender's clock starts after the
//! receiver's, and bytes sent after the sender's warm-up arrive after the receiver's: there is
//! something to measure however late the system runs either process.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use super::paced::Pace;
use super::{Schedule, end, per_second};
use crate::perf::job::{EndReport, Job};
use crate::perf::usage::Meter;
use crate::transport::Transport;

/// The reader's buffer, bytes; the writer's buffer is a message.
const READ: usize = 64 << 10;
/// The receiver's answer to the first bytes.
const STARTED: u8 = 1;
/// Pause of a paced sender between due writes, as iperf3 does by default.
const PACING_INTERVAL: Duration = Duration::from_millis(1);

pub(super) fn serve<T: Transport>(
    transport: &T,
    listener: &T::Listener,
    job: &Job,
) -> io::Result<EndReport> {
    let mut stream = transport.accept(listener)?;
    let mut buf = vec![0u8; READ.max(job.size)];
    // The first byte starts the clock, not the accept.
    let mut early = stream.read(&mut buf)? as u64;
    if early == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let start = Instant::now() + job.warm_up();
    stream.write_all(&[STARTED])?;
    let mut now = Instant::now();
    while now < start {
        let n = stream.read(&mut buf)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        early += n as u64;
        now = Instant::now();
    }
    let start = now;
    let mut bytes = 0u64;
    let mut last = start;
    loop {
        let n = stream.read(&mut buf)?;
        if n == 0 {
            let report: EndReport = per_second(bytes, last - start)?.into();
            return Ok(EndReport { work: early + bytes, ..report });
        }
        bytes += n as u64;
        last = Instant::now();
    }
}

pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    let mut stream = transport.connect(&job.address)?;
    let message = vec![0x5a; job.size];
    // Small messages: the clock is not part of the cost.
    let between_looks = (READ / job.size).max(1);
    stream.write_all(&message)?;
    stream.read_exact(&mut [0])?;
    let schedule = Schedule::from_now(job);
    // The receiver assigns a read beginning in the warm-up to the warm-up. So send enough for
    // another read.
    let least = 2 * READ.max(job.size) + 1;
    let pace = (job.rate > 0).then(|| Pace::from(Instant::now(), job.rate));
    let (mut sent, mut measured) = (0, 0);
    let mut meter = None;
    loop {
        let now = Instant::now();
        if now >= schedule.end && measured >= least {
            break;
        }
        if now >= schedule.start && measured == 0 {
            meter = Meter::start(job.others);
        }
        let writes = match pace {
            None => between_looks,
            Some(pace) => pace.due_at(now).saturating_sub(sent) as usize,
        };
        for _ in 0..writes {
            stream.write_all(&message)?;
        }
        sent += writes as u64;
        if now >= schedule.start {
            measured += writes * job.size;
        }
        if pace.is_some() {
            std::thread::sleep(PACING_INTERVAL);
        }
    }
    let usage = meter.and_then(|meter| meter.stop(measured as u64));
    end(stream);
    Ok(EndReport { usage, ..EndReport::default() })
}
