// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's end of a bed: the daemon with its ports, the directory, the logs.

use std::ffi::OsStr;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vhost_device_ism::management::{AddGuest, Client};

use super::child::Program;
use super::logs::Logs;
use super::machine::{Incoming, Machine, Vm, Wires};
use super::namespace::Namespace;
use super::paths::Built;
use crate::bench::Dir;
use crate::watch::eventually;

/// State shared by a bed and its guests. The fields end in this order: the daemon before its directory
/// and its logs.
pub(super) struct Host {
    daemon: Mutex<Option<Program>>,
    daemon_args: Vec<String>,
    ports: Mutex<Vec<AddGuest>>,
    /// UDP port of the Ethernet.
    lan: u16,
    namespace: Option<Namespace>,
    pub(super) dir: Dir,
    pub(super) logs: Logs,
}

impl Host {
    /// A host whose daemon does not run yet.
    pub(super) fn new(test: &str, daemon_args: &[&str]) -> Host {
        Host::on(free_udp_port(), None, Logs::new(test), daemon_args)
    }

    /// Two hosts with networks of their own and a cable between them, whose daemons do not run yet.
    #[track_caller]
    pub(super) fn two(tests: [&str; 2], daemon_args: [&[&str]; 2]) -> [Host; 2] {
        let [one, two] = tests.map(Logs::new);
        let [here, there] = Namespace::pair([&one, &two]);
        let lan = free_udp_port();
        [
            Host::on(lan, Some(here), one, daemon_args[0]),
            Host::on(lan, Some(there), two, daemon_args[1]),
        ]
    }

    /// Another host on the same Ethernet, whose daemon does not run yet.
    pub(super) fn beside(&self, test: &str, daemon_args: &[&str]) -> Host {
        Host::on(self.lan, None, Logs::new(test), daemon_args)
    }

    fn on(lan: u16, namespace: Option<Namespace>, logs: Logs, daemon_args: &[&str]) -> Host {
        Host {
            daemon: Mutex::default(),
            daemon_args: daemon_args.iter().map(ToString::to_string).collect(),
            ports: Mutex::default(),
            lan,
            namespace,
            dir: Dir::new(),
            logs,
        }
    }

    /// The daemon, if running.
    pub(super) fn daemon(&self) -> MutexGuard<'_, Option<Program>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ports(&self) -> MutexGuard<'_, Vec<AddGuest>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn management_path(&self) -> PathBuf {
        self.dir.path().join("management")
    }

    /// A connection to the daemon's management socket.
    #[track_caller]
    pub(super) fn management(&self) -> Client {
        Client::connect(self.management_path()).unwrap()
    }

    /// Starts the daemon and adds every known port.
    #[track_caller]
    pub(super) fn start_daemon(&self) {
        let management = self.management_path();
        let daemon = Built::Daemon.path();
        // The project's QEMU device tells resets, so a stopped device is only a paused one.
        let enter = self.enter();
        let mut args: Vec<&OsStr> = enter.iter().map(OsStr::new).collect();
        args.extend([daemon.as_ref(), OsStr::new("--stopped-grace"), OsStr::new("0")]);
        args.extend([OsStr::new("--management"), management.as_ref()]);
        args.extend(self.daemon_args.iter().map(OsStr::new));
        let program = Program::start("the daemon", &args, &[], &self.logs.open("daemon.log"));
        eventually("the daemon answers", || {
            if let Some(status) = program.ended() {
                panic!("the daemon has ended: {status}");
            }
            Client::connect(&management).is_ok()
        });
        let mut client = self.management();
        for port in self.ports().iter() {
            client.add(port).unwrap();
        }
        let before = self.daemon().replace(program);
        assert!(before.is_none(), "a daemon runs already");
    }

    /// Adds a port, also to a running daemon. Returns the path of its socket.
    #[track_caller]
    pub(super) fn add_port(&self, mut port: AddGuest) -> PathBuf {
        let name = port.name.clone().unwrap_or_default();
        port.socket = self.dir.path().join(format!("ism-{name}"));
        if self.daemon().is_some() {
            self.management().add(&port).unwrap();
        }
        let socket = port.socket.clone();
        self.ports().push(port);
        socket
    }

    /// Adds a removed port to the daemon again.
    #[track_caller]
    pub(super) fn add_again(&self, name: &str) {
        let ports = self.ports();
        let port = ports.iter().find(|port| port.name.as_deref() == Some(name));
        self.management().add(port.unwrap_or_else(|| panic!("no port {name}"))).unwrap();
    }

    /// Adds the unknown ports of a guest.
    #[track_caller]
    pub(super) fn add_ports(&self, vm: &Vm) {
        for port in &vm.ports {
            let known = self.ports().iter().any(|known| known.name == port.name);
            if !known {
                self.add_port(port.clone());
            }
        }
    }

    /// Starts a guest's QEMU.
    #[track_caller]
    pub(super) fn start(&self, vm: &Vm) -> Machine {
        Machine::start(vm, &self.wires(vm), &self.logs)
    }

    /// Starts a QEMU waiting for the guest's state.
    #[track_caller]
    pub(super) fn start_incoming(&self, vm: &Vm) -> Incoming {
        Machine::incoming(vm, &self.wires(vm), &self.logs)
    }

    /// Where the daemon listens for a guest's devices.
    pub(super) fn sockets(&self, vm: &Vm) -> Vec<PathBuf> {
        let ports = self.ports();
        let socket = |port: &AddGuest| {
            let known = ports.iter().find(|known| known.name == port.name);
            known.map(|port| port.socket.clone()).unwrap_or_default()
        };
        vm.ports.iter().map(socket).collect()
    }

    /// Where a QEMU of this host waits for the state of a guest.
    pub(super) fn migration(&self, guest: &str) -> String {
        match &self.namespace {
            // The port is free: this network has no other users.
            Some(namespace) => format!("tcp:{}:4444", namespace.address),
            None => {
                format!("unix:{}", self.dir.path().join(format!("{guest}.migration")).display())
            }
        }
    }

    /// The words before each command of this host.
    fn enter(&self) -> Vec<String> {
        self.namespace.iter().flat_map(Namespace::enter).collect()
    }

    fn wires(&self, vm: &Vm) -> Wires<'_> {
        let lan = match &self.namespace {
            Some(namespace) => format!("{}@{}", self.lan, namespace.address),
            None => self.lan.to_string(),
        };
        Wires { dir: self.dir.path(), ism: self.sockets(vm), lan, enter: self.enter() }
    }
}

/// An unused UDP port.
fn free_udp_port() -> u16 {
    UdpSocket::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port()
}
