// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices leave in order: SIGTERM, `ctl remove`, `ctl drain` and a reload first tell the drivers, and wait
//! for drivers with support for leaving, up to the operator's time limit.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use vhost_device_ism::management::Client;
use virtio_ism_abi::Status;
use virtio_ism_abi::command::{BACKING_WINDOW, LeftRequest, Op, TokenRequest};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::{Event, LeaveReason};
use zerocopy::IntoBytes;

use super::front_end::*;
use super::program::{PROGRAM, Program, strict};

const DMB: u32 = 64 << 10;
/// Longer than any test may take.
const FOREVER: &str = "600";

/// Two drivers; the second has attached a DMB of the first.
struct Pair {
    a: FrontEnd,
    b: FrontEnd,
    token: u64,
    /// Offset of the DMB in the windows of owner and user.
    at: [u64; 2],
}

impl Pair {
    fn new(place: &Place) -> Pair {
        let wish = Wish::default();
        Pair::with(place, wish)
    }

    fn with(place: &Place, wish: Wish) -> Pair {
        let features = wish.features;
        let mut a = FrontEnd::connect_with(&place.path("a"), wish);
        let wish = Wish { features, ..Wish::default() };
        let mut b = FrontEnd::connect_with(&place.path("b"), wish);
        for driver in [&mut a, &mut b] {
            driver.feed_events(8);
        }
        let (_, gid_b) = (a.hello(), b.hello());
        let own = a.register(gid_b, 1, DMB, BACKING_WINDOW);
        let token = own.token.get();
        let attached = b.attach(token);
        Pair { a, b, token, at: [own.dmb_off.get(), attached.dmb_off.get()] }
    }

    fn let_go(&mut self) {
        let token = TokenRequest { token: self.token.into() };
        assert_eq!(self.b.command(Op::Detach, token.as_bytes()).0, Status::Ok);
        assert_eq!(self.a.command(Op::Unregister, token.as_bytes()).0, Status::Ok);
    }
}

/// A driver's next request to leave: number, reason and time.
fn asked(driver: &mut FrontEnd) -> (u32, LeaveReason, Duration) {
    match driver.event(TIMEOUT) {
        Some(Event::Leave { number, reason, within }) => (number, reason, within),
        other => panic!("{other:?}"),
    }
}

fn left(driver: &mut FrontEnd, number: u32) -> Status {
    let body = LeftRequest { number: number.into(), reserved: 0.into() };
    driver.command(Op::Left, body.as_bytes()).0
}

fn start(place: &Place, options: &[&str]) -> Program {
    let management = place.path("m");
    let options = [options, &[strict(), "--management", management.to_str().unwrap()]].concat();
    let program = Program::start(place, &["a", "b"], &options);
    until_listening(&management);
    program
}

fn ctl(place: &Place, args: &[&str]) -> std::process::Child {
    let mut command = Command::new(PROGRAM);
    command.args(["ctl", "--management", place.path("m").to_str().unwrap()]).args(args);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command.spawn().unwrap()
}

#[test]
fn sigterm_tells_all_drivers_and_ends_as_soon_as_they_have_left() {
    let place = Place::new();
    let mut program = start(&place, &["--leave-timeout", FOREVER]);
    let mut pair = Pair::new(&place);
    kill_process(program.pid(), Signal::TERM).unwrap();
    let [a, b] = [&mut pair.a, &mut pair.b].map(asked);
    for (number, reason, within) in [a, b] {
        assert_eq!((number, reason), (1, LeaveReason::Restart));
        assert!(within > Duration::from_secs(300), "{within:?}");
    }
    // The device works until then, takes on nothing new, and accepts no connection any more.
    assert_eq!(pair.b.transfer(pair.token, &[(0, b"moved")], false), Status::Ok);
    assert_eq!(pair.a.read_window(pair.at[0], 5), b"moved");
    pair.b.write_window(pair.at[1], b"store");
    assert_eq!(pair.a.read_window(pair.at[0], 5), b"store");
    let again = TokenRequest { token: pair.token.into() };
    assert_eq!(pair.b.command(Op::Attach, again.as_bytes()).0, Status::Estate);
    eventually("no socket", || !place.path("a").exists());
    // One driver says LEFT, and the other has unregistered its DMB.
    assert_eq!(left(&mut pair.b, b.0), Status::Ok);
    assert!(place.path("m").exists(), "one is still there");
    let token = TokenRequest { token: pair.token.into() };
    assert_eq!(pair.a.command(Op::Unregister, token.as_bytes()).0, Status::Ok);
    let (status, said) = program.ended();
    assert!(status.success(), "{said}");
    assert!(said.contains("drivers were asked to leave"), "{said}");
    assert!(said.contains("all drivers have left"), "{said}");
    pair.a.wait_cut();
    pair.b.wait_cut();
}

