// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer doing the handshake by hand over TCP, one message at a time, with arbitrary devices.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_driver::DeviceAddress;
use rustix::net::{AddressFamily, SocketType, connect, socket};
use smc_core::handshake::{
    Accepted, AwaitAccept, AwaitConfirm, AwaitProposal, Candidate, ClcReader, ClientStep, Config,
    ConfirmStep, Dmbe, Established, IsmDevice as Offered, Selection, ServerStep, Terms, start,
};
use smc_core::time::Tick;
use smc_core::wire::ids::{Chid, DmbToken, Features, Gid, LinkId, PeerId, Release, SizeCode};
use smc_rendezvous::{ClientAction, PeerDiscovery};
use virtio_ism::transport::{RunningDevice, SetupOptions};
use virtio_ism::{IsmDevice, IsmError, OpenOptions, Prefer};
use virtio_ism_abi::Gid as AbiGid;

use crate::bench::{Bench, eid};
use crate::watch::{TIMEOUT, note};

/// A device of its own, without a stack.
pub struct Device {
    /// The driver.
    pub ism: Arc<IsmDevice>,
    /// The transport below the device, for tests reading the whole window.
    pub transport: Arc<RunningDevice>,
}

impl Device {
    /// On a port of the bench.
    pub fn open(bench: &Bench, port: usize) -> Device {
        Device::at(bench.socket(port)).unwrap()
    }

    /// At any address.
    ///
    /// # Errors
    /// As [`IsmDevice::open_on`].
    pub fn at(address: impl Into<DeviceAddress>) -> Result<Device, IsmError> {
        let options = OpenOptions { prefer: Prefer::Window, ..OpenOptions::new(address) };
        let OpenOptions { move_queues, leaves, owner, .. } = options;
        let wanted = SetupOptions { move_queues, guest_memory: 16 << 20, leaves, owner };
        let transport = options.address.open(wanted, options.timeout)?;
        let ism = IsmDevice::open_on(transport.clone(), &options)?;
        Ok(Device { ism, transport })
    }

    /// This host's configuration for a handshake.
    pub fn config(&self) -> Config {
        Config {
            devices: vec![Offered { chid: Chid(self.ism.chid().0), gid: self.gid() }],
            ..host(&[])
        }
    }

    /// The device's GID.
    pub fn gid(&self) -> Gid {
        Gid(self.ism.gid().0)
    }
}

/// The configuration of a host with these devices (CHID, every byte of the GID) for a handshake.
pub fn host(devices: &[(u16, u8)]) -> Config {
    let mut config = Config::new(PeerId([9; 8]));
    config.ueids = vec![eid(guest_driver::socket::DEFAULT_EID)];
    let offered = |(chid, gid): &(u16, u8)| Offered { chid: Chid(*chid), gid: Gid([*gid; 16]) };
    config.devices = devices.iter().map(offered).collect();
    config
}

/// How a DMB is told to a peer.
pub fn dmbe(token: u64, len: u32) -> Dmbe {
    let size = SizeCode::at_least(len.into()).unwrap();
    Dmbe { token: DmbToken(token), index: 0, size }
}

/// The number of the raw peers' logical link.
pub const LINK: LinkId = LinkId([7, 7, 7, 7]);

/// Writes raw bytes; an earlier reset by the peer is fine.
pub fn put(mut tcp: &TcpStream, bytes: &[u8]) {
    let _ = tcp.write_all(bytes);
}

/// Reads one whole CLC message.
#[track_caller]
pub fn read_message(mut tcp: &TcpStream, mut reader: ClcReader) -> Vec<u8> {
    note("reads a CLC message");
    loop {
        if let Some(message) = reader.message() {
            return message.to_vec();
        }
        let n = tcp.read(reader.space()).unwrap();
        reader.filled(n).unwrap();
    }
}

/// How a connection ends from the view of a raw peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// FIN.
    Closed,
    /// RST.
    Reset,
}

