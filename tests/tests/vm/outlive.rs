// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Streams between guests go on while daemons and devices end and restart below: over TCP, and over
//! the device once there is one again.

use std::thread;
use std::time::{Duration, Instant};

use smc_tests::eventually;
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

/// How long a program in a guest may take for an answer. An emulated guest on a busy host is slow.
const LIMIT: Duration = Duration::from_secs(300);
/// Streams of a client. One more connection is for requests.
const STREAMS: usize = 16;
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

/// An echoing server.
pub(crate) struct Server(Job);

#[track_caller]
pub(crate) fn serve(guest: &Guest, path: &str) -> Server {
    let run = program(&["serve", "pci", path, &format!("0.0.0.0:{PORT}")]).open_stdin();
    let mut server = guest.spawn(run);
    assert_eq!(server.line(), "listens");
    Server(server)
}

impl Server {
    /// The longest times without bytes since the last call.
    #[track_caller]
    pub(crate) fn pauses(&mut self) -> Pauses {
        self.0.feed("pauses\n");
        Pauses::parse(&self.0.line())
    }

    #[track_caller]
    pub(crate) fn assert_whole(&self) {
        let out = self.0.out();
        assert!(!out.contains("failed"), "a connection has failed: {out}");
    }
}

/// The longest times without bytes, ms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pauses {
    /// On connections of this stack.
    pub(crate) smc: u64,
    /// On connections always on TCP.
    pub(crate) tcp: u64,
}

impl Pauses {
    #[track_caller]
    fn parse(said: &str) -> Pauses {
        let numbers: Vec<u64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [smc, tcp] = numbers[..] else { panic!("{said}") };
        Pauses { smc, tcp }
    }
}

/// A client with some streams.
pub(crate) struct Streams {
    job: Job,
    count: usize,
}

impl Streams {
    #[track_caller]
    pub(crate) fn new(guest: &Guest, server: &Guest, path: &str) -> Streams {
        Streams::some(STREAMS, guest, server, path)
    }

    /// So many. A guest with two clients is emulated by one processor.
    #[track_caller]
    pub(crate) fn some(count: usize, guest: &Guest, server: &Guest, path: &str) -> Streams {
        let address = format!("{}:{PORT}", server.ip());
        let run = program(&["talk", "pci", path, &address, &count.to_string()]).open_stdin();
        Streams { job: guest.spawn(run), count }
    }

    /// Sends a command and returns the answer.
    #[track_caller]
    pub(crate) fn command(&mut self, command: &str) -> String {
        self.job.feed(&format!("{command}\n"));
        self.job.line()
    }

    /// Checks for every connection on a device, and none on its way.
    #[track_caller]
    pub(crate) fn assert_on_device(&mut self) {
        let said = format!("device {}, tcp 0, leaving 0", self.count + 1);
        assert_eq!(self.command("carriers"), said);
    }

    /// Checks for every connection on TCP.
    #[track_caller]
    pub(crate) fn assert_on_tcp(&mut self) {
        let said = format!("device 0, tcp {}, leaving 0", self.count + 1);
        assert_eq!(self.command("carriers"), said);
    }

    /// Makes new streams on SMC, if need be after retries, with bytes flowing.
    #[track_caller]
    pub(crate) fn flow(&mut self) {
        eventually("new streams are SMC", || self.command("open") == "open smc");
        assert_eq!(self.command("flow"), "flows");
    }

    /// Waits until every stream has left its device, and checks for flowing bytes.
    #[track_caller]
    pub(crate) fn leave(&mut self, what: &str) {
        assert_eq!(self.command("left"), "left", "{what}");
        assert_eq!(self.command("more"), "more", "{what}");
    }

    /// Waits for the same streams to return to a device, by the statistics, and checks for flowing
    /// bytes. Returns the time taken.
    #[track_caller]
    pub(crate) fn come_back(&mut self, what: &str) -> Duration {
        let begun = Instant::now();
        assert_eq!(self.command("back"), "back", "{what}");
        let took = begun.elapsed();
        assert_eq!(self.command("more"), "more", "{what}");
        self.assert_on_device();
        println!("{what}: back on a device after {took:?}");
        took
    }

    /// The same streams are on a device, perhaps again, and bytes flow.
    #[track_caller]
    pub(crate) fn stay(&mut self, what: &str) {
        let said = format!("device {}, tcp 0, leaving 0", self.count + 1);
        eventually("all streams are on a device", || self.command("carriers") == said);
        assert_eq!(self.command("more"), "more", "{what}");
    }

    /// The longest times without bytes since the last call.
    #[track_caller]
    pub(crate) fn pauses(&mut self) -> Pauses {
        Pauses::parse(&self.command("pauses"))
    }

    /// Checks for every stream going on, and ending with its bytes whole.
    #[track_caller]
    pub(crate) fn finish(&mut self, what: &str) {
        assert_eq!(self.command("more"), "more", "{what}");
        let said = self.command("finish");
        assert!(said.starts_with("whole "), "{what}: {said}");
        println!("{what}: {said}");
    }
}

/// The cause of a loss of one end's device, or of both.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// The daemon is stopped by SIGTERM, and started again.
    Stopped,
    /// The daemon is killed.
    Killed,
    /// `ctl remove` of the client's guest.
    Removed,
    /// `ctl drain` of the client's guest.
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

// The same streams live through all of them.
#[track_caller]
fn streams_go_on(path: &str, losses: &[Loss]) {
    let bed = Bed::new();
    let [a, b] = bed.boot([Vm::named("a"), Vm::named("b").unpluggable()]);
    let server = serve(&a, path);
    let mut client = Streams::new(&b, &a, path);
    for run in 0..runs() {
        client.flow();
        for loss in losses {
            let what = format!("{path}, {loss:?}, run {run}");
            loss.happens(&bed, &b);
            client.leave(&what);
            client.assert_on_tcp();
            loss.is_over(&bed, &b);
            let took = client.come_back(&what);
            // A ring with a life as long as the way back counts as a good one.
            thread::sleep(took + Duration::from_secs(1));
        }
        client.finish(&format!("{path}, run {run}"));
    }
    server.assert_whole();
}

#[test]
fn streams_over_moves_come_back() {
    streams_go_on("moves", &[Loss::Stopped, Loss::Killed, Loss::Drained, Loss::Unplugged]);
}

const DAEMON: [Loss; 4] = [Loss::Stopped, Loss::Killed, Loss::Removed, Loss::Drained];

#[test]
fn streams_in_the_window_come_back_when_the_daemon_does() {
    streams_go_on("window", &DAEMON);
}

#[test]
fn streams_come_back_when_a_device_is_plugged_in_again() {
    streams_go_on("window", &[Loss::Unplugged]);
}
