// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two programs echoing their input: targets of a conformance test.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::Duration;

use super::net::{Line, Net};

/// Bytes per echo.
const CHUNK: usize = 64 << 10;
/// Pause of a client after a failed connect.
const PAUSE: Duration = Duration::from_millis(20);
/// Stack of a thread with a connection.
const STACK: usize = 256 << 10;

/// Listens, says "ready", and echoes each connection in a thread.
///
/// # Panics
/// If listening on the address fails.
pub fn echo(who: &str, address: &str, say: fn(&str)) {
    let address: SocketAddr = address.parse().unwrap();
    let door = Net::new(who).listen(address).unwrap();
    say("ready");
    loop {
        // A failed handshake is no error of this program.
        if let Ok(line) = door.accept() {
            let serve = move || drop(send_back(&line));
            thread::Builder::new().stack_size(STACK).spawn(serve).unwrap();
        }
    }
}

/// Connects, echoes up to the end, and connects again.
///
/// # Panics
/// If the address is invalid.
pub fn call(who: &str, address: &str) {
    let address: SocketAddr = address.parse().unwrap();
    let net = Net::new(who);
    loop {
        match net.connect(address) {
            Ok(line) => drop(send_back(&line)),
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

fn send_back(line: &Line) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        let n = line.recv(&mut buffer)?;
        if n == 0 {
            return line.shutdown(Shutdown::Write);
        }
        let mut rest = &buffer[..n];
        while !rest.is_empty() {
            rest = &rest[line.send(rest)?..];
        }
    }
}
