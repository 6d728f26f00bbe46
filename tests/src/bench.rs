// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A daemon in this process, and stacks on its ports.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use guest_driver::{Config, DataPath, DeviceAddress, SmcListener, SmcStream, Stack};
use smc_core::wire::ids::Eid;
use smc_test_support::TestDir;
use vhost_device_ism::config::{FabricSpec, GuestSpec};
use vhost_device_ism::{Config as DaemonConfig, Daemon};
use virtio_ism_abi::Chid;

use crate::watch::{LIMIT, note, test_timeout, watched};

/// The carrier of a test's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// A virtio-ism fabric, by stores into the window.
    Window,
    /// A virtio-ism fabric, by moves of the device.
    Move,
    /// The loopback fabric, CHID 0xFFFF.
    Loopback,
    /// SMC-R version 2 over the RNICs of two machines.
    Rdma,
    /// SMC-R version 1 over them.
    RdmaV1,
    /// TCP after a Decline: the stacks have no EID in common. A test's findings on this fabric hold
    /// for TCP.
    Fallback,
}

impl Fabric {
    /// Whether SMC carries the connections.
    pub fn is_smc(self) -> bool {
        self != Fabric::Fallback
    }

    /// Whether SMC-R carries them.
    pub fn is_rdma(self) -> bool {
        matches!(self, Fabric::Rdma | Fabric::RdmaV1)
    }

    /// Bytes in the ring of the default receive buffer before a write blocks.
    pub fn room(self) -> usize {
        // SMC-D has a control block in front of the ring. An element of SMC-R is twice as long, and
        // its writer keeps eight bytes for questions after a move to another link.
        if self.is_rdma() { (128 << 10) - 8 } else { (64 << 10) - 32 }
    }

    /// A configuration of the `n`th stack, on a device of this fabric. Connections end with the device.
    pub fn config(self, n: usize, device: impl Into<DeviceAddress>) -> Config {
        let mut config = Config::new(device);
        config.outlive_device = false;
        if self.is_rdma() {
            config.devices.clear();
            config.smcr.v1 = self == Fabric::RdmaV1;
            config.smcr.v2 = self == Fabric::Rdma;
        }
        config.path = match self {
            Fabric::Window => DataPath::Window,
            Fabric::Move => DataPath::Move,
            _ => DataPath::Auto,
        };
        if self == Fabric::Fallback {
            config = config.eid(eid(&format!("ALONE-{n}")));
        }
        // Long enough to be no reason for anything on a loaded machine.
        config.clc_timeout = test_timeout();
        config.detect_timeout = test_timeout() / 4;
        config
    }

    /// The CHID of its fabric.
    pub fn chid(self) -> Chid {
        match self {
            Fabric::Loopback => Chid(0xffff),
            _ => Chid::VIRTIO_FIRST,
        }
    }
}

/// A directory for sockets, gone with its value.
#[derive(Debug)]
pub struct Dir(TestDir);

impl Dir {
    /// Makes a fresh directory.
    #[allow(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Dir {
        Dir(TestDir::new())
    }

    /// The device's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The socket of port `n`.
    pub fn socket(&self, n: usize) -> PathBuf {
        self.0.join(format!("port{n}"))
    }
}

/// A daemon and its directory.
pub struct Bench {
    // Dropped before the directory.
    daemon: Option<Daemon>,
    fabric: Fabric,
    dir: Dir,
}

impl Bench {
    /// A daemon with one fabric and `ports` ports.
    pub fn new(fabric: Fabric, ports: usize) -> Bench {
        Bench::tuned(fabric, ports, |_| {})
    }

    /// The same, with a say in the daemon's configuration.
    pub fn tuned(fabric: Fabric, ports: usize, tune: impl FnOnce(&mut DaemonConfig)) -> Bench {
        let mut bench = Bench { daemon: None, fabric, dir: Dir::new() };
        let chid = fabric.chid();
        let port = |n| GuestSpec { chid, ..GuestSpec::new(bench.dir.socket(n)) };
        let mut config = DaemonConfig {
            fabrics: vec![FabricSpec::new(chid)],
            guests: (0..ports).map(port).collect(),
            ..DaemonConfig::default()
        };
        tune(&mut config);
        bench.daemon = Some(Daemon::start(config).unwrap());
        bench
    }

