// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs of this test's own: an echo by tokio, and servers that speak first.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, Case, after, times};
use crate::common::my_role;

/// This executable in a role of a test.
fn role(test: &str, role: &str, place: &Place) -> Program {
    role_by("env", test, role, place)
}

/// Like [`role`], on the first or the second processor. Without a fixed processor, the kernel
/// places two ends that wait for each other on one processor or on two, by chance; on one they are
/// three times as fast.
fn role_on(processor: usize, test: &str, role: &str, place: &Place) -> Program {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    role_by(&format!("taskset -c {} env", processor % processors), test, role, place)
}

fn role_by(command: &str, test: &str, role: &str, place: &Place) -> Program {
    let Place { address, port, .. } = place;
    let this = std::env::current_exe().unwrap();
    Program::new(format!(
        "{command} PRELOAD_TEST_ROLE={role} PRELOAD_TEST_PORT={port} PRELOAD_TEST_ADDRESS={address} \
         RUST_TEST_THREADS=1 {} {test} --exact --include-ignored --nocapture",
        this.display()
    ))
}

fn address() -> String {
    std::env::var("PRELOAD_TEST_ADDRESS").unwrap()
}

/// A number of messages, each with other bytes and of another length.
fn message(connection: usize, number: usize) -> Vec<u8> {
    let length = 1 + (connection * 7919 + number * number * 31) % 70_000;
    (0..length).map(|at| (at + connection * 17 + number) as u8).collect()
}

async fn echo(port: u16) {
    let listener = tokio::net::TcpListener::bind((address(), port)).await.unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let (mut reader, mut writer) = stream.split();
            // A closing client resets unread bytes.
            let _ = tokio::io::copy(&mut reader, &mut writer).await;
            let _ = writer.shutdown().await;
        });
    }
}

/// Sends messages over eight connections at a time, and reads meanwhile.
async fn ask(port: u16, connections: usize, messages: usize) {
    let mut tasks = Vec::new();
    for connection in 0..connections {
        tasks.push(tokio::spawn(async move {
            let mut stream = tokio::net::TcpStream::connect((address(), port)).await.unwrap();
            let (mut reader, mut writer) = stream.split();
            for number in 0..messages {
                let sent = message(connection, number);
                let mut got = vec![0; sent.len()];
                let (written, read) =
                    tokio::join!(writer.write_all(&sent), reader.read_exact(&mut got));
                written.unwrap();
                read.unwrap();
                assert!(sent == got, "message {number} of connection {connection}");
            }
            writer.shutdown().await.unwrap();
            assert_eq!(reader.read(&mut [0]).await.unwrap(), 0);
        }));
        if tasks.len() == 8 {
            for task in tasks.drain(..) {
                task.await.unwrap();
            }
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn tokio_echo() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap()
    };
    if let Some((role, port)) = my_role() {
        if role == "server" {
            runtime().block_on(echo(port));
        }
        for (connections, messages) in [(8, times(100, 2000)), (times(100, 1000), 3)] {
            let (connections, messages) = (connections as usize, messages as usize);
            let begun = Instant::now();
            runtime().block_on(ask(port, connections, messages));
            let all = (connections * messages) as f64;
            println!("per second: {}", all / begun.elapsed().as_secs_f64());
        }
        return;
    }
    let net = Net::new();
    for (name, figure) in [("tokio, echo", 1), ("tokio, echo, a connection for three", 2)] {
        Case {
            name,
            needs: &[],
            server: &|place| role("echo::tokio_echo", "server", place),
            client: &|place| role("echo::tokio_echo", "client", place),
            figure: &|text| after(text.split("per second").nth(figure).unwrap(), ":"),
            seen_by: None,
            carried: Carried::Both,
            wanted: 0.9,
        }
        .run(&net);
    }
}

const BANNER: &[u8] = b"220 ready\r\n";

/// A server that speaks first, with a thread for each connection.
fn greet(port: u16) {
    for stream in TcpListener::bind((address(), port)).unwrap().incoming() {
        let mut stream = stream.unwrap();
        std::thread::spawn(move || {
            let _ = stream.write_all(BANNER);
            while matches!(stream.read(&mut [0; 64]), Ok(1..)) {}
        });
    }
}

/// The same with an event loop.
async fn greet_by_events(port: u16) {
    let listener = tokio::net::TcpListener::bind((address(), port)).await.unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let _ = stream.write_all(BANNER).await;
            while matches!(stream.read(&mut [0; 64]).await, Ok(1..)) {}
        });
    }
}

/// Time of a client until the first bytes of a server that speaks first. The figure is the number
/// of such clients, one after another, in a second: of the median one.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn first_bytes() {
    if let Some((role, port)) = my_role() {
        let by_events = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        match role.as_str() {
            "threads" => greet(port),
            "events" => by_events().unwrap().block_on(greet_by_events(port)),
            _ => {
                let took = (0..times(200, 2000)).map(|_| {
                    let begun = Instant::now();
                    let mut stream = TcpStream::connect((address(), port)).unwrap();
                    let mut got = [0; BANNER.len()];
                    stream.read_exact(&mut got).unwrap();
                    let took = begun.elapsed();
                    assert_eq!(got, BANNER);
                    took
                });
                let mut took: Vec<Duration> = took.collect();
                took.sort();
                println!("per second: {}", 1.0 / took[took.len() / 2].as_secs_f64());
            }
        }
        return;
    }
    let net = Net::new();
    for (name, server) in [("first bytes, threads", "threads"), ("first bytes, events", "events")] {
        Case {
            name,
            needs: &[],
            server: &|place| role_on(0, "echo::first_bytes", server, place),
            client: &|place| role_on(1, "echo::first_bytes", "client", place),
            figure: &|text| after(text, "per second:"),
            seen_by: None,
            carried: Carried::Both,
            wanted: 0.1,
        }
        .run(&net);
    }
}
