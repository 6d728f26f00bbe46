// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Wake-ups of tokio's tasks waiting for SMC connections.
#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use guest_driver::socket::tokio::{AsyncSmcListener, AsyncSmcStream};
use guest_driver::{Config, SmcListener, SmcStream, Stack};
use smc_test_support::TestDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, split};
use tokio::runtime::{Builder, Runtime};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

/// A test counting descriptors runs alone in its process.
static ALONE: RwLock<()> = RwLock::new(());

/// A fabric with one device for servers and one for clients.
struct Fabric {
    others: Option<RwLockReadGuard<'static, ()>>,
    dir: TestDir,
    daemon: Option<Daemon>,
    server: Arc<Stack>,
    client: Arc<Stack>,
}

impl Fabric {
    fn new(spin: Duration) -> Fabric {
        let others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
        let mut fabric = Fabric::alone(spin);
        fabric.others = Some(others);
        fabric
    }

    fn alone(spin: Duration) -> Fabric {
        let dir = TestDir::new();
        let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
        let [server, client] = ["a", "b"].map(|name| {
            daemon.add_guest(GuestSpec::new(dir.join(name))).unwrap();
            let mut config = Config::new(dir.join(name));
            config.spin = spin;
            // The end of the daemon is an end of connections here.
            config.outlive_device = false;
            Stack::open(config).unwrap()
        });
        Fabric { others: None, dir, daemon: Some(daemon), server, client }
    }

    /// A connection whose server is a task and whose client a thread.
    fn with_thread(&self) -> (AsyncSmcStream, SmcStream) {
        let listener = SmcListener::bind(&self.server, local()).unwrap();
        let addr = listener.local_addr().unwrap();
        let client = self.client.clone();
        let connecting = std::thread::spawn(move || SmcStream::connect(&client, addr).unwrap());
        let server = listener.accept().unwrap().0;
        let client = connecting.join().unwrap();
        assert!(server.is_smc() && client.is_smc());
        (AsyncSmcStream::new(server).unwrap(), client)
    }

