// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections that stay on TCP. No call waits for that reason, and short-lived processes do not
//! open devices.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/c.rs"]
mod c;
mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use common::{Fabric, await_listener, free_port, my_role, role};
use smc_test_support::Stopwatch;

type Server = fn(TcpListener);
type Client = fn(u16);

/// Runs a server and a client, unless this process is one of them.
fn meet(
    test: &str,
    (server, client): (Server, Client),
    commands: impl FnOnce(&Fabric) -> [Command; 2],
    judge: impl FnOnce(&Fabric),
) {
    if let Some((role, port)) = my_role() {
        match &*role {
            "server" => server(TcpListener::bind(("127.0.0.1", port)).unwrap()),
            _ => client(port),
        }
        return;
    }
    let fabric = Fabric::new(12);
    let [mut server, mut client] = commands(&fabric);
    let port = free_port();
    let server = role(&mut server, test, "server", port);
    await_listener(port);
    role(&mut client, test, "client", port).finish();
    server.finish();
    judge(&fabric);
}

fn on_smc(fabric: &Fabric) -> Command {
    fabric.smc(std::env::current_exe().unwrap())
}

/// A server declines after a while. A thread that sleeps in `poll` for the connection wakes at
/// once, although the handshake has left nothing to poll by the time the thread runs.
#[test]
fn poll_returns_at_once_on_a_late_decline() {
    const PAUSE: Duration = Duration::from_millis(30);
    const TIMES: usize = 8;
    fn server(listener: TcpListener) {
        for _ in 0..TIMES {
            let (mut stream, _) = listener.accept().unwrap();
            std::thread::sleep(PAUSE);
            stream.write_all(b"hello").unwrap();
            assert_eq!(stream.read(&mut [0; 9]).unwrap(), 0);
        }
    }
    fn client(port: u16) {
        let wait = |_| {
            let begun = Stopwatch::start();
            let stream = c::connect_nonblocking(port);
            assert_eq!(c::poll(&stream, libc::POLLOUT, 100_000).unwrap(), libc::POLLOUT);
            let took = begun.elapsed();
            stream.set_nonblocking(false).unwrap();
            (&stream).read_exact(&mut [0; 5]).unwrap();
            took
        };
        // A sleep that misses the Decline lasts a second.
        let took: Vec<_> = (0..TIMES).map(wait).collect();
        let late = took.iter().filter(|took| **took >= Duration::from_millis(950)).count();
        assert!(late <= TIMES / 4, "{took:?}");
    }
    let test = "poll_returns_at_once_on_a_late_decline";
    let commands = |fabric: &Fabric| {
        let [mut server, mut client] = [on_smc(fabric), on_smc(fabric)];
        server.env("SMC_RUN_EIDS", "ONE");
        client.env("SMC_RUN_EIDS", "OTHER");
        [server, client]
    };
    meet(test, (server, client), commands, |fabric| {
        assert_eq!(fabric.decided(), (0, 2 * TIMES), "{:?}", fabric.broken());
    });
}

#[test]
fn a_server_with_a_short_lived_child_per_client_stops_opening_devices_for_them() {
    const CLIENTS: usize = 60;
    fn server(listener: TcpListener) {
        for _ in 0..CLIENTS {
            let (stream, _) = listener.accept().unwrap();
            let child = c::fork(|| {
                let mut word = [0; 5];
                (&stream).read_exact(&mut word).unwrap();
                (&stream).write_all(&word).unwrap();
            });
            drop(stream);
            c::wait(child);
        }
    }
    fn client(port: u16) {
        for _ in 0..CLIENTS {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(b"hello").unwrap();
            let mut back = Vec::new();
            stream.read_to_end(&mut back).unwrap();
            assert_eq!(back, b"hello");
        }
    }
    let test = "a_server_with_a_short_lived_child_per_client_stops_opening_devices_for_them";
    meet(
        test,
        (server, client),
        |fabric| [on_smc(fabric), on_smc(fabric)],
        |fabric| {
            assert_eq!(fabric.broken(), Vec::<String>::new());
            let (smc, tcp) = fabric.decided();
            assert_eq!(smc + tcp, 2 * CLIENTS);
            // How many depends on how fast the machine is just now.
            assert!(smc > 0 && fabric.said("exit soon") > 0, "{smc} {tcp}");
            // The client has learned from the answers, and does not ask each time.
            assert!(fabric.said("several times in a row") > 0, "{smc} {tcp}");
        },
    );
}