#[test]
fn what_is_mapped_stays_mapped_and_shared_when_the_daemon_has_gone_in_order_or_was_killed() {
    for signal in [Signal::TERM, Signal::KILL] {
        let place = Place::new();
        let mut program = start(&place, &["--leave-timeout", FOREVER]);
        let mut pair = Pair::new(&place);
        kill_process(program.pid(), signal).unwrap();
        if signal == Signal::TERM {
            for driver in [&mut pair.a, &mut pair.b] {
                let (number, ..) = asked(driver);
                left(driver, number);
            }
        }
        drop(program.ended());
        pair.a.wait_cut();
        pair.b.wait_cut();
        pair.b.write_window(pair.at[1], b"after the end");
        assert_eq!(pair.a.read_window(pair.at[0], 13), b"after the end");
    }
}

#[test]
fn a_driver_that_never_answers_has_its_time_and_no_more() {
    let place = Place::new();
    let mut program = start(&place, &["--leave-timeout", "0.3"]);
    let mut pair = Pair::new(&place);
    let begin = Instant::now();
    kill_process(program.pid(), Signal::TERM).unwrap();
    let (_, _, within) = asked(&mut pair.a);
    assert!(within <= Duration::from_millis(300), "{within:?}");
    // An answer to an unknown request.
    assert_eq!(left(&mut pair.a, 77), Status::Enoent);
    let (status, said) = program.ended();
    assert!(status.success(), "{said}");
    assert!(begin.elapsed() >= Duration::from_millis(300));
    assert!(said.contains("drivers have not left in time") && said.contains("staying=2"), "{said}");
}

#[test]
fn a_second_sigterm_ends_the_wait() {
    let place = Place::new();
    let mut program = start(&place, &["--leave-timeout", FOREVER]);
    let mut pair = Pair::new(&place);
    kill_process(program.pid(), Signal::TERM).unwrap();
    asked(&mut pair.a);
    kill_process(program.pid(), Signal::TERM).unwrap();
    let (status, said) = program.ended();
    assert!(status.success(), "{said}");
    pair.a.wait_cut();
}

#[test]
fn nobody_is_asked_who_does_not_know_how_to_leave_or_if_there_is_no_time() {
    let old = Wish::default().features & !Features::LEAVE.bits();
    for (features, timeout) in [(old, FOREVER), (Wish::default().features, "0")] {
        let place = Place::new();
        let mut program = start(&place, &["--leave-timeout", timeout]);
        let mut pair = Pair::with(&place, Wish { features, ..Wish::default() });
        let said = program.end(Signal::TERM);
        assert!(!said.contains("leave"), "{said}");
        assert!(pair.a.event(QUIET).is_none_or(|event| !matches!(event, Event::Leave { .. })));
    }
}

#[test]
fn ctl_drain_has_the_drivers_of_one_guest_leave_and_keeps_it() {
    let place = Place::new();
    let _program = start(&place, &[]);
    let mut pair = Pair::new(&place);
    let drain = ctl(&place, &["drain", "b", "--timeout", FOREVER, "--migration"]);
    let (number, reason, _) = asked(&mut pair.b);
    assert_eq!(reason, LeaveReason::Migration);
    let list = ctl(&place, &["list"]).wait_with_output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    assert!(list.contains("connected, leaving"), "others are served meanwhile: {list}");
    assert_eq!(left(&mut pair.b, number), Status::Ok);
    assert_eq!(left(&mut pair.b, number), Status::Enoent, "twice");
    let output = drain.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout, b"drivers that have left: 1\n");
    // The other guest was not asked, and the drained one has a device as before, without new DMBs.
    assert!(pair.a.event(QUIET).is_none());
    assert_eq!(pair.b.transfer(pair.token, &[(0, b"moved")], false), Status::Ok);
    let mut client = Client::connect(place.path("m")).unwrap();
    let guests = client.list().unwrap();
    let counts =
        |n: usize| (guests[n].leaving, guests[n].counts.leaves_asked, guests[n].counts.leaves_done);
    assert_eq!((counts(0), counts(1)), ((false, 0, 0), (true, 1, 1)));
    let metrics = client.metrics().unwrap();
    assert!(metrics.contains("ism_leaves_done_total{guest=\"b\",chid=\"ff00\"} 1"), "{metrics}");
    // A front end connecting again gets a device as usual.
    drop(pair.b);
    eventually("the next one", || !client.list().unwrap()[1].connected);
    let (mut b, _) = FrontEnd::greet(&place.path("b"));
    let gid_a = pair.a.hello();
    b.register(gid_a, 1, DMB, BACKING_WINDOW);
}

