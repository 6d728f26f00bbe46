// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two programs that send back what they get: targets of a conformance test.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::Duration;

use super::net::{Line, Net};

/// Bytes that are sent back at a time.
const CHUNK: usize = 64 << 10;
/// How long a client waits after it could not connect.
const PAUSE: Duration = Duration::from_millis(20);
/// Stack of a thread with a connection.
const STACK: usize = 256 << 10;

/// Listens, says "ready", and sends back what comes, in a thread per connection.
///
/// # Panics
/// The address cannot be had.
pub fn echo(who: &str, address: &str, say: fn(&str)) {
    let address: SocketAddr = address.parse().unwrap();
    let door = Net::new(who).listen(address).unwrap();
    say("ready");
    loop {
        // A handshake that failed is none of this program's business.
        if let Ok(line) = door.accept() {
            let serve = move || drop(send_back(&line));
            thread::Builder::new().stack_size(STACK).spawn(serve).unwrap();
        }
    }
}

/// Connects, sends back what comes until the end, and connects again.
///
/// # Panics
/// The address is none.
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