/// Reads to the end of the connection: returns the bytes and the kind of end.
#[track_caller]
pub fn read_to_end(mut tcp: &TcpStream) -> (Vec<u8>, End) {
    note("reads to the end of a TCP connection");
    tcp.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (mut bytes, mut buf) = (Vec::new(), [0; 4096]);
    loop {
        match tcp.read(&mut buf) {
            Ok(0) => return (bytes, End::Closed),
            Ok(n) => bytes.extend_from_slice(&buf[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                return (bytes, End::Reset);
            }
            Err(error) => panic!("{error} after {} bytes", bytes.len()),
        }
    }
}

/// A raw client after its Proposal.
pub struct Proposed {
    /// The connection.
    pub tcp: TcpStream,
    /// The handshake's state before the answer.
    pub awaiting: AwaitAccept,
}

/// The bytes of a Proposal, and the handshake's state before the answer.
pub fn proposal(config: &Config) -> (AwaitAccept, Vec<u8>) {
    start(Arc::new(config.clone()), Tick(0)).unwrap()
}

/// Connects and proposes.
pub fn propose(addr: SocketAddr, config: &Config) -> Proposed {
    propose_on(TcpStream::connect(addr).unwrap(), config)
}

/// Like [`propose`], to a server knowing its peers by TCP option 254, as AF_SMC does.
pub fn propose_to_linux(addr: SocketAddr, config: &Config, discovery: &PeerDiscovery) -> Proposed {
    let tcp: OwnedFd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let asked = discovery.before_connect(&tcp, &addr);
    connect(&tcp, &addr).unwrap();
    let action = discovery.connected(&tcp, asked);
    assert!(matches!(action, ClientAction::Propose { .. }), "{action:?}");
    propose_on(tcp.into(), config)
}

fn propose_on(tcp: TcpStream, config: &Config) -> Proposed {
    tcp.set_nodelay(true).unwrap();
    let (awaiting, bytes) = proposal(config);
    put(&tcp, &bytes);
    Proposed { tcp, awaiting }
}

impl Proposed {
    /// Takes the server's Accept.
    #[track_caller]
    pub fn accepted(self) -> (TcpStream, Accepted) {
        let message = read_message(&self.tcp, self.awaiting.reader());
        // A returning peer knows the terms of the first contact.
        let known =
            Terms { release: Release::V2_1, features: Features::EMULATED_ISM, carriers: None };
        match self.awaiting.handle(&message, |_, _| Some(known)) {
            ClientStep::Offered(accepted) => (self.tcp, accepted),
            other => panic!("{other:?}"),
        }
    }
}

/// A raw server after a Proposal.
pub struct Selected {
    /// The connection.
    pub tcp: TcpStream,
    /// The server's selection.
    pub selection: Selection,
}

/// Accepts a connection and reads its Proposal.
#[track_caller]
pub fn select(listener: &TcpListener, config: &Config) -> Selected {
    let (tcp, _) = listener.accept().unwrap();
    tcp.set_nodelay(true).unwrap();
    let awaiting = AwaitProposal::new(Arc::new(config.clone()), Tick(0));
    let message = read_message(&tcp, awaiting.reader());
    match awaiting.handle(&message) {
        ServerStep::Eligible(selection) => Selected { tcp, selection },
        other => panic!("{other:?}"),
    }
}

impl Selected {
    /// The GID of the client.
    pub fn client(&self) -> AbiGid {
        AbiGid(self.candidate().peer.0)
    }

    fn candidate(&self) -> Candidate {
        self.selection.candidates()[0]
    }

    /// Sends Accept with this element.
    pub fn accept(self, own: Dmbe) -> (TcpStream, AwaitConfirm) {
        let candidate = self.candidate();
        let (awaiting, bytes) = self.selection.accept(candidate, None, own, LINK, Tick(0));
        put(&self.tcp, &bytes);
        (self.tcp, awaiting)
    }

    /// The bytes of an Accept with this element, not sent.
    pub fn accept_bytes(&self, own: Dmbe) -> Vec<u8> {
        self.selection.clone().accept(self.candidate(), None, own, LINK, Tick(0)).1
    }
}

/// Reads Confirm.
#[track_caller]
pub fn confirmed(tcp: &TcpStream, awaiting: AwaitConfirm) -> Established {
    let message = read_message(tcp, awaiting.reader());
    match awaiting.handle(&message) {
        ConfirmStep::Established(established) => established,
        other => panic!("{other:?}"),
    }
}

/// Ends the sending half.
pub fn finish(tcp: &TcpStream) {
    let _ = tcp.shutdown(Shutdown::Write);
}
