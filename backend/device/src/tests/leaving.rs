// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Leaving in order: drivers told, drivers waited for, and the drivers' possible answers.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use virtio_ism_abi::Status;
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::{Event, LeaveReason};

use super::harness::{Driver, World};
use super::ism::{CloseReason, LeaveGroup};

const K64: u32 = 64 << 10;
const SECOND: Duration = Duration::from_secs(1);

fn ask(driver: &Driver, reason: LeaveReason) -> Arc<LeaveGroup> {
    let group = LeaveGroup::new();
    driver.device.ask_to_leave(reason, SECOND, &group);
    group
}

/// Two drivers; the second has attached a DMB of the first.
fn pair(world: &World) -> (Driver, Driver, u64) {
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    let token = a.register(b.gid, 0, K64).unwrap().token.get();
    b.attach(token).unwrap();
    (a, b, token)
}

#[test]
fn a_driver_hears_once_why_and_how_soon_it_is_to_leave() {
    let world = World::new();
    let (a, _b, _) = pair(&world);
    let before = a.notifier.count();
    for (number, reason) in (1..).zip(LeaveReason::ALL) {
        let group = ask(&a, reason);
        assert_eq!(group.staying(), 1);
        assert!(a.notifier.count() > before && a.device.has_events());
        world.clock.advance(250_000_000);
        let events = a.events();
        let [Event::Leave { number: n, reason: r, within }] = events[..] else {
            panic!("{events:?}")
        };
        assert_eq!((n, r, within), (number, reason, Duration::from_millis(750)));
        assert!(a.events().is_empty(), "told twice");
    }
}

#[test]
fn a_driver_that_reads_late_hears_of_the_latest_request_only_and_of_no_time_that_is_over() {
    let world = World::new();
    let (a, mut b, _) = pair(&world);
    let (_first, second) = (ask(&a, LeaveReason::Drain), ask(&a, LeaveReason::Restart));
    b.end();
    world.clock.advance(5_000_000_000);
    let events = a.events();
    assert!(
        matches!(events[0], Event::Leave { number: 2, reason: LeaveReason::Restart, within }
            if within.is_zero()),
        "{events:?}"
    );
    assert!(matches!(events[1], Event::PeerDown { .. }), "the session goes on: {events:?}");
    assert_eq!(second.staying(), 1);
    b.hello();
}

#[test]
fn a_driver_has_left_when_it_says_so_and_its_dmbs_stay() {
    let world = World::new();
    let (mut a, b, token) = pair(&world);
    let group = ask(&a, LeaveReason::Removal);
    a.left(1).unwrap();
    assert_eq!((group.staying(), group.wait(SECOND)), (0, 0));
    let info = a.device.info();
    assert_eq!((info.dmbs, info.counts.leaves_asked, info.counts.leaves_done), (1, 1, 1));
    b.kick(token);
    assert!(matches!(a.events()[..], [Event::Leave { .. }, Event::SlabWake(_)]));
}

#[test]
fn a_driver_has_left_when_its_last_dmb_is_gone_or_its_session_is() {
    let world = World::new();
    for how in 0..4 {
        let (mut a, mut b, token) = pair(&world);
        let theirs = b.register(a.gid, 0, K64).unwrap().token.get();
        a.attach(theirs).unwrap();
        let group = ask(&a, LeaveReason::Restart);
        match how {
            0 => {
                a.unregister(token).unwrap();
                assert_eq!(group.staying(), 1, "one is attached");
                a.detach(theirs).unwrap();
            }
            1 => a.end(),
            2 => drop(a.hello()),
            _ => a.device.leave(),
        }
        assert_eq!(group.staying(), 0, "{how}");
        assert_eq!(a.device.info().counts.leaves_done, 1, "{how}");
    }
}

#[test]
fn drivers_without_dmbs_or_without_the_feature_are_not_waited_for() {
    let world = World::new();
    let (idle, absent) = (world.driver("idle"), world.join("absent"));
    let (mut old, _b, _) = pair(&world);
    old.device.set_features(Features::all() - Features::LEAVE);
    for driver in [&idle, &absent, &old] {
        assert_eq!(ask(driver, LeaveReason::Restart).staying(), 0);
    }
    assert!(old.events().is_empty(), "it does not know the record");
    assert_eq!(old.left(1), Err(Status::Einval), "nor the command");
    assert_eq!(old.device.info().counts.leaves_asked, 0);
}

