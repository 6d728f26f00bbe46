// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The examples work as their first lines say: each server echoes to each client, by SMC-D where both have a
//! device, else by TCP.
//!
//! Cargo has built the programs in `examples/`, and the daemon runs in this process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc;

use smc_test_support::{TIMEOUT, TestDir};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

/// The echo examples. The tokio example is only built with the feature.
const ECHO: &[&str] = if cfg!(feature = "tokio") {
    &["blocking", "poller", "tokio"]
} else {
    &["blocking", "poller"]
};
/// The built example. Cargo builds no examples for a test selected by `--test`.
fn example(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let dir = BUILT.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let dir = test.parent().and_then(Path::parent).unwrap();
        let mut build = Command::new(env!("CARGO"));
        // With the features of the whole workspace, as `cargo test --workspace` has built them.
        build.args(["build", "--quiet", "--workspace", "--examples"]);
        build.arg("--target-dir").arg(dir.parent().unwrap());
        if dir.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
        dir.join("examples")
    });
    dir.join(name)
}

/// A daemon with a device pool.
struct Fabric {
    daemon: Daemon,
    dir: TestDir,
}

impl Fabric {
    fn new(_name: &str) -> Fabric {
        let dir = TestDir::new();
        let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
        let mut pool = GuestSpec::new(dir.join("any.sock"));
        pool.devices = Some(8);
        daemon.add_guest(pool).unwrap();
        Fabric { daemon, dir }
    }

    /// An example with a device of the pool.
    fn command(&self, name: &str, role: &str, address: &str) -> Command {
        let mut command = without_device(name, role, address);
        command.env("SMC_DEVICE", self.dir.join("any.sock"));
        command
    }

    fn end(self) {
        self.daemon.stop();
    }
}

fn without_device(name: &str, role: &str, address: &str) -> Command {
    let mut command = Command::new(example(name));
    command.args([role, address]).env("SMC_DEVICE", "none").env("SMC_CONFIG", "");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// A server, killed at the end of the test.
struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    fn start(mut command: Command) -> Server {
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Server { child, out, address }
    }

    /// Ends the server, and returns its output about connections.
    fn end(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        let mut said = String::new();
        self.out.read_to_string(&mut said).unwrap();
        said.lines().map(str::to_owned).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a client to its end, and returns its printed lines.
fn run(mut client: Command) -> Vec<String> {
    let mut child = client.spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let (said, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let _ = out.read_to_string(&mut text);
        let _ = said.send(text);
    });
    let text = lines.recv_timeout(TIMEOUT);
    if text.is_err() {
        child.kill().unwrap();
    }
    assert!(child.wait().unwrap().success(), "{client:?}: {text:?}");
    text.unwrap().lines().map(str::to_owned).collect()
}

/// Checks the carrier `what` in the lines about connections.
fn assert_carried_by(what: &str, lines: &[String]) {
    assert!(!lines.is_empty());
    for line in lines {
        assert!(line.contains(what), "{lines:#?}");
    }
}

/// Runs the clients against a server, and checks the output of both ends.
fn check(fabric: &Fabric, server: &str, clients: &[&str]) {
    let running = Server::start(fabric.command(server, "server", "127.0.0.1:0"));
    for client in clients {
        let mut said = run(fabric.command(client, "client", &running.address));
        assert!(said.pop().unwrap().ends_with(" bytes came back"), "{client} at {server}");
        assert_carried_by("SMC-D v2.1 over fabric", &said);
    }
    assert_carried_by(": SMC-D v2.1 over fabric", &running.end());
}

#[test]
fn every_server_echoes_to_every_client_by_smc_d() {
    let fabric = Fabric::new("echo");
    for server in ECHO {
        check(&fabric, server, ECHO);
    }
    fabric.end();
}

#[cfg(feature = "tokio")]
#[test]
fn hyper_answers_hyper_by_smc_d() {
    let fabric = Fabric::new("hyper");
    check(&fabric, "hyper", &["hyper"]);
    fabric.end();
}

#[test]
fn a_program_finds_the_device_of_the_settings() {
    let fabric = Fabric::new("settings");
    let settings = fabric.dir.join("smc.toml");
    let pool = fabric.dir.join("any.sock");
    std::fs::write(&settings, format!("device = {pool:?}\nspin-us = 0\n")).unwrap();
    let by_settings = |role, address: &str| {
        let mut command = without_device("blocking", role, address);
        command.env_remove("SMC_DEVICE").env("SMC_CONFIG", &settings);
        command
    };
    let server = Server::start(by_settings("server", "127.0.0.1:0"));
    let mut said = run(by_settings("client", &server.address));
    assert!(said.pop().unwrap().ends_with(" bytes came back"));
    assert_carried_by("SMC-D", &said);
    // A mistake in the file is told, and no reason to fail.
    std::fs::write(&settings, "device = 7").unwrap();
    let mut said = run(by_settings("client", &server.address));
    assert!(said.pop().unwrap().ends_with(" bytes came back"));
    assert_carried_by("TCP (", &said);
    drop(server);
    fabric.end();
}

#[test]
fn an_end_without_a_device_makes_it_tcp_and_both_say_why() {
    let fabric = Fabric::new("fallback");
    let server = Server::start(fabric.command("blocking", "server", "127.0.0.1:0"));
    let mut said = run(without_device("blocking", "client", &server.address));
    assert!(said.pop().unwrap().ends_with(" bytes came back"));
    assert_carried_by("TCP (no virtio-ism device: none configured", &said);
    assert_carried_by(": TCP (", &server.end());
    fabric.end();
}
