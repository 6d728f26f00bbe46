// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Echo with blocking sockets, like the sockets of `std::net`: a thread per connection.
//!
//!     smc fabric &
//!     cargo run -p guest-driver --example blocking -- server 127.0.0.1:5000 &
//!     cargo run -p guest-driver --example blocking -- client 127.0.0.1:5000
//!
//! Both ends find the fabric as all programs do (`smc config`), and print the carrier of the bytes. Without a
//! fabric a program says why, and goes on over TCP.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::thread;

use guest_driver::{Config, SmcListener, SmcStream, Stack};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // One stack per process: the stack has the device, and the threads waiting for its events.
    let stack = stack()?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", address] => serve(&stack, address)?,
        ["client", address] => ask(&stack, address)?,
        _ => return Err("usage: blocking server|client ADDRESS:PORT".into()),
    }
    Ok(())
}

/// The stack on the fabric of this machine; without one, a stack whose connections are TCP.
fn stack() -> io::Result<Arc<Stack>> {
    Stack::discover().or_else(|why| {
        eprintln!("every connection is TCP: {why}");
        Stack::open(Config::default())
    })
}

fn serve(stack: &Arc<Stack>, address: &str) -> io::Result<()> {
    // Clients with and without SMC are served on the same port.
    let listener = SmcListener::bind(stack, address)?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept()?;
        println!("{peer}: {}", stream.info());
        thread::spawn(move || {
            if let Err(error) = echo(stream) {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

fn echo(mut stream: SmcStream) -> io::Result<()> {
    let mut buf = [0; 16 << 10];
    loop {
        match stream.read(&mut buf)? {
            0 => return Ok(()),
            n => stream.write_all(&buf[..n])?,
        }
    }
}

fn ask(stack: &Arc<Stack>, address: &str) -> io::Result<()> {
    // The server has to expect SMC: an ordinary one would take the handshake for data.
    let mut stream = SmcStream::connect(stack, address)?;
    println!("{}", stream.info());
    let mut bytes = 0;
    for round in 0..256u32 {
        let message = [round as u8; 4096];
        stream.write_all(&message)?;
        let mut back = [0; 4096];
        stream.read_exact(&mut back)?;
        if back != message {
            return Err(io::Error::other(format!("round {round}: other bytes came back")));
        }
        bytes += back.len();
    }
    stream.shutdown(Shutdown::Write)?;
    println!("{bytes} bytes came back");
    Ok(())
}