#[test]
fn a_device_that_is_about_to_go_takes_on_nothing_new_but_lets_go() {
    let world = World::new();
    for features in [Features::all(), Features::all() - Features::LEAVE] {
        let (mut a, mut b, token) = pair(&world);
        a.device.set_features(features);
        let theirs = b.register(a.gid, 1, K64).unwrap().token.get();
        assert!(!a.device.info().is_leaving);
        let _departure = ask(&a, LeaveReason::Drain);
        assert!(a.device.info().is_leaving);
        assert_eq!(a.register(b.gid, 1, K64).map(drop), Err(Status::Estate));
        assert_eq!(a.attach(theirs).map(drop), Err(Status::Estate));
        assert_eq!(a.query(b.gid).map(drop), Ok(()));
        a.unregister(token).unwrap();
        // A driver beginning a new session is told, and gets no further.
        a.hello();
        let told = a.events().iter().any(|event| matches!(event, Event::Leave { number: 1, .. }));
        assert_eq!(told, features.contains(Features::LEAVE));
        assert_eq!(a.register(b.gid, 1, K64).map(drop), Err(Status::Estate));
        // The driver's peers go on with others.
        let c = world.driver("c");
        b.register(c.gid, 7, K64).unwrap();
    }
}

#[test]
fn a_drain_can_be_taken_back_and_the_end_of_a_device_cannot() {
    let world = World::new();
    for reason in LeaveReason::ALL {
        let (mut a, b, _) = pair(&world);
        assert!(!a.device.stay(), "nobody asked");
        let group = ask(&a, reason);
        let drains = matches!(reason, LeaveReason::Drain | LeaveReason::Migration);
        assert_eq!(a.device.stay(), drains);
        assert!(!a.device.stay(), "twice");
        let info = a.device.info();
        assert_eq!((info.is_leaving, info.counts.leaves_done), (!drains, 0));
        assert_eq!((group.staying(), group.taken_back()), (!drains as usize, drains as usize));
        // A driver without having read the first event gets only the second.
        let events = a.events();
        if drains {
            assert_eq!(group.wait(SECOND), 1, "it has not left");
            assert!(matches!(events[..], [Event::Stay { number: 1 }]), "{events:?}");
            assert_eq!(a.left(1), Err(Status::Enoent));
            a.register(b.gid, 1, K64).unwrap();
            a.hello();
            assert!(a.events().iter().all(|event| !matches!(event, Event::Leave { .. })));
            a.register(b.gid, 1, K64).unwrap();
        } else {
            assert!(matches!(events[..], [Event::Leave { number: 1, .. }]), "{events:?}");
        }
        // The next request has another number.
        let _again = ask(&a, LeaveReason::Drain);
        assert!(a.events().iter().any(|event| matches!(event, Event::Leave { number: 2, .. })));
    }
    let old = world.driver("old");
    old.device.set_features(Features::all() - Features::LEAVE);
    let _group = ask(&old, LeaveReason::Drain);
    assert!(old.device.stay() && old.events().is_empty(), "it does not know the record");
}

#[test]
fn an_answer_counts_once_for_its_request_and_for_nobody_else() {
    let world = World::new();
    let (mut a, mut b, _) = pair(&world);
    assert_eq!(a.left(1), Err(Status::Enoent), "nobody asked");
    let others = ask(&b, LeaveReason::Drain);
    let first = ask(&a, LeaveReason::Drain);
    for wrong in [0, 2, u32::MAX] {
        assert_eq!(a.left(wrong), Err(Status::Enoent));
    }
    assert_eq!((first.staying(), others.staying()), (1, 1));
    a.left(1).unwrap();
    assert_eq!(a.left(1), Err(Status::Enoent), "twice");
    assert_eq!((first.staying(), others.staying()), (0, 1), "not for another");
    // The answer to an earlier request does not answer a later one.
    let second = ask(&a, LeaveReason::Restart);
    assert_eq!(a.left(1), Err(Status::Enoent));
    assert_eq!(second.staying(), 1);
    a.left(2).unwrap();
    assert_eq!(second.staying(), 0);
    b.device.close_session(CloseReason::Failed);
    assert_eq!((b.left(1), others.staying()), (Err(Status::Estate), 0));
}

#[test]
fn one_group_waits_for_many_and_each_waits_for_its_own() {
    let world = World::new();
    let (mut a, mut b, _) = pair(&world);
    let both = LeaveGroup::new();
    for driver in [&a, &b] {
        driver.device.ask_to_leave(LeaveReason::Restart, SECOND, &both);
    }
    let again = ask(&a, LeaveReason::Removal);
    assert_eq!((both.staying(), again.staying()), (2, 1));
    let waiter = std::thread::spawn({
        let both = both.clone();
        move || both.wait(Duration::from_secs(600))
    });
    a.left(2).unwrap();
    assert_eq!((both.staying(), again.staying()), (1, 0));
    b.left(1).unwrap();
    assert_eq!(waiter.join().unwrap(), 0);
}

