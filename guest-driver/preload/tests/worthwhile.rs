// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client that leaves short connections to TCP, and returns to SMC for long ones. TCP option 254
//! needs root; without root most of these tests print SKIPPED, and fail where `CI=true`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "../../tests/rendezvous/bed.rs"]
mod bed;
mod common;
#[path = "../../tests/rendezvous/wire.rs"]
#[allow(dead_code, reason = "not every test uses all of it")]
mod wire;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{Fabric, await_listener, free_port, my_role, role, test_of};
use guest_driver::traffic::{self, Endpoint, EndpointTraffic, TrafficTable};
use smc_rendezvous::{Options, PassedOn, Policy, Rendezvous};
use wire::{HERE, THERE, Wire};

const PORT: u16 = 6100;
/// After so many connections a client may leave further ones to TCP.
const LEARNED: usize = 8;
/// Number of further connections on SMC at most before the first ones are counted: a thread of the
/// library may still have a connection closed by its program. If the process ends first, such a
/// connection never counts.
const LATE: usize = 16;

/// The descriptors passed on by `smc run`.
struct Passed {
    option: PassedOn,
    traffic: OwnedFd,
    /// The file for later runs.
    learned: Option<PathBuf>,
}

impl Passed {
    fn new() -> Passed {
        let option = Rendezvous::attach(Options::default()).unwrap().pass_on().unwrap();
        Passed { option, traffic: traffic::create(None).unwrap(), learned: None }
    }

    /// Another run of `smc run`.
    fn next_run(self, learned: &Path) -> Passed {
        let traffic = traffic::create(Some(learned)).unwrap();
        Passed { traffic, learned: Some(learned.into()), ..self }
    }

    /// The client's knowledge of its server.
    fn learned(&self) -> Vec<EndpointTraffic> {
        let program = std::env::current_exe().unwrap();
        let known = TrafficTable::adopt(&self.traffic, &program, None).unwrap().endpoints();
        known.into_iter().filter(|one| matches!(one.endpoint, Endpoint::Server(_))).collect()
    }

    fn program(&self, fabric: &Fabric) -> Command {
        let mut command = fabric.smc(std::env::current_exe().unwrap());
        command
            .env("SMC_RUN_CONNECT", "")
            .env("SMC_RUN_RENDEZVOUS", "required")
            .env("SMC_RUN_OPTION", self.option.to_string())
            .env("SMC_RUN_TRAFFIC", self.traffic.as_raw_fd().to_string());
        command.envs(self.learned.iter().map(|learned| ("SMC_RUN_LEARNED", learned)));
        command
    }
}

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// One of the programs: a server that answers messages until the client closes, or a client that
/// makes `COUNT` connections, one after the other.
fn is_program() -> bool {
    let Some((role, port)) = my_role() else { return false };
    let count = number("COUNT").unwrap();
    let mut message = vec![7; number("BYTES").unwrap_or(1024)];
    if role == "server" {
        let address = if port == PORT { HERE[0] } else { "127.0.0.1" };
        let listener = TcpListener::bind((address, port)).unwrap();
        let answer = |mut stream: TcpStream| {
            let mut message = vec![0; number("BYTES").unwrap_or(1024)];
            while stream.read_exact(&mut message).is_ok() {
                stream.write_all(&message).unwrap();
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..count {
                let (stream, _) = listener.accept().unwrap();
                match number("SIDE_BY_SIDE") {
                    None => answer(stream),
                    Some(_) => drop(scope.spawn(move || answer(stream))),
                }
            }
        });
        return true;
    }
    if number("EACH_IN_A_PROCESS").is_some() && count > 1 {
        for n in 0..count {
            let mut one = Command::new(std::env::current_exe().unwrap());
            one.args(std::env::args().skip(1)).env("COUNT", "1");
            if number("LONG_FROM").is_some_and(|from| n >= from) {
                one.env("LONG_FROM", "0");
            }
            assert!(one.output().unwrap().status.success());
        }
        return true;
    }
    let address = if port == PORT { THERE[0] } else { "127.0.0.1" };
    let mut open = Vec::new();
    for n in 0..count {
        let mut stream = TcpStream::connect((address, port)).unwrap();
        let is_long = number("LONG_FROM").is_some_and(|from| n >= from);
        for _ in 0..if is_long { 600 } else { 1 } {
            stream.write_all(&message).unwrap();
            stream.read_exact(&mut message).unwrap();
        }
        if is_long && number("KEEPS_OPEN").is_some() {
            open.push(stream);
        }
    }
    true
}

