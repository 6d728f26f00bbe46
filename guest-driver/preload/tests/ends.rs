// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end seen by unmodified programs when their connections are cut: the end of data only if the
//! writer has closed, or its process has ended. And the bytes read by a client whose device goes
//! before the answer of its server: the server's bytes, and no byte of the protocol.
//!
//! `SMC_ENDS=500` is the number of runs of each case; the default is short.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/c.rs"]
mod c;
mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::{Fabric, Running, await_listener, free_port, my_role, role};
use smc_core::handshake::{
    AwaitProposal, Config, DeclineReason, Dmbe, IsmDevice, Selection, ServerStep,
};
use smc_core::time::Tick;
use smc_core::wire::ids::{Chid, DmbToken, Eid, Gid, LinkId, PeerId, SizeCode};

fn runs() -> u64 {
    std::env::var("SMC_ENDS").map_or(1, |text| text.parse().unwrap())
}

/// Number of bytes of a writer that closes in order.
const WHOLE: usize = 700_000;

fn writer(port: u16) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    c::set_send_buffer(&stream, 4096);
    let whole = std::env::var("WHOLE").is_ok();
    let block = [7u8; 7000];
    let mut done = 0;
    while !(whole && done == WHOLE) && stream.write_all(&block).is_ok() {
        done += block.len();
    }
}

/// Reads to the end, and reports how the data ended.
fn say_end(mut stream: &TcpStream, pause: Duration) {
    let (mut buf, mut count) = ([0; 4096], 0);
    let end = loop {
        match stream.read(&mut buf) {
            Ok(0) => break "end",
            Ok(n) => count += n,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break "reset",
            Err(error) => panic!("{error}"),
        }
        thread::sleep(pause);
    };
    println!("saw {end} after {count}");
}

fn reader(listener: TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    // The connection is decided now.
    stream.read_exact(&mut [0; 7000]).unwrap();
    match &*std::env::var("READER").unwrap() {
        "fast" => say_end(&stream, Duration::ZERO),
        "slow" => say_end(&stream, Duration::from_micros(300)),
        // A relay carries the bytes for the child.
        "child" => c::wait(c::fork(|| say_end(&stream, Duration::ZERO))),
        // A relay for a program without the library.
        _ => {
            let mut program = Command::new("cat");
            program.env_remove("LD_PRELOAD").stdin(OwnedFd::from(stream)).stdout(Stdio::null());
            let status = program.stderr(Stdio::null()).status().unwrap();
            println!("saw {}", if status.success() { "end" } else { "reset" });
        }
    }
}

const READERS: [&str; 4] = ["fast", "slow", "child", "program"];

/// The stream of a writer.
enum Kind {
    /// Without end.
    Endless,
    /// With an end.
    Whole,
    /// Without end, on a connection that ends with its device.
    EndsWithDevice,
}

/// Runs each reader against a writer; `cut` cuts their connection. Returns the report of the
/// reader.
fn meet(test: &str, reader: &str, kind: Kind, cut: impl FnOnce(&mut Fabric, Running)) -> String {
    let mut fabric = Fabric::new(2);
    let port = free_port();
    let this = std::env::current_exe().unwrap();
    let mut server = fabric.smc(&this);
    let server = role(server.env("READER", reader), test, "server", port);
    await_listener(port);
    let mut client = fabric.smc(&this);
    match kind {
        Kind::Endless => {}
        Kind::Whole => drop(client.env("WHOLE", "1")),
        Kind::EndsWithDevice => drop(client.env("SMC_RUN_OUTLIVE", "false")),
    }
    let client = role(&mut client, test, "client", port);
    common::eventually(|| fabric.decided().0 == 2);
    cut(&mut fabric, client);
    let said = server.finish();
    let found = said.lines().find_map(|line| line.split_once("saw ")).map(|(_, end)| end);
    found.unwrap_or_else(|| panic!("{reader}: {said}")).into()
}

fn is_program() -> bool {
    let Some((role, port)) = my_role() else { return false };
    match &*role {
        "server" => reader(TcpListener::bind(("127.0.0.1", port)).unwrap()),
        _ => writer(port),
    }
    true
}

#[test]
fn a_stream_that_lost_its_devices_is_reset_for_the_reader() {
    if is_program() {
        return;
    }
    let test = "a_stream_that_lost_its_devices_is_reset_for_the_reader";
    for run in 0..runs() {
        for reader in READERS {
            for device in [None, Some("00"), Some("01")] {
                let said = meet(test, reader, Kind::EndsWithDevice, |fabric, client| {
                    thread::sleep(Duration::from_millis(20 + run % 50));
                    match device {
                        None => fabric.kill_daemon(),
                        Some(name) => fabric.remove_device(name),
                    }
                    client.finish();
                });
                assert!(said.starts_with("reset"), "{reader}, {device:?}, run {run}: {said}");
            }
        }
    }
}

