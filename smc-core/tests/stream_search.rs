// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every order in which one direction can write, queue, mark, leave its ring, come back and end, by
//! search, with the two halves of both ends over rings of four bytes: no byte is lost, doubled, out
//! of order or in another's place, and no end waits for ever. Twelve mistakes of an owner are found.

use std::collections::{HashSet, VecDeque};

use smc_core::carrier::{Action, Input, Reading, Renewal, Role};
use smc_core::connection::{Actions, Event, Receiver, Ring, Sender};
use smc_core::stream::{
    Leaving, OwnerState, Place, RecordRecv, RecvHalf, SendHalf, SendPath, Transmit, first_words,
};
use smc_core::wire::cdc::{ConsumerWord, ProducerWord, StateFlags};
use smc_core::wire::clc::Kind;
use smc_core::wire::record::{Reason, Record};

const RING: Ring = match Ring::smcr_without_eye_catcher(4) {
    Ok(ring) => ring,
    Err(_) => panic!("a ring of four bytes"),
};

/// A mistake of an owner, made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    WritesRingWhileLeaving,
    SendsRecordBeforeChange,
    OvertakesItsQueue,
    LosesItsQueue,
    EndsBeforeItsQueue,
    ForgetsTheMark,
    ForgetsTheWordsOfAnEnd,
    ForgetsTheBaseOfARing,
    ForgetsUnreadBytes,
    ForgetsItsEndOnANewRing,
    CountsTwice,
    StoresOverUnreadBytes,
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    bytes: u8,
    urgent: Option<u8>,
    leaves: u8,
    returns: u8,
    /// The role of the writer, end 0, in proposing new rings.
    role: Role,
    mistake: Mistake,
}

const PLAN: Plan = Plan {
    bytes: 3,
    urgent: None,
    leaves: 1,
    returns: 0,
    role: Role::Client,
    mistake: Mistake::None,
};

#[derive(Clone, Debug)]
enum Item {
    Record(Record),
    Data(Record, u8),
    Message(Kind),
}

/// The memory of a ring: bytes, and the peer's words.
#[derive(Clone, Debug)]
struct Memory {
    bytes: [u8; 4],
    words: [u64; 2],
}

#[derive(Clone, Debug)]
struct End {
    send: SendHalf,
    recv: RecvHalf,
    records: RecordRecv,
    own: Memory,
    /// The memory of the negotiated ring.
    next: Memory,
    rings: u8,
    input: VecDeque<u8>,
    queue: VecDeque<u8>,
    written: u8,
    got: u8,
    shut: bool,
    told: bool,
    preparing: bool,
}

#[derive(Clone, Debug)]
struct World {
    ends: [End; 2],
    tcp: [VecDeque<Item>; 2],
    leaves: u8,
    returns: u8,
}

type Result<T> = std::result::Result<T, String>;

fn memory() -> Memory {
    Memory { bytes: [u8::MAX; 4], words: first_words(&RING, &RING) }
}

impl World {
    fn new(plan: &Plan) -> World {
        let end = |role| {
            let mut receiver = Receiver::new(RING);
            let _ = receiver.set_oob_inline(true);
            End {
                send: SendHalf::new(Sender::new(RING), role, true),
                recv: RecvHalf::new(receiver, first_words(&RING, &RING)),
                records: RecordRecv::default(),
                own: memory(),
                next: memory(),
                rings: 0,
                input: VecDeque::new(),
                queue: VecDeque::new(),
                written: 0,
                got: 0,
                shut: false,
                told: false,
                preparing: false,
            }
        };
        let other = if plan.role == Role::Client { Role::Server } else { Role::Client };
        let ends = [end(plan.role), end(other)];
        World { ends, tcp: Default::default(), leaves: plan.leaves, returns: plan.returns }
    }

    /// The peer's memory, as end `i` writes it.
    fn peers(&mut self, i: usize) -> &mut Memory {
        let ahead = self.ends[i].rings > self.ends[1 - i].rings;
        let peer = &mut self.ends[1 - i];
        if ahead { &mut peer.next } else { &mut peer.own }
    }