#[test]
fn a_wait_ends_with_its_time_or_when_it_is_given_up() {
    let world = World::new();
    let (a, _b, _) = pair(&world);
    let silent = ask(&a, LeaveReason::Restart);
    assert_eq!(silent.wait(Duration::from_millis(1)), 1);
    assert_eq!(silent.wait(Duration::ZERO), 1);
    let waiter = std::thread::spawn({
        let silent = silent.clone();
        move || silent.wait(Duration::from_secs(600))
    });
    silent.give_up();
    assert_eq!(waiter.join().unwrap(), 1);
    assert_eq!(silent.wait(Duration::from_secs(600)), 1, "one that begins later");
}

/// The next step of a device and its driver.
#[derive(Clone, Copy, Debug)]
enum Step {
    Register,
    Unregister,
    Attach,
    Detach,
    Ask,
    Left { back: u32 },
    Stay,
    Hello,
    End,
    Read,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Register),
        3 => Just(Step::Unregister),
        2 => Just(Step::Attach),
        2 => Just(Step::Detach),
        2 => Just(Step::Ask),
        3 => (0u32..3).prop_map(|back| Step::Left { back }),
        1 => Just(Step::Stay),
        1 => Just(Step::Hello),
        1 => Just(Step::End),
        1 => Just(Step::Read),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// A driver changing its mind, answering at random, or silent: each group counts the driver until it has
    /// left and no longer, and the counters add up.
    #[test]
    fn whatever_a_driver_does_groups_count_it_rightly(
        steps in prop::collection::vec(step(), 1..60)
    ) {
        let world = World::new();
        let (mut a, mut b) = (world.driver("a"), world.driver("b"));
        let (mut own, mut theirs) = (Vec::new(), Vec::new());
        // Departures with whether each still counts the driver; the number of the last request.
        let mut groups: Vec<(Arc<LeaveGroup>, bool)> = Vec::new();
        let (mut last, mut answered, mut is_open, mut idx) = (0, false, true, 0);
        let (mut leaves, mut taken_back) = (false, 0);
        for step in steps {
            match step {
                Step::Register => {
                    idx += 1;
                    let expected = is_open && !leaves;
                    match a.register(b.gid, idx, K64) {
                        Ok(reply) => own.push(reply.token.get()),
                        Err(status) => prop_assert_eq!((expected, status), (false, Status::Estate)),
                    }
                }
                Step::Attach if is_open && !leaves => {
                    let token = b.register(a.gid, 1000 + idx, K64).unwrap().token.get();
                    idx += 1;
                    a.attach(token).unwrap();
                    theirs.push(token);
                }
                Step::Attach => {}
                Step::Unregister => {
                    if let Some(token) = own.pop() {
                        a.unregister(token).unwrap();
                    }
                }
                Step::Detach => {
                    if let Some(token) = theirs.pop() {
                        a.detach(token).unwrap();
                    }
                }
                Step::Ask => {
                    let group = ask(&a, LeaveReason::Drain);
                    let counts = is_open && !(own.is_empty() && theirs.is_empty());
                    groups.push((group, counts));
                    last += 1;
                    (leaves, answered) = (true, false);
                }
                Step::Left { back } => {
                    let number = u32::saturating_sub(last, back);
                    let expected = match (is_open, leaves && number == last && !answered) {
                        (false, _) => Err(Status::Estate),
                        (true, true) => Ok(()),
                        (true, false) => Err(Status::Enoent),
                    };
                    prop_assert_eq!(a.left(number), expected);
                    if expected.is_ok() {
                        answered = true;
                        groups.iter_mut().for_each(|(_, counts)| *counts = false);
                    }
                }
                Step::Stay => {
                    prop_assert_eq!(a.device.stay(), leaves);
                    leaves = false;
                    for (group, counts) in groups.iter_mut().filter(|(_, counts)| *counts) {
                        prop_assert_eq!(group.taken_back(), 1);
                        (*counts, taken_back) = (false, taken_back + 1);
                    }
                }
                Step::Hello | Step::End => {
                    if matches!(step, Step::Hello) {
                        a.hello();
                        (is_open, answered) = (true, false);
                    } else {
                        a.end();
                        is_open = false;
                    }
                    own.clear();
                    theirs.clear();
                }
                Step::Read => drop(a.events()),
            }
            if own.is_empty() && theirs.is_empty() {
                groups.iter_mut().for_each(|(_, counts)| *counts = false);
            }
            for (group, counts) in &groups {
                prop_assert_eq!(group.staying(), usize::from(*counts), "{:?}", step);
            }
            let (info, staying) = (a.device.info(), groups.iter().filter(|d| d.1).count());
            let done = info.counts.leaves_done + taken_back;
            prop_assert_eq!(info.counts.leaves_asked - done, staying as u64);
            prop_assert_eq!(info.is_leaving, leaves);
        }
    }
}
