// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmodified programs finding each other by TCP option 254, without settings. The option needs
//! root. Without root these tests print SKIPPED, and fail where `CI=true`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "../../tests/rendezvous/bed.rs"]
mod bed;
#[path = "common/c.rs"]
mod c;
mod common;
#[path = "../../tests/rendezvous/wire.rs"]
#[allow(dead_code, reason = "not every test uses all of it")]
mod wire;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use common::{Fabric, await_listener, my_role, role, test_of};
use smc_rendezvous::{Options, PassedOn, Policy, Rendezvous};
use wire::{Fate, HERE, THERE, Wire};

const PORT: u16 = 6000;

/// The rendezvous for the programs, passed on as by `smc run`.
struct Passed {
    text: PassedOn,
    policy: Option<std::path::PathBuf>,
}

impl Passed {
    /// An offered one, opened in this process when a program asks.
    fn new() -> Passed {
        let (text, own) = Rendezvous::offer().unwrap();
        std::thread::spawn(move || {
            if rustix::io::read(&own, &mut [0]) == Ok(1) {
                Rendezvous::serve(Options::default(), own.as_fd());
            }
        });
        Passed { text, policy: None }
    }

    fn with_policy(fabric: &Fabric, policy: &str) -> Passed {
        let file = fabric.file("policy.toml");
        std::fs::write(&file, policy).unwrap();
        let mut options = Options::default();
        options.policy = Policy::load(&file).unwrap();
        let text = Rendezvous::attach(options).unwrap().pass_on().unwrap();
        Passed { text, policy: Some(file) }
    }

    /// A program with the library, whose settings list no peer.
    fn program(&self, fabric: &Fabric, mode: &str) -> Command {
        let mut command = fabric.smc(std::env::current_exe().unwrap());
        command
            .env("SMC_RUN_CONNECT", "")
            .env("SMC_RUN_RENDEZVOUS", mode)
            .env("SMC_RUN_OPTION", self.text.to_string())
            // The time limits below find a program waiting for the timeout.
            .env("SMC_RUN_DETECT_MS", "8000");
        if let Some(policy) = &self.policy {
            command.env("SMC_RUN_POLICY", policy);
        }
        command
    }
}

fn plain() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

/// Runs a server and a client. Returns how long the client took from connect to the end of data.
fn meet(test: &str, mut server: Command, mut client: Command, first: &str) -> Duration {
    let server = role(server.env("FIRST", first), test, "server", PORT);
    await_listener(PORT);
    let said = role(client.env("FIRST", first), test, "client", PORT).finish();
    server.finish();
    let millis = said.split("took ").nth(1).and_then(|rest| rest.split(' ').next());
    Duration::from_millis(millis.and_then(|text| text.parse().ok()).expect(&said))
}

/// One of the programs. The first writer matters. A server that reads first soon has the client's
/// first bytes; a server that writes first does not.
fn is_program() -> bool {
    let Some((role, port)) = my_role() else { return false };
    let server_first = std::env::var("FIRST").unwrap() == "server";
    let greet = |mut stream: &TcpStream| stream.write_all(b"220 ready").unwrap();
    let await_banner = |mut stream: &TcpStream| {
        let mut banner = [0; 9];
        stream.read_exact(&mut banner).unwrap();
        assert_eq!(&banner, b"220 ready");
    };
    if role == "server" {
        if std::env::var_os("CLOSES_ALL").is_some() {
            // Like daemons that close all inherited descriptors.
            c::close_from(3);
            (3..2000).for_each(c::close);
        }
        let listener = TcpListener::bind((HERE[0], port)).unwrap();
        if std::env::var_os("ASKS_NOTHING").is_some() {
            c::forbid(&[libc::SYS_bpf, libc::SYS_getsockname, libc::SYS_getpeername]);
        }
        let (mut stream, _) = listener.accept().unwrap();
        if server_first {
            greet(&stream);
        }
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"GET /", "what the client said, and nothing else");
        if !server_first {
            greet(&stream);
        }
    } else {
        let begun = smc_test_support::Stopwatch::start();
        let mut stream = match std::env::var_os("NONBLOCKING") {
            _ if std::env::var_os("REFUSED_FIRST").is_some() => connect_after_a_refusal(),
            None => TcpStream::connect((THERE[0], port)).unwrap(),
            Some(_) => {
                let stream = c::connect_nonblocking_to(THERE[0].parse().unwrap(), port);
                assert_eq!(c::poll(&stream, libc::POLLOUT, 100_000).unwrap(), libc::POLLOUT);
                assert!(stream.take_error().unwrap().is_none());
                stream.set_nonblocking(false).unwrap();
                stream
            }
        };
        if server_first {
            await_banner(&stream);
        }
        stream.write_all(b"GET /").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        if !server_first {
            await_banner(&stream);
        }
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        println!("took {} ms", begun.elapsed().as_millis());
    }
    true
}

