// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Streams between guests that go on when daemons, devices and machines come and go below them.

use std::time::Duration;

use smc_tests::eventually;
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

/// How long a program in a guest may take for an answer. An emulated guest on a busy host is slow.
const LIMIT: Duration = Duration::from_secs(300);
/// Streams of a client.
const STREAMS: &str = "16";
/// Port of the server.
const PORT: &str = "5000";

/// How often each loss is tried: `SMC_OUTLIVE`, once by default.
fn runs() -> u32 {
    std::env::var("SMC_OUTLIVE").map_or(1, |text| text.parse().expect("SMC_OUTLIVE is a number"))
}

fn program(words: &[&str]) -> Run {
    let run = Run::from([&["smc-test-peer", "streams"], words].concat().as_slice());
    run.env("RUST_LOG", "guest_driver=debug,virtio_ism=info").within(LIMIT)
}

/// A server that echoes.
#[track_caller]
pub(crate) fn serve(guest: &Guest, path: &str) -> Job {
    let mut server = guest.spawn(program(&["serve", "pci", path, &format!("0.0.0.0:{PORT}")]));
    assert_eq!(server.line(), "listens");
    server
}

/// A client with some streams.
pub(crate) struct Streams(Job);

impl Streams {
    #[track_caller]
    pub(crate) fn new(guest: &Guest, server: &Guest, path: &str) -> Streams {
        let address = format!("{}:{PORT}", server.ip());
        let run = program(&["talk", "pci", path, &address, STREAMS]).open_stdin();
        Streams(guest.spawn(run))
    }

    /// Sends a command and returns the answer.
    #[track_caller]
    pub(crate) fn command(&mut self, command: &str) -> String {
        self.0.feed(&format!("{command}\n"));
        self.0.line()
    }

    /// New streams, as soon as they are SMC, on which bytes flow.
    #[track_caller]
    pub(crate) fn flow(&mut self) {
        eventually("new streams are SMC", || self.command("open") == "open smc");
        assert_eq!(self.command("flow"), "flows");
    }

    /// All streams go on over TCP, and end with all of their bytes.
    #[track_caller]
    pub(crate) fn finish_on_tcp(&mut self, what: &str) {
        assert_eq!(self.command("left"), "left", "{what}");
        self.finish(what);
    }

    /// All streams go on, and end with all of their bytes.
    #[track_caller]
    pub(crate) fn finish(&mut self, what: &str) {
        assert_eq!(self.command("more"), "more", "{what}");
        let said = self.command("finish");
        assert!(said.starts_with("whole "), "{what}: {said}");
        println!("{what}: {said}");
    }
}

/// What takes the device of one end, or of both.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// The daemon is stopped by SIGTERM, and started again.
    Stopped,
    /// It is killed.
    Killed,
    /// `ctl remove` of the client's guest.
    Removed,
    /// `ctl drain` of it.
    Drained,
    /// QEMU's `device_del`.
    Unplugged,
}

impl Loss {
    #[track_caller]
    fn happens(self, bed: &Bed, guest: &Guest) {
        match self {
            Loss::Stopped => bed.stop_daemon(),
            Loss::Killed => bed.kill_daemon(),
            Loss::Removed => bed.management().remove("b").unwrap(),
            Loss::Drained => {
                let left = bed.management().drain("b", None, false).unwrap();
                assert_eq!(left.asked, 1, "{left:?}");
            }
            Loss::Unplugged => guest.unplug(0),
        }
    }

    /// The guest has a device again.
    #[track_caller]
    fn is_over(self, bed: &Bed, guest: &Guest) {
        match self {
            Loss::Stopped | Loss::Killed => bed.start_daemon(),
            Loss::Removed => bed.add_again("b"),
            Loss::Drained => bed.restart_daemon(),
            Loss::Unplugged => {
                guest.plug(0);
                eventually("the guest has its device", || {
                    guest.ok("smc devices --bind").contains("bound to vfio-pci")
                });
            }
        }
    }
}

#[track_caller]
fn streams_go_on(path: &str, losses: &[Loss]) {
    let bed = Bed::new();
    let [a, b] = bed.boot([Vm::named("a"), Vm::named("b").unpluggable()]);
    let server = serve(&a, path);
    let mut client = Streams::new(&b, &a, path);
    for run in 0..runs() {
        for loss in losses {
            client.flow();
            loss.happens(&bed, &b);
            client.finish_on_tcp(&format!("{path}, {loss:?}, run {run}"));
            loss.is_over(&bed, &b);
        }
    }
    client.flow();
    client.finish("at the end");
    assert_eq!(server.out(), "listens\n", "no connection has failed");
}

const DAEMON: [Loss; 4] = [Loss::Stopped, Loss::Killed, Loss::Removed, Loss::Drained];

#[test]
fn streams_in_the_window_go_on_when_the_daemon_goes() {
    streams_go_on("window", &DAEMON);
}

#[test]
fn streams_go_on_when_their_device_is_unplugged() {
    streams_go_on("window", &[Loss::Unplugged]);
}
