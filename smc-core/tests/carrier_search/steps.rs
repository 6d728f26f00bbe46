// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The possible next steps.

use smc_core::carrier::{Input, Outgoing, Renewal};
use smc_core::wire::record::{Reason, Record};

use crate::world::{Carrier, Device, Item, Mistake, Plan, Ring, Told, World, Wrong};

/// A step: its name, whether the step has to happen some time, and the resulting state.
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) due: bool,
    pub(crate) to: Result<World, Wrong>,
}

/// The name of a step, if wanted: names cost more time than steps.
macro_rules! say {
    ($self:ident, $($text:tt)*) => {
        if $self.named { format!($($text)*) } else { String::new() }
    };
}

/// Collects the steps from one state.
pub(crate) struct Steps<'a> {
    from: &'a World,
    plan: &'a Plan,
    /// Steps get names.
    named: bool,
    list: Vec<Step>,
}

impl<'a> Steps<'a> {
    pub(crate) fn of(from: &'a World, plan: &'a Plan, named: bool) -> Vec<Step> {
        let mut steps = Steps { from, plan, named, list: Vec::new() };
        for i in 0..2 {
            steps.tcp(i);
            if from.acts(i) {
                steps.program(i);
                steps.process(i);
                steps.reading(i);
                steps.device(i);
                steps.coming_back(i);
            }
            steps.faults(i);
        }
        steps.list
    }

    fn add(&mut self, name: String, due: bool, step: impl FnOnce(&mut World) -> Result<(), Wrong>) {
        let mut world = self.from.clone();
        let to = step(&mut world).map(|()| world);
        self.list.push(Step { name, due, to });
    }

    fn tell(&mut self, i: usize, due: bool, input: Input) {
        let plan = self.plan;
        self.add(say!(self, "end {i}: {input:?}"), due, |world| world.tell(i, input, plan));
    }

    /// The program writes, or ends its direction.
    fn program(&mut self, i: usize) {
        let (plan, side) = (self.plan, &self.from.sides[i]);
        let works = side.device == Device::Works || plan.carrier == Carrier::Window;
        let works = works && !self.from.awaits_reader(i, plan);
        let may_write = side.written < plan.bytes[i] && !side.done;
        if may_write && side.on_ring && side.held == 0 && works {
            self.add(say!(self, "program {i} writes to the ring"), true, |world| {
                world.sides[i].written += 1;
                world.write_ring(i, plan);
                Ok(())
            });
        }
        if may_write && side.on_tcp && side.held == 0 {
            self.add(say!(self, "program {i} writes to TCP"), true, |world| {
                let byte = world.sides[i].written;
                world.sides[i].written += 1;
                world.send_next(i, byte, plan);
                Ok(())
            });
        }
        let stopped = !side.on_ring && !side.on_tcp;
        let may_hold = match stopped {
            true => side.end.outgoing().may_hold(),
            false => side.on_ring,
        };
        if may_write && plan.queue && side.held < 2 && may_hold {
            self.add(say!(self, "program {i} writes to the queue"), true, |world| {
                world.sides[i].written += 1;
                world.sides[i].held += 1;
                Ok(())
            });
        }
        if side.held > 0 && side.on_tcp {
            self.add(say!(self, "end {i} sends a held byte to TCP"), true, |world| {
                let byte = world.sides[i].written - world.sides[i].held;
                world.sides[i].held -= 1;
                world.send_next(i, byte, plan);
                Ok(())
            });
        }
        if side.held > 0 && side.on_ring && works {
            self.add(say!(self, "end {i} sends a held byte to the ring"), true, |world| {
                world.sides[i].held -= 1;
                world.write_ring(i, plan);
                Ok(())
            });
        }
        if !side.done && side.held == 0 && side.written == plan.bytes[i] {
            self.add(say!(self, "program {i} ends its direction"), true, |world| {
                world.sides[i].done = true;
                if world.sides[i].on_ring {
                    world.rings[i].done = true;
                }
                world.tell(i, Input::Said, plan)
            });
        }
    }

    /// The process ends when both programs have ended their directions, or goes on for ever.
    fn process(&mut self, i: usize) {
        let side = &self.from.sides[i];
        if side.done && side.told == Told::End && side.end.is_on_tcp() {
            self.add(say!(self, "process {i} ends"), false, |world| {
                world.die(i, false);
                world.sides[i].left = true;
                Ok(())
            });
        }
    }

