// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connect, request, reply, close: several client threads, and a server for one connection after
//! the other.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::Schedule;
use crate::perf::job::{EndReport, Job};
use crate::transport::{Stream, Transport};

/// First byte of an ordinary request.
const REQUEST: u8 = 0x5a;
/// First byte of the request to end the server.
const STOP: u8 = 0;

pub(super) fn serve<T: Transport>(
    transport: &T,
    listener: &T::Listener,
    job: &Job,
) -> io::Result<()> {
    let mut message = vec![0u8; job.size];
    loop {
        let mut stream = transport.accept(listener)?;
        stream.send_at_once()?;
        stream.read_exact(&mut message)?;
        stream.write_all(&message)?;
        if message.first() == Some(&STOP) {
            // The client closes first, so nothing is lost at the end of this process.
            let _ = stream.read(&mut message);
            return Ok(());
        }
    }
}

fn ask<T: Transport>(transport: &T, address: &str, message: &mut [u8]) -> io::Result<()> {
    let mut stream = transport.connect(address)?;
    stream.send_at_once()?;
    stream.write_all(message)?;
    stream.read_exact(message)
}

pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    let schedule = Schedule::from_now(job);
    let connections = AtomicU64::new(0);
    let report = schedule.on_threads(job, vec![(); job.threads], |()| {
        let mut message = vec![REQUEST; job.size];
        let mut done = 0u64;
        loop {
            ask(transport, &job.address, &mut message)?;
            connections.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            done += u64::from(now >= schedule.start);
            // A busy machine may have come to nothing so far.
            if now >= schedule.end && done > 0 {
                return Ok((done, now));
            }
        }
    })?;
    ask(transport, &job.address, &mut vec![STOP; job.size])?;
    Ok(EndReport { work: connections.into_inner(), ..report })
}
