// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Echo with one thread for all connections: [`Poller`] finds ready connections in shared memory, without
//! system calls while there is work to do.
//!
//!     smc fabric --socket-path /tmp/any.sock,devices=8 &
//!     export SMC_DEVICE=/tmp/any.sock
//!     cargo run -p guest-driver --example poller -- server 127.0.0.1:5000 &
//!     cargo run -p guest-driver --example poller -- client 127.0.0.1:5000

use std::collections::HashMap;
use std::error::Error;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use guest_driver::{Config, Interest, Poller, SmcListener, SmcStream, Stack};

/// The key of the listener; connections have larger ones.
const LISTENER: u64 = 0;
/// Connections of the client, and bytes sent and received by each.
const CONNECTIONS: u64 = 16;
const BYTES: usize = 64 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = std::env::var("SMC_DEVICE");
    let stack = Stack::open(device.map_or_else(|_| Config::default(), Config::new))?;
    // The poller spins for 50 us before sleeping.
    let poller = Poller::new(Duration::from_micros(50))?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", address] => serve(&stack, &poller, address)?,
        ["client", address] => ask(&stack, &poller, address)?,
        _ => return Err("usage: poller server|client ADDRESS:PORT".into()),
    }
    Ok(())
}

/// A connection of the server, with bytes not yet taken by its peer.
struct Echo {
    stream: SmcStream,
    unsent: Vec<u8>,
}

fn serve(stack: &Arc<Stack>, poller: &Poller, address: &str) -> io::Result<()> {
    let listener = SmcListener::bind(stack, address)?;
    listener.set_nonblocking(true)?;
    poller.add_fd(listener.pollable(), LISTENER, Interest::READ)?;
    println!("listening on {}", listener.local_addr()?);
    let (mut connections, mut next, mut ready) = (HashMap::new(), LISTENER, Vec::new());
    loop {
        poller.wait(&mut ready, 64, None)?;
        for event in &ready {
            if event.key == LISTENER {
                // Readable may also mean a handshake in progress, without a connection yet.
                while let Some((stream, peer)) = unless_it_would_block(listener.accept())? {
                    println!("{peer}: {}", stream.info());
                    stream.set_nonblocking(true)?;
                    next += 1;
                    poller.add(&stream, next, Interest::READ)?;
                    connections.insert(next, Echo { stream, unsent: Vec::new() });
                }
            } else if let Some(echo) = connections.get_mut(&event.key)
                && !go_on(echo, poller, event.key).unwrap_or(false)
            {
                poller.remove(event.key)?;
                connections.remove(&event.key);
            }
        }
    }
}

/// Sends remaining bytes, else reads and sends once. `false`: the client has ended the connection.
fn go_on(echo: &mut Echo, poller: &Poller, key: u64) -> io::Result<bool> {
    let was_blocked = !echo.unsent.is_empty();
    if !was_blocked {
        echo.unsent.resize(16 << 10, 0);
        let received = unless_it_would_block(echo.stream.recv(&mut echo.unsent));
        echo.unsent.truncate(received.as_ref().map_or(0, |n| n.unwrap_or(0)));
        match received? {
            Some(0) => return Ok(false),
            Some(_) => {}
            None => return Ok(true),
        }
    }
    let sent = unless_it_would_block(echo.stream.send(&echo.unsent))?.unwrap_or(0);
    echo.unsent.drain(..sent);
    // The server reads no more than its peer takes.
    match (was_blocked, echo.unsent.is_empty()) {
        (false, false) => poller.modify(key, Interest::WRITE)?,
        (true, true) => poller.modify(key, Interest::READ)?,
        _ => {}
    }
    Ok(true)
}

fn ask(stack: &Arc<Stack>, poller: &Poller, address: &str) -> io::Result<()> {
    let data: Vec<u8> = (0..BYTES).map(|n| (n % 251) as u8).collect();
    let mut connections = HashMap::new();
    for key in 0..CONNECTIONS {
        let stream = SmcStream::connect(stack, address)?;
        println!("{}", stream.info());
        stream.set_nonblocking(true)?;
        poller.add(&stream, key, Interest::BOTH)?;
        connections.insert(key, (stream, 0, 0));
    }
    let (mut ready, mut buf) = (Vec::new(), vec![0; 16 << 10]);
    while !connections.is_empty() {
        poller.wait(&mut ready, 64, None)?;
        for event in &ready {
            let Some((stream, sent, back)) = connections.get_mut(&event.key) else { continue };
            if event.writable && *sent < BYTES {
                *sent += unless_it_would_block(stream.send(&data[*sent..]))?.unwrap_or(0);
                if *sent == BYTES {
                    poller.modify(event.key, Interest::READ)?;
                }
            }
            if let Some(n) = unless_it_would_block(stream.recv(&mut buf))? {
                if n == 0 || buf[..n] != data[*back..][..n] {
                    return Err(io::Error::other(format!("other bytes came back after {back}")));
                }
                *back += n;
            }
            if *back == BYTES {
                poller.remove(event.key)?;
                connections.remove(&event.key);
            }
        }
    }
    println!("{} bytes came back", CONNECTIONS as usize * BYTES);
    Ok(())
}

fn unless_it_would_block<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}