    fn publish(&mut self, i: usize) {
        let end = &mut self.ends[i];
        let flags = (end.send.sender.flags(), end.send.close.flags());
        let words = end.send.words(end.recv.receiver.cursor(), flags.0, flags.1);
        end.send.on_published(words[0]);
        self.peers(i).words = words;
    }

    fn put(&mut self, i: usize, byte: u8, plan: &Plan) {
        let end = &mut self.ends[i];
        let [span, _] = end.send.sender.spans(1);
        match plan.urgent == Some(byte) {
            true => end.send.sender.advance_urgent(1),
            false => end.send.sender.advance(1, false),
        };
        end.send.count(1);
        if plan.mistake == Mistake::CountsTwice {
            end.send.count(1);
        }
        self.peers(i).bytes[span.offset as usize] = byte;
        self.publish(i);
    }

    fn put_record(&mut self, i: usize, byte: u8, plan: &Plan) {
        let end = &mut self.ends[i];
        let at = end.send.total();
        let more = !end.queue.is_empty();
        end.send.count(1);
        if plan.urgent == Some(byte) {
            self.tcp[i].push_back(Item::Record(Record::Urgent { at: at + 1 }));
        }
        self.tcp[i].push_back(Item::Data(Record::Data { at, len: 1, more }, byte));
    }

    /// Sends a byte on the path of its half. `false`: nothing goes now.
    fn transmit(&mut self, i: usize, byte: u8, plan: &Plan) -> bool {
        let send = &self.ends[i].send;
        let is_urgent = plan.urgent == Some(byte);
        match (send.next(1, || true), send.path()) {
            (Transmit::Ring { .. }, _) => self.put(i, byte, plan),
            (Transmit::Record, _) if !is_urgent || send.may_send_urgent_record() => {
                self.put_record(i, byte, plan);
            }
            (_, SendPath::Leaving(_)) if plan.mistake == Mistake::WritesRingWhileLeaving => {
                self.put(i, byte, plan);
            }
            (_, SendPath::Leaving(Leaving::Change))
                if plan.mistake == Mistake::SendsRecordBeforeChange =>
            {
                self.put_record(i, byte, plan);
            }
            _ => return false,
        }
        true
    }

    /// Takes the peer's reading.
    fn refresh(&mut self, i: usize) -> Result<()> {
        let end = &mut self.ends[i];
        let word = ConsumerWord::from_u64(end.own.words[1]);
        end.send.take(word, false).map_err(|error| format!("end {i}: {error}"))
    }

    fn store_words(&mut self, i: usize) {
        let end = &mut self.ends[i];
        if let Some(words) = end.records.words(&RING) {
            end.own.words = words;
        }
    }

    fn arrived(&self, i: usize) -> Option<u64> {
        let end = &self.ends[i];
        end.records.stored().or_else(|| end.recv.arrived(end.own.words))
    }

    fn change(&mut self, i: usize, input: Input, plan: &Plan) -> Result<()> {
        let arrived = self.arrived(i).ok_or("an impossible cursor")?;
        let unsent = !self.ends[i].queue.is_empty();
        let owner = OwnerState { unsent, arrived, ..OwnerState::default() };
        let actions = self.ends[i].send.change(input, &owner);
        actions.into_iter().try_for_each(|action| self.perform(i, action, plan))
    }