/// Runs a test on a wire that changes nothing, if this process is none of the programs.
fn on_wire<T: FnOnce(&str) + Send>(test: T) {
    if !is_program() {
        bed::run(|| {
            let _wire = Wire::honest();
            test(test_of::<T>().unwrap());
        });
    }
}

/// A socket whose first connection is refused while no call waits, and its second connection.
fn connect_after_a_refusal() -> TcpStream {
    let host = THERE[0].parse().unwrap();
    let stream = c::connect_nonblocking_to(host, PORT + 1);
    c::poll(&stream, libc::POLLOUT, 100_000).unwrap();
    assert!(stream.take_error().unwrap().is_some());
    stream.set_nonblocking(false).unwrap();
    // The kernel reports once more that the first connection has failed.
    assert!(c::connect(&stream, host, PORT).is_err());
    c::connect(&stream, host, PORT).unwrap();
    stream
}

/// A program that waits for nothing takes less time.
const SOON: Duration = Duration::from_secs(4);

/// Requires `f` to take less than a time in one of three runs. A waiting program waits in every
/// run; a busy machine is late only in some.
#[track_caller]
fn takes_less_than(limit: Duration, mut once: impl FnMut() -> Duration) {
    let mut all = Vec::new();
    while all.len() < 3 {
        all.push(once());
        if all.last().is_some_and(|took| *took < limit) {
            return;
        }
    }
    panic!("took {all:?}");
}

// Shows: OPT-11.
#[test]
fn programs_find_each_other_with_nothing_configured() {
    on_wire(|test| {
        for (server, client) in [("required", "required"), ("auto", "auto"), ("auto", "required")] {
            for first in ["server", "client"] {
                takes_less_than(SOON, || {
                    let (fabric, passed) = (Fabric::new(2), Passed::new());
                    let server = passed.program(&fabric, server);
                    let client = passed.program(&fabric, client);
                    let took = meet(test, server, client, first);
                    assert_eq!(fabric.decided(), (2, 0), "{:?}", fabric.broken());
                    took
                });
            }
        }
    });
}

#[test]
fn a_connect_that_does_not_wait_finds_its_peer_as_well() {
    on_wire(|test| {
        for speaks in [true, false] {
            takes_less_than(SOON, || {
                let (fabric, passed) = (Fabric::new(2), Passed::new());
                let server = if speaks { passed.program(&fabric, "required") } else { plain() };
                let mut client = passed.program(&fabric, "required");
                client.env("NONBLOCKING", "1");
                let took = meet(test, server, client, "client");
                let expected = if speaks { (2, 0) } else { (0, 1) };
                assert_eq!(fabric.decided(), expected, "{:?}", fabric.broken());
                took
            });
        }
    });
}

/// The library leaves the second connection to the kernel. Its server must not wait for a Proposal.
#[test]
fn a_socket_that_was_refused_once_asks_for_nothing_later() {
    on_wire(|test| {
        takes_less_than(SOON, || {
            let (fabric, passed) = (Fabric::new(2), Passed::new());
            let mut client = passed.program(&fabric, "auto");
            client.env("REFUSED_FIRST", "1");
            let took = meet(test, passed.program(&fabric, "auto"), client, "server");
            assert_eq!(fabric.decided().0, 0, "{:?}", fabric.broken());
            took
        });
    });
}

// Shows: OPT-9.
#[test]
fn a_plain_peer_sees_no_byte_of_smc_and_nobody_waits() {
    on_wire(|test| {
        let kinds = ["required", "auto"]
            .into_iter()
            .flat_map(|mode| ["server", "client"].into_iter().map(move |first| (mode, first)));
        for (mode, first) in kinds {
            for (on_server, on_client) in [(true, false), (false, true)] {
                takes_less_than(SOON, || {
                    let (fabric, passed) = (Fabric::new(2), Passed::new());
                    let one = |smc| if smc { passed.program(&fabric, mode) } else { plain() };
                    let took = meet(test, one(on_server), one(on_client), first);
                    assert_eq!(fabric.decided(), (0, 1), "{:?}", fabric.broken());
                    took
                });
            }
        }
    });
}

/// Most processes of a shell or a build never make a connection. They start sooner without the
/// rendezvous.
#[test]
fn a_program_takes_the_rendezvous_up_with_its_first_tcp_socket() {
    if my_role().is_some() {
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let at_first = descriptors();
        drop(UdpSocket::bind("127.0.0.1:0").unwrap());
        assert_eq!(descriptors(), at_first);
        drop(TcpListener::bind("127.0.0.1:0").unwrap());
        assert!(descriptors() >= at_first + 4, "maps, cgroup and link");
        return;
    }
    bed::run(|| {
        let (fabric, passed) = (Fabric::new(1), Passed::new());
        let test = "a_program_takes_the_rendezvous_up_with_its_first_tcp_socket";
        role(&mut passed.program(&fabric, "auto"), test, "program", PORT).finish();
    });
}

