// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Many connections, threads and stacks.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::thread;

use smc_tests::end::{End, Listener, Site};
use smc_tests::{eventually, fewer, note, pattern, read_exactly, send_all, slurp};

on_every_fabric! {
    two_hundred_connections_at_the_same_time
    readers_and_writers_on_all_ends
    many_threads_write_to_one_connection
    several_readers_share_a_connection
    clients_come_from_many_threads
    short_connections_cost_the_device_nothing
    one_stack_is_server_and_client
}

/// More devices than a machine has.
mod several {
    use super::several_stacks_talk_to_one_server;

    with_several_devices! {
        several_stacks_talk_to_one_server
    }
}

/// Accepts and echoes until `count` connections have ended.
fn echo_server(listener: Listener, count: usize) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let serve = |mut stream: End| {
            let mut buf = vec![0; 8 << 10];
            loop {
                match stream.read(&mut buf).unwrap() {
                    0 => return,
                    n => stream.write_all(&buf[..n]).unwrap(),
                }
            }
        };
        let threads: Vec<_> = (0..count)
            .map(|_| listener.accept().unwrap().0)
            .map(|stream| thread::spawn(move || serve(stream)))
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    })
}

fn ask(stream: &End, seed: u64, len: usize) {
    let bytes = pattern(seed, len);
    send_all(stream, &bytes);
    assert!(read_exactly(stream, len) == bytes);
}

fn two_hundred_connections_at_the_same_time(site: &Site) {
    let pair = site.pair_with(|config| config.recv_buffer = 16 << 10);
    let streams: Vec<_> = (0..200).map(|_| pair.connect()).collect();
    for round in 0..3 {
        for (n, (client, _)) in streams.iter().enumerate() {
            send_all(client, &pattern(n as u64 + round, 500 + n));
        }
        for (n, (_, server)) in streams.iter().enumerate().rev() {
            let bytes = pattern(n as u64 + round, 500 + n);
            assert!(read_exactly(server, bytes.len()) == bytes, "connection {n}");
            send_all(server, &bytes);
        }
        for (n, (client, _)) in streams.iter().enumerate() {
            let bytes = pattern(n as u64 + round, 500 + n);
            assert!(read_exactly(client, bytes.len()) == bytes, "connection {n}");
        }
    }
    if let Some(devices) = site.devices().filter(|_| site.is_smc()) {
        assert_eq!((devices.dmbs, devices.attached), (400, 400));
    }
    drop(streams);
    eventually("all are closed", || {
        pair.client.totals().closing + pair.server.totals().closing == 0
    });
}

fn readers_and_writers_on_all_ends(site: &Site) {
    const LEN: usize = 500_000;
    let pair = site.pair();
    let mut threads = Vec::new();
    for n in 0..4 {
        let (client, server) = pair.connect();
        for (seed, from, to) in [(n, &client, &server), (n + 100, &server, &client)] {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            threads.push(thread::spawn(move || {
                send_all(&from, &pattern(seed, LEN));
                from.shutdown(Shutdown::Write).unwrap();
            }));
            threads.push(thread::spawn(move || assert!(slurp(&to) == pattern(seed, LEN))));
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn many_threads_write_to_one_connection(site: &Site) {
    const EACH: usize = 50_000;
    let pair = site.pair();
    let (client, server) = pair.connect();
    let writers: Vec<_> = (0..6u8)
        .map(|n| {
            let client = client.try_clone().unwrap();
            thread::spawn(move || {
                for _ in 0..EACH / 500 {
                    send_all(&client, &[n; 500]);
                }
            })
        })
        .collect();
    let bytes = read_exactly(&server, 6 * EACH);
    for n in 0..6u8 {
        assert_eq!(bytes.iter().filter(|byte| **byte == n).count(), EACH, "writer {n}");
    }
    writers.into_iter().for_each(|thread| thread.join().unwrap());
}

fn several_readers_share_a_connection(site: &Site) {
    const LEN: usize = 200_000;
    let pair = site.pair();
    let (client, server) = pair.connect();
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let mut server = server.try_clone().unwrap();
            thread::spawn(move || {
                let (mut sum, mut n, mut buf) = (0u64, 0, [0; 777]);
                loop {
                    match server.read(&mut buf).unwrap() {
                        0 => return (sum, n),
                        got => {
                            sum += buf[..got].iter().map(|byte| u64::from(*byte)).sum::<u64>();
                            n += got;
                        }
                    }
                }
            })
        })
        .collect();
    let bytes = pattern(3, LEN);
    send_all(&client, &bytes);
    drop(client);
    note("waits for the readers");
    let got = readers.into_iter().map(|reader| reader.join().unwrap());
    let (sum, n) = got.fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
    assert_eq!(n, LEN);
    assert_eq!(sum, bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>());
}

fn several_stacks_talk_to_one_server(site: &Site) {
    let pair = site.pair();
    let clients = [site.client(2), site.client(3)];
    // Each client comes several times, in turns: the server knows returning clients.
    for round in 0..3 {
        let streams: Vec<_> = [&pair.client, &clients[0], &clients[1]]
            .into_iter()
            .map(|client| pair.connect_from(client))
            .collect();
        for (n, (client, server)) in streams.iter().enumerate() {
            let bytes = pattern(n as u64 + round, 30_000);
            send_all(client, &bytes);
            assert!(read_exactly(server, bytes.len()) == bytes, "client {n}, round {round}");
            send_all(server, &bytes);
            assert!(read_exactly(client, bytes.len()) == bytes, "client {n}, round {round}");
        }
    }
}

fn clients_come_from_many_threads(site: &Site) {
    let pair = site.pair();
    let addr = pair.addr();
    let client = pair.client.clone();
    let server = echo_server(pair.listener, 60);
    let threads: Vec<_> = (0..6)
        .map(|n| {
            let client = client.clone();
            thread::spawn(move || {
                for round in 0..10 {
                    note(format!("round {round}"));
                    let stream = client.connect(addr).unwrap();
                    ask(&stream, n * 10 + round, 3000);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    note("waits for the server");
    server.join().unwrap();
}

// Shows: CLOSE-38.
fn short_connections_cost_the_device_nothing(site: &Site) {
    let pair = site.pair();
    const WARM: usize = 20;
    let rounds = fewer(if site.is_smc() { 1000 } else { 200 });
    let mut before = None;
    for round in 0..rounds {
        let (client, server) = pair.connect();
        send_all(&client, b"ping");
        assert_eq!(read_exactly(&server, 4), b"ping");
        send_all(&server, b"pong");
        assert_eq!(read_exactly(&client, 4), b"pong");
        drop(client);
        assert!(slurp(&server).is_empty());
        drop(server);
        if round == WARM {
            before = site.devices();
        }
    }
    if let (Some(before), Some(after)) = (before, site.devices())
        && site.is_smc()
    {
        // Buffers and attachments are reused from earlier connections. A late close makes another
        // buffer now and then, at a command or two for each end.
        let commands = after.commands - before.commands;
        let connections = rounds - WARM;
        println!("{} DMBs, {commands} commands for {connections} connections", after.dmbs);
        assert!(commands <= 50, "{commands} commands for {connections} connections");
        assert!(after.dmbs <= 12, "{} DMBs for connections one after the other", after.dmbs);
    }
}

fn one_stack_is_server_and_client(site: &Site) {
    let stack = site.server(0);
    let listener = stack.listen();
    let addr = listener.addr();
    let server = echo_server(listener, 3);
    for round in 0..3 {
        let stream = stack.connect(addr).unwrap();
        println!("{}", stream.nature().text);
        ask(&stream, round, 100_000);
    }
    server.join().unwrap();
}
