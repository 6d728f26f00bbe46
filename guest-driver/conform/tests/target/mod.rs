// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A target for the suite: the handshake of smc-core over TCP, without any device. A [`Fault`]
//! breaks one rule.

#![allow(dead_code, unused_imports, reason = "each test program uses its part")]
#![allow(clippy::unwrap_used, reason = "a target that cannot run fails the test")]

mod client;
pub(crate) mod fabric;
pub(crate) mod faults;
pub(crate) mod hosts;
pub(crate) mod links;
pub(crate) mod llc_faults;
mod server;

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use smc_conform::{CaseResult, Cases, Names, Results, RunStatus, Verdict};

use smc_core::handshake::{ClcReader, Dmbe, HandshakeError, LinkEnd, Terms};
use smc_core::wire::ids::{DmbToken, Gid, LinkId, Mtu, Psn, Qpn, Rkey, SizeCode};

pub(crate) use client::Clients;
pub(crate) use faults::Fault;
pub(crate) use hosts::Host;
pub(crate) use links::Network;
pub(crate) use server::Server;

/// CHID of the target's fabric.
pub(crate) const CHID: u16 = 0xff01;
/// The target's EID.
pub(crate) const EID: &str = "CONFORMANCE";
/// How long the target waits for a message.
pub(crate) const WAIT: Duration = Duration::from_millis(4000);

fn dmbe() -> Dmbe {
    Dmbe { token: DmbToken(0x5354), index: 0, size: SizeCode::at_least(65536).unwrap() }
}

const LINK: LinkId = LinkId([0, 0, 0, 9]);

fn link_end() -> LinkEnd {
    LinkEnd {
        gid: Gid::from_ipv4(Ipv4Addr::LOCALHOST.octets()),
        mac: hosts::mac(),
        qpn: Qpn::new(0x55),
        psn: Psn::new(0x1234),
        mtu: Mtu::B1024,
        rkey: Rkey(0x99),
        address: 0xff11_0000_0000_0000,
        index: 1,
        token: 0x77,
        size: SizeCode::at_least(65536).unwrap(),
        direct: true,
    }
}

/// Known peers of SMC-D, as remembered by an implementation.
type Known = Mutex<HashMap<(u16, [u8; 16]), Terms>>;

/// Reads one message, subject to the fault.
fn read(mut tcp: &TcpStream, mut reader: ClcReader, fault: &Fault) -> Result<Vec<u8>, Wrong> {
    loop {
        if let Some(message) = reader.message() {
            let mut message = message.to_vec();
            (fault.incoming)(&mut message);
            return Ok(message);
        }
        let space = reader.space();
        let len = if fault.reads_all { space.len() } else { space.len().min(4096) };
        match tcp.read(&mut space[..len]) {
            Ok(n) => {
                (fault.segment)(&mut space[..n]);
                reader.filled(n).map_err(Wrong::Handshake)?;
            }
            Err(error) => return Err(Wrong::Io(error)),
        }
    }
}

/// Why a message did not come.
enum Wrong {
    Handshake(HandshakeError),
    Io(io::Error),
}

impl Wrong {
    fn is_timeout(&self) -> bool {
        matches!(self, Wrong::Io(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Sends a message, changed by the fault.
fn write(mut tcp: &TcpStream, mut message: Vec<u8>, fault: &Fault) {
    (fault.outgoing)(&mut message);
    let _ = tcp.write_all(&message);
}

/// Sends received data back, until the peer's end.
fn echo(mut tcp: &TcpStream, fault: &Fault) {
    let _ = tcp.set_read_timeout(Some(Duration::from_secs(20)));
    let mut buffer = [0; 4096];
    let mut skip = fault.loses;
    while let Ok(n @ 1..) = tcp.read(&mut buffer) {
        let lost = skip.min(n);
        skip -= lost;
        if tcp.write_all(&buffer[lost..n]).is_err() {
            return;
        }
    }
}

/// Holds an SMC connection until the peer ends.
fn hold(mut tcp: &TcpStream) {
    let _ = tcp.set_read_timeout(Some(Duration::from_secs(20)));
    let mut buffer = [0; 4096];
    while let Ok(1..) = tcp.read(&mut buffer) {}
}

/// Resets the connection: an orderly end might pass for success.
fn abort(tcp: &TcpStream) {
    let _ = socket2::SockRef::from(tcp).set_linger(Some(Duration::ZERO));
}

/// Targets tested at a time, few enough for prompt processor time.
const AT_A_TIME: usize = 6;

/// The faults not noticed by `found`.
pub(crate) fn missed(
    faults: &[Fault],
    found: impl Fn(&Fault) -> Option<String> + Sync,
) -> Vec<&'static str> {
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match found(fault) {
                        Some(found) => println!("{}: {found}", fault.name),
                        None => missed.lock().unwrap().push(fault.name),
                    }
                }
            });
        }
    });
    missed.into_inner().unwrap()
}

/// The cases of the suite, loaded once.
pub(crate) fn cases() -> &'static Cases {
    static CASES: OnceLock<Cases> = OnceLock::new();
    CASES.get_or_init(|| Cases::load(None).unwrap())
}

/// The suite's parameters for a host.
pub(crate) fn names(host: &Host) -> Names {
    let ipv4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
    let ipv6 = [0xfd, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    Names {
        eid: EID.into(),
        seid: host.config.seid.map(|_| hosts::SEID.into()),
        chid: host.config.devices.first().map_or(CHID, |device| device.chid.0),
        gid: fabric::SUITE,
        mac: links::SUITE_MAC,
        roce_gid: if host.route.ipv6 { ipv6 } else { ipv4 },
        subnet: ([127, 0, 0, 0], 8),
        prefix: host.route.ipv6.then_some(hosts::PREFIX),
    }
}

/// A known deviation of a client without SMC-R (reading D-14).
const DEVIATIONS: [&str; 1] = ["client-proposal-v2-mac"];

/// Whether a case went badly. The target is not Linux, so the deviations of Linux count as well.
fn is_bad(one: &CaseResult) -> bool {
    let is_known = DEVIATIONS.contains(&one.case.id.as_str());
    one.verdict == Verdict::Fail || one.verdict == Verdict::DeviatesAsLinux && !is_known
}

/// Every bad case as a line, including mistakes of a case's author.
pub(crate) fn failures(results: &Results) -> Vec<String> {
    let is_mistake = |one: &CaseResult| one.says.contains(" has no field ");
    let bad = results.results.iter().filter(|one| is_bad(one) || is_mistake(one));
    bad.map(|one| format!("{} {}: {}", one.case.level.name(), one.case.id, one.says)).collect()
}

/// Factor on the times of the second attempt. 1, and so no second attempt, while the suite searches
/// for a fault of the target or of smc-core: the suite would find the fault twice.
pub(crate) fn time_factor(only: &[&str]) -> u32 {
    let is_broken = std::env::var("SMC_FAULT").is_ok_and(|number| number != "0");
    if only.is_empty() && !is_broken { 4 } else { 1 }
}

/// Ends the program at the first failed case if smc-core has a fault: one failure is enough.
pub(crate) fn progress(status: RunStatus<'_>) {
    let last = status.last;
    if is_bad(last) && std::env::var("SMC_FAULT").is_ok_and(|number| number != "0") {
        println!("FAIL {}: {}", last.case.id, last.says);
        std::process::exit(101);
    }
}