/// For a client without the option, neither the missing option nor the client's addresses take a
/// system call. With such a call the server's process would end.
#[test]
fn a_server_asks_the_kernel_nothing_about_a_plain_client() {
    on_wire(|test| {
        for first in ["server", "client"] {
            let (fabric, passed) = (Fabric::new(1), Passed::new());
            let mut server = passed.program(&fabric, "auto");
            // Its report of each connection has the addresses.
            server.env("ASKS_NOTHING", "1").env_remove("SMC_RUN_STATUS");
            meet(test, server, plain(), first);
        }
    });
}

/// The client's last acknowledgement of the three-way handshake must not wait for a Proposal: none
/// comes.
#[test]
fn a_plain_server_that_speaks_first_is_heard_at_once() {
    on_wire(|test| {
        for waits in [true, false] {
            let once = |_| {
                let (fabric, passed) = (Fabric::new(1), Passed::new());
                let mut client = passed.program(&fabric, "auto");
                if !waits {
                    client.env("NONBLOCKING", "1");
                }
                meet(test, plain(), client, "server")
            };
            // A delayed acknowledgement takes 200 ms. A busy machine is late only in some runs.
            let fastest = (0..5).map(once).min().unwrap();
            assert!(fastest < Duration::from_millis(150), "waits: {waits}, {fastest:?}");
        }
    });
}

// Shows: OPT-16.
#[test]
fn an_option_that_is_stripped_costs_nothing_where_the_client_speaks_first() {
    if is_program() {
        return;
    }
    for synack in [false, true] {
        bed::run(move || {
            let _wire = Wire::new(move |packet| {
                if packet.is_syn() && packet.is_ack() == synack {
                    packet.replace_option([1; 8]);
                }
                Fate::Pass
            });
            let test = "an_option_that_is_stripped_costs_nothing_where_the_client_speaks_first";
            for first in ["client", "server"] {
                // After its answer to the option, a server waits for a Proposal before its program
                // may write.
                let waits = synack && first == "server";
                let timeout = smc_rendezvous::PROPOSAL_TIMEOUT;
                takes_less_than(SOON + if waits { timeout } else { Duration::ZERO }, || {
                    let (fabric, passed) = (Fabric::new(2), Passed::new());
                    let server = passed.program(&fabric, "required");
                    let client = passed.program(&fabric, "required");
                    let took = meet(test, server, client, first);
                    assert_eq!(fabric.decided(), (0, 2), "{:?}", fabric.broken());
                    took
                });
            }
        });
    }
}

// Shows: OPT-15.
#[test]
fn the_policy_decides_who_asks_and_who_answers() {
    on_wire(|test| {
        let name = std::env::current_exe().unwrap();
        let name = name.file_name().unwrap().to_str().unwrap();
        for (policy, smc) in [
            ("[[rule]]\nuse = 'tcp'\nports = [6000]".to_owned(), false),
            ("[[rule]]\nuse = 'tcp'\nwhen = 'listen'\npeers = ['10.77.0.0/24']".to_owned(), false),
            ("[[rule]]\nuse = 'tcp'\nwhen = 'connect'\npeers = ['10.77.0.2']".to_owned(), false),
            (format!("[[rule]]\nuse = 'tcp'\nprograms = ['{name}']"), false),
            ("[[rule]]\nuse = 'tcp'\nprograms = ['redis-server']".to_owned(), true),
            ("default = 'tcp'\n[[rule]]\nuse = 'smc'\nports = ['5999-6001']".to_owned(), true),
        ] {
            let fabric = Fabric::new(2);
            let passed = Passed::with_policy(&fabric, &policy);
            let server = passed.program(&fabric, "required");
            let client = passed.program(&fabric, "required");
            meet(test, server, client, "client");
            assert_eq!(fabric.decided().0, if smc { 2 } else { 0 }, "{policy}");
        }
    });
}

#[test]
fn a_program_that_closes_all_descriptors_still_answers() {
    on_wire(|test| {
        let (fabric, passed) = (Fabric::new(2), Passed::new());
        let mut server = passed.program(&fabric, "required");
        server.env("CLOSES_ALL", "1");
        let client = passed.program(&fabric, "required");
        meet(test, server, client, "server");
        assert_eq!(fabric.decided(), (2, 0), "{:?}", fabric.broken());
    });
}

#[test]
fn where_the_option_is_required_and_was_not_passed_on_everything_is_tcp() {
    on_wire(|test| {
        let (fabric, passed) = (Fabric::new(2), Passed::new());
        let without = || {
            let mut command = passed.program(&fabric, "required");
            command.env_remove("SMC_RUN_OPTION").env("SMC_RUN_CONNECT", "*");
            command
        };
        takes_less_than(SOON, || meet(test, without(), without(), "server"));
        assert_eq!(fabric.decided().0, 0);
    });
}
