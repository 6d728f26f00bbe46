// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Many connections with one message to and fro on each at a time; one thread with an event loop on
//! either side.

use std::io::{self, Read as _};
use std::time::{Duration, Instant};

use super::{Schedule, end, measured, per_second};
use crate::perf::job::{EndReport, Job};
use crate::perf::usage::{Meter, SetupMeter, Usage};
use crate::transport::{Interest, Poll, Stream, Transport};

/// Longest wait before the program reads the clock.
const CLOCK_INTERVAL: Duration = Duration::from_millis(100);
/// The reader's buffer, bytes.
const READ: usize = 64 << 10;

/// A connection and its bytes to write.
struct Peer<S> {
    stream: S,
    /// Bytes of the current message received back (client).
    got: usize,
    /// Bytes left over by a write.
    rest: Vec<u8>,
}

impl<S: Stream> Peer<S> {
    fn new(stream: S) -> io::Result<Peer<S>> {
        stream.send_at_once()?;
        stream.set_nonblocking(true)?;
        Ok(Peer { stream, got: 0, rest: Vec::new() })
    }

    /// Writes as much as possible. If bytes are left over, waits for `waiting` on the connection.
    fn send(
        &mut self,
        poll: &mut impl Poll<S>,
        key: u64,
        bytes: &[u8],
        waiting: Interest,
    ) -> io::Result<()> {
        let sent = some(self.stream.write(bytes))?;
        if let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            self.rest.extend_from_slice(rest);
            poll.modify(&self.stream, key, waiting)?;
        }
        Ok(())
    }

    /// Writes the bytes left over. `true`: nothing is left.
    fn flush(&mut self, poll: &mut impl Poll<S>, key: u64) -> io::Result<bool> {
        if !self.rest.is_empty() {
            let sent = some(self.stream.write(&self.rest))?;
            self.rest.drain(..sent);
            if self.rest.is_empty() {
                poll.modify(&self.stream, key, Interest::Read)?;
            }
        }
        Ok(self.rest.is_empty())
    }
}

/// Nothing, if a call would have had to wait.
fn some(done: io::Result<usize>) -> io::Result<usize> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        done => done,
    }
}

pub(super) fn serve<T: Transport>(
    transport: &T,
    mut poll: impl Poll<T::Stream>,
    listener: &T::Listener,
    job: &Job,
) -> io::Result<()> {
    let mut peers = Vec::with_capacity(job.connections);
    for key in 0..job.connections {
        let peer = Peer::new(transport.accept(listener)?)?;
        poll.add(&peer.stream, key as u64, Interest::Read)?;
        peers.push(Some(peer));
    }
    let mut open = peers.len();
    let mut ready = Vec::new();
    let mut buf = vec![0u8; READ];
    while open > 0 {
        poll.wait(&mut ready, CLOCK_INTERVAL)?;
        for key in ready.drain(..) {
            let Some(slot) = peers.get_mut(key as usize) else { continue };
            let Some(peer) = slot else { continue };
            if !peer.flush(&mut poll, key)? {
                continue;
            }
            match peer.stream.read(&mut buf) {
                Ok(0) => {
                    poll.remove(&peer.stream, key)?;
                    *slot = None;
                    open -= 1;
                }
                // Reads no more until the bytes are written: the client's message stays bounded.
                Ok(n) => {
                    let bytes = buf.get(..n).unwrap_or_default();
                    peer.send(&mut poll, key, bytes, Interest::Write)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

pub(super) fn drive<T: Transport>(
    transport: &T,
    mut poll: impl Poll<T::Stream>,
    job: &Job,
) -> io::Result<EndReport> {
    let message = vec![0x5a; job.size];
    let mut buf = vec![0u8; READ];
    let mut peers = Vec::with_capacity(job.connections);
    let mut setup = SetupMeter::start(job.others);
    for key in 0..job.connections {
        let peer = Peer::new(transport.connect(&job.address)?)?;
        poll.add(&peer.stream, key as u64, Interest::Read)?;
        peers.push(peer);
        if key == 0 && job.connections > 1 {
            // The first one makes the link, and the first buffers of both ends.
            setup = SetupMeter::start(job.others);
        }
    }
    let setup = setup.and_then(SetupMeter::stop);
    let schedule = Schedule::from_now(job);
    let active = peers.len().saturating_sub(job.idle);
    for (key, peer) in peers.iter_mut().take(active).enumerate() {
        peer.send(&mut poll, key as u64, &message, Interest::Both)?;
    }
    let mut ready = Vec::new();
    let mut begun: Option<(Instant, Option<Meter>)> = None;
    let mut echoes = 0u64;
    loop {
        let now = Instant::now();
        match &mut begun {
            None if now >= schedule.start => {
                (begun, echoes) = (Some((Instant::now(), Meter::start(job.others))), 0);
            }
            // On a busy machine the first echo may come late.
            Some((start, meter)) if now >= schedule.end && echoes > 0 => {
                let usage = meter.take().and_then(|meter| meter.stop(echoes));
                let report = finish(peers, poll, echoes, now - *start, usage)?;
                return Ok(EndReport { setup, ..report });
            }
            _ => {}
        }
        poll.wait(&mut ready, CLOCK_INTERVAL)?;
        for key in ready.drain(..) {
            let Some(peer) = peers.get_mut(key as usize) else { continue };
            // Go on reading even if bytes are left: the server may wait for the client's reads.
            peer.flush(&mut poll, key)?;
            // No more than is missing: a second message is not under way.
            let missing = (message.len() - peer.got).min(buf.len());
            let n = match peer.stream.read(buf.get_mut(..missing).unwrap_or_default()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => some(read)?,
            };
            peer.got += n;
            if peer.got == message.len() {
                peer.got = 0;
                echoes += 1;
                peer.send(&mut poll, key, &message, Interest::Both)?;
            }
        }
    }
}

/// Ends in an orderly way, without resets for the server: half closes, and reads the bytes still in
/// flight.
fn finish<S: Stream, P: Poll<S>>(
    peers: Vec<Peer<S>>,
    poll: P,
    echoes: u64,
    time: Duration,
    usage: Option<Usage>,
) -> io::Result<EndReport> {
    drop(poll);
    for peer in &peers {
        peer.stream.set_nonblocking(false)?;
        peer.stream.finish()?;
    }
    // All have ended their halves before the first of them is waited for.
    for peer in peers {
        end(peer.stream);
    }
    Ok(measured(per_second(echoes, time)?, usage))
}
