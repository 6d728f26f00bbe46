// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A restored machine goes on with a copy of the former window, until its driver notices the loss of
//! the device. Bytes sent by its programs in the meantime, and by their peers since the copy, are not
//! lost, or both ends are told of a reset.
//!
//! `a` stays, and `b` was saved.

use std::thread;
use std::time::Duration;

use smc_tests::helper::Helper;
use smc_tests::watch::LIMIT;
use smc_tests::{Dir, eventually, note, watched};

use crate::outlive::start_daemon;
use crate::support::PEER;

/// More than a ring and a send queue have room for.
const MUCH: usize = 10_000_000;

struct Ends {
    daemon: Option<Helper>,
    a: Helper,
    b: Helper,
    dir: Dir,
}

impl Ends {
    /// A connection made by `b`.
    fn new(path: &str) -> Ends {
        let dir = Dir::new();
        let daemon = start_daemon(&dir);
        let [a, b] = [0, 1].map(|n| {
            let device = dir.socket(n).display().to_string();
            Helper::spawn(PEER, &["restored", &device, path])
        });
        let mut ends = Ends { daemon: Some(daemon), a, b, dir };
        let address = ends.ask("a listen");
        ends.a.feed("accept\n");
        ends.says(&format!("b connect {address}"), "smc");
        assert_eq!(ends.a.line(), "smc");
        ends
    }

    fn ask(&mut self, command: &str) -> String {
        note(command.to_owned());
        let (who, command) = command.split_once(' ').unwrap();
        let end = if who == "a" { &mut self.a } else { &mut self.b };
        end.feed(&format!("{command}\n"));
        end.line()
    }

    #[track_caller]
    fn says(&mut self, command: &str, wanted: &str) {
        let said = self.ask(command);
        assert_eq!(said, wanted, "{command}");
    }

    /// Each line is a command and its expected answer.
    #[track_caller]
    fn all_say(&mut self, lines: &str) {
        for line in lines.split(';').map(str::trim).filter(|line| !line.is_empty()) {
            let (command, wanted) = line.split_once(": ").unwrap();
            self.says(command, wanted);
        }
    }

    #[track_caller]
    fn save(&mut self) {
        let said = self.ask("b save");
        assert!(said.starts_with("saved ") && said != "saved 0", "{said}");
    }

    /// The driver of `b` notices the loss of its device, and `a` the loss of `b`.
    fn lose(&mut self) {
        self.daemon().feed("remove port1\n");
    }

    fn daemon(&mut self) -> &mut Helper {
        self.daemon.as_mut().unwrap()
    }

    #[track_caller]
    fn on_tcp(&mut self) {
        for who in ["a", "b"] {
            eventually("it is on TCP", || self.ask(&format!("{who} carrier")) == "Tcp");
        }
    }
}

/// Runs commands before the copy, on the copy, and after the loss of the device.
#[track_caller]
fn goes_on(before: &str, restored: &str, after: &str) {
    watched(LIMIT, || {
        let mut ends = Ends::new("window");
        ends.all_say(before);
        ends.save();
        ends.all_say(restored);
        ends.lose();
        ends.all_say(after);
    });
}

/// Bytes go both ways.
const BOTH_WAYS: &str =
    "a send 70: sent 70; b recv 70: got 70; b send 90: sent 90; a recv 90: got 90;";

#[test]
fn bytes_that_were_sent_in_the_copy_arrive() {
    goes_on(
        "b send 1000: sent 1000",
        "b send 2000: sent 2000; b send 500: sent 500",
        &format!("a recv 3500: got 3500; {BOTH_WAYS} b carrier: Tcp; a carrier: Tcp"),
    );
}

#[test]
fn bytes_that_the_copy_lacks_arrive() {
    goes_on(
        "a send 5000: sent 5000; b recv 10: got 10",
        "a send 3000: sent 3000; b recv 4990: got 4990",
        &format!("b recv 3000: got 3000; {BOTH_WAYS}"),
    );
}

