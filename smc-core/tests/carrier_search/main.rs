// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every possible change of carriers between two ends while devices leave or die, ends die and TCP
//! breaks, by search: no byte is lost, doubled or out of order, no cut stream ends cleanly, and no
//! end waits for ever.

mod steps;
mod world;

use std::collections::HashSet;
use std::hash::BuildHasherDefault;

use smc_core::carrier::Reading;
use steps::Steps;
use world::{Carrier, Mistake, Plan, Told, World};

/// A fast hash; the states are not chosen by an attacker, so collisions do not matter.
#[derive(Default)]
struct Mix(u64);

impl std::hash::Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_isize(&mut self, n: isize) {
        self.write_u64(n as u64);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
}

type Hasher = BuildHasherDefault<Mix>;

/// Searches every state breadth first. Returns the number of states.
///
/// # Errors
/// The violated rule, and the shortest sequence leading there.
fn search(plan: &Plan) -> Result<usize, String> {
    // Each state with the one before, in the order of discovery.
    let mut found = vec![(World::new(plan), 0)];
    let mut known: HashSet<World, Hasher> = HashSet::default();
    let mut at = 0;
    while at < found.len() {
        let world = found[at].0.clone();
        let steps = Steps::of(&world, plan, false);
        if steps.iter().all(|step| !step.due || step.to.as_ref() == Ok(&world)) {
            judge(&world).map_err(|wrong| way(&found, at, plan, &wrong))?;
        }
        for (n, step) in steps.into_iter().enumerate() {
            let next = step.to.map_err(|wrong| {
                let name = &Steps::of(&world, plan, true)[n].name;
                way(&found, at, plan, &format!("{name}: {wrong}"))
            })?;
            if !known.contains(&next) {
                known.insert(next.clone());
                found.push((next, at));
            }
        }
        at += 1;
        assert!(found.len() < 2_000_000, "{plan:?}: too many states");
    }
    Ok(found.len())
}

/// The steps to a state, and the violated rule.
fn way(found: &[(World, usize)], mut at: usize, plan: &Plan, wrong: &str) -> String {
    let mut steps = vec![wrong.to_owned()];
    let end = &found[at].0;
    while at != 0 {
        let (world, before) = &found[at];
        let taken = Steps::of(&found[*before].0, plan, true);
        let step = taken.into_iter().find(|step| step.to.as_ref() == Ok(world));
        steps.extend(step.map(|step| step.name));
        at = *before;
    }
    steps.reverse();
    format!("{}\n{end:#?}", steps.join("\n"))
}

/// Checks a state without any due step.
fn judge(world: &World) -> Result<(), String> {
    for i in 0..2 {
        let (side, peer) = (&world.sides[i], &world.sides[1 - i]);
        if !side.alive || side.told == Told::Reset {
            continue;
        }
        if side.end.is_over() {
            return Err(format!("end {i} is reset, and its program does not know"));
        }
        if side.told == Told::End {
            continue;
        }
        if peer.told == Told::Reset {
            return Err(format!("end {} was reset, and end {i} does not know", 1 - i));
        }
        if peer.alive && (peer.done || side.got != peer.written) {
            return Err(format!("end {i} has {} of {}, and waits", side.got, peer.written));
        }
        if !peer.alive {
            return Err(format!("end {i} waits for an end that is gone"));
        }
        if !side.on_ring && !side.on_tcp
            || matches!(side.end.incoming().reading(), Reading::Until(_))
        {
            return Err(format!("end {i} has left its ring and goes nowhere"));
        }
    }
    Ok(())
}

const PLAN: Plan = Plan {
    carrier: Carrier::Window,
    bytes: [1, 1],
    faults: 1,
    returns: 0,
    queue: false,
    urgent: [None; 2],
    mistake: Mistake::None,
};

fn holds(plan: Plan) {
    match search(&plan) {
        Ok(states) => println!("{plan:?}: {states} states"),
        Err(wrong) => panic!("{plan:?}\n{wrong}"),
    }
}

