//! TCP option 254 on a wire: who sends it, who answers, who knows.
//!
//! Needs what a rendezvous needs, and a network namespace: root. Elsewhere these tests are skipped.

mod bed;
mod wire;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_driver::rendezvous::{Options, Rendezvous};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::{Fate, HERE, Wire, there};

/// As both ends send it; the kernel fills up to a multiple of four with NOPs.
const OPTION: [u8; 8] = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9, 1, 1];

fn attach() -> Arc<Rendezvous> {
    Rendezvous::attach(Options::default()).unwrap()
}

/// The address of a listener to be, of either family.
fn any(family: usize) -> SocketAddr {
    SocketAddr::new(HERE[family].parse().unwrap(), 0)
}

/// A client that asks for SMC.
fn ask(rendezvous: &[&Rendezvous], server: SocketAddr) -> TcpStream {
    let to = there(server);
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket: OwnedFd =
        rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    for rendezvous in rendezvous {
        assert!(rendezvous.want(&socket, &to).unwrap());
    }
    rustix::net::connect(&socket, &to).unwrap();
    socket.into()
}

/// The options 254 of the SYNs (`false`) and SYN-ACKs (`true`), with what fills them up.
fn options(wire: &Wire) -> Vec<(bool, Vec<u8>)> {
    let seen = wire.seen().into_iter();
    seen.map(|segment| {
        let mut rest = &segment.options[..];
        let mut found = Vec::new();
        // Ours is the last one: it, and all that follows.
        while let [kind, tail @ ..] = rest {
            match kind {
                254 => {
                    found = rest.to_vec();
                    break;
                }
                0 => break,
                1 => rest = tail,
                _ => rest = &rest[usize::from(tail[0])..],
            }
        }
        (segment.synack, found)
    })
    .collect()
}

/// Both directions carry data.
fn talk(mut client: &TcpStream, mut server: &TcpStream) {
    let mut bytes = [0u8; 4];
    client.write_all(b"ping").unwrap();
    server.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"ping");
    server.write_all(b"pong").unwrap();
    client.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"pong");
}

#[test]
fn both_ends_send_the_option_and_know_of_each_other() {
    bed::run(|| {
        let wire = Wire::honest();
        let rendezvous = attach();
        for family in [0, 1] {
            let listener = rendezvous.bind(&any(family)).unwrap();
            for _ in 0..3 {
                let client = ask(&[&rendezvous], listener.local_addr().unwrap());
                let (server, _) = listener.accept().unwrap();
                assert_eq!(
                    options(&wire),
                    [(false, OPTION.to_vec()), (true, OPTION.to_vec())],
                    "family {family}"
                );
                assert_eq!(rendezvous.peer_speaks_smc(&client), Some(true));
                assert_eq!(rendezvous.peer_speaks_smc(&server), Some(true));
                talk(&client, &server);
            }
        }
    });
}