#[test]
fn bytes_that_were_read_in_the_copy_do_not_come_again() {
    goes_on(
        "a send 60000: sent 60000; a pour 300000: pours",
        "b recv 50000: got 50000",
        "b recv 310000: got 310000; b send 100: sent 100; a recv 0: poured 300000",
    );
}

#[test]
fn full_rings_lose_nothing() {
    goes_on(
        "a send 60000: sent 60000; b send 60000: sent 60000",
        "a send 5000: sent 5000; b send 5000: sent 5000",
        "a recv 65000: got 65000; b recv 65000: got 65000",
    );
}

#[test]
fn an_end_that_was_said_in_the_copy_is_heard() {
    goes_on(
        "b send 1000: sent 1000",
        "b send 2000: sent 2000; b done: done",
        "a rest: got 3000 and the end; a send 500: sent 500; a done: done; b rest: got 500 and the end",
    );
    goes_on(
        "b send 1000: sent 1000",
        "b send 2000: sent 2000; b close: closed",
        "a rest: got 3000 and the end",
    );
    goes_on("", "b close: closed", "a rest: got 0 and the end");
}

#[test]
fn an_end_that_the_copy_lacks_is_heard() {
    goes_on(
        "a send 1000: sent 1000",
        "a send 2000: sent 2000; a done: done; b send 10: sent 10",
        "b rest: got 3000 and the end; b done: done; a rest: got 10 and the end",
    );
    goes_on(
        "a send 1000: sent 1000",
        "a send 2000: sent 2000; a close: closed",
        "b rest: got 3000 and the end",
    );
    goes_on("a send 1000: sent 1000", "a close: closed", "b rest: got 1000 and the end");
}

#[test]
fn an_answer_to_who_has_ended_arrives() {
    goes_on(
        "a send 1000: sent 1000; a done: done",
        "b rest: got 1000 and the end; b send 2000: sent 2000; b close: closed",
        "a rest: got 2000 and the end",
    );
    goes_on(
        "a send 1000: sent 1000",
        "a done: done; b recv 1000: got 1000; b send 2000: sent 2000; b close: closed",
        "a rest: got 2000 and the end",
    );
}

#[test]
fn an_abort_is_a_reset() {
    goes_on(
        "b send 1000: sent 1000",
        "b send 2000: sent 2000; b abort: aborted",
        "a rest: got 1000 and ConnectionReset",
    );
    goes_on("a send 1000: sent 1000", "a abort: aborted", "b rest: got 1000 and ConnectionReset");
}

#[test]
fn an_urgent_byte_arrives_once() {
    goes_on(
        "b send 1000: sent 1000",
        "b urgent: urgent",
        &format!("a recv 1000: got 1000; a mark: mark; {BOTH_WAYS}"),
    );
    // The urgent byte is in the ring already.
    goes_on(
        "b send 1000: sent 1000; b urgent: urgent",
        "",
        &format!("a recv 1000: got 1000; a mark: mark; {BOTH_WAYS}"),
    );
    goes_on(
        "a send 1000: sent 1000",
        "a urgent: urgent",
        &format!("b recv 1000: got 1000; b mark: mark; {BOTH_WAYS}"),
    );
    goes_on(
        "a send 1000: sent 1000; a urgent: urgent",
        "b recv 1000: got 1000; b mark: mark",
        BOTH_WAYS,
    );
    goes_on(
        "b send 1000: sent 1000; b urgent: urgent",
        "a recv 1000: got 1000; a mark: mark",
        BOTH_WAYS,
    );
}

