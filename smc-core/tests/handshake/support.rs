// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hosts to shake hands with, and the shortest way through a handshake.

use std::sync::Arc;

use smc_core::handshake::{
    Accepted, AwaitAccept, AwaitConfirm, AwaitProposal, Candidate, ClientStep, Config, ConfirmStep,
    Dmbe, Established, IsmDevice, Selection, ServerStep, Terms, start,
};
use smc_core::time::Tick;
use smc_core::wire::ids::{Chid, DmbToken, Eid, Gid, GidV1, LinkId, PeerId, SizeCode};

pub(crate) const NOW: Tick = Tick(1_000_000);
pub(crate) const VIRTIO: u16 = 0xff01;

pub(crate) fn eid(name: &str) -> Eid {
    Eid::new(name).unwrap()
}

/// An emulated device of host `n`.
pub(crate) fn emulated(chid: u16, n: u8) -> IsmDevice {
    IsmDevice { chid: Chid(chid), gid: Gid([n; 16]) }
}

/// A platform device of host `n`.
pub(crate) fn platform(chid: u16, n: u8) -> IsmDevice {
    IsmDevice { chid: Chid(chid), gid: Gid::from_parts(GidV1([n; 8]), GidV1::NONE) }
}

/// A host with one virtio-ism device and one EID.
pub(crate) fn host(n: u8) -> Config {
    let mut config = Config::new(PeerId([n; 8]));
    config.ueids = vec![eid("LAB")];
    config.devices = vec![emulated(VIRTIO, n)];
    config
}

pub(crate) fn client_host() -> Config {
    host(1)
}

pub(crate) fn server_host() -> Config {
    host(2)
}

pub(crate) fn client_dmbe() -> Dmbe {
    Dmbe { token: DmbToken(0x1111), index: 0, size: SizeCode::MIN }
}

pub(crate) fn server_dmbe() -> Dmbe {
    Dmbe { token: DmbToken(0x2222), index: 0, size: SizeCode::RFC_MAX }
}

pub(crate) const CLIENT_LINK: LinkId = LinkId([0, 0, 0, 1]);
pub(crate) const SERVER_LINK: LinkId = LinkId([0, 0, 0, 2]);

pub(crate) fn propose(client: &Config) -> (AwaitAccept, Vec<u8>) {
    start(Arc::new(client.clone()), NOW).unwrap()
}

pub(crate) fn receive(server: &Config, proposal: &[u8]) -> ServerStep {
    AwaitProposal::new(Arc::new(server.clone()), NOW).handle(proposal)
}

pub(crate) fn eligible(server: &Config, proposal: &[u8]) -> Selection {
    match receive(server, proposal) {
        ServerStep::Eligible(selection) => selection,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn accept(selection: Selection, known: Option<Terms>) -> (AwaitConfirm, Vec<u8>) {
    let first = selection.candidates()[0];
    selection.accept(first, known, server_dmbe(), SERVER_LINK, NOW)
}

/// Each side's memory of earlier handshakes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) client: Option<Terms>,
    pub(crate) server: Option<Terms>,
}

pub(crate) fn offered(client: AwaitAccept, message: &[u8], known: Option<Terms>) -> Accepted {
    match client.handle(message, |_, _| known) {
        ClientStep::Offered(accepted) => accepted,
        other => panic!("{other:?}"),
    }
}

/// The bytes of a whole handshake and each side's result.
pub(crate) struct Run {
    pub(crate) accept: Vec<u8>,
    pub(crate) confirm: Vec<u8>,
    pub(crate) client: Established,
    pub(crate) server: Established,
}

/// Runs a handshake without faults and checks that both sides have the same view.
pub(crate) fn run(client: &Config, server: &Config, memory: Memory) -> Run {
    let (awaits_accept, proposal) = propose(client);
    let (awaits_confirm, accept) = accept(eligible(server, &proposal), memory.server);
    let accepted = offered(awaits_accept, &accept, memory.client);
    let (client, confirm) = accepted.confirm(client_dmbe(), CLIENT_LINK);
    let ConfirmStep::Established(server) = awaits_confirm.handle(&confirm) else {
        panic!("Confirm is not taken");
    };
    let Candidate { chid, local, peer } = client.devices;
    assert_eq!(server.devices, Candidate { chid, local: peer, peer: local });
    assert_eq!(client.eid, server.eid);
    assert_eq!(client.terms, server.terms);
    assert_eq!(client.first_contact, server.first_contact);
    assert_eq!((client.own, client.peer), (server.peer, server.own));
    assert_eq!((client.own_link, client.peer_link), (server.peer_link, server.own_link));
    Run { accept, confirm, client, server }
}

/// Parses hexadecimal text; spaces mean nothing.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// A name in the format of messages: 32 bytes, padded with spaces.
pub(crate) fn blank_padded(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(32, b' ');
    bytes
}

/// Sets the length field of a message to the length of the bytes.
pub(crate) fn patch_length(bytes: &mut [u8]) {
    let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
    bytes[5..7].copy_from_slice(&length);
}