    fn perform(&mut self, i: usize, action: Action, plan: &Plan) -> Result<()> {
        let end = &mut self.ends[i];
        match action {
            Action::StopRing if plan.mistake == Mistake::LosesItsQueue => end.queue.clear(),
            Action::Write(record) => self.tcp[i].push_back(Item::Record(record)),
            Action::Repeat { .. } => return Err(format!("end {i} repeats arrived bytes")),
            Action::SendTcp => {
                end.records.acknowledge(end.send.sender.producer_word().cursor);
                self.store_words(i);
                self.refresh(i)?;
            }
            Action::ReadTcp { from } => {
                self.look(i)?;
                let end = &mut self.ends[i];
                let has_sent = end.send.path() == SendPath::Tcp;
                let sent = end.send.sender.producer_word().cursor;
                let last = ConsumerWord::from_u64(end.own.words[1]);
                end.records.begin_tcp(from, last, has_sent.then_some(sent));
                self.store_words(i);
            }
            Action::PeerSaid(flags) => {
                end.records.end(flags);
                if plan.mistake != Mistake::ForgetsTheWordsOfAnEnd {
                    self.store_words(i);
                }
            }
            Action::Mark(at) if plan.mistake != Mistake::ForgetsTheMark => {
                end.records.mark(at);
                self.store_words(i);
            }
            Action::Propose => self.tcp[i].push_back(Item::Message(Kind::Proposal)),
            Action::Prepare => end.preparing = true,
            Action::Accept => self.tcp[i].push_back(Item::Message(Kind::Accept)),
            Action::Confirm => self.tcp[i].push_back(Item::Message(Kind::Confirm)),
            Action::Reset(violation) => return Err(format!("end {i} is reset: {violation}")),
            _ => {}
        }
        Ok(())
    }

    /// The reader looks at the words in its ring.
    fn look(&mut self, i: usize) -> Result<()> {
        let end = &mut self.ends[i];
        let [producer, consumer] = end.own.words;
        let words = (ProducerWord::from_u64(producer), ConsumerWord::from_u64(consumer));
        let update =
            end.recv.take(words.0, words.1).map_err(|error| format!("end {i}: {error}"))?;
        if words.1.state_flags.contains(StateFlags::SENDING_DONE) {
            end.recv.receiver.on_peer_done();
        }
        let is_ring = end.send.path() == SendPath::Ring;
        if update.update.is_due() && is_ring {
            self.publish(i);
        }
        Ok(())
    }

    /// The reader takes a byte, or the end.
    fn read(&mut self, i: usize, plan: &Plan) -> Result<()> {
        self.look(i)?;
        let end = &mut self.ends[i];
        if end.recv.receiver.readable() == 0 {
            let word = ConsumerWord::from_u64(end.own.words[1]);
            let is_done = word.state_flags.contains(StateFlags::SENDING_DONE);
            if is_done && end.recv.receiver.available() == 0 {
                if end.got != plan.bytes {
                    return Err(format!("an end is told at {} of {}", end.got, plan.bytes));
                }
                end.told = true;
            }
            return Ok(());
        }
        let at_mark = end.recv.receiver.at_mark();
        let [span, _] = end.recv.receiver.peek(0, 1);
        let byte = end.own.bytes[span.offset as usize];
        if byte != end.got {
            return Err(format!("byte {byte} is read in the place of {}", end.got));
        }
        if (plan.urgent == Some(byte)) != at_mark {
            return Err(format!("byte {byte} has the mark: {at_mark}"));
        }
        end.got += 1;
        let _ = end.recv.receiver.consume(1);
        if end.send.path() == SendPath::Ring {
            self.publish(i);
        }
        Ok(())
    }

    fn shut(&mut self, i: usize, event: Event, plan: &Plan) -> Result<()> {
        let end = &mut self.ends[i];
        let unsent = !end.queue.is_empty() && plan.mistake != Mistake::EndsBeforeItsQueue;
        let actions = end.send.end(event, unsent);
        if actions.contains(Actions::SEND_DONE) {
            if end.send.path() == SendPath::Ring {
                self.publish(i);
            } else if end.send.note_said() {
                self.change(i, Input::Said, plan)?;
            }
        }
        Ok(())
    }