const CARRIERS: [Carrier; 3] = [Carrier::Window, Carrier::Copies, Carrier::NoCopies];

#[test]
fn no_byte_is_lost_when_rings_are_left() {
    CARRIERS.into_iter().for_each(|carrier| holds(Plan { carrier, bytes: [2, 1], ..PLAN }));
}

#[test]
fn no_byte_is_lost_when_two_things_go_wrong() {
    CARRIERS
        .into_iter()
        .for_each(|carrier| holds(Plan { carrier, bytes: [1, 0], faults: 2, ..PLAN }));
}

#[test]
fn no_byte_is_lost_from_a_send_queue() {
    holds(Plan { queue: true, bytes: [2, 0], ..PLAN });
    holds(Plan { queue: true, bytes: [1, 0], faults: 2, ..PLAN });
}

#[test]
fn no_byte_is_lost_when_connections_come_back() {
    CARRIERS.into_iter().for_each(|carrier| holds(Plan { carrier, returns: 1, ..PLAN }));
}

#[test]
fn a_connection_that_has_come_back_can_leave_again() {
    let carrier = Carrier::Copies;
    holds(Plan { carrier, bytes: [1, 0], faults: 2, returns: 1, ..PLAN });
}

#[test]
fn no_mark_of_an_urgent_byte_is_lost() {
    for carrier in CARRIERS {
        for byte in [0, 1] {
            holds(Plan { carrier, bytes: [2, 0], urgent: [Some(byte), None], ..PLAN });
        }
        holds(Plan { carrier, bytes: [1, 1], urgent: [Some(0); 2], ..PLAN });
        holds(Plan { carrier, bytes: [1, 0], urgent: [Some(0), None], faults: 2, ..PLAN });
    }
}

#[test]
fn no_mark_is_lost_from_a_send_queue_nor_when_connections_come_back() {
    let marked = Plan { bytes: [2, 0], urgent: [Some(0), None], ..PLAN };
    for (carrier, byte) in CARRIERS.into_iter().flat_map(|carrier| [(carrier, 0), (carrier, 1)]) {
        let urgent = [Some(byte), None];
        holds(Plan { carrier, urgent, queue: true, ..marked });
        holds(Plan { carrier, urgent, returns: 1, ..marked });
    }
}

/// Checks that the search finds the mistake, with this message.
fn finds(mistake: Mistake, plan: Plan, expected: &str) {
    let plan = Plan { mistake, ..plan };
    let wrong = search(&plan).expect_err("nothing is wrong");
    let (steps, _) = wrong.split_once("\nWorld").unwrap_or_default();
    assert!(steps.contains(expected), "{plan:?}\n{steps}");
}

#[test]
fn the_search_finds_each_mistake() {
    let one = Plan { bytes: [2, 1], ..PLAN };
    let two = Plan { bytes: [2, 0], faults: 2, ..PLAN };
    let copies = Plan { carrier: Carrier::Copies, ..one };
    finds(Mistake::AnswersTooSoon, copies, "reads a byte that has not arrived");
    finds(Mistake::CountsLostBytes, one, "reads memory that is gone");
    let none = Plan { carrier: Carrier::NoCopies, ..one };
    finds(Mistake::InventsCopies, none, "reads byte 255 in the place of 0");
    finds(Mistake::HidesHeldBytes, Plan { queue: true, ..two }, "is told of an end at 0, 1 were");
    finds(Mistake::OverlooksCutRecord, two, "is told of an end at 0, 1 were");
    finds(Mistake::ForgetsItsEnd, one, "and waits");
    finds(Mistake::AnswersNoLeave, one, "and waits");
    let marked = Plan { urgent: [Some(1), None], ..copies };
    finds(Mistake::ForgetsItsMark, marked, "reads the urgent byte 1 as another");
    finds(Mistake::MarksTooLate, marked, "reads the urgent byte 1 as another");
    let returns = Plan { returns: 1, ..one };
    finds(Mistake::ReadsRingTooSoon, returns, "in the place of");
    finds(Mistake::ProposesBehindItsEnd, returns, "comes for a process that has ended");
}
