// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process to be killed by a test: a daemon, or one end of connections.
//!
//! ```text
//! smc-test-peer daemon SOCKET...        says "ready"; obeys its standard input: "remove GUEST",
//!                                       "drain GUEST", "begin-drain GUEST" (does not wait), and
//!                                       "leave" (each says "left N of M"), "undrain GUEST"
//!                                       (says "undrained N"), "stop" (says "stopped")
//! smc-test-peer pour FABRIC DEVICE ADDRESS SEED LIMIT
//!                                       writes a pattern; at the first error drops the socket, says
//!                                       "failed" and the number of bytes written, and ends; kills
//!                                       itself after LIMIT bytes, unless LIMIT is 0
//! smc-test-peer sink DEVICE             says its port, then "accepted smc" per connection; reads
//! smc-test-peer source DEVICE ADDRESS   says "connected smc"; writes for ever
//! smc-test-peer trickle DEVICE ADDRESS  says "connected smc"; writes byte after byte without waiting, on
//!                                       a connection that outlives its device, and says "." for each
//! smc-test-peer idle DEVICE ADDRESS     says "connected smc"; does nothing
//! smc-test-peer echo DEVICE ADDRESS     says "connected smc"; echoes, never spins
//! smc-test-peer serve DEVICE ADDRESS    echoes, see `smc_tests::talk`
//! smc-test-peer talk DEVICE ADDRESS     obeys its standard input, see there
//! smc-test-peer outlive DEVICE DEVICE   echoes, see `smc_tests::outlive`
//! smc-test-peer streams serve|talk ...  streams able to go on without their device, see
//!                                       `smc_tests::streams`
//! smc-test-peer restored DEVICE PATH    obeys its standard input, with a copy of the window,
//!                                       see `smc_tests::restored`
//! smc-test-peer rogue ...               a guest misbehaving on purpose, see `smc_tests::rogue`
//! smc-test-peer agent DEVICE ADDRESS [while-stdin]
//!                                       the far end of conformance tests, see `smc_tests::agent`:
//!                                       says "listens on ADDRESS"
//! smc-test-peer probe PCI-ID             drives other devices than ISM, see `smc_tests::vm::probe`
//! smc-test-peer rdma add|remove|show ... soft-RoCE adapters, see `smc_tests::linux`
//! smc-test-peer linux ...                AF_SMC's settings and tables, see `smc_tests::linux`
//! smc-test-peer interop serve|talk WHO ADDRESS
//!                                       ends of connections, see `smc_tests::interop`
//! smc-test-peer control PORT            runs the commands of the VM bed's control channel
//! smc-test-peer leash PROGRAM ARG...    becomes a program ending with its parent
//! ```
//!
//! The process ends with its standard input; as `agent` only with `while-stdin`, from `serve` on by itself.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use guest_driver::{Config, SmcListener, SmcStream, Stack};
use smc_tests::Fabric;
use vhost_device_ism::{Config as DaemonConfig, Daemon, LeaveInfo, config::GuestSpec};
use virtio_ism_abi::event::LeaveReason;

fn say(line: &str) {
    let mut out = std::io::stdout();
    // The test may have gone.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Logs of the stack go to standard error, if `RUST_LOG` is set.
fn log() {
    if let Ok(filter) = tracing_subscriber::EnvFilter::try_from_default_env() {
        let log = tracing_subscriber::fmt().with_env_filter(filter);
        log.with_writer(std::io::stderr).with_ansi(false).init();
    }
}

fn carrier(stream: &SmcStream) -> &'static str {
    if stream.is_smc() { "smc" } else { "tcp" }
}

/// Connections end with the device.
fn config(device: &str) -> Config {
    Config { outlive_device: false, ..Config::new(device) }
}