    /// The next record comes to end `i`, or the rest of the last one.
    fn serve(&mut self, i: usize, plan: &Plan) -> Result<()> {
        let end = &mut self.ends[i];
        if matches!(end.send.carrier().incoming().reading(), Reading::Until(_)) {
            self.change(i, Input::Arrived, plan)?;
        }
        let end = &mut self.ends[i];
        if end.records.has_body() {
            let read = match plan.mistake {
                Mistake::StoresOverUnreadBytes => ProducerWord::from_u64(end.own.words[0]).cursor,
                _ => end.recv.receiver.cursor(),
            };
            let Place { offset, len } = end.records.place(read, end.input.len(), &RING);
            if len > 0 {
                end.own.bytes[offset as usize] = end.input.pop_front().unwrap_or(u8::MAX);
                end.records.store(1);
                self.store_words(i);
            }
            return Ok(());
        }
        let begins = matches!(self.tcp[1 - i].front(), Some(Item::Record(Record::Change { .. })));
        if begins {
            self.look(i)?;
            let receiver = &self.ends[i].recv.receiver;
            let waits = receiver.available() > 0 || receiver.exception();
            if waits && plan.mistake != Mistake::ForgetsUnreadBytes {
                return Ok(());
            }
        }
        match self.tcp[1 - i].pop_front() {
            Some(Item::Record(record)) => self.change(i, Input::Record(record), plan)?,
            Some(Item::Data(record, byte)) => {
                self.change(i, Input::Record(record), plan)?;
                self.ends[i].input.push_back(byte);
                self.ends[i].records.begin_body(1);
            }
            Some(Item::Message(kind)) => self.change(i, Input::Message(kind), plan)?,
            None => {}
        }
        if begins { self.begin_ring(i, plan) } else { Ok(()) }
    }

    fn begin_ring(&mut self, i: usize, plan: &Plan) -> Result<()> {
        let end = &mut self.ends[i];
        if end.records.stored() != Some(end.recv.total()) {
            return Err(format!("end {i} begins a ring at another position"));
        }
        end.recv.begin_ring(RING, &RING);
        if plan.mistake != Mistake::ForgetsTheBaseOfARing {
            end.records.begin_ring();
        }
        end.own = std::mem::replace(&mut end.next, memory());
        end.rings += 1;
        let writes = end.send.begin_ring(Sender::new(RING));
        if writes && plan.mistake != Mistake::ForgetsItsEndOnANewRing {
            self.publish(i);
        }
        Ok(())
    }

    /// The next states, with the steps to them.
    fn steps(&self, plan: &Plan) -> Vec<(String, Result<World>)> {
        let mut steps = Vec::new();
        let mut add = |name: &str, i: usize, step: &dyn Fn(&mut World) -> Result<()>| {
            let mut world = self.clone();
            let done = step(&mut world);
            steps.push((format!("{name} {i}"), done.map(|()| world)));
        };
        let writer = &self.ends[0];
        if writer.written < plan.bytes {
            add("write", 0, &|world| {
                world.refresh(0)?;
                let byte = world.ends[0].written;
                let queue = world.ends[0].queue.len();
                let may_pass = queue == 0 || plan.mistake == Mistake::OvertakesItsQueue;
                if may_pass && world.transmit(0, byte, plan) {
                    world.ends[0].written += 1;
                } else if queue < 2 && world.ends[0].send.path() != SendPath::Tcp {
                    world.ends[0].queue.push_back(byte);
                    world.ends[0].written += 1;
                }
                Ok(())
            });
        } else if !writer.shut {
            add("shut", 0, &|world| {
                world.ends[0].shut = true;
                world.shut(0, Event::ShutdownWrite, plan)
            });
        }
        if let Some(byte) = writer.queue.front().copied() {
            add("flush", 0, &|world| {
                world.refresh(0)?;
                let mut queue = std::mem::take(&mut world.ends[0].queue);
                queue.pop_front();
                let rest = queue.clone();
                world.ends[0].queue = queue;
                if !world.transmit(0, byte, plan) {
                    world.ends[0].queue.push_front(byte);
                } else if rest.is_empty() && world.ends[0].shut {
                    world.shut(0, Event::Flushed, plan)?;
                }
                Ok(())
            });
        }
        if !self.ends[1].told {
            add("read", 1, &|world| world.read(1, plan));
        }
        for i in 0..2 {
            add("serve", i, &|world| world.serve(i, plan));
            let end = &self.ends[i];
            if end.preparing {
                add("prepared", i, &|world| {
                    world.ends[i].preparing = false;
                    world.change(i, Input::Prepared(true), plan)
                });
            }
            if self.leaves > 0 && !end.send.has_left() {
                add("leave", i, &|world| {
                    world.leaves -= 1;
                    world.change(i, Input::Leave(Reason::DeviceLeaves), plan)
                });
            }
        }
        let client = usize::from(plan.role == Role::Server);
        let carrier = self.ends[client].send.carrier();
        if self.returns > 0 && carrier.is_on_tcp() && carrier.renewal() == Renewal::None {
            add("return", client, &|world| {
                world.returns -= 1;
                world.change(client, Input::Return, plan)
            });
        }
        steps
    }
}

