// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! This side of the control connections.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::lock;
use super::wire::{Answer, Call, receive, send};
use crate::watch::{note, slowly};

/// Longest time of one call, shorter than a test's limit: the test then names the call.
const DEADLINE: Duration = Duration::from_secs(45);

/// A test's far end.
#[derive(Debug)]
pub struct Far {
    addr: SocketAddr,
    test: u64,
    /// Lives as long as the test.
    first: TcpStream,
    /// Control connections without a call.
    idle: Mutex<Vec<TcpStream>>,
}

impl Far {
    /// Begins a test with the program serving at `addr`.
    pub fn begin(addr: SocketAddr) -> Far {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // The process id keeps the number apart from other processes' numbers.
        let test = u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed);
        let first = greet(addr, &Call::Begin { test });
        Far { addr, test, first, idle: Mutex::default() }
    }

    /// The other machine's address, for this one.
    pub fn there(&self) -> IpAddr {
        self.addr.ip()
    }

    /// This machine's address, for the other one.
    pub fn here(&self) -> IpAddr {
        self.first.local_addr().unwrap().ip()
    }

    /// Makes a call and waits for its end. The error is the call's; if the other side does not
    /// answer, or has gone, the test fails.
    #[track_caller]
    pub fn call<T: DeserializeOwned>(&self, call: &Call, bytes: &[u8]) -> io::Result<(T, Vec<u8>)> {
        let idle = lock(&self.idle).pop();
        let tcp = idle.unwrap_or_else(|| greet(self.addr, &Call::Join { test: self.test }));
        let answer = converse(&tcp, self.addr, call, bytes);
        lock(&self.idle).push(tcp);
        answer
    }

    /// Ends the test: the other side drops the test's objects and frees the devices.
    ///
    /// # Errors
    /// If the devices do not become free.
    pub fn end(&self) -> io::Result<()> {
        converse::<()>(&self.first, self.addr, &Call::End, &[]).map(drop)
    }

    /// Drops an object of the far end. Says nothing while the test is failing anyway.
    #[track_caller]
    pub(crate) fn release(&self, object: u64) {
        let call = Call::Drop { object };
        if thread::panicking() {
            // A drop may wait for a peer already gone.
            let _ = greet_quietly(self.addr, &Call::Join { test: self.test })
                .and_then(|tcp| send(&tcp, &call, &[]));
            return;
        }
        self.call::<()>(&call, &[]).unwrap();
    }
}

fn greet_quietly(addr: SocketAddr, hello: &Call) -> io::Result<TcpStream> {
    let limit = slowly(DEADLINE);
    let tcp = TcpStream::connect_timeout(&addr, limit)?;
    tcp.set_nodelay(true)?;
    tcp.set_read_timeout(Some(limit))?;
    tcp.set_write_timeout(Some(limit))?;
    send(&tcp, hello, &[])?;
    match receive::<Answer>(&tcp)? {
        Some((Ok(_), _)) => Ok(tcp),
        Some((Err(failure), _)) => Err(failure.into()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[track_caller]
fn greet(addr: SocketAddr, hello: &Call) -> TcpStream {
    greet_quietly(addr, hello)
        .unwrap_or_else(|error| panic!("the far end at {addr} cannot be reached: {error}"))
}

#[track_caller]
fn converse<T: DeserializeOwned>(
    tcp: &TcpStream,
    addr: SocketAddr,
    call: &Call,
    bytes: &[u8],
) -> io::Result<(T, Vec<u8>)> {
    note(format!("waits for the far end: {call:?}"));
    let answer = send(tcp, call, bytes).and_then(|()| receive::<Answer>(tcp));
    match answer {
        Ok(Some((Ok(value), bytes))) => match serde_json::from_value(value) {
            Ok(value) => Ok((value, bytes)),
            Err(error) => panic!("the far end answers {call:?} with something else: {error}"),
        },
        Ok(Some((Err(failure), _))) => Err(failure.into()),
        Ok(None) => panic!("the far end at {addr} has gone during {call:?}"),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            panic!("the far end at {addr} does not come back from {call:?}")
        }
        Err(error) => panic!("the far end at {addr} has gone during {call:?}: {error}"),
    }
}
