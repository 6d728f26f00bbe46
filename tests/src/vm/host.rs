//! The host's end of a bed: the daemon with its ports, the directory, the logs.

use std::ffi::OsStr;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vhost_device_ism::management::{AddGuest, Client};

use super::child::Program;
use super::logs::Logs;
use super::machine::{Machine, Vm, Wires};
use super::paths::Built;
use crate::bench::Dir;
use crate::watch::eventually;

/// What a bed and its guests share. The fields end in this order: the daemon ends before its
/// directory and its logs.
pub(super) struct Host {
    daemon: Mutex<Option<Program>>,
    daemon_args: Vec<String>,
    ports: Mutex<Vec<AddGuest>>,
    lan: u16,
    pub(super) dir: Dir,
    pub(super) logs: Logs,
}

impl Host {
    /// A host whose daemon does not run yet.
    pub(super) fn new(test: &str, daemon_args: &[&str]) -> Host {
        Host {
            daemon: Mutex::default(),
            daemon_args: daemon_args.iter().map(ToString::to_string).collect(),
            ports: Mutex::default(),
            lan: free_udp_port(),
            dir: Dir::new(),
            logs: Logs::new(test),
        }
    }

    /// The daemon, if it runs.
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

    /// Starts the daemon and adds all ports that are known.
    #[track_caller]
    pub(super) fn start_daemon(&self) {
        let management = self.management_path();
        let daemon = Built::Daemon.path();
        // The project's QEMU device tells resets, so a stopped device is only a paused one.
        let mut args: Vec<&OsStr> = vec![daemon.as_ref(), "--stopped-grace".as_ref(), "0".as_ref()];
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

    /// Adds a port, to the daemon too if it runs. Returns the path of its socket.
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

    /// Adds the ports of a guest that are not known yet.
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
        let ism = vm.ports.iter().map(|port| {
            let ports = self.ports();
            let known = ports.iter().find(|known| known.name == port.name);
            known.map(|port| port.socket.clone()).unwrap_or_default()
        });
        let ism = ism.collect();
        Machine::start(vm, &Wires { dir: self.dir.path(), ism, lan: self.lan }, &self.logs)
    }
}

/// A UDP port that nobody uses.
fn free_udp_port() -> u16 {
    UdpSocket::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port()
}
