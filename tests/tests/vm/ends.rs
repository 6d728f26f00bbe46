// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server and a client in two guests, for tests acting on the machines below.

use std::time::Duration;

use smc_tests::eventually;
use smc_tests::vm::{Guest, Job, Run};

/// Port of the server.
pub(crate) const PORT: &str = "5000";

/// How long a client may take for an answer: longer than one CLC message of `smc_tests::talk`.
const LIMIT: Duration = Duration::from_secs(180);

/// Puts the driver's log into the transcript, kept if the test fails.
fn logged(run: Run) -> Run {
    run.env("RUST_LOG", "guest_driver=debug")
}

/// An echoing server, see `smc_tests::talk`.
#[track_caller]
pub(crate) fn serve(guest: &Guest) -> Job {
    let address = format!("0.0.0.0:{PORT}");
    let mut server =
        guest.spawn(logged(Run::from(["smc-test-peer", "serve", "pci", &address])).within(LIMIT));
    let first = server.line();
    assert!(first.starts_with("listens as "), "{first}");
    server
}

/// A client carrying out commands.
pub(crate) struct Client(Job);

impl Client {
    /// In a guest; its server is in the other one.
    #[track_caller]
    pub(crate) fn new(guest: &Guest, server: &Guest) -> Client {
        Client::on("pci", guest, server)
    }

    /// On a device of the guest.
    #[track_caller]
    pub(crate) fn on(device: &str, guest: &Guest, server: &Guest) -> Client {
        let address = format!("{}:{PORT}", server.ip());
        let run = Run::from(["smc-test-peer", "talk", device, &address]);
        Client(guest.spawn(logged(run).open_stdin().within(LIMIT)))
    }

    /// Sends a command and returns the answer.
    #[track_caller]
    pub(crate) fn command(&mut self, command: &str) -> String {
        self.0.feed(&format!("{command}\n"));
        self.0.line()
    }

    /// The next line, of a job in the background.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        self.0.line()
    }

    /// A new connection, required to be SMC.
    #[track_caller]
    pub(crate) fn connect(&mut self) {
        assert_eq!(self.command("connect"), "connected smc");
        self.ping();
    }

    /// Connects again and again until the connection is SMC.
    #[track_caller]
    pub(crate) fn connect_eventually(&mut self) {
        eventually("a new connection is SMC", || self.command("connect") == "connected smc");
        self.ping();
    }

    /// Bytes go to the server and back.
    #[track_caller]
    pub(crate) fn ping(&mut self) {
        assert_eq!(self.command("ping"), "pong");
    }

    /// Ends the program, to free its device.
    #[track_caller]
    pub(crate) fn end(self) {
        self.0.close_stdin();
        self.0.wait().ok();
    }

    /// The connection fails in the background: after how many milliseconds without bytes.
    #[track_caller]
    pub(crate) fn failed_after(&mut self) -> u64 {
        self.failed_by(&["ConnectionReset"])
    }

    /// The connection ends in the background after a kill of the peer's process. If the process had
    /// read every byte sent, the kernel's FIN makes an end of data, as on TCP.
    #[track_caller]
    pub(crate) fn ended_by_kill(&mut self) {
        self.failed_by(&["ConnectionReset", "UnexpectedEof", "BrokenPipe"]);
    }

    #[track_caller]
    fn failed_by(&mut self, kinds: &[&str]) -> u64 {
        let said = self.line();
        let words: Vec<&str> = said.split_whitespace().collect();
        assert!(words[0] == "failed" && kinds.contains(&words[1]), "{said}");
        let at = words.iter().position(|word| *word == "ms").unwrap();
        words[at - 1].parse().unwrap()
    }
}
