// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A bed: a daemon, and the state shared with its guests.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use vhost_device_ism::management::{AddGuest, Client, Guest as Port};

use super::child::Program;
use super::guest::Guest;
use super::host::Host;
use super::logs::print_always;
use super::machine::{Net, Vm};
use super::paths;
use super::semaphore::Permit;
use super::uml::Uml;
use crate::helper::Helper;

/// How long a daemon may take to end, on a busy host.
const STOPS_WITHIN: Duration = Duration::from_secs(60);

/// A daemon of its own, as a process, and the place where guests are started.
pub struct Bed {
    pub(super) host: Arc<Host>,
    test: String,
    since: Instant,
    /// A second bed runs under the permit of the first one.
    _permit: Option<Permit>,
}

impl Bed {
    /// A daemon without guests.
    #[track_caller]
    #[allow(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Bed {
        Bed::with(&[])
    }

    /// Like [`Bed::new`], while no other test has guests: for measurements, or for many guests.
    #[track_caller]
    pub fn alone() -> Bed {
        Bed::with_permit(Permit::exclusive(), &[])
    }

    /// A daemon with further options.
    #[track_caller]
    pub fn with(daemon_args: &[&str]) -> Bed {
        Bed::with_permit(Permit::shared(), daemon_args)
    }

    #[track_caller]
    fn with_permit(permit: Permit, daemon_args: &[&str]) -> Bed {
        let test = match thread::current().name() {
            None | Some("main") => paths::program(),
            Some(test) => test.to_owned(),
        };
        let host = Arc::new(Host::new(&test, daemon_args));
        let bed = Bed { host, test, since: Instant::now(), _permit: Some(permit) };
        bed.start_daemon();
        bed
    }

    /// A second daemon, in the role of another host of the same network. Its guests and this bed's
    /// guests reach each other if they are on the Ethernet, see [`Vm::lan`].
    #[track_caller]
    pub fn another_host(&self) -> Bed {
        self.another_host_with(&[])
    }

    /// Like [`Bed::another_host`], with further options for the other daemon.
    #[track_caller]
    pub fn another_host_with(&self, daemon_args: &[&str]) -> Bed {
        let test = format!("{}, another host", self.test);
        let host = Arc::new(self.host.beside(&test, daemon_args));
        let bed = Bed { host, test, since: Instant::now(), _permit: None };
        bed.start_daemon();
        bed
    }

    /// Two daemons in the roles of two hosts, each with its own network namespace, and with further
    /// options. Guests migrate between the hosts by TCP. `None`, after a report: namespaces need root.
    #[track_caller]
    pub fn two_hosts(daemon_args: [&[&str]; 2]) -> Option<[Bed; 2]> {
        if !rustix::process::geteuid().is_root() {
            print_always("NOT TESTED: two hosts in network namespaces, which takes root");
            return None;
        }
        let permit = Permit::shared();
        let test = thread::current().name().unwrap_or("two hosts").to_owned();
        let tests = [test.clone(), format!("{test}, another host")];
        let hosts = Host::two([&tests[0], &tests[1]], daemon_args);
        let mut permit = Some(permit);
        let mut tests = tests.into_iter();
        Some(hosts.map(|host| {
            let test = tests.next().unwrap_or_default();
            let host = Arc::new(host);
            let bed = Bed { host, test, since: Instant::now(), _permit: permit.take() };
            bed.start_daemon();
            bed
        }))
    }

    /// Two guests with a network between them.
    #[track_caller]
    pub fn pair(&self) -> [Guest; 2] {
        self.boot([Vm::named("a"), Vm::named("b")])
    }

    /// One guest, without a network unless asked for by [`Vm::lan`].
    #[track_caller]
    pub fn guest(&self, name: &str) -> Guest {
        let [guest] = self.boot([Vm::named(name)]);
        guest
    }

    /// Boots guests at the same time. Two get a network between them, more an Ethernet.
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
            self.host.add_ports(&vm);
            Guest::start(&self.host, vm)
        });
        for guest in &guests {
            guest.wait_ready();
        }
        guests
    }

    /// Boots guests of user-mode Linux at the same time, with words on their kernel's command line.
    #[track_caller]
    pub fn boot_uml<const N: usize>(&self, names: [&str; N], words: &str) -> [Uml; N] {
        let guests = names.map(|name| Uml::start(&self.host, name, words));
        for guest in &guests {
            guest.wait_ready();
        }
        guests
    }

    /// One guest of user-mode Linux, with the device of a backend at `socket` instead of the daemon's.
    #[track_caller]
    pub fn boot_uml_on(&self, name: &str, socket: &Path, words: &str) -> Uml {
        let guest = Uml::start_on(&self.host, name, socket, words);
        guest.wait_ready();
        guest
    }

    /// A path in the bed's directory, for sockets of a test's own.
    pub fn path(&self, name: &str) -> PathBuf {
        self.host.dir.path().join(name)
    }

    /// A path among the logs, kept if the test fails.
    pub fn log(&self, name: &str) -> PathBuf {
        self.host.logs.path(name)
    }

    /// Adds a port to the daemon for a front end other than [`Bed::boot`]'s. Returns the socket's
    /// path.
    #[track_caller]
    pub fn port(&self, name: &str) -> PathBuf {
        let port = AddGuest { name: Some(name.to_owned()), ..AddGuest::default() };
        self.host.add_port(port)
    }

    /// Starts a program of [`crate::rogue`] on the host.
    #[track_caller]
    pub fn rogue(&self, words: &[&str]) -> Helper {
        Helper::spawn(paths::test_peer(), &[&["rogue"], words].concat())
    }

    /// Starts another program on the host, whose output becomes `NAME.log`.
    #[track_caller]
    pub fn program<S: AsRef<OsStr>>(&self, name: &str, command: &[S]) -> Program {
        Program::start(name, command, &[], &self.host.logs.open(&format!("{name}.log")))
    }

    /// Process id of the daemon.
    #[track_caller]
    pub fn daemon_pid(&self) -> u32 {
        self.host.daemon().as_ref().expect("no daemon runs").pid()
    }

    /// Kills the daemon.
    #[track_caller]
    pub fn kill_daemon(&self) {
        self.host.daemon().take().expect("no daemon runs").kill();
    }

    /// Ends the daemon by SIGTERM, and waits for the end.
    #[track_caller]
    pub fn stop_daemon(&self) {
        let daemon = self.host.daemon().take().expect("no daemon runs");
        daemon.terminate();
        daemon.wait(STOPS_WITHIN);
    }

    /// Adds a removed port again.
    #[track_caller]
    pub fn add_again(&self, name: &str) {
        self.host.add_again(name);
    }

    /// Starts the daemon again, with its former ports.
    #[track_caller]
    pub fn start_daemon(&self) {
        self.host.start_daemon();
    }

    /// Kills the daemon and starts a new one.
    #[track_caller]
    pub fn restart_daemon(&self) {
        self.kill_daemon();
        self.start_daemon();
    }

    /// A connection to the daemon's management socket.
    #[track_caller]
    pub fn management(&self) -> Client {
        self.host.management()
    }

    /// The daemon's counters, by guest. The first device of guest `a` is port `a`.
    #[track_caller]
    pub fn list(&self) -> Vec<Port> {
        self.management().list().unwrap()
    }

    /// The daemon's counters of a guest.
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

impl Drop for Bed {
    fn drop(&mut self) {
        let seconds = self.since.elapsed().as_secs_f32();
        print_always(&format!("{seconds:6.1} s  {}", self.test));
    }
}

impl fmt::Debug for Bed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bed in {}", self.host.dir.path().display())
    }
}
