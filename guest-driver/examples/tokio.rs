// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Echo under tokio: the sockets are `AsyncRead` and `AsyncWrite`, and their readiness comes through
//! tokio's own reactor.
//!
//!     smc fabric --socket-path /tmp/any.sock,devices=8 &
//!     export SMC_DEVICE=/tmp/any.sock
//!     cargo run -p guest-driver --features tokio --example tokio -- server 127.0.0.1:5000 &
//!     cargo run -p guest-driver --features tokio --example tokio -- client 127.0.0.1:5000

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use guest_driver::socket::tokio::{AsyncSmcListener, AsyncSmcStream};
use guest_driver::{Config, Stack};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Simultaneous connections of the client.
const CONNECTIONS: u8 = 16;

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = std::env::var("SMC_DEVICE");
    let stack = Stack::open(device.map_or_else(|_| Config::default(), Config::new))?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", address] => serve(&stack, address.parse()?).await,
        ["client", address] => ask(&stack, address.parse()?).await,
        _ => Err("usage: tokio server|client ADDRESS:PORT".into()),
    }
}

async fn serve(stack: &Arc<Stack>, address: SocketAddr) -> Result<(), Failure> {
    let listener = AsyncSmcListener::bind(stack, address)?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().await?;
        println!("{peer}: {}", stream.info());
        tokio::spawn(async move {
            // The halves of `tokio::io::split` work, too.
            let (mut from, mut to) = tokio::io::split(stream);
            if let Err(error) = tokio::io::copy(&mut from, &mut to).await {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

async fn ask(stack: &Arc<Stack>, address: SocketAddr) -> Result<(), Failure> {
    let tasks: Vec<_> =
        (0..CONNECTIONS).map(|number| tokio::spawn(echo(stack.clone(), address, number))).collect();
    let mut bytes = 0;
    for task in tasks {
        bytes += task.await??;
    }
    println!("{bytes} bytes came back");
    Ok(())
}

/// Sends messages over a connection of its own, and returns the number of received bytes.
async fn echo(stack: Arc<Stack>, address: SocketAddr, number: u8) -> Result<usize, Failure> {
    // The handshake runs on tokio's pool for blocking calls.
    let mut stream = AsyncSmcStream::connect(&stack, address).await?;
    println!("{}", stream.info());
    let mut bytes = 0;
    for round in 0..16u8 {
        let message = [number.wrapping_add(round); 4096];
        stream.write_all(&message).await?;
        let mut back = [0; 4096];
        stream.read_exact(&mut back).await?;
        if back != message {
            return Err(format!("connection {number}, round {round}: other bytes came back").into());
        }
        bytes += back.len();
    }
    stream.shutdown().await?;
    Ok(bytes)
}
