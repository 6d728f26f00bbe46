//! A bed: a daemon, and what its guests share.

use std::ffi::OsStr;
use std::fmt;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use vhost_device_ism::management::{AddGuest, Client, Guest as Port};

use super::child::Program;
use super::guest::Guest;
use super::logs::Logs;
use super::machine::{Machine, Net, Vm, Wires};
use super::places::{self, Built};
use super::turns::Turn;
use crate::bench::Dir;
use crate::watch::eventually;

/// A daemon of its own, as a process, and the place where guests are started.
pub struct Bed {
    inner: Arc<Inner>,
    _turn: Turn,
}

/// What a bed and its guests hold together. The order is that of the end.
pub(super) struct Inner {
    daemon: Mutex<Option<Program>>,
    daemon_args: Vec<String>,
    ports: Mutex<Vec<AddGuest>>,
    lan: u16,
    dir: Dir,
    pub(super) logs: Logs,
}

impl Bed {
    /// A daemon without guests.
    #[track_caller]
    #[allow(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Bed {
        Bed::with(&[])
    }

    /// As [`Bed::new`] while no other test has guests: for one that measures, or has many of them.
    #[track_caller]
    pub fn alone() -> Bed {
        Bed::in_turn(Turn::alone(), &[])
    }

    /// As [`Bed::new`] for a test that waits for time-outs rather than for its guests' processors.
    #[track_caller]
    pub fn patient() -> Bed {
        Bed::in_turn(Turn::patient(), &[])
    }

    /// A daemon with further options.
    #[track_caller]
    pub fn with(daemon_args: &[&str]) -> Bed {
        Bed::in_turn(Turn::among_others(), daemon_args)
    }

    #[track_caller]
    fn in_turn(turn: Turn, daemon_args: &[&str]) -> Bed {
        let test = match thread::current().name() {
            None | Some("main") => places::program(),
            Some(test) => test.to_owned(),
        };
        let bed = Bed {
            inner: Arc::new(Inner {
                daemon: Mutex::default(),
                daemon_args: daemon_args.iter().map(ToString::to_string).collect(),
                ports: Mutex::default(),
                lan: free_udp_port(),
                dir: Dir::new(),
                logs: Logs::new(&test),
            }),
            _turn: turn,
        };
        bed.start_daemon();
        bed
    }

    /// Two guests with a network between them.
    #[track_caller]
    pub fn pair(&self) -> [Guest; 2] {
        self.boot([Vm::named("a"), Vm::named("b")])
    }

    /// One guest. It has no network unless [`Vm::lan`] says so.
    #[track_caller]
    pub fn guest(&self, name: &str) -> Guest {
        let [guest] = self.boot([Vm::named(name)]);
        guest
    }

    /// Guests that boot at the same time. Two get a network between them, more an Ethernet.
    #[track_caller]
    pub fn boot<const N: usize>(&self, mut vms: [Vm; N]) -> [Guest; N] {
        let nets: &[Net] = match N {
            0 | 1 => &[Net::None],
            2 => &[Net::PairA, Net::PairB],
            _ => &[Net::Lan],
        };
        for (vm, net) in vms.iter_mut().zip(nets.iter().cycle()) {
            vm.net.get_or_insert_with(|| net.clone());
        }
        let guests = vms.map(|vm| {
            self.inner.add_ports(&vm);
            Guest::start(&self.inner, vm)
        });
        for guest in &guests {
            guest.wait_ready();
        }
        guests
    }

    /// A path in the bed's directory, for sockets of a test's own.
    pub fn path(&self, name: &str) -> PathBuf {
        self.inner.dir.path().join(name)
    }

    /// A path among the logs that are kept when the test fails.
    pub fn log(&self, name: &str) -> PathBuf {
        self.inner.logs.path(name)
    }

    /// A port of the daemon for a front end other than [`Bed::boot`]'s: where it listens.
    #[track_caller]
    pub fn port(&self, name: &str) -> PathBuf {
        let port = AddGuest { name: Some(name.to_owned()), ..AddGuest::default() };
        self.inner.add_port(port)
    }

    /// Starts another program on the host, whose output becomes `NAME.log`.
    #[track_caller]
    pub fn program<S: AsRef<OsStr>>(&self, name: &str, command: &[S]) -> Program {
        Program::start(name, command, &[], &self.inner.logs.open(&format!("{name}.log")))
    }

    /// Process id of the daemon.
    #[track_caller]
    pub fn daemon_pid(&self) -> u32 {
        self.inner.daemon().as_ref().expect("no daemon runs").pid()
    }

    /// Kills the daemon.
    #[track_caller]
    pub fn kill_daemon(&self) {
        self.inner.daemon().take().expect("no daemon runs").kill();
    }

    /// Starts the daemon again, with the ports it had.
    #[track_caller]
    pub fn start_daemon(&self) {
        self.inner.start_daemon();
    }

    /// Kills the daemon and starts it again.
    #[track_caller]
    pub fn restart_daemon(&self) {
        self.kill_daemon();
        self.start_daemon();
    }

    /// A connection to the daemon's management socket.
    #[track_caller]
    pub fn management(&self) -> Client {
        self.inner.management()
    }

    /// What the daemon counts, by guest. The first device of guest `a` is port `a`.
    #[track_caller]
    pub fn list(&self) -> Vec<Port> {
        self.management().list().unwrap()
    }

    /// What the daemon counts of a guest.
    #[track_caller]
    pub fn counters(&self, name: &str) -> Port {
        let port = self.list().into_iter().find(|port| port.name == name);
        port.unwrap_or_else(|| panic!("the daemon has no port {name}"))
    }

    /// The daemon has found no fault with any front end.
    #[track_caller]
    pub fn assert_faultless(&self) {
        for port in self.list() {
            assert!(port.faults.is_empty(), "{}: faults {:?}", port.name, port.faults);
        }
    }
}

impl fmt::Debug for Bed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bed in {}", self.inner.dir.path().display())
    }
}

impl Inner {
    fn daemon(&self) -> MutexGuard<'_, Option<Program>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ports(&self) -> MutexGuard<'_, Vec<AddGuest>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn management_path(&self) -> PathBuf {
        self.dir.path().join("management")
    }

    #[track_caller]
    fn management(&self) -> Client {
        Client::connect(self.management_path()).unwrap()
    }

    #[track_caller]
    fn start_daemon(&self) {
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

    #[track_caller]
    fn add_port(&self, mut port: AddGuest) -> PathBuf {
        let name = port.name.clone().unwrap_or_default();
        port.socket = self.dir.path().join(format!("ism-{name}"));
        if self.daemon().is_some() {
            self.management().add(&port).unwrap();
        }
        let socket = port.socket.clone();
        self.ports().push(port);
        socket
    }

    #[track_caller]
    fn add_ports(&self, vm: &Vm) {
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
