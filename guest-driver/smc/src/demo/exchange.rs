// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The dialogue of the demo's server and client on a connection, whatever the carrier.
//!
//! First [`PINGS`] messages of [`PING`] bytes go to and fro. Then blocks: a length of eight bytes,
//! the block; the server answers with the nanoseconds of the block's arrival, and sends the block
//! back. A length of zero asks for the SHA-256 of all blocks so far.

use std::io;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::transport::Stream;

/// Messages to and fro.
pub(super) const PINGS: usize = 5000;
/// Size of a message, bytes.
pub(super) const PING: usize = 64;
/// Longest block, bytes.
pub(super) const BLOCK: usize = 16 << 20;

/// Serves the client's requests until the client ends.
pub(super) fn serve(mut stream: impl Stream) -> io::Result<()> {
    stream.send_at_once()?;
    let mut ping = [0u8; PING];
    for _ in 0..PINGS {
        stream.read_exact(&mut ping)?;
        stream.write_all(&ping)?;
    }
    let mut hash = Sha256::new();
    let mut block = vec![0u8; BLOCK];
    loop {
        let mut len = [0u8; 8];
        match stream.read(&mut len)? {
            0 => return Ok(()),
            n => stream.read_exact(len.get_mut(n..).unwrap_or_default())?,
        }
        let len = u64::from_be_bytes(len);
        if len == 0 {
            stream.write_all(&hash.clone().finalize())?;
            continue;
        }
        let len = usize::try_from(len).ok().filter(|len| *len <= BLOCK);
        let bytes = len.and_then(|len| block.get_mut(..len)).ok_or(io::ErrorKind::InvalidData)?;
        let start = Instant::now();
        stream.read_exact(bytes)?;
        let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        hash.update(&*bytes);
        stream.write_all(&took.to_be_bytes())?;
        stream.write_all(bytes)?;
    }
}

/// The client's end.
pub(super) struct Exchange<S> {
    stream: S,
    back: Vec<u8>,
    came_back: Sha256,
    to_server: Duration,
    to_client: Duration,
    round_trip: Duration,
}

/// The result of an exchange.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Summary {
    /// SHA-256 of the blocks received by the server.
    pub(super) at_server: String,
    /// SHA-256 of the blocks sent back.
    pub(super) came_back: String,
    /// Seconds of the blocks' way to the server.
    pub(super) to_server: f64,
    /// Seconds of the blocks' way back.
    pub(super) to_client: f64,
    /// Median round trip of [`PING`] bytes, microseconds.
    pub(super) round_trip: f64,
}

impl<S: Stream> Exchange<S> {
    pub(super) fn new(stream: S) -> io::Result<Exchange<S>> {
        stream.send_at_once()?;
        Ok(Exchange {
            stream,
            back: vec![0; BLOCK],
            came_back: Sha256::new(),
            to_server: Duration::ZERO,
            to_client: Duration::ZERO,
            round_trip: Duration::ZERO,
        })
    }

    /// The messages to and fro. Calls `goes_on` now and then: a slow machine takes long for all of them.
    pub(super) fn ping(&mut self, goes_on: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let mut message = [0x5a; PING];
        let mut times = Vec::with_capacity(PINGS);
        for number in 0..PINGS {
            if number % (PINGS / 50) == 0 {
                goes_on()?;
            }
            let start = Instant::now();
            self.stream.write_all(&message)?;
            self.stream.read_exact(&mut message)?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        self.round_trip = times.get(PINGS / 2).copied().unwrap_or_default();
        Ok(())
    }

    /// One block there and back.
    pub(super) fn send(&mut self, block: &[u8]) -> io::Result<()> {
        self.stream.write_all(&(block.len() as u64).to_be_bytes())?;
        self.stream.write_all(block)?;
        let mut took = [0u8; 8];
        self.stream.read_exact(&mut took)?;
        self.to_server += Duration::from_nanos(u64::from_be_bytes(took));
        let back = self.back.get_mut(..block.len()).ok_or(io::ErrorKind::InvalidInput)?;
        let start = Instant::now();
        self.stream.read_exact(back)?;
        self.to_client += start.elapsed();
        self.came_back.update(&*back);
        match *back == *block {
            true => Ok(()),
            false => Err(io::Error::other("other bytes came back")),
        }
    }

    /// Ends the connection.
    pub(super) fn finish(self) -> io::Result<()> {
        self.stream.finish()
    }

    /// The results so far, with the server's hash.
    pub(super) fn summary(&mut self) -> io::Result<Summary> {
        self.stream.write_all(&0u64.to_be_bytes())?;
        let mut at_server = [0u8; 32];
        self.stream.read_exact(&mut at_server)?;
        Ok(Summary {
            at_server: hex(&at_server),
            came_back: hex(&self.came_back.clone().finalize()),
            to_server: self.to_server.as_secs_f64(),
            to_client: self.to_client.as_secs_f64(),
            round_trip: self.round_trip.as_secs_f64() * 1e6,
        })
    }
}

/// Lower-case hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{Tcp, Transport};

    #[test]
    fn blocks_go_there_and_back_and_the_hashes_are_those_of_the_data() {
        let (listener, address) = Tcp::LOOPBACK.listen().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve(Tcp::LOOPBACK.accept(&listener).unwrap()).unwrap());
            let mut exchange = Exchange::new(Tcp::LOOPBACK.connect(&address).unwrap()).unwrap();
            exchange.ping(|| Ok(())).unwrap();
            let data: Vec<u8> = (0..500_000u32).map(|i| (i % 251) as u8).collect();
            let mut hash = Sha256::new();
            for block in data.chunks(200_000) {
                hash.update(block);
                exchange.send(block).unwrap();
            }
            let summary = exchange.summary().unwrap();
            let hash = hex(&hash.finalize());
            assert_eq!((&summary.at_server, &summary.came_back), (&hash, &hash));
            assert!(summary.round_trip > 0.0 && summary.to_server > 0.0);
        });
    }
}