#[test]
fn ctl_drain_fails_if_a_driver_stays_and_can_be_said_again() {
    let place = Place::new();
    let _program = start(&place, &[]);
    let mut pair = Pair::new(&place);
    for number in 1..=2 {
        let drain = ctl(&place, &["drain", "a", "--timeout", "0.05"]).wait_with_output().unwrap();
        assert!(!drain.status.success());
        let said = String::from_utf8(drain.stderr).unwrap();
        assert!(said.contains("1 of 1 drivers have not left in time"), "{said}");
        assert_eq!(asked(&mut pair.a).0, number);
    }
    let unknown = ctl(&place, &["drain", "nobody"]).wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no guest"), "{unknown:?}");
    pair.let_go();
    let drain = ctl(&place, &["drain", "a"]).wait_with_output().unwrap();
    assert_eq!(drain.stdout, b"drivers that have left: 0\n", "it has no DMB");
}

#[test]
fn ctl_undrain_takes_a_drain_back_before_and_after_the_driver_has_left() {
    let place = Place::new();
    let _program = start(&place, &[]);
    let mut pair = Pair::new(&place);
    let gid_b = pair.b.hello();
    let undrain = || {
        let output = ctl(&place, &["undrain", "a"]).wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let served = "devices in service again: 1\n";
    for answers in [false, true, false] {
        let drain = ctl(&place, &["drain", "a", "--timeout", FOREVER]);
        let number = loop {
            // Its user has begun a new session, reported as PEER_DOWN.
            match pair.a.event(TIMEOUT) {
                Some(Event::Leave { number, .. }) => break number,
                Some(Event::PeerDown { .. } | Event::DmbGone { .. }) => {}
                other => panic!("{other:?}"),
            }
        };
        if answers {
            assert_eq!(left(&mut pair.a, number), Status::Ok);
            assert!(drain.wait_with_output().unwrap().status.success());
            assert_eq!(undrain(), served);
        } else {
            assert_eq!(undrain(), served);
            let output = drain.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success() && said.contains("taken back"), "{said}");
        }
        let event = pair.a.event(TIMEOUT);
        assert!(matches!(event, Some(Event::Stay { number: n }) if n == number), "{event:?}");
        assert_eq!(left(&mut pair.a, number), Status::Enoent, "nobody asks any more");
        pair.a.register(gid_b, 2 + number, DMB, BACKING_WINDOW);
    }
    assert_eq!(undrain(), "devices in service again: 0\n", "it is not drained");
    let unknown = ctl(&place, &["undrain", "nobody"]).wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no guest"), "{unknown:?}");
}

#[test]
fn ctl_remove_waits_for_the_drivers_and_then_removes() {
    let place = Place::new();
    let _program = start(&place, &[]);
    let mut pair = Pair::new(&place);
    let remove = ctl(&place, &["remove", "a", "--timeout", FOREVER]);
    let (number, reason, _) = asked(&mut pair.a);
    assert_eq!(reason, LeaveReason::Removal);
    let mut client = Client::connect(place.path("m")).unwrap();
    assert_eq!(client.list().unwrap().len(), 2);
    assert_eq!(left(&mut pair.a, number), Status::Ok);
    assert!(remove.wait_with_output().unwrap().status.success());
    assert_eq!(client.list().unwrap().len(), 1);
    pair.a.wait_cut();
}

#[test]
fn a_reload_tells_the_drivers_of_guests_that_go_or_change() {
    let place = Place::new();
    let file = place.path("c.toml");
    let guest = |name: &str, more: &str| {
        format!("[[guest]]\nsocket = {:?}\n{more}\n", place.path(name).to_str().unwrap())
    };
    let head = format!("leave-timeout = {FOREVER}\n");
    std::fs::write(&file, format!("{head}{}{}", guest("a", ""), guest("b", ""))).unwrap();
    let mut program = Program::start(&place, &[], &[strict(), "--config", file.to_str().unwrap()]);
    eventually("the sockets", || place.path("a").exists() && place.path("b").exists());
    let mut pair = Pair::new(&place);
    std::fs::write(&file, format!("{head}{}", guest("a", "mode = \"666\""))).unwrap();
    kill_process(program.pid(), Signal::HUP).unwrap();
    let [a, b] = [&mut pair.a, &mut pair.b].map(asked);
    assert_eq!((a.1, b.1), (LeaveReason::Restart, LeaveReason::Removal));
    assert_eq!((left(&mut pair.a, a.0), left(&mut pair.b, b.0)), (Status::Ok, Status::Ok));
    pair.a.wait_cut();
    pair.b.wait_cut();
    eventually("the changed guest", || place.path("a").exists());
    program.end(Signal::TERM);
}
