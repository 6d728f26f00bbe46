// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Terms agreed with a peer, knowledge kept of peers, and the info of a connection.

use std::time::Duration;

use guest_driver::SmcdInfo;
use smc_tests::end::{End, How, Pair, Role, Site};
use smc_tests::{Fabric, eventually, pattern, read_exactly, send_all};

on_every_fabric! {
    addresses_are_those_of_tcp
    options_of_tcp_can_be_set_and_read
    an_established_tcp_connection_can_be_upgraded
    totals_count
}

/// Tests of features missing in TCP.
mod smc {
    use super::{
        a_restarted_end_begins_anew, buffers_have_the_size_that_was_asked_for,
        idle_peers_are_forgotten_with_their_buffers, the_first_contact_is_the_first_only,
        the_two_ends_agree_on_the_connection,
    };

    on_smc_d! {
        the_two_ends_agree_on_the_connection
        the_first_contact_is_the_first_only
        a_restarted_end_begins_anew
        buffers_have_the_size_that_was_asked_for
        idle_peers_are_forgotten_with_their_buffers
    }
}

#[track_caller]
fn info(stream: &End) -> SmcdInfo {
    let nature = stream.nature();
    nature.smc.unwrap_or_else(|| panic!("{}", nature.text))
}

// Shows: SOCK-1, SOCK-2.
fn addresses_are_those_of_tcp(site: &Site) {
    let (server, client) = (site.server(0), site.client(1));
    for local in site.addresses(&server) {
        let listener = match server.listen_at((local, 0).into()) {
            Ok(listener) => listener,
            // A machine without IPv6.
            Err(error) if local.is_ipv6() => {
                println!("{local}: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let pair = Pair { listener, ..Pair::new(server.clone(), client.clone(), site.is_smc()) };
        let (here, there) = pair.connect();
        assert_eq!(here.peer_addr().unwrap(), pair.addr());
        assert_eq!(there.local_addr().unwrap(), pair.addr());
        assert_eq!(here.local_addr().unwrap(), there.peer_addr().unwrap());
        drop(there);
        assert_eq!(here.peer_addr().unwrap(), pair.addr(), "known after the end, too");
    }
}

// Shows: SOCK-5, SOCK-6, SOCK-9.
fn options_of_tcp_can_be_set_and_read(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    for on in [true, false] {
        client.set_nodelay(on).unwrap();
        assert_eq!(client.nodelay().unwrap(), on);
    }
    client.set_ttl(42).unwrap();
    assert_eq!(client.ttl().unwrap(), 42);
    send_all(&client, b"x");
    assert_eq!(read_exactly(&server, 1), b"x");
}

fn an_established_tcp_connection_can_be_upgraded(site: &Site) {
    let pair = site.pair();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| pair.listener.accept().unwrap().0);
        let client = pair.client.connect_how(pair.addr(), How::Upgrade).unwrap();
        let server = accepting.join().unwrap();
        assert_eq!(client.is_smc(), site.is_smc());
        send_all(&client, b"up");
        assert_eq!(read_exactly(&server, 2), b"up");
    });
}

fn totals_count(site: &Site) {
    let pair = site.pair();
    let streams: Vec<_> = (0..3).map(|_| pair.connect()).collect();
    for totals in [pair.client.totals(), pair.server.totals()] {
        let expected = if site.is_smc() { (3, 0, 0) } else { (0, 3, 0) };
        assert_eq!((totals.smc, totals.tcp, totals.broken), expected);
        // Peers of SMC-R are known by their link group.
        let expected = match site.fabric() {
            Fabric::Rdma | Fabric::RdmaV1 => (0, 1),
            Fabric::Fallback => (0, 0),
            _ => (1, 0),
        };
        assert_eq!((totals.peers, totals.groups), expected);
        assert_eq!(totals.closing, 0);
    }
    drop(streams);
    eventually("all are closed", || {
        pair.client.totals().closing + pair.server.totals().closing == 0
    });
    if site.is_smc() {
        eventually("the buffers are in the pool", || pair.server.totals().pooled == 3);
    }
}

