// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a conformance test runs.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use guest_driver::Config;

use super::{Host, Pair};
use crate::agent::far::Far;
use crate::agent::open;
use crate::agent::wire::{Call, Device, Settings};
use crate::bench::{Bench, Fabric};
use crate::helper::Helper;
use crate::leaks::Devices;
use crate::watch::{LIMIT, note, watched};

/// The role of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The stack listens.
    Server,
    /// The stack connects.
    Client,
}

/// Where the two ends of a test are.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// Both in this process, and the daemon too.
    Here,
    /// The end of this role runs in a process of the program at this path.
    Process(&'static str, Role),
    /// The end of this role runs in another machine, and its program listens at
    /// `SMC_TEST_FAR=HOST:PORT`. `SMC_TEST_DEVICE` names this machine's own device; the default is
    /// `pci`.
    Machine(Role),
}

/// A fabric, a place, and the daemon if there is one here.
pub struct Site {
    fabric: Fabric,
    // Dropped in this order: the far end before the daemon.
    far: Option<(Role, Arc<Far>)>,
    bench: Option<Bench>,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Site {
    fn new(fabric: Fabric, place: Place) -> Site {
        let bench = || Bench::new(fabric, 4);
        match place {
            Place::Here => Site { fabric, far: None, bench: Some(bench()), _alone: None },
            Place::Process(program, role) => {
                let far = Arc::new(Far::begin(process(program)));
                Site { fabric, far: Some((role, far)), bench: Some(bench()), _alone: None }
            }
            Place::Machine(role) => {
                let alone = alone();
                let far = Arc::new(Far::begin(machine()));
                Site { fabric, far: Some((role, far)), bench: None, _alone: Some(alone) }
            }
        }
    }

    /// The fabric under test.
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// Whether SMC carries the connections.
    pub fn is_smc(&self) -> bool {
        self.fabric.is_smc()
    }

    /// Whether both ends are on one host, from their own view.
    pub fn is_one_host(&self) -> bool {
        self.bench.is_some()
    }

    /// The objects of the daemon's devices, if the daemon is in this process.
    pub fn devices(&self) -> Option<Devices> {
        self.bench.as_ref().map(|bench| Devices::of(bench.daemon()))
    }

    /// This machine's address, for the other one.
    pub fn here(&self) -> IpAddr {
        self.far.as_ref().map_or(Ipv4Addr::LOCALHOST.into(), |(_, far)| far.here())
    }

    /// Addresses a server may listen on.
    pub fn addresses(&self, server: &Host) -> Vec<IpAddr> {
        match self.bench {
            Some(_) => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            None => vec![server.ip()],
        }
    }

    /// A configuration of a stack on port `n`. Port 0 is the server's by custom.
    ///
    /// Between machines every port is the device of the machine.
    pub fn config(&self, n: usize) -> Config {
        match &self.bench {
            Some(bench) => bench.config(n),
            None => self.fabric.config(n, own_device()),
        }
    }

    /// Opens a stack at the place of its role.
    ///
    /// # Errors
    /// Errors of [`guest_driver::Stack::open`].
    pub fn open(&self, role: Role, config: Config) -> io::Result<Host> {
        match &self.far {
            Some((far_role, far)) if *far_role == role => {
                let device = match &self.bench {
                    _ if config.devices.is_empty() => Device::None,
                    Some(_) => {
                        Device::Named(config.devices.iter().map(|d| d.to_string()).collect())
                    }
                    None => Device::Own,
                };
                let settings = Box::new(Settings::of(&config, device));
                Ok(Host::there(far, far.call(&Call::Open(settings), &[])?.0))
            }
            _ => Ok(Host::here(open(&config)?, self.here())),
        }
    }

    /// A server's stack on port `n`.
    #[track_caller]
    pub fn server(&self, n: usize) -> Host {
        self.open(Role::Server, self.config(n)).unwrap()
    }

    /// A client's stack on port `n`.
    #[track_caller]
    pub fn client(&self, n: usize) -> Host {
        self.open(Role::Client, self.config(n)).unwrap()
    }

    /// A server on port 0 and a client on port 1.
    #[track_caller]
    pub fn pair(&self) -> Pair {
        self.pair_with(|_| {})
    }

    /// The same, with a say in both configurations.
    #[track_caller]
    pub fn pair_with(&self, mut tune: impl FnMut(&mut Config)) -> Pair {
        let mut open = |role, n| {
            let mut config = self.config(n);
            tune(&mut config);
            self.open(role, config).unwrap()
        };
        Pair::new(open(Role::Server, 0), open(Role::Client, 1), self.is_smc())
    }

    /// Nothing is left, and the daemon has found no fault with any front end.
    #[track_caller]
    fn end(self) {
        if let Some((_, far)) = &self.far {
            far.end().unwrap();
        }
        if let Some(bench) = &self.bench {
            bench.assert_faultless();
        }
    }
}

/// The program with the far ends of this process's tests. The program ends with this process.
fn process(program: &str) -> SocketAddr {
    static PROCESS: OnceLock<(Mutex<Helper>, SocketAddr)> = OnceLock::new();
    let start = || {
        let args = ["agent", "none", "127.0.0.1:0", "while-stdin"];
        let (helper, line) = Helper::start(program, &args);
        let addr = line.strip_prefix("listens on ").and_then(|addr| addr.parse().ok());
        (Mutex::new(helper), addr.unwrap_or_else(|| panic!("the far end says {line:?}")))
    };
    PROCESS.get_or_init(start).1
}

/// Where the other machine's program listens.
fn machine() -> SocketAddr {
    let text = std::env::var("SMC_TEST_FAR")
        .expect("SMC_TEST_FAR=HOST:PORT says where `smc-test-peer agent` of the other machine is");
    let addr = text.to_socket_addrs().ok().and_then(|mut addrs| addrs.next());
    addr.unwrap_or_else(|| panic!("SMC_TEST_FAR={text} is no address"))
}

fn own_device() -> String {
    std::env::var("SMC_TEST_DEVICE").unwrap_or_else(|_| "pci".into())
}

/// Tests between machines run one after the other, whatever the test runner does: there is one
/// device.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a test with a deadline. With a daemon in this process there are four ports, and the daemon
/// must have found no fault with its front ends.
#[track_caller]
pub fn run(fabric: Fabric, place: Place, test: fn(&Site)) {
    // Outside the deadline: waiting for the machine's device has no limit.
    let site = Site::new(fabric, place);
    watched(LIMIT, || {
        test(&site);
        site.end();
        note("ends");
    });
}
