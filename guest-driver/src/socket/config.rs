// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration of a stack.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use smc_core::wire::ids::Eid;

use crate::smcr::{Rnics, SmcrOptions};
use crate::traffic::TrafficTable;
use smc_rendezvous::Mode;
use virtio_ism::transport::DeviceAddress;

/// The devices, RNICs and sockets of a stack. The defaults suit a process with one device.
#[derive(Clone, Debug)]
pub struct Config {
    /// Virtio-ism devices in the order of preference; at most [`MAX_DEVICES`] are offered to a
    /// peer.
    pub devices: Vec<DeviceAddress>,
    /// RNICs for SMC-R, used without a common fabric.
    pub rnics: Rnics,
    /// Options of SMC-R.
    pub smcr: SmcrOptions,
    /// User EIDs: peers need one in common.
    pub eids: Vec<Eid>,
    /// Receive buffer of new connections, bytes (SOCK-4, RMB-13); rounded up to 16 KiB times a power of
    /// two, at most 1 MiB. An element of SMC-R is twice as long. A DMB of SMC-D is half as long for
    /// each 8 MiB of DMBs already used by connections of the fabric, but not shorter than 16 KiB.
    pub recv_buffer: usize,
    /// The time for which a blocked call spins before it sleeps; zero: never.
    pub spin: Duration,
    /// The path of bytes to a peer on the same fabric.
    pub path: DataPath,
    /// Bytes of guest memory of a device, for rings and for buffers of the move path. Pages take no
    /// memory before the driver uses them.
    pub guest_memory: usize,
    /// Whether connections continue over TCP when their device, the peer's device or the last link of
    /// SMC-R is gone, if the peer supports it, too. This holds between processes and virtual machines,
    /// and for SMC-R of release 2.1. When a device announces its leave, connections switch to TCP
    /// first. A stack with this option has one more thread. On by default.
    pub outlive_device: bool,
    /// Whether connections come back to a device after its return (see [`Config::outlive_device`]), if
    /// the peer supports it, too. Not so for SMC-R.
    pub return_to_device: bool,
    /// The longest wait for a device behind a socket in use by another process; zero: none.
    pub device_timeout: Duration,
    /// The longest duration of one CLC message of the peer.
    pub clc_timeout: Duration,
    /// The longest wait of a server for the first bytes of a client, taken for an ordinary TCP client
    /// afterwards.
    pub detect_timeout: Duration,
    /// The method of finding out which peers speak SMC.
    pub rendezvous: Mode,
    /// Options of TCP option 254: the processes that use it, and the peers concerned.
    pub rendezvous_options: smc_rendezvous::Options,
    /// Socket for reports of this process, see [`statistics`](super::statistics).
    pub statistics: Option<PathBuf>,
    /// Statistics of servers and listeners, for reports.
    pub traffic: Option<Arc<TrafficTable>>,
    /// Options changed only by tests.
    #[doc(hidden)]
    pub testing: TestOptions,
}

/// Options changed only by tests.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct TestOptions {
    /// System EID (EID-11).
    pub seid: Option<Eid>,
    /// The longest wait of a closed connection for its peer to close, too.
    pub close_timeout: Duration,
    /// Lifetime of a peer without connections, with its buffers.
    pub idle_peer_timeout: Duration,
    /// The longest time for connections to leave a device about to go.
    pub leave_time: Duration,
    /// Offer SMCv2 release 2.0 only, as old peers do. Emulated devices then never match.
    pub release_2_0: bool,
}

impl Default for TestOptions {
    fn default() -> TestOptions {
        TestOptions {
            seid: None,
            close_timeout: Duration::from_secs(60),
            idle_peer_timeout: Duration::from_secs(600),
            leave_time: Duration::from_secs(1),
            release_2_0: false,
        }
    }
}

/// The most emulated devices in a Proposal (EISM-12).
pub const MAX_DEVICES: usize = 4;

/// The EID of a stack whose configuration has none. Both ends of a connection need the same.
pub const DEFAULT_EID: &str = "VIRTIO-ISM";

/// The path of bytes to a peer on the same fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataPath {
    /// The window where both ends have one with fast memory, else move.
    #[default]
    Auto,
    /// The window, or no SMC.
    Window,
    /// The device copies.
    Move,
}

impl Config {
    /// The defaults, with one device.
    pub fn new(device: impl Into<DeviceAddress>) -> Config {
        Config { devices: vec![device.into()], ..Config::default() }
    }

    /// Adds a user EID (32 characters of `A-Z 0-9 - .` at most). The first one replaces the
    /// default (EID-17).
    pub fn eid(mut self, eid: Eid) -> Config {
        if self.eids == default_eids() {
            self.eids.clear();
        }
        self.eids.push(eid);
        self
    }
}

fn default_eids() -> Vec<Eid> {
    Eid::new(DEFAULT_EID).into_iter().collect()
}

impl Default for Config {
    fn default() -> Config {
        Config {
            devices: Vec::new(),
            rnics: Rnics::Auto,
            smcr: SmcrOptions::default(),
            eids: default_eids(),
            recv_buffer: 64 << 10,
            spin: Duration::from_micros(50),
            path: DataPath::Auto,
            guest_memory: 64 << 20,
            outlive_device: true,
            return_to_device: true,
            device_timeout: Duration::from_secs(10),
            clc_timeout: Duration::from_secs(6),
            detect_timeout: Duration::from_millis(200),
            rendezvous: Mode::Off,
            rendezvous_options: smc_rendezvous::Options::default(),
            statistics: None,
            traffic: None,
            testing: TestOptions::default(),
        }
    }
}