    /// The fabric under test.
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// Whether SMC carries the connections.
    pub fn is_smc(&self) -> bool {
        self.fabric.is_smc()
    }

    /// The daemon.
    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    /// Ends the daemon.
    pub fn stop_daemon(&mut self) {
        note("stops the daemon");
        self.daemon.take().unwrap().stop();
    }

    /// Starts another daemon on the same sockets.
    pub fn start_daemon(&mut self, ports: usize) {
        let chid = self.fabric.chid();
        let port = |n| GuestSpec { chid, ..GuestSpec::new(self.dir.socket(n)) };
        self.daemon = Some(
            Daemon::start(DaemonConfig {
                fabrics: vec![FabricSpec::new(chid)],
                guests: (0..ports).map(port).collect(),
                ..DaemonConfig::default()
            })
            .unwrap(),
        );
    }

    /// The socket of port `n`.
    pub fn socket(&self, n: usize) -> PathBuf {
        self.dir.socket(n)
    }

    /// The daemon has found no fault with any front end.
    #[track_caller]
    pub fn assert_faultless(&self) {
        for port in self.daemon().list() {
            let faults: u64 = port.faults.iter().sum();
            assert_eq!(faults, 0, "{}: faults {:?}", port.spec.name, port.faults);
        }
    }

    /// A configuration of a stack on port `n`. Port 0 is the server's by custom.
    pub fn config(&self, n: usize) -> Config {
        self.fabric.config(n, self.socket(n))
    }

    /// A stack on port `n`.
    pub fn stack(&self, n: usize) -> Arc<Stack> {
        Stack::open(self.config(n)).unwrap()
    }

    /// A server on port 0 and a client on port 1.
    pub fn pair(&self) -> Pair {
        self.pair_with(|_| {})
    }

    /// The same, with a say in both configurations.
    pub fn pair_with(&self, mut tune: impl FnMut(&mut Config)) -> Pair {
        let mut open = |n| {
            let mut config = self.config(n);
            tune(&mut config);
            Stack::open(config).unwrap()
        };
        Pair::new(open(0), open(1), self.is_smc())
    }
}

/// An EID.
pub fn eid(name: &str) -> Eid {
    Eid::new(name).unwrap()
}

/// A server with a listener, and a client.
pub struct Pair {
    /// The server's stack.
    pub server: Arc<Stack>,
    /// The client's stack.
    pub client: Arc<Stack>,
    /// The server's listener.
    pub listener: SmcListener,
    /// Whether connections are expected to be SMC.
    pub smc: bool,
}

impl Pair {
    /// A pair of two stacks; connections are expected to be SMC if `smc`.
    pub fn new(server: Arc<Stack>, client: Arc<Stack>, smc: bool) -> Pair {
        let listener = SmcListener::bind(&server, "127.0.0.1:0").unwrap();
        Pair { server, client, listener, smc }
    }

    /// The server's address.
    pub fn addr(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// A new connection: the client's end and the server's.
    #[track_caller]
    pub fn connect(&self) -> (SmcStream, SmcStream) {
        self.connect_from(&self.client)
    }

    /// A new connection from another stack, on SMC or not.
    #[track_caller]
    pub fn connect_any_from(&self, client: &Arc<Stack>) -> (SmcStream, SmcStream) {
        note("connects");
        thread::scope(|scope| {
            let accepting = scope.spawn(|| self.listener.accept().unwrap().0);
            let here = SmcStream::connect(client, self.addr()).unwrap();
            (here, accepting.join().unwrap())
        })
    }

    /// A new connection from another stack.
    #[track_caller]
    pub fn connect_from(&self, client: &Arc<Stack>) -> (SmcStream, SmcStream) {
        let (here, there) = self.connect_any_from(client);
        assert_eq!(here.is_smc(), self.smc, "client: {}", here.info());
        assert_eq!(there.is_smc(), self.smc, "server: {}", there.info());
        (here, there)
    }
}

/// Runs a test on a fabric with four ports, with a deadline; the daemon must have found no fault
/// with its front ends.
#[track_caller]
pub fn run(fabric: Fabric, test: fn(&Bench)) {
    watched(LIMIT, || {
        let bench = Bench::new(fabric, 4);
        test(&bench);
        bench.assert_faultless();
        note("ends");
    });
}