#[test]
fn an_end_with_both_of_its_copies_loses_nothing() {
    watched(LIMIT, || {
        let mut ends = Ends::new("window");
        ends.all_say("a send 1000: sent 1000; b send 1000: sent 1000");
        ends.save();
        let said = ends.ask("a save");
        assert!(said.starts_with("saved "), "{said}");
        ends.all_say(
            "a send 500: sent 500; b send 700: sent 700; a recv 10: got 10; b recv 10: got 10",
        );
        ends.daemon().feed("remove port0\nremove port1\n");
        ends.all_say("a recv 1690: got 1690; b recv 1490: got 1490");
        ends.all_say(BOTH_WAYS);
        ends.on_tcp();
    });
}

// The driver of `b` is told of its peer before its own device.
#[test]
fn a_peer_that_leaves_first_gets_all() {
    for (before, restored, after) in [
        ("b send 1000: sent 1000", "b send 2000: sent 2000", "a recv 3000: got 3000"),
        (
            "b send 1000: sent 1000",
            "b send 2000: sent 2000; b close: closed",
            "a rest: got 3000 and the end",
        ),
        ("a send 1000: sent 1000", "a send 2000: sent 2000", "b recv 3000: got 3000"),
    ] {
        watched(LIMIT, || {
            let mut ends = Ends::new("window");
            ends.all_say(before);
            ends.save();
            ends.all_say(restored);
            ends.daemon().feed("begin-drain port0\n");
            thread::sleep(Duration::from_millis(300));
            ends.lose();
            ends.all_say(after);
        });
    }
}

// `a` has begun to leave, and awaits the answer of the saved `b`.
#[test]
fn a_peer_whose_daemon_ends_meanwhile_gets_all() {
    watched(LIMIT, || {
        let mut ends = Ends::new("window");
        ends.all_say("a send 5000: sent 5000; b send 100: sent 100");
        ends.save();
        ends.b.stop();
        ends.lose();
        eventually("it leaves", || ends.ask("a carrier") == "Leaving");
        ends.says("a pour 70", "pours");
        ends.daemon.take().unwrap().kill();
        ends.daemon = Some(start_daemon(&ends.dir));
        ends.b.resume();
        ends.all_say("b send 200: sent 200; b recv 5070: got 5070");
        ends.says("a recv 300", "poured 70");
        assert_eq!(ends.a.line(), "got 300");
        ends.all_say(BOTH_WAYS);
    });
}

// The last bytes of `a` are in no memory of `b`.
#[test]
fn a_peer_that_has_died_since_is_no_end_of_data() {
    watched(LIMIT, || {
        let mut ends = Ends::new("window");
        ends.says("a send 1000", "sent 1000");
        ends.save();
        ends.b.stop();
        ends.says("a send 2000", "sent 2000");
        ends.lose();
        eventually("it leaves", || ends.ask("a carrier") == "Leaving");
        ends.a.feed("exit\n");
        thread::sleep(Duration::from_millis(200));
        ends.b.resume();
        ends.says("b rest", "got 1000 and ConnectionReset");
    });
}

// The last bytes of `b` may be in no memory of `a`.
#[test]
fn an_end_that_has_died_in_its_copy_is_no_end_of_data() {
    watched(LIMIT, || {
        let mut ends = Ends::new("window");
        ends.says("b send 1000", "sent 1000");
        ends.save();
        ends.b.stop();
        ends.lose();
        eventually("it leaves", || ends.ask("a carrier") == "Leaving");
        ends.b.feed("send 2000\nexit\n");
        ends.b.resume();
        let said = ends.ask("a rest");
        let whole = ["got 3000 and the end", "got 3000 and ConnectionReset"];
        let cut = "got 1000 and ConnectionReset";
        assert!(said == cut || whole.contains(&said.as_str()), "{said}");
    });
}

#[test]
fn a_stream_that_flows_meanwhile_goes_on() {
    goes_on(
        &format!("a pour {MUCH}: pours; b recv 20000: got 20000"),
        "b send 500: sent 500",
        &format!("b recv {}: got {0}; a recv 500: poured {MUCH}; a recv 0: got 500", MUCH - 20_000),
    );
}
