// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of a little-endian Linux, compared byte for byte with a group's own.

use std::time::Duration;

use smc_core::link_group::*;
use smc_core::time::Tick;
use smc_core::wire::ids::{Gid, LinkLimits, Rkey};
use smc_core::wire::llc::DeleteReason;

use super::support::*;

/// `00*8` is eight zero bytes; blanks and `|` mean nothing.
fn bytes(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for word in text.split([' ', '|', '\n']).filter(|word| !word.is_empty()) {
        let (digits, times) = match word.split_once('*') {
            Some((digits, times)) => (digits, times.parse().unwrap()),
            None => (word, 1),
        };
        for _ in 0..times {
            let pairs = digits.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap());
            out.extend(pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()));
        }
    }
    out
}

const SERVER_LINK: &str = "525400000001 | 00*10 ffff 0a090001 | 000011 | 01 | 00000101";
const CLIENT_LINK: &str = "525400000002 | 00*10 ffff 0a090002 | 000111 | 01 | 00000101";
const REGION: Region = Region { rkey: Rkey(0x3e0), address: 0xff11_0000_00d9_0000 };

fn linux(generation: Generation) -> Pair {
    assert_eq!(rnic(SERVER, 0).gid, Gid::from_ipv4([10, 9, 0, 1]));
    let mut pair = Pair::new(params_of(generation, PeerProfile::LINUX, [1, 1]));
    // The keys come from the captures, not from the hosts.
    pair.honest = false;
    pair
}

fn v21_255() -> Generation {
    Generation::V21(LinkLimits { max_conns: 255, max_links: 2 })
}

fn check(pair: &Pair, n: usize, from: usize, text: &str) {
    assert_eq!((pair.trace[n].0, &pair.trace[n].1), (from, &bytes(text)), "message {n}");
}

// Shows: CLCV2-84, LLC-12, LLC-16, LLCV2-10, LLCV2-11, LLCV2-13.
#[test]
fn confirm_link_in_both_versions() {
    let mut pair = linux(v21_255());
    pair.run_until_idle();
    check(&pair, 0, SERVER, &format!("212c0003 {SERVER_LINK} 02 ff 00*8"));
    check(&pair, 1, CLIENT, &format!("212c0083 {CLIENT_LINK} 02 ff 00*8"));
    let mut pair = linux(v1());
    pair.run_until_idle();
    check(&pair, 0, SERVER, &format!("012c0003 {SERVER_LINK} 02 00 00*8"));
    check(&pair, 1, CLIENT, &format!("012c0083 {CLIENT_LINK} 02 00 00*8"));
}

// Shows: LLC-19.
#[test]
fn add_link_and_its_refusal() {
    // The attempt with the only RNIC. A Linux server has the direct bit and its own GID in the
    // request as well; both count for nothing there.
    let new = "525400000001 0000 | 00*10 ffff 0a090001 | 000012 02 03 001200 00*8";
    let mut pair = linux(v21_255());
    pair.run_until_idle();
    check(
        &pair,
        2,
        SERVER,
        &format!("22580000 {new} | 80 00 00*16 00*8 0101 | 00000011 00000012 0000001200000000"),
    );
    check(&pair, 3, CLIENT, &format!("222c00c0 {new}"));
    let mut pair = linux(v1());
    pair.run_until_idle();
    check(&pair, 2, SERVER, &format!("022c0000 {new}"));
    check(&pair, 3, CLIENT, &format!("022c01c0 {new}"));
}

// Shows: LLCV2-19, LLCV2-20, LLCV2-41.
#[test]
fn linux_add_link_is_refused_as_linux_does() {
    let mut pair = linux(v21_255());
    for _ in 0..2 {
        pair.drain(SERVER);
        pair.drain(CLIENT);
        let wire = pair.wires.pop_front().unwrap();
        pair.deliver(wire);
    }
    let body = "525400000001 0000 00*10 ffff 0a090001 000012 02 03 55c6cb 00*8";
    let request = bytes(&format!(
        "22580000 {body} | 80 00 00*10 ffff 0a090001 00*8 0100 | 000003e0 00000570 ff11000000d90000"
    ));
    let group = &mut pair.hosts[CLIENT].group;
    group.handle_message(LinkKey::FIRST, &request, pair.now).unwrap();
    pair.trace.clear();
    pair.drain(CLIENT);
    check(&pair, 0, CLIENT, &format!("222c00c0 {body}"));
    assert!(pair.hosts[CLIENT].group.is_usable());
}

// Shows: LLC-4, LLC-46, LLC-49, LLCV2-32, LLCV2-36.
#[test]
fn keys_come_and_go() {
    for (generation, confirm, delete, deleted) in
        [(v21_255(), "262c00", "292c00", "00*36"), (v1(), "062c00", "092c00", "000003e0 00*32")]
    {
        let mut pair = linux(generation);
        pair.run_until_idle();
        pair.forget();
        let group = &mut pair.hosts[CLIENT].group;
        group.add_rmb(RmbId(5), None, &[(LinkKey::FIRST, REGION)], pair.now).unwrap();
        pair.hosts[CLIENT].rmbs.insert(RmbId(5));
        pair.run_until_idle();
        let body = "00 000003e0 ff11000000d90000 00*27";
        check(&pair, 0, CLIENT, &format!("{confirm}00 {body}"));
        check(&pair, 1, SERVER, &format!("{confirm}80 {body}"));
        pair.hosts[CLIENT].group.remove_rmb(RmbId(5), pair.now);
        pair.run_until_idle();
        check(&pair, 2, CLIENT, &format!("{delete}00 01000000 000003e0 00*32"));
        check(&pair, 3, SERVER, &format!("{delete}80 01000000 {deleted}"));
    }
}

// Shows: LLC-35, LLC-58, LLCV2-31.
#[test]
fn silence_and_the_end() {
    for (generation, test, delete) in [(v21_255(), "272c00", "242c00"), (v1(), "072c00", "042c00")]
    {
        let mut pair = linux(generation);
        pair.run_until_idle();
        pair.forget();
        pair.run(Duration::from_secs(31));
        // The server has heard nothing for a little less long.
        check(&pair, 0, CLIENT, &format!("{test}00 00*40"));
        check(&pair, 1, SERVER, &format!("{test}80 00*40"));
        pair.forget();
        let group = &mut pair.hosts[CLIENT].group;
        group.connection_added(LinkKey::FIRST, pair.now).unwrap();
        group.terminate(DeleteReason::OPERATOR, pair.now);
        pair.run_until_idle();
        check(&pair, 0, CLIENT, &format!("{delete}40 00 00020000 00*35"));
        check(&pair, 1, SERVER, &format!("{delete}60 00 00020000 00*35"));
        assert!(pair.over() && pair.now > Tick(0));
    }
}