fn sink(device: &str) {
    let stack = Stack::open(config(device)).unwrap();
    let listener = SmcListener::bind(&stack, "127.0.0.1:0").unwrap();
    say(&listener.local_addr().unwrap().to_string());
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        say(&format!("accepted {}", carrier(&stream)));
        std::thread::spawn(move || {
            let mut buf = vec![0; 16 << 10];
            while stream.read(&mut buf).is_ok_and(|n| n > 0) {}
        });
    }
}

fn connect(device: &str, address: &str) -> SmcStream {
    connect_with(config(device), address)
}

fn connect_with(config: Config, address: &str) -> SmcStream {
    let stack = Stack::open(config).unwrap();
    let stream = SmcStream::connect(&stack, address).unwrap();
    say(&format!("connected {}", carrier(&stream)));
    stream
}

fn trickle(device: &str, address: &str) {
    let stream = connect_with(Config { outlive_device: true, ..config(device) }, address);
    stream.set_nonblocking(true).unwrap();
    loop {
        match stream.send(b"x") {
            Ok(_) => say("."),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn pour(fabric: &str, device: &str, address: &str, [seed, limit]: [u64; 2]) {
    let fabric = if fabric == "move" { Fabric::Move } else { Fabric::Window };
    let stream = connect_with(fabric.config(1, device), address);
    // No bytes wait in this process, so none are lost when the process is killed.
    stream.set_send_buffer(0);
    let (mut block, mut done) = (vec![0; 16 << 10], 0);
    loop {
        smc_tests::bytes::fill(seed, done, &mut block);
        match stream.send(&block) {
            Ok(n) => done += n,
            Err(_) => break,
        }
        if limit > 0 && done as u64 >= limit {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                .unwrap();
        }
    }
    drop(stream);
    say(&format!("failed {done}"));
    std::process::exit(0);
}

/// Echoes on this many connections with `outlive_device`.
fn repeat(device: &str, address: &str, streams: usize) {
    let mut config = Config::new(device);
    config.outlive_device = true;
    config.testing.leave_time = Duration::from_secs(3600);
    let stack = Stack::open(config).unwrap();
    let threads: Vec<_> = (0..streams)
        .map(|_| {
            let mut stream = SmcStream::connect(&stack, address).unwrap();
            assert!(stream.is_smc());
            std::thread::spawn(move || {
                let (mut buf, mut done) = (vec![0; 20_000], 0);
                loop {
                    match stream.read(&mut buf)? {
                        0 => break,
                        n => stream.write_all(&buf[..n])?,
                    }
                    done += 1;
                }
                stream.shutdown(std::net::Shutdown::Write)?;
                Ok::<u32, std::io::Error>(done)
            })
        })
        .collect();
    say("connected");
    for thread in threads {
        match thread.join().unwrap() {
            Ok(_) => say("whole"),
            Err(error) => say(&format!("failed {error}")),
        }
    }
    // Closed connections still send out their send queues, as long as there is a stack.
    while stack.totals().closing > 0 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// A daemon obeying its standard input.
fn serve_devices(sockets: &[&str]) {
    let guests = sockets.iter().map(GuestSpec::new).collect();
    let leave_timeout = Duration::from_secs(3600);
    let config = DaemonConfig { guests, leave_timeout, ..DaemonConfig::default() };
    let daemon = Daemon::start(config).unwrap();
    let left = |info: LeaveInfo| say(&format!("left {} of {}", info.left, info.asked));
    say("ready");
    let drain = |guest: &str| {
        left(daemon.drain(guest, LeaveReason::Drain, leave_timeout).unwrap());
    };
    std::thread::scope(|scope| {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match line.split_once(' ') {
                Some(("remove", guest)) => daemon.remove_guest(guest).unwrap(),
                Some(("drain", guest)) => drain(guest),
                Some(("begin-drain", guest)) => {
                    let guest = guest.to_owned();
                    scope.spawn(move || drain(&guest));
                }
                Some(("undrain", guest)) => {
                    say(&format!("undrained {}", daemon.undrain(guest).unwrap()));
                }
                None if line == "leave" => left(daemon.leave(&Default::default())),
                _ => break,
            }
        }
    });
    daemon.stop();
    say("stopped");
}

fn work(args: &[&str]) {
    match *args {
        ["daemon", ref sockets @ ..] => serve_devices(sockets),
        ["pour", fabric, device, address, seed, limit] => {
            pour(fabric, device, address, [seed, limit].map(|number| number.parse().unwrap()));
        }
        ["sink", device] => sink(device),
        ["source", device, address] => {
            let mut stream = connect(device, address);
            // No bytes wait in this process, so none are lost when the process is killed.
            stream.set_send_buffer(0);
            while stream.write(&[7; 10_000]).is_ok_and(|n| n > 0) {}
        }
        ["trickle", device, address] => trickle(device, address),
        ["echo", device, address] => {
            let config = Config { spin: Duration::ZERO, ..config(device) };
            let mut stream = connect_with(config, address);
            assert!(ism_sys::Doorbell::prepare());
            let mut buf = [0; 4096];
            while let Ok(n @ 1..) = stream.read(&mut buf) {
                stream.write_all(&buf[..n]).unwrap();
            }
        }
        ["repeat", device, address, streams] => repeat(device, address, streams.parse().unwrap()),
        ["idle", device, address] => {
            let _stream = connect(device, address);
            std::thread::park();
        }
        ["serve", device, address] => smc_tests::talk::serve(device, address, say),
        ["talk", device, address] => {
            smc_tests::talk::talk(device, address, say);
            std::process::exit(0);
        }
        ["outlive", window, moves] => smc_tests::outlive::serve([window, moves], say),
        ["streams", "serve", device, path, address] => {
            log();
            smc_tests::streams::serve(device, path, address, say);
        }
        ["streams", "talk", device, path, address, streams] => {
            log();
            smc_tests::streams::talk(device, path, address, streams.parse().unwrap(), say);
            std::process::exit(0);
        }
        ["restored", device, path] => {
            log();
            smc_tests::restored::run(device, path, say);
            std::process::exit(0);
        }
        ["rogue", ref args @ ..] => {
            smc_tests::rogue::run(args, say);
            std::process::exit(0);
        }
        ["linux", ref args @ ..] => {
            smc_tests::linux::run(args, say);
            std::process::exit(0);
        }
        ["interop", "serve", who, address] => {
            log();
            smc_tests::interop::serve(who, address, say);
        }
        ["interop", "talk", who, address] => {
            log();
            smc_tests::interop::talk(who, address, say);
            std::process::exit(0);
        }
        ["interop", "echo", who, address] => smc_tests::interop::echo(who, address, say),
        ["interop", "call", who, address] => smc_tests::interop::call(who, address),
        ["rdma", ref args @ ..] => {
            smc_tests::linux::rdma(args, say);
            std::process::exit(0);
        }
        ["probe", id] => {
            smc_tests::vm::probe::run(id, say);
            std::process::exit(0);
        }
        ["agent", device, address, ..] => {
            smc_tests::agent::serve(device, address, |addr| say(&format!("listens on {addr}")))
                .unwrap();
        }
        _ => panic!("unknown arguments: {args:?}"),
    }
}

fn main() {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match args.first().and_then(|arg| arg.to_str()) {
        Some("leash") => return smc_tests::vm::leash::run(&args[1..]).unwrap(),
        Some("control") => return smc_tests::vm::control::serve(Path::new(&args[1])).unwrap(),
        _ => {}
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    // Started by a shell in another machine, the program may have no standard input.
    let own_end = [
        "daemon", "agent", "serve", "talk", "outlive", "streams", "restored", "rogue", "probe",
        "rdma", "linux", "interop",
    ];
    let own_end = args.first().is_some_and(|word| own_end.contains(word));
    if !own_end || args.last() == Some(&"while-stdin") {
        std::thread::spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            std::process::exit(0);
        });
    }
    work(&args);
    std::thread::park();
}