    /// A connection between two tasks.
    async fn of_tasks(&self) -> (AsyncSmcStream, AsyncSmcStream) {
        let listener = AsyncSmcListener::bind(&self.server, local()).unwrap();
        let addr = listener.local_addr().unwrap();
        let (client, server) =
            tokio::join!(AsyncSmcStream::connect(&self.client, addr), listener.accept());
        (server.unwrap().0, client.unwrap())
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.stop();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn runtimes() -> [Runtime; 2] {
    [Builder::new_current_thread(), Builder::new_multi_thread()]
        .map(|mut builder| builder.worker_threads(3).enable_all().build().unwrap())
}

/// Stacks that spin as usual, and never.
fn spins() -> [Duration; 2] {
    [Duration::from_micros(50), Duration::ZERO]
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, future).await.unwrap_or_else(|_| panic!("{what} never ends"))
}

#[test]
fn a_connection_has_no_descriptor_for_its_readiness() {
    let _alone = ALONE.write().unwrap_or_else(PoisonError::into_inner);
    let fabric = Fabric::alone(spins()[0]);
    for runtime in runtimes() {
        runtime.block_on(async {
            let first = fabric.of_tasks().await;
            let before = descriptors();
            let mut all = Vec::new();
            for _ in 0..20 {
                all.push(fabric.of_tasks().await);
            }
            // A TCP socket at each end.
            let more = descriptors().saturating_sub(before);
            assert!(more < 3 * 20, "{more} descriptors for 20 connections");
            drop((all, first));
        });
    }
}

#[test]
fn a_task_is_woken_however_long_nothing_has_come() {
    for (spin, runtime) in spins().into_iter().flat_map(|spin| runtimes().map(|rt| (spin, rt))) {
        let fabric = Fabric::new(spin);
        runtime.block_on(async {
            let (mut server, mut client) = fabric.with_thread();
            let pauses = [0, 1, 30, 0, 1300, 0].map(Duration::from_millis);
            let thread = std::thread::spawn(move || {
                let (mut byte, mut times) = ([0], Vec::new());
                for (n, pause) in pauses.into_iter().cycle().take(18).enumerate() {
                    // Once with each length, and short ones again and again.
                    std::thread::sleep(if n < 6 { pause } else { pause.min(pauses[2]) });
                    let begun = smc_test_support::Stopwatch::start();
                    client.write_all(&[n as u8]).unwrap();
                    client.read_exact(&mut byte).unwrap();
                    assert_eq!(byte, [n as u8]);
                    times.push(begun.elapsed());
                }
                // Without wake-ups the byte would be found once a second.
                times.sort_unstable();
                assert!(times[times.len() / 2] < Duration::from_millis(300), "{times:?}");
            });
            for n in 0..18u8 {
                let mut byte = [0];
                soon("a read", server.read_exact(&mut byte)).await.unwrap();
                assert_eq!(byte, [n]);
                soon("a write", server.write_all(&byte)).await.unwrap();
            }
            thread.join().unwrap();
        });
    }
}

#[test]
fn a_runtime_that_was_busy_loses_no_wake_up() {
    for (spin, runtime) in spins().into_iter().flat_map(|spin| runtimes().map(|rt| (spin, rt))) {
        let fabric = Fabric::new(spin);
        runtime.block_on(async {
            let mut tasks = Vec::new();
            let mut clients = Vec::new();
            for _ in 0..8 {
                let (mut server, client) = fabric.with_thread();
                clients.push(client);
                tasks.push(tokio::spawn(async move {
                    let mut got = [0; 3];
                    soon("a read", server.read_exact(&mut got)).await.unwrap();
                    got
                }));
            }
            // Every task waits, and perhaps the runtime sleeps.
            tokio::time::sleep(Duration::from_millis(20)).await;
            // No thread of the runtime is left while the bytes come.
            let blocked = (0..3)
                .map(|_| tokio::spawn(async { std::thread::sleep(Duration::from_millis(100)) }));
            let blocked: Vec<_> = blocked.collect();
            std::thread::sleep(Duration::from_millis(30));
            clients.iter_mut().for_each(|client| client.write_all(b"abc").unwrap());
            for task in blocked {
                task.await.unwrap();
            }
            for task in tasks {
                assert_eq!(task.await.unwrap(), *b"abc");
            }
        });
    }
}

#[test]
fn reads_that_are_given_up_take_nothing_with_them() {
    let fabric = Fabric::new(spins()[1]);
    for runtime in runtimes() {
        runtime.block_on(async {
            let (mut server, mut client) = fabric.with_thread();
            let mut byte = [0];
            for n in 0..20u8 {
                let given_up = tokio::time::timeout(
                    Duration::from_millis(u64::from(n % 3)),
                    server.read(&mut byte),
                );
                assert!(given_up.await.is_err());
                client.write_all(&[n]).unwrap();
                // Another task goes on with the connection.
                let task = tokio::spawn(async move {
                    let mut byte = [0];
                    soon("a read", server.read_exact(&mut byte)).await.unwrap();
                    (server, byte)
                });
                let (back, got) = task.await.unwrap();
                server = back;
                assert_eq!(got, [n]);
            }
        });
    }
}

#[test]
fn one_task_waits_to_read_and_another_to_write() {
    const BYTES: usize = 3 << 20;
    for (spin, runtime) in spins().into_iter().flat_map(|spin| runtimes().map(|rt| (spin, rt))) {
        let fabric = Fabric::new(spin);
        runtime.block_on(async {
            let (server, mut client) = fabric.with_thread();
            let (mut from, mut to) = split(server);
            let reader = tokio::spawn(async move {
                let mut byte = [0];
                soon("a read", from.read_exact(&mut byte)).await.unwrap();
                byte
            });
            let writer = tokio::spawn(async move {
                let all: Vec<u8> = (0..BYTES).map(|n| (n / 251) as u8).collect();
                soon("a write", to.write_all(&all)).await.unwrap();
                soon("a shutdown", to.shutdown()).await.unwrap();
            });
            let thread = std::thread::spawn(move || {
                // The writer has no room by now.
                std::thread::sleep(Duration::from_millis(50));
                let mut all = Vec::new();
                client.read_to_end(&mut all).unwrap();
                assert!(
                    all.len() == BYTES
                        && all.iter().enumerate().all(|(n, b)| *b == (n / 251) as u8)
                );
                client.write_all(b"r").unwrap();
                client
            });
            writer.await.unwrap();
            assert_eq!(reader.await.unwrap(), *b"r");
            thread.join().unwrap();
        });
    }
}

#[test]
fn tasks_learn_of_ends() {
    for (spin, runtime) in spins().into_iter().flat_map(|spin| runtimes().map(|rt| (spin, rt))) {
        let mut fabric = Fabric::new(spin);
        runtime.block_on(async {
            let (mut closed, client) = fabric.with_thread();
            let waits = tokio::spawn(async move { soon("a read", closed.read(&mut [0])).await });
            tokio::time::sleep(Duration::from_millis(10)).await;
            drop(client);
            assert_eq!(waits.await.unwrap().unwrap(), 0);

            let (mut reset, client) = fabric.with_thread();
            let waits = tokio::spawn(async move { soon("a read", reset.read(&mut [0])).await });
            tokio::time::sleep(Duration::from_millis(10)).await;
            client.reset();
            assert!(waits.await.unwrap().is_err());

            let (mut lost, _client) = fabric.with_thread();
            let waits = tokio::spawn(async move { soon("a read", lost.read(&mut [0])).await });
            tokio::time::sleep(Duration::from_millis(10)).await;
            let daemon = fabric.daemon.take().unwrap();
            tokio::task::spawn_blocking(move || daemon.stop()).await.unwrap();
            assert!(waits.await.unwrap().is_err());
        });
    }
}

#[test]
fn each_runtime_wakes_its_own_tasks_and_takes_nobody_with_it() {
    let fabric = Fabric::new(spins()[1]);
    let [one, other] = runtimes();
    let (server, client) = one.block_on(fabric.of_tasks());
    // One end of each connection stays with the first runtime.
    let (mut second, mut client_of_second) = one.block_on(async {
        let listener = AsyncSmcListener::bind(&fabric.server, local()).unwrap();
        let addr = listener.local_addr().unwrap();
        let connecting = {
            let stack = fabric.client.clone();
            other.spawn(async move { AsyncSmcStream::connect(&stack, addr).await.unwrap() })
        };
        let server = listener.accept().await.unwrap().0;
        (server, connecting.await.unwrap())
    });
    let echo = other.spawn(async move {
        let mut byte = [0];
        for _ in 0..50 {
            soon("a read", client_of_second.read_exact(&mut byte)).await.unwrap();
            client_of_second.write_all(&byte).await.unwrap();
        }
        client_of_second
    });
    one.block_on(async {
        let mut byte = [0];
        for n in 0..50u8 {
            second.write_all(&[n]).await.unwrap();
            soon("a read", second.read_exact(&mut byte)).await.unwrap();
            assert_eq!(byte, [n]);
        }
    });
    let mut client_of_second = other.block_on(echo).unwrap();
    // A task of one runtime waits for connections of another one.
    let (mut server, mut client) = (server, client);
    let waits = other.spawn(async move {
        let mut byte = [0];
        soon("a read", server.read_exact(&mut byte)).await.unwrap();
        (byte, soon("a read", server.read(&mut byte)).await)
    });
    one.block_on(async {
        client.write_all(b"x").await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    });
    drop(one);
    // No thread wakes the task any more, and the read reports the shutdown.
    let (byte, error) = other.block_on(waits).unwrap();
    assert_eq!(byte, *b"x");
    assert!(error.unwrap_err().to_string().contains("shut down"));
    // The other runtime goes on.
    drop(second);
    let end = other.block_on(async { soon("a read", client_of_second.read(&mut [0])).await });
    assert_eq!(end.unwrap(), 0);
    drop(client);
}

#[test]
fn many_connections_of_many_threads_echo_all_bytes() {
    for (spin, runtime) in spins().into_iter().flat_map(|spin| runtimes().map(|rt| (spin, rt))) {
        let fabric = Fabric::new(spin);
        runtime.block_on(async {
            let listener = AsyncSmcListener::bind(&fabric.server, local()).unwrap();
            let addr = listener.local_addr().unwrap();
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(async move {
                        let (mut from, mut to) = split(stream);
                        let _ = tokio::io::copy(&mut from, &mut to).await;
                        let _ = to.shutdown().await;
                    });
                }
            });
            let tasks = (0..150usize).map(|number| {
                let stack = fabric.client.clone();
                tokio::spawn(async move {
                    let mut stream = AsyncSmcStream::connect(&stack, addr).await.unwrap();
                    for turn in 0..6 {
                        let length = 1 + (number * 7919 + turn * turn * 31) % 90_000;
                        let sent: Vec<u8> =
                            (0..length).map(|at| (at + number + turn) as u8).collect();
                        let mut got = vec![0; length];
                        let (mut from, mut to) = split(&mut stream);
                        let (written, read) =
                            tokio::join!(to.write_all(&sent), from.read_exact(&mut got));
                        written.unwrap();
                        read.unwrap();
                        assert!(sent == got, "turn {turn} of connection {number}");
                    }
                    stream.shutdown().await.unwrap();
                    assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
                })
            });
            for task in tasks.collect::<Vec<_>>() {
                soon("an echo", task).await.unwrap();
            }
        });
    }
}