/// Searches every state. Returns the number of states.
///
/// # Errors
/// The broken rule, and the steps to it.
fn search(plan: &Plan) -> Result<usize> {
    let mut known = HashSet::new();
    let mut open = VecDeque::from([(World::new(plan), String::new())]);
    while let Some((world, way)) = open.pop_front() {
        let key = format!("{world:?}");
        let mut moves = false;
        for (name, next) in world.steps(plan) {
            let next = next.map_err(|wrong| format!("{wrong}:{way} {name}"))?;
            let next_key = format!("{next:?}");
            // Leaves and returns are possible, and no way to go on.
            let is_due = !name.starts_with("leave") && !name.starts_with("return");
            moves |= is_due && next_key != key;
            if known.insert(next_key) {
                open.push_back((next, format!("{way} {name},")));
            }
        }
        if !moves && !world.ends[1].told {
            return Err(format!("an end waits at {}:{way}", world.ends[1].got));
        }
        assert!(known.len() < 300_000, "{plan:?}: too many states");
    }
    Ok(known.len())
}

fn holds(plan: Plan) {
    match search(&plan) {
        Ok(states) => println!("{plan:?}: {states} states"),
        Err(wrong) => panic!("{plan:?}\n{wrong}"),
    }
}

#[test]
fn bytes_go_on_in_order_from_a_full_ring_a_queue_and_records() {
    holds(Plan { bytes: 7, leaves: 0, ..PLAN });
    holds(Plan { bytes: 6, ..PLAN });
}

#[test]
fn bytes_go_on_in_order_when_connections_come_back() {
    for role in [Role::Client, Role::Server] {
        holds(Plan { returns: 1, role, ..PLAN });
        holds(Plan { bytes: 2, leaves: 2, returns: 1, role, ..PLAN });
    }
}

#[test]
fn the_mark_stays_at_its_byte() {
    for byte in 0..3 {
        holds(Plan { urgent: Some(byte), ..PLAN });
    }
    holds(Plan { bytes: 2, urgent: Some(0), returns: 1, ..PLAN });
}

#[test]
fn the_search_finds_each_mistake_of_an_owner() {
    let finds = |mistake, plan: Plan, expected: &str| {
        let wrong = search(&Plan { mistake, ..plan }).expect_err(&format!("{mistake:?}"));
        assert!(wrong.contains(expected), "{mistake:?}: {wrong}");
    };
    let back = Plan { returns: 1, ..PLAN };
    let again = Plan { bytes: 2, leaves: 2, returns: 1, ..PLAN };
    let full = Plan { bytes: 6, ..PLAN };
    let marked = Plan { urgent: Some(1), ..PLAN };
    finds(Mistake::WritesRingWhileLeaving, PLAN, "the ring has bytes up to 1, LEAVE says 0");
    let server = Plan { role: Role::Server, ..back };
    finds(Mistake::SendsRecordBeforeChange, server, "DATA came out of turn");
    finds(Mistake::OvertakesItsQueue, full, "byte 1 is read in the place of 0");
    finds(Mistake::LosesItsQueue, full, "END came out of turn");
    finds(Mistake::EndsBeforeItsQueue, full, "an end is told at 4 of 6");
    finds(Mistake::ForgetsTheMark, marked, "byte 1 has the mark: false");
    finds(Mistake::ForgetsTheWordsOfAnEnd, PLAN, "an end waits at 3");
    finds(Mistake::ForgetsTheBaseOfARing, again, "byte 255 is read in the place of 1");
    finds(Mistake::ForgetsUnreadBytes, back, "byte 1 is read in the place of 0");
    finds(Mistake::ForgetsItsEndOnANewRing, back, "an end waits at 3");
    finds(Mistake::CountsTwice, PLAN, "an end waits at 1");
    finds(Mistake::StoresOverUnreadBytes, full, "announces 1 bytes where 0 fit");
}
