// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A relay on the TCP connection of a handshake. The relay keeps a copy of the first bytes, to show
//! the messages of the handshake, and counts every byte, to show the absence of others.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ism_sys::lock;
use smc_core::wire::clc::{Kind, Message, Peek, peek_header};

/// Bytes kept of each direction; a handshake has less than a thousand.
const KEPT: usize = 16 << 10;

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// One message of the handshake.
#[derive(Debug)]
pub(super) struct CapturedMessage {
    pub(super) direction: Direction,
    /// When its last byte came, after the client connected.
    pub(super) after: Duration,
    pub(super) len: usize,
    /// The message; `None` if unparsable.
    pub(super) message: Option<Message>,
}

/// The relay.
#[derive(Debug)]
pub(super) struct Tap {
    address: SocketAddr,
    record: Arc<Mutex<Record>>,
}

#[derive(Debug, Default)]
struct Record {
    total: u64,
    /// (direction, time, bytes up to here in that direction)
    arrivals: Vec<(Direction, Duration, usize)>,
    kept: [Vec<u8>; 2],
}

impl Direction {
    fn index(self) -> usize {
        self as usize
    }
}

impl Tap {
    /// Relays one connection to `server`, on threads of its own.
    ///
    /// # Errors
    /// No port is left.
    pub(super) fn start(server: SocketAddr) -> io::Result<Tap> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let record = Arc::<Mutex<Record>>::default();
        let shared = record.clone();
        std::thread::spawn(move || {
            if let Err(error) = relay(&listener, server, &shared) {
                tracing::debug!(%error, "relay");
            }
        });
        Ok(Tap { address, record })
    }

    /// Where the client has to go.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes in both directions so far.
    pub(super) fn total(&self) -> u64 {
        lock(&self.record).total
    }

    /// The messages of a successful handshake, in order. The last message was sent before the
    /// success was known, but may still be in the relay.
    pub(super) fn handshake(&self) -> Vec<CapturedMessage> {
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            let messages = self.messages();
            let last = messages.last().and_then(|captured| captured.message.as_ref());
            let over = last.is_some_and(|last| last.kind() == Kind::Confirm);
            if over || Instant::now() > deadline {
                return messages;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The messages so far, in order.
    fn messages(&self) -> Vec<CapturedMessage> {
        let record = lock(&self.record);
        let mut all = Vec::new();
        for direction in [Direction::ToServer, Direction::ToClient] {
            let mut at = 0;
            while let Some(bytes) = record.kept[direction.index()].get(at..) {
                let Peek::Message { length, .. } = peek_header(bytes) else { break };
                let Some(bytes) = bytes.get(..length) else { break };
                at += length;
                let arrival =
                    record.arrivals.iter().find(|(w, _, end)| *w == direction && *end >= at);
                all.push(CapturedMessage {
                    direction,
                    after: arrival.map(|(_, time, _)| *time).unwrap_or_default(),
                    len: length,
                    message: Message::parse(bytes).ok(),
                });
            }
        }
        all.sort_by_key(|captured| captured.after);
        all
    }
}

fn relay(listener: &TcpListener, server: SocketAddr, record: &Mutex<Record>) -> io::Result<()> {
    let (client, _) = listener.accept()?;
    let start = Instant::now();
    let server = TcpStream::connect(server)?;
    for side in [&client, &server] {
        side.set_nodelay(true)?;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| copy(&client, &server, Direction::ToServer, start, record));
        copy(&server, &client, Direction::ToClient, start, record);
    });
    Ok(())
}

fn copy(
    mut from: &TcpStream,
    mut to: &TcpStream,
    direction: Direction,
    start: Instant,
    record: &Mutex<Record>,
) {
    let mut buf = [0u8; 4096];
    while let Ok(n @ 1..) = from.read(&mut buf) {
        let bytes = buf.get(..n).unwrap_or_default();
        let mut kept = lock(record);
        kept.total += n as u64;
        let copy = &mut kept.kept[direction.index()];
        let room = KEPT.saturating_sub(copy.len()).min(n);
        copy.extend_from_slice(bytes.get(..room).unwrap_or_default());
        let end = copy.len();
        if room > 0 {
            kept.arrivals.push((direction, start.elapsed(), end));
        }
        drop(kept);
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_core::wire::clc::{Decline, Diagnosis, TypeReasons, Version};
    use smc_core::wire::ids::{OsType, PeerId};

    #[test]
    fn hands_bytes_on_and_tells_the_messages_in_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tap = Tap::start(listener.local_addr().unwrap()).unwrap();
        let mut client = TcpStream::connect(tap.address()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let decline = Message::Decline(Decline {
            version: Version::V2,
            out_of_sync: false,
            peer_id: PeerId([0; 8]),
            diagnosis: Diagnosis(0x0303_0000),
            os: OsType::LINUX,
            reasons: TypeReasons::default(),
        })
        .emit();
        client.write_all(&decline).unwrap();
        client.write_all(b"plain bytes").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut got = Vec::new();
        server.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), decline.len() + 11);
        assert_eq!(tap.total(), got.len() as u64);
        let [captured] = &tap.messages()[..] else { panic!("{:?}", tap.messages()) };
        assert_eq!((captured.direction, captured.len), (Direction::ToServer, decline.len()));
        assert!(matches!(captured.message, Some(Message::Decline(_))));
    }
}
