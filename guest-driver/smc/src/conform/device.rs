// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of this machine used by the suite: a virtio-ism device, and TCP option 254.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use guest_driver::DeviceAddress;
use rustix::net::{AddressFamily, SocketType};
use smc_conform::{Announce, Buffer, Fabric, PeerBuffer};
use smc_rendezvous::{ClientAction, PeerDiscovery};
use virtio_ism::{IsmDevice, OpenOptions, OwnDmb, PeerDmb};
use virtio_ism_abi::{Gid, Token};

/// Bytes of a DMB of the suite.
const BUFFER: u32 = 64 << 10;
/// `BUFFER` as a size code: the exponent of two, in units of 16 KiB.
const BUFFER_CODE: u8 = 2;

/// Opens a device.
///
/// # Errors
/// There is no device, or another process uses it.
pub(super) fn open(address: &Path) -> io::Result<Arc<IsmDevice>> {
    IsmDevice::open(OpenOptions::new(DeviceAddress::from(address))).map_err(io::Error::other)
}

/// The device as the suite's fabric.
pub(super) struct OnFabric(Arc<IsmDevice>);

impl OnFabric {
    pub(super) fn new(device: &Arc<IsmDevice>) -> OnFabric {
        OnFabric(device.clone())
    }
}

impl Fabric for OnFabric {
    fn gid(&self) -> [u8; 16] {
        self.0.gid().0
    }

    fn chid(&self) -> u16 {
        self.0.chid().0
    }

    fn register(&self, user: [u8; 16]) -> Result<Box<dyn Buffer>, String> {
        let dmb = self.0.register(Gid(user), BUFFER, 0);
        Ok(Box::new(OwnBuffer(dmb.map_err(|error| error.to_string())?)))
    }

    fn attach(&self, token: [u8; 8], len: u32) -> Result<Box<dyn PeerBuffer>, String> {
        let attached = self.0.attach(Token(u64::from_be_bytes(token)), len);
        Ok(Box::new(TargetBuffer(attached.map_err(|error| error.to_string())?)))
    }
}

struct OwnBuffer(OwnDmb);

impl Buffer for OwnBuffer {
    fn token(&self) -> [u8; 8] {
        self.0.token().0.to_be_bytes()
    }

    fn size_code(&self) -> u8 {
        BUFFER_CODE
    }

    fn words(&self) -> [[u8; 8]; 2] {
        self.0.words().map(u64::to_ne_bytes)
    }

    fn read(&self, offset: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // The suite asks for bytes of its own ring only.
        let read = self.0.memory().copy_out(offset as usize, &mut bytes);
        if read.is_ok() { bytes } else { Vec::new() }
    }
}

struct TargetBuffer(PeerDmb);

impl PeerBuffer for TargetBuffer {
    fn deliver(&self, pieces: &[(u32, &[u8])], words: [[u8; 8]; 2]) -> Result<(), String> {
        let words = words.map(u64::from_ne_bytes);
        self.0.deliver(pieces, words, true).map_err(|error| error.to_string())
    }
}

/// Connects with the option.
pub(super) struct OptionClient<'a>(&'a PeerDiscovery);

impl<'a> OptionClient<'a> {
    pub(super) fn new(discovery: &'a PeerDiscovery) -> OptionClient<'a> {
        OptionClient(discovery)
    }
}

impl Announce for OptionClient<'_> {
    fn connect(&self, server: SocketAddr) -> io::Result<(TcpStream, bool)> {
        let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket: OwnedFd = rustix::net::socket(family, SocketType::STREAM, None)?;
        let asked = self.0.before_connect(&socket, &server);
        rustix::net::connect(&socket, &server)?;
        let action = self.0.connected(&socket, asked);
        let answered = matches!(action, ClientAction::Propose { awaited: true });
        Ok((socket.into(), answered))
    }
}