/// Runs a test on a wire that changes nothing, if this process is none of the programs.
fn on_wire<T: FnOnce(&str, Wire) + Send>(test: T) {
    if !is_program() {
        bed::run(|| test(test_of::<T>().unwrap(), Wire::honest()));
    }
}

/// Has a client make `count` connections to a server.
fn run(test: &str, mut server: Command, mut client: Command, port: u16, count: usize) {
    let server = role(server.env("COUNT", count.to_string()), test, "server", port);
    await_listener(port);
    let client = role(client.env("COUNT", count.to_string()), test, "client", port);
    client.within(Duration::from_secs(90)).finish();
    server.finish();
}

/// Number of SYNs that asked for SMC.
fn asked(wire: &Wire) -> usize {
    let magic = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
    let asks = |options: &[u8]| options.windows(6).any(|part| part == magic);
    wire.seen().iter().filter(|syn| !syn.synack && asks(&syn.options)).count()
}

#[test]
fn short_connections_are_left_to_tcp() {
    on_wire(|test, wire| {
        let (fabric, passed) = (Fabric::new(2), Passed::new());
        let count = LEARNED + LATE + 2 * 64;
        run(test, passed.program(&fabric), passed.program(&fabric), PORT, count);
        let smc = asked(&wire);
        assert!((LEARNED..LEARNED + LATE).contains(&smc), "the others are plain TCP: {smc}");
        assert_eq!(fabric.decided(), (2 * smc, 2 * (count - smc)), "{:?}", fabric.broken());
        assert_eq!(fabric.said("too short to be faster on SMC"), count - smc);
        let [server] = &passed.learned()[..] else { panic!() };
        assert_eq!(
            server.endpoint,
            Endpoint::Server((THERE[0].parse::<IpAddr>().unwrap(), PORT).into())
        );
        let numbers = (smc as u64, (count - smc) as u64, 2);
        assert_eq!((server.smc, server.tcp, server.samples), numbers);
        assert_eq!((server.bytes, server.round_trips, server.on_tcp), (2048, 1, true));
    });
}

#[test]
fn processes_of_one_connection_each_learn_together() {
    on_wire(|test, wire| {
        let (fabric, passed) = (Fabric::new(4), Passed::new());
        let mut client = passed.program(&fabric);
        client.env("EACH_IN_A_PROCESS", "1");
        run(test, passed.program(&fabric), client, PORT, LEARNED + 64);
        let smc = asked(&wire);
        assert!((LEARNED..LEARNED + LATE).contains(&smc), "{smc}");
        assert_eq!(fabric.decided().0, 2 * smc, "{:?}", fabric.broken());
    });
}

/// A loop of `smc run` with one connection each: the knowledge is the user's.
#[test]
fn runs_of_one_connection_each_learn_together() {
    on_wire(|test, wire| {
        let fabric = Fabric::new(4);
        let file = fabric.file("learned");
        let count = LEARNED + LATE + 4;
        let mut passed = Passed::new();
        let mut server = passed.program(&fabric);
        let server = role(server.env("COUNT", count.to_string()), test, "server", PORT);
        await_listener(PORT);
        for _ in 0..count {
            passed = passed.next_run(&file);
            let mut client = passed.program(&fabric);
            role(client.env("COUNT", "1"), test, "client", PORT).finish();
        }
        server.finish();
        let smc = asked(&wire);
        assert!((LEARNED..LEARNED + LATE).contains(&smc), "the others are plain TCP: {smc}");
        assert_eq!(fabric.decided().0, 2 * smc, "{:?}", fabric.broken());
    });
}