    fn reading(&mut self, i: usize) {
        let (plan, side, ring) = (self.plan, &self.from.sides[i], &self.from.rings[1 - i]);
        let memory = side.device != Device::GoneWithMemory;
        let too_soon = plan.mistake == Mistake::ReadsRingTooSoon && ring.first > 0;
        if (side.reads_ring || too_soon) && memory && ring.taken < ring.arrived && !side.knows {
            self.add(say!(self, "end {i} takes a byte from the ring"), true, |world| {
                world.take(i, plan)
            });
        }
        if memory && self.from.sees_done(i) && side.told == Told::Nothing {
            self.add(say!(self, "end {i} sees that its peer is done"), true, |world| {
                world.told_end(i)
            });
        }
        // The bytes posted by the peer arrive as long as both devices work.
        if plan.carrier != Carrier::Window
            && ring.arrived < ring.written
            && side.device == Device::Works
            && self.from.sides[1 - i].device == Device::Works
        {
            self.add(say!(self, "a byte arrives in the ring of end {i}"), true, |world| {
                world.rings[1 - i].arrived += 1;
                Ok(())
            });
        }
        if matches!(side.end.incoming().reading(), smc_core::carrier::Reading::Until(_))
            && self.from.positions(i, plan).arrived > 0
        {
            self.tell(i, true, Input::Arrived);
        }
    }

    /// The reports about devices to an end.
    fn device(&mut self, i: usize) {
        let (side, peer) = (&self.from.sides[i], &self.from.sides[1 - i]);
        let uses_ring =
            !side.end.is_on_tcp() || matches!(side.end.renewal(), Renewal::Confirmed { .. });
        if side.device != Device::Works && !side.knows && uses_ring {
            let plan = self.plan;
            self.add(say!(self, "end {i} learns that its device is gone"), true, |world| {
                world.lose_ring(i, Reason::DeviceGone, plan)
            });
        }
        // The end's own device works, and reports the loss of the peer's; or the time for a leave
        // is over.
        let leaving =
            matches!(side.end.outgoing(), Outgoing::Leaving { .. }) || !side.end.is_on_ring();
        let lost = peer.device != Device::Works || !peer.alive;
        if side.device == Device::Works && !side.knows && uses_ring && (lost || leaving) {
            let plan = self.plan;
            self.add(say!(self, "end {i} learns that its ring is of no use"), lost, |world| {
                world.lose_ring(i, Reason::PeerGone, plan)
            });
        }
    }

    /// TCP brings something to end `i`, or breaks.
    fn tcp(&mut self, i: usize) {
        let plan = self.plan;
        if self.from.rst[i] {
            self.add(say!(self, "end {i} hears of the reset of TCP"), true, |world| {
                world.rst[i] = false;
                match world.acts(i) {
                    true => world.tell(i, Input::TcpReset, plan),
                    false => Ok(()),
                }
            });
        }
        if self.from.tcp[1 - i].is_empty() || self.from.sides[i].told == Told::Reset {
            return;
        }
        if self.from.sides[i].left {
            // The bytes sent by the process were acknowledged before, so an RST takes nothing away.
            self.add(say!(self, "something comes for process {i}"), true, |world| {
                match world.tcp[1 - i].remove(0) {
                    Item::Message(kind) => {
                        Err(format!("{kind:?} comes for a process that has ended"))
                    }
                    _ => Ok(()),
                }
            });
            return;
        }
        if !self.from.sides[i].alive {
            // The kernel answers by RST for an ended process.
            self.add(say!(self, "end {i} is gone, and TCP breaks"), true, |world| {
                world.break_tcp(i);
                Ok(())
            });
            return;
        }
        self.add(
            say!(self, "end {i} gets {:?}", self.from.tcp[1 - i][0]),
            true,
            |world| match world.tcp[1 - i].remove(0) {
                Item::Record(record) => world.tell(i, Input::Record(record), plan),
                Item::Data(record, first) => {
                    world.tell(i, Input::Record(record), plan)?;
                    let n = record.body_len() as u8;
                    let good = !world.sides[i].end.is_over();
                    (0..n)
                        .filter(|_| good)
                        .try_for_each(|k| world.get(i, first.wrapping_add(k), plan))
                }
                Item::Message(kind) => {
                    let clc = Record::Clc { len: 78 };
                    world.tell(i, Input::Record(clc), plan)?;
                    world.tell(i, Input::Message(kind), plan)
                }
                Item::CutRecord => {
                    world.tcp[1 - i].clear();
                    let whole = plan.mistake == Mistake::OverlooksCutRecord;
                    world.tell(i, Input::TcpEnded { whole }, plan)
                }
                Item::Fin => world.ended(i, plan),
            },
        );
    }

