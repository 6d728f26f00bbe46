// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server that reads by system calls of its own, with clients finding the server by TCP option
//! 254. The program gets one Proposal as data, and no further one; all clients are served. The
//! option needs root. Without root this test prints SKIPPED, and fails where `CI=true`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "../../tests/rendezvous/bed.rs"]
mod bed;
mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use common::{Fabric, await_listener, my_role, role};
use smc_rendezvous::{Options, Rendezvous};

const PORT: u16 = 6000;
const TEST: &str = "a_listener_whose_program_reads_by_its_own_calls_answers_no_more";
const CLIENTS: usize = 4;

/// Answers requests, and refuses others. Says how many these were.
fn serve(port: u16) {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let (mut served, mut refused) = (0, 0);
    while served < CLIENTS {
        let (stream, _) = listener.accept().unwrap();
        let mut room = [0; 1000];
        let n = rustix::io::read(&stream, &mut room).unwrap();
        let answer: &[u8] = if &room[..n] == b"hello" { b"HELLO" } else { b"400" };
        rustix::io::write(&stream, answer).unwrap();
        if answer == b"HELLO" { served += 1 } else { refused += 1 }
    }
    println!("refused {refused}.");
}

#[test]
fn a_listener_whose_program_reads_by_its_own_calls_answers_no_more() {
    match my_role() {
        None => {}
        Some((role, port)) if role == "server" => return serve(port),
        Some((_, port)) => {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(b"hello").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert_eq!(text, "HELLO");
            return;
        }
    }
    bed::run(|| {
        bed::ip("link set lo up");
        let fabric = Fabric::new(CLIENTS + 1);
        let passed = Rendezvous::attach(Options::default()).unwrap().pass_on().unwrap();
        let program = || {
            let mut command = fabric.smc(std::env::current_exe().unwrap());
            command
                .env("SMC_RUN_CONNECT", "")
                .env("SMC_RUN_RENDEZVOUS", "auto")
                .env("SMC_RUN_OPTION", passed.to_string());
            command
        };
        let server = role(&mut program(), TEST, "server", PORT);
        await_listener(PORT);
        for _ in 0..CLIENTS {
            role(&mut program(), TEST, "client", PORT).finish_beside(&[&server]);
        }
        let said = server.finish();
        assert!(said.contains("refused 1."), "{said}");
        assert_eq!(fabric.decided().0, 0);
        assert_eq!((fabric.said("own_calls"), fabric.said("\"again\"")), (1, 1));
    });
}