#[test]
fn the_end_of_a_writer_is_an_end_of_data() {
    if is_program() {
        return;
    }
    let test = "the_end_of_a_writer_is_an_end_of_data";
    for run in 0..runs() {
        for reader in READERS {
            let said = meet(test, reader, Kind::Endless, |_, client| {
                thread::sleep(Duration::from_millis(20 + run % 50));
                // Killed, as on TCP.
                drop(client);
            });
            assert!(said.starts_with("end"), "{reader}, killed, run {run}: {said}");
            let said = meet(test, reader, Kind::Whole, |_, client| drop(client.finish()));
            let all = format!("end after {}", WHOLE - 7000);
            let right = if reader == "program" { said == "end" } else { said == all };
            assert!(right, "{reader}, closed, run {run}: {said}");
        }
    }
}

/// A program whose relay lives in its parent: the parent's end is a reset, because bytes may be lost.
#[test]
fn the_end_of_a_connection_s_owner_is_a_reset() {
    fn owner(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 7000]).unwrap();
        let owner = rustix::process::getpid();
        c::fork(|| {
            (&stream).read_exact(&mut [0; 7000]).unwrap();
            rustix::process::kill_process(owner, rustix::process::Signal::KILL).unwrap();
            say_end(&stream, Duration::ZERO);
        });
        thread::sleep(Duration::from_secs(60));
    }
    if let Some((role, port)) = my_role() {
        match &*role {
            "server" => owner(TcpListener::bind(("127.0.0.1", port)).unwrap()),
            _ => writer(port),
        }
        return;
    }
    let test = "the_end_of_a_connection_s_owner_is_a_reset";
    let fabric = Fabric::new(2);
    let port = free_port();
    let this = std::env::current_exe().unwrap();
    let server = role(&mut fabric.smc(&this), test, "server", port);
    await_listener(port);
    let client = role(&mut fabric.smc(&this), test, "client", port);
    client.finish();
    common::eventually(|| server.said().contains("reset after"));
}

/// Takes a client's Proposal.
fn proposal(tcp: &TcpStream) -> Selection {
    let mut config = Config::new(PeerId([9; 8]));
    config.ueids = vec![Eid::new(guest_driver::socket::DEFAULT_EID).unwrap()];
    config.devices = vec![IsmDevice { chid: Chid(0xff00), gid: Gid([9; 16]) }];
    let awaiting = AwaitProposal::new(Arc::new(config), Tick(0));
    let message = message(tcp, awaiting.reader());
    match awaiting.handle(&message) {
        ServerStep::Eligible(selection) => selection,
        other => panic!("{other:?}"),
    }
}

fn message(mut tcp: &TcpStream, mut reader: smc_core::handshake::ClcReader) -> Vec<u8> {
    loop {
        if let Some(message) = reader.message() {
            return message.to_vec();
        }
        let n = tcp.read(reader.space()).unwrap();
        assert!(n > 0, "the client has closed");
        reader.filled(n).unwrap();
    }
}

fn asks(port: u16) {
    let mut stream = match &*std::env::var("CONNECT").unwrap() {
        "blocking" => TcpStream::connect(("127.0.0.1", port)).unwrap(),
        _ => c::connect_nonblocking(port),
    };
    stream.set_nonblocking(false).unwrap();
    stream.write_all(b"question").unwrap();
    let mut answer = [0; 6];
    stream.read_exact(&mut answer).unwrap();
    println!("answer: {}", answer.escape_ascii());
}

#[test]
fn a_client_whose_device_goes_before_the_answer_reads_no_byte_of_the_protocol() {
    if let Some((_, port)) = my_role() {
        return asks(port);
    }
    let test = "a_client_whose_device_goes_before_the_answer_reads_no_byte_of_the_protocol";
    let this = std::env::current_exe().unwrap();
    for how in ["blocking", "nonblocking"] {
        for accepts in [false, true] {
            for removed in [false, true] {
                let mut fabric = Fabric::new(1);
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let port = listener.local_addr().unwrap().port();
                let mut client = fabric.smc(&this);
                client.env("CONNECT", how).env("SMC_RUN_RENDEZVOUS", "off");
                let client = role(&mut client, test, "client", port);
                let (mut tcp, _) = listener.accept().unwrap();
                let selection = proposal(&tcp);
                match removed {
                    true => fabric.remove_device("00"),
                    false => fabric.kill_daemon(),
                }
                thread::sleep(Duration::from_millis(150));
                if accepts {
                    let size = SizeCode::at_least(65536).unwrap();
                    let own = Dmbe { token: DmbToken(7), index: 0, size };
                    let candidate = selection.candidates()[0];
                    let (awaiting, accept) =
                        selection.accept(candidate, None, own, LinkId([7; 4]), Tick(0));
                    tcp.write_all(&accept).unwrap();
                    let reply = message(&tcp, awaiting.reader());
                    let step = awaiting.handle(&reply);
                    let declined =
                        matches!(step, smc_core::handshake::ConfirmStep::PeerDeclined(_));
                    assert!(declined, "{step:?}");
                } else {
                    let decline = selection.decline(DeclineReason::NoIsmDevice);
                    tcp.write_all(&decline.message).unwrap();
                }
                tcp.write_all(b"answer").unwrap();
                let mut question = [0; 8];
                tcp.read_exact(&mut question).unwrap();
                assert_eq!(&question, b"question", "{how}, {accepts}, {removed}");
                let said = client.finish();
                assert!(said.contains("answer: answer"), "{how}, {accepts}, {removed}: {said}");
            }
        }
    }
}
