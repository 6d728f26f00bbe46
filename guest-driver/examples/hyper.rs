// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HTTP by hyper over SMC: hyper takes any stream of tokio, and notices nothing.
//!
//!     smc fabric --socket-path /tmp/any.sock,devices=8 &
//!     export SMC_DEVICE=/tmp/any.sock
//!     cargo run -p guest-driver --features tokio --example hyper -- server 127.0.0.1:5000 &
//!     cargo run -p guest-driver --features tokio --example hyper -- client 127.0.0.1:5000
//!
//! Any other HTTP client gets its answers by TCP: `curl -d hello http://127.0.0.1:5000/`.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use guest_driver::socket::tokio::{AsyncSmcListener, AsyncSmcStream};
use guest_driver::{Config, Stack};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = std::env::var("SMC_DEVICE");
    let stack = Stack::open(device.map_or_else(|_| Config::default(), Config::new))?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", address] => serve(&stack, address.parse()?).await,
        ["client", address] => ask(&stack, address.parse()?).await,
        _ => Err("usage: hyper server|client ADDRESS:PORT".into()),
    }
}

async fn serve(stack: &Arc<Stack>, address: SocketAddr) -> Result<(), Failure> {
    let listener = AsyncSmcListener::bind(stack, address)?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().await?;
        println!("{peer}: {}", stream.info());
        tokio::spawn(async move {
            let http = hyper::server::conn::http1::Builder::new();
            if let Err(error) = http.serve_connection(TokioIo::new(stream), service_fn(echo)).await
            {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

/// Answers with the body of the request.
async fn echo(request: Request<Incoming>) -> Result<Response<Incoming>, Infallible> {
    Ok(Response::new(request.into_body()))
}

async fn ask(stack: &Arc<Stack>, address: SocketAddr) -> Result<(), Failure> {
    let stream = AsyncSmcStream::connect(stack, address).await?;
    println!("{}", stream.info());
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut bytes = 0;
    for round in 0..16u8 {
        let body = Bytes::from(vec![round; 64 << 10]);
        let request = Request::post("/").header("Host", address.to_string());
        let response = sender.send_request(request.body(Full::new(body.clone()))?).await?;
        let back = response.into_body().collect().await?.to_bytes();
        if back != body {
            return Err(format!("round {round}: another body came back").into());
        }
        bytes += back.len();
    }
    println!("{bytes} bytes came back");
    Ok(())
}
