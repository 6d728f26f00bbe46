// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program at its limit of descriptors (RLIMIT_NOFILE) holds as many connections as on TCP: a
//! connection on SMC takes the program's own number and no other. If few numbers are left, new
//! connections stay on TCP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::process::Command;
use std::time::Duration;

use common::{Fabric, Running, await_listener, compiled, free_port};

/// The limit of `ulimit -n 1024`.
const LIMIT: &str = "1024";
/// The library has about twenty numbers of its own, and each of the tests one for its report.
const CLIENTS: usize = 980;
/// For waits that check each client in each call.
const LOWER_LIMIT: &str = "512";
const FEWER_CLIENTS: usize = 470;

/// Clients and a server with this way to wait, at a limit. Returns the number of ends on SMC.
fn serve(way: &str, clients: usize, limit: &str) -> usize {
    let fabric = Fabric::new(2);
    let port = free_port().to_string();
    let program = compiled("limited", &[]);
    let start = |command: &mut Command| Running::start(command).within(Duration::from_secs(240));
    let number = clients.to_string();
    let server = start(fabric.smc(&program).args([way, &port, &number, limit]));
    await_listener(port.parse().unwrap());
    let client = start(fabric.smc(&program).args(["client", &port, &number]));
    assert_eq!(client.finish_beside(&[&server]), format!("answered {clients}\n"), "{way}");
    assert_eq!(server.finish(), "served\n", "{way}");
    assert_eq!(fabric.broken(), [""; 0], "{way}");
    let (smc, _) = fabric.decided();
    // The server has a device, and its clients are told so.
    assert!(smc == 0 || fabric.said("NOISM2SUPP") == 0, "{way}");
    smc
}

#[test]
fn a_server_by_epoll_holds_as_many_clients_at_its_limit_as_on_tcp() {
    let smc = serve("epoll", CLIENTS, LIMIT);
    assert!(smc >= 2 * 600, "{smc}");
}

#[test]
fn a_server_by_poll_holds_as_many_clients_at_its_limit_as_on_tcp() {
    let smc = serve("poll", FEWER_CLIENTS, LOWER_LIMIT);
    assert!(smc >= 2 * 250, "{smc}");
}

#[test]
fn a_server_by_select_holds_as_many_clients_at_its_limit_as_on_tcp() {
    let smc = serve("select", FEWER_CLIENTS, LOWER_LIMIT);
    assert!(smc >= 2 * 250, "{smc}");
}

#[test]
fn a_server_with_a_thread_for_each_client_holds_as_many_at_its_limit_as_on_tcp() {
    for way in ["threads", "thread-poll"] {
        let smc = serve(way, CLIENTS, LIMIT);
        assert!(smc >= 2 * 600, "{way}: {smc}");
    }
}

#[test]
fn connections_stay_on_tcp_where_the_limit_leaves_no_room_for_a_device() {
    for limit in [24, 64, 100, 255] {
        // Standard streams, listener, set, a file, and the library's numbers open for a moment.
        assert_eq!(serve("epoll", limit - 12, &limit.to_string()), 0, "{limit}");
    }
}