fn the_two_ends_agree_on_the_connection(site: &Site) {
    let pair = site.pair();
    let (client, server) = pair.connect();
    let (c, s) = (info(&client), info(&server));
    assert_eq!((c.chid, s.chid), (site.fabric().chid(), site.fabric().chid()));
    assert_eq!((c.local_gid, c.peer_gid), (s.peer_gid, s.local_gid));
    assert_eq!(c.local_gid, pair.client.devices()[0].1);
    assert_eq!(c.local_gid == c.peer_gid, site.fabric() == Fabric::Loopback);
    assert_eq!([c.eid, s.eid].map(|eid| eid.to_string()), ["VIRTIO-ISM"; 2]);
    assert_eq!((c.release, s.release), (1, 1));
    assert!(c.first_contact && s.first_contact);
    assert_eq!((c.local_buffer, c.peer_buffer), (s.peer_buffer, s.local_buffer));
    assert_eq!(
        (c.window, s.window),
        (site.fabric() != Fabric::Move, site.fabric() != Fabric::Move)
    );
    if site.is_one_host() {
        assert_eq!(c.peer_host, s.peer_host, "one host");
    }
    let text = client.nature().text;
    assert!(text.starts_with("SMC-D v2.1 over fabric"), "{text}");
}

fn the_first_contact_is_the_first_only(site: &Site) {
    let pair = site.pair();
    for round in 0..4 {
        let (client, server) = pair.connect();
        // Every process on a loopback fabric has the same GID: a server cannot recognise a returning
        // peer.
        let first = round == 0 || site.fabric() == Fabric::Loopback;
        assert_eq!(info(&client).first_contact, first);
        assert_eq!(info(&server).first_contact, first);
        send_all(&client, b"x");
        read_exactly(&server, 1);
    }
    assert_eq!(pair.server.totals().peers, 1);
}

// Shows: CLC-8, LG-62.
fn a_restarted_end_begins_anew(site: &Site) {
    let pair = site.pair();
    let talk = |pair: &Pair, first: bool| {
        let (client, server) = pair.connect();
        let first = first || site.fabric() == Fabric::Loopback;
        assert_eq!(info(&client).first_contact, first);
        send_all(&client, b"hello");
        assert_eq!(read_exactly(&server, 5), b"hello");
    };
    talk(&pair, true);
    talk(&pair, false);
    // The client's process starts again: another GID (but on loopback), and no memory.
    let Pair { server, client, listener, .. } = pair;
    drop(client);
    let again = || {
        let mut stack = None;
        eventually("the port is free again", || {
            stack = site.open(Role::Client, site.config(1)).ok();
            stack.is_some()
        });
        stack.unwrap()
    };
    let pair = Pair { listener, ..Pair::new(server, again(), true) };
    talk(&pair, true);
    talk(&pair, false);
}

// Shows: RMB-13, SOCK-4.
fn buffers_have_the_size_that_was_asked_for(site: &Site) {
    for (asked, size) in [
        (0, 16 << 10),
        (16 << 10, 16 << 10),
        (20_000, 32 << 10),
        (100_000, 128 << 10),
        (1 << 20, 1 << 20),
        (64 << 20, 1 << 20),
    ] {
        // The client's buffer is as asked for, the server's has the default size: sizes need not be
        // equal.
        let mut config = site.config(1);
        config.recv_buffer = asked;
        let pair = Pair::new(site.server(0), site.open(Role::Client, config).unwrap(), true);
        let (client, server) = pair.connect();
        assert_eq!((info(&client).local_buffer, info(&client).peer_buffer), (size, 64 << 10));
        assert_eq!((info(&server).local_buffer, info(&server).peer_buffer), (64 << 10, size));
        server.set_nonblocking(true).unwrap();
        let bytes = pattern(asked as u64, 2 << 20);
        let sent = server.send(&bytes).unwrap();
        assert_eq!(sent, size as usize - 32);
        assert!(read_exactly(&client, sent) == bytes[..sent]);
    }
}

fn idle_peers_are_forgotten_with_their_buffers(site: &Site) {
    let pair =
        site.pair_with(|config| config.testing.idle_peer_timeout = Duration::from_millis(300));
    for _ in 0..2 {
        let (client, server) = pair.connect();
        assert!(info(&client).first_contact, "the peer was forgotten meanwhile");
        send_all(&client, b"x");
        read_exactly(&server, 1);
        drop((client, server));
        eventually("peers are forgotten", || {
            pair.client.totals().peers + pair.server.totals().peers == 0
        });
        eventually("buffers are given back", || {
            site.devices().is_none_or(|devices| devices.dmbs == 0 && devices.attached == 0)
        });
    }
}