    fn coming_back(&mut self, i: usize) {
        let (side, plan) = (&self.from.sides[i], self.plan);
        if side.preparing {
            for done in [false, true] {
                if done && side.device != Device::Works {
                    continue;
                }
                self.add(say!(self, "end {i} has prepared: {done}"), true, |world| {
                    world.sides[i].preparing = false;
                    if done {
                        world.sides[i].knows = false;
                    }
                    world.tell(i, Input::Prepared(done), plan)
                });
            }
        }
        let idle = side.end.is_on_tcp() && side.end.renewal() == Renewal::None;
        if self.from.returns > 0 && i == 0 && idle && self.from.tcp_works {
            self.add(say!(self, "devices are there again"), false, |world| {
                world.returns -= 1;
                for side in &mut world.sides {
                    // An end still using the old ring gets no other.
                    if side.end.is_on_tcp() {
                        (side.device, side.knows) = (Device::Works, false);
                    }
                }
                world.rings = world.rings.map(|ring| match ring.taken == ring.written {
                    true => Ring { first: ring.first + ring.written, ..Ring::default() },
                    false => ring,
                });
                world.tell(i, Input::Return, plan)
            });
        }
    }

    /// The possible faults, limited by the plan.
    fn faults(&mut self, i: usize) {
        if self.from.faults == 0 || !self.from.sides[i].alive {
            return;
        }
        let (plan, side) = (self.plan, &self.from.sides[i]);
        struct Names {
            named: bool,
        }
        let names = Names { named: self.named };
        let mut fault = |name: String, step: &dyn Fn(&mut World) -> Result<(), Wrong>| {
            self.add(name, false, |world| {
                world.faults -= 1;
                step(world)
            });
        };
        if side.device == Device::Works {
            fault(say!(names, "the device of end {i} is about to go"), &|world| {
                world.tell(i, Input::Leave(Reason::DeviceLeaves), plan)
            });
            for device in [Device::Gone, Device::GoneWithMemory] {
                fault(say!(names, "the device of end {i}: {device:?}"), &|world| {
                    world.sides[i].device = device;
                    Ok(())
                });
            }
        }
        fault(say!(names, "end {i} dies"), &|world| {
            world.die(i, false);
            Ok(())
        });
        if side.on_tcp && side.written < plan.bytes[i] && !side.done && side.held == 0 {
            fault(say!(names, "end {i} dies while it writes a record"), &|world| {
                world.die(i, true);
                Ok(())
            });
        }
        if i == 0 && self.from.tcp_works {
            self.add(say!(self, "TCP breaks"), false, |world| {
                world.faults -= 1;
                world.break_tcp(0);
                world.rst[0] = true;
                Ok(())
            });
        }
    }
}

impl World {
    fn write_ring(&mut self, i: usize, plan: &Plan) {
        let gone = self.sides[1 - i].device == Device::GoneWithMemory;
        self.rings[i].written += 1;
        if plan.carrier == Carrier::Window && !gone {
            self.rings[i].arrived += 1;
        }
    }

    /// An end saves the ring's bytes, and takes nothing more from the ring.
    fn lose_ring(&mut self, i: usize, reason: Reason, plan: &Plan) -> Result<(), Wrong> {
        let memory = self.sides[i].device != Device::GoneWithMemory;
        while memory
            && self.sides[i].reads_ring
            && self.rings[1 - i].taken < self.rings[1 - i].arrived
        {
            self.take(i, plan)?;
        }
        self.sides[i].knows = true;
        self.tell(i, Input::RingGone(reason), plan)
    }

    fn die(&mut self, i: usize, in_record: bool) {
        if in_record {
            self.sides[i].written += 1;
        }
        self.sides[i].alive = false;
        if self.tcp_works {
            let last = if in_record { Item::CutRecord } else { Item::Fin };
            self.tcp[i].push(last);
        }
    }

    /// The peer's FIN. On a ring the device reports the meaning: the peer's process has ended, and
    /// all its posted bytes have arrived; the words tell whether bytes were held.
    fn ended(&mut self, i: usize, plan: &Plan) -> Result<(), Wrong> {
        self.tell(i, Input::TcpEnded { whole: true }, plan)?;
        let works = self.sides[i].device == Device::Works;
        if !self.sides[i].end.is_on_ring() || self.sides[i].told != Told::Nothing || !works {
            return Ok(());
        }
        if self.sides[1 - i].held > 0 || self.sides[1 - i].device != Device::Works {
            self.reset(i);
            return Ok(());
        }
        self.rings[1 - i].arrived = self.rings[1 - i].written;
        while self.rings[1 - i].taken < self.rings[1 - i].written {
            self.take(i, plan)?;
        }
        self.told_end(i)
    }
}
