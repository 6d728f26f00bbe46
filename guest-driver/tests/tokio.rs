// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC sockets under tokio.
#![cfg(feature = "tokio")]

use guest_driver::socket::tokio::{AsyncSmcListener, AsyncSmcStream};
use guest_driver::{Config, Stack};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

#[tokio::test]
async fn twenty_connections_echo_on_one_thread() {
    let dir = smc_test_support::TestDir::new();
    let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
    let sockets = ["a", "b"].map(|name| dir.join(name));
    for socket in &sockets {
        daemon.add_guest(GuestSpec::new(socket)).unwrap();
    }
    let server = Stack::open(Config::new(&sockets[0])).unwrap();
    let client = Stack::open(Config::new(&sockets[1])).unwrap();
    let listener = AsyncSmcListener::bind(&server, "127.0.0.1:0".parse().unwrap()).unwrap();
    let addr = listener.local_addr().unwrap();

    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buf = vec![0; 8192];
                loop {
                    match stream.read(&mut buf).await {
                        Ok(0) | Err(_) => return,
                        Ok(n) => stream.write_all(&buf[..n]).await.unwrap(),
                    }
                }
            });
        }
    });
    let clients = (0..20u8).map(|i| {
        let client = client.clone();
        tokio::spawn(async move {
            let mut stream = AsyncSmcStream::connect(&client, addr).await.unwrap();
            assert!(stream.info().is_smc());
            let data: Vec<u8> = (0..200_000u32).map(|n| (n as u8).wrapping_mul(i)).collect();
            let mut back = vec![0; data.len()];
            for (out, into) in data.chunks(40_000).zip(back.chunks_mut(40_000)) {
                stream.write_all(out).await.unwrap();
                stream.read_exact(into).await.unwrap();
            }
            assert!(back == data);
            stream.shutdown().await.unwrap();
            assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0);
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    daemon.stop();
    std::fs::remove_dir_all(&dir).unwrap();
}