/// The sample, one of 64 connections, shows that connections are long now; the next ones are on
/// SMC. So all but 64 are.
#[test]
fn connections_that_become_long_return_to_smc() {
    on_wire(|test, wire| {
        for each in [false, true] {
            let (fabric, passed) = (Fabric::new(4), Passed::new());
            let mut client = passed.program(&fabric);
            client.env("LONG_FROM", (LEARNED + LATE).to_string());
            if each {
                client.env("EACH_IN_A_PROCESS", "1");
            }
            run(test, passed.program(&fabric), client, PORT, LEARNED + 64 + 10);
            assert_eq!(asked(&wire), LEARNED + 10, "each in a process: {each}");
            assert_eq!(fabric.decided().0, 2 * (LEARNED + 10), "{:?}", fabric.broken());
        }
    });
}

/// A connection with a message of 1 MiB and its answer gains between a fourth and a sixth of the cost of
/// a device.
#[test]
fn a_process_without_a_device_opens_one_after_some_connections() {
    on_wire(|test, wire| {
        let (fabric, passed) = (Fabric::new(4), Passed::new());
        let mut all = 0;
        for (each, count, on_tcp) in [(false, LEARNED + LATE, 0), (true, 3, 3), (false, 5, 2)] {
            let (mut server, mut client) = (passed.program(&fabric), passed.program(&fabric));
            for program in [&mut server, &mut client] {
                program.env("BYTES", (1 << 20).to_string());
            }
            if each {
                client.env("EACH_IN_A_PROCESS", "1");
            }
            run(test, server, client, PORT, count);
            let smc = asked(&wire);
            assert_eq!(smc, count - on_tcp, "each in a process: {each}");
            all += smc;
        }
        assert_eq!(fabric.decided().0, 2 * all, "{:?}", fabric.broken());
        assert_eq!(fabric.said("too short to be faster on SMC"), 5);
    });
}

/// Open connections are found to be long before they end.
#[test]
fn a_connection_that_is_still_open_counts_as_well() {
    on_wire(|test, wire| {
        let (fabric, passed) = (Fabric::new(2), Passed::new());
        let (mut server, mut client) = (passed.program(&fabric), passed.program(&fabric));
        server.env("SIDE_BY_SIDE", "1");
        client.env("LONG_FROM", (LEARNED + LATE).to_string()).env("KEEPS_OPEN", "1");
        run(test, server, client, PORT, LEARNED + 2 * 64 + 10);
        // The second sample finds out about the first.
        assert_eq!(asked(&wire), LEARNED + 10);
    });
}

#[test]
fn a_rule_forces_smc() {
    on_wire(|test, wire| {
        for (rule, policy, smc) in [
            ("*:6100", "", true),
            ("10.77.0.0/24", "", true),
            ("10.77.0.2:6101", "", false),
            ("", "[[rule]]\nuse = 'always-smc'\nports = [6100]", true),
            ("", "default = 'always-smc'\n[[rule]]\nuse = 'smc'\nports = [6100]", false),
        ] {
            let (fabric, passed) = (Fabric::new(2), Passed::new());
            let mut client = passed.program(&fabric);
            client.env("SMC_RUN_ALWAYS", rule);
            if !policy.is_empty() {
                let file = fabric.file("policy.toml");
                std::fs::write(&file, policy).unwrap();
                Policy::load(&file).unwrap();
                client.env("SMC_RUN_POLICY", file);
            }
            let count = LEARNED + LATE;
            run(test, passed.program(&fabric), client, PORT, count);
            let on_smc = asked(&wire);
            assert!(on_smc >= LEARNED && (on_smc == count) == smc, "{rule} {policy} {on_smc}");
            assert_eq!(fabric.decided().0, 2 * on_smc, "{rule} {policy} {:?}", fabric.broken());
        }
    });
}

/// Such a server looks at each client's first bytes. If the server speaks first, it waits for the
/// first bytes of a client on TCP.
#[test]
fn without_the_option_nothing_is_left_to_tcp() {
    if is_program() {
        return;
    }
    let test = "without_the_option_nothing_is_left_to_tcp";
    let (fabric, memory) = (Fabric::new(2), traffic::create(None).unwrap());
    let program = || {
        let mut program = fabric.smc(std::env::current_exe().unwrap());
        program.env("SMC_RUN_TRAFFIC", memory.as_raw_fd().to_string());
        program
    };
    run(test, program(), program(), free_port(), 3 * LEARNED);
    assert_eq!(fabric.decided(), (2 * 3 * LEARNED, 0), "{:?}", fabric.broken());
}
