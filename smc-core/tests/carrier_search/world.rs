// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two ends, a ring and a stream of TCP in each direction, and two programs. A byte is known by its
//! number in its direction, so a read shows every lost, doubled or misplaced byte.

use smc_core::carrier::{Action, End, Input, Positions, Reading, Role, Violation};
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::clc;
use smc_core::wire::record::{Reason, Record};

/// The transport of bytes to the peer's ring, and the fate of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Carrier {
    /// By stores, visible at once.
    Window,
    /// By moves or RDMA, with a delay or never; the sender has copies.
    Copies,
    /// Like `Copies`, without copies.
    NoCopies,
}

/// A mistake made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mistake {
    None,
    /// The receiver sends RECEIVED for bytes still on their way.
    AnswersTooSoon,
    /// The receiver counts bytes lost with their memory.
    CountsLostBytes,
    /// The sender claims missing copies.
    InventsCopies,
    /// LEAVE and DATA do not announce held bytes.
    HidesHeldBytes,
    /// The end of a direction, sent on the ring, is not repeated.
    ForgetsItsEnd,
    /// Bytes of the new ring are read before CHANGE has come.
    ReadsRingTooSoon,
    /// A cut record at the end of TCP is taken for no record.
    OverlooksCutRecord,
    /// The answer is awaited for ever: LEAVE is not answered by LEAVE.
    AnswersNoLeave,
    /// LEAVE is not followed by the mark of an urgent byte, perhaps not arrived.
    ForgetsItsMark,
    /// The mark of an urgent byte on TCP follows the byte.
    MarksTooLate,
    /// An end proposes a new ring although its direction has ended.
    ProposesBehindItsEnd,
}

/// The parameters of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) carrier: Carrier,
    /// Bytes written by each program.
    pub(crate) bytes: [u8; 2],
    /// Maximum number of faults and leaves: devices, ends, TCP.
    pub(crate) faults: u8,
    /// Maximum number of new rings.
    pub(crate) returns: u8,
    /// Ends may hold bytes in a send queue.
    pub(crate) queue: bool,
    /// Number of the urgent byte of each direction.
    pub(crate) urgent: [Option<u8>; 2],
    pub(crate) mistake: Mistake,
}

/// A ring of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Ring {
    /// Number of its first byte.
    pub(crate) first: u8,
    /// Bytes written to the ring.
    pub(crate) written: u8,
    /// Bytes that have arrived.
    pub(crate) arrived: u8,
    /// Bytes taken out by the receiver.
    pub(crate) taken: u8,
    /// The sender's words declare the end.
    pub(crate) done: bool,
}

/// An item on its way on TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Item {
    Record(Record),
    /// DATA, and the true number of its first byte.
    Data(Record, u8),
    /// The beginning of a DATA record.
    CutRecord,
    Message(clc::Kind),
    Fin,
}

/// The device of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Device {
    Works,
    /// The device is gone, and the memory of the ring stays.
    Gone,
    /// The device is gone, and the memory is lost.
    GoneWithMemory,
}

/// The last report to the reading program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Told {
    Nothing,
    End,
    Reset,
}

/// One end and its program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Side {
    pub(crate) end: End,
    pub(crate) alive: bool,
    /// The process has ended after both directions had, and no data may come for the process.
    pub(crate) left: bool,
    pub(crate) device: Device,
    /// The end knows of the loss of its ring.
    pub(crate) knows: bool,
    /// Bytes taken from the program.
    pub(crate) written: u8,
    /// Bytes in the send queue, among the written ones.
    pub(crate) held: u8,
    pub(crate) done: bool,
    /// Bytes go into the ring; or to TCP; or nowhere.
    pub(crate) on_ring: bool,
    pub(crate) on_tcp: bool,
    /// Bytes come from the ring.
    pub(crate) reads_ring: bool,
    /// Bytes received, in order.
    pub(crate) got: u8,
    pub(crate) told: Told,
    /// The program knows the urgent byte as urgent.
    pub(crate) marked: bool,
    /// The owner prepares a new ring.
    pub(crate) preparing: bool,
}

/// The complete state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) sides: [Side; 2],
    /// Indexed by the sender.
    pub(crate) rings: [Ring; 2],
    /// Indexed by the sender.
    pub(crate) tcp: [Vec<Item>; 2],
    /// TCP was reset, and this end has not learned of the reset.
    pub(crate) rst: [bool; 2],
    pub(crate) tcp_works: bool,
    pub(crate) faults: u8,
    pub(crate) returns: u8,
}

/// A violated rule.
pub(crate) type Wrong = String;

impl World {
    pub(crate) fn new(plan: &Plan) -> World {
        let side = |role| Side {
            end: End::on_ring(role, true),
            alive: true,
            left: false,
            device: Device::Works,
            knows: false,
            written: 0,
            held: 0,
            done: false,
            on_ring: true,
            on_tcp: false,
            reads_ring: true,
            got: 0,
            told: Told::Nothing,
            marked: false,
            preparing: false,
        };
        World {
            sides: [side(Role::Client), side(Role::Server)],
            rings: Default::default(),
            tcp: Default::default(),
            rst: [false; 2],
            tcp_works: true,
            faults: plan.faults,
            returns: plan.returns,
        }
    }

    /// Whether this end takes part: its process lives and its connection was not reset.
    pub(crate) fn acts(&self, i: usize) -> bool {
        self.sides[i].alive && !self.sides[i].end.is_over() && self.sides[i].told != Told::Reset
    }

    pub(crate) fn positions(&self, i: usize, plan: &Plan) -> Positions {
        let (side, out, own) = (&self.sides[i], &self.rings[i], &self.rings[1 - i]);
        let sent = side.written - side.held;
        let kept = match plan.carrier {
            _ if plan.mistake == Mistake::InventsCopies => 0,
            Carrier::Copies => out.first + out.arrived,
            Carrier::Window | Carrier::NoCopies => sent,
        };
        let lost =
            side.device == Device::GoneWithMemory && plan.mistake != Mistake::CountsLostBytes;
        let arrived = if lost { own.taken } else { own.arrived };
        let forgets = plan.mistake == Mistake::ForgetsItsEnd;
        let said = match side.done && !forgets {
            true => StateFlags::SENDING_DONE,
            false => StateFlags::empty(),
        };
        let unsent = side.held > 0 && plan.mistake != Mistake::HidesHeldBytes;
        let arrived = (own.first + arrived).into();
        // No byte was written behind an urgent byte, or the peer has read the urgent byte. A
        // window's memory has the mark as long as the byte.
        let urgent = self.urgent_at(i, sent.wrapping_sub(1), plan)
            && sent > out.first
            && plan.carrier != Carrier::Window
            && plan.mistake != Mistake::ForgetsItsMark;
        let urgent = urgent.then_some(sent.into());
        Positions { sent: sent.into(), kept: kept.into(), unsent, urgent, said, arrived }
    }

    /// Whether the byte with this number is the urgent one of the direction sent by `i`.
    pub(crate) fn urgent_at(&self, i: usize, byte: u8, plan: &Plan) -> bool {
        plan.urgent[i] == Some(byte)
    }

    /// Whether the peer may not have read an urgent byte. Nothing goes to the ring behind such a
    /// byte.
    pub(crate) fn awaits_reader(&self, i: usize, plan: &Plan) -> bool {
        let (ring, sent) = (&self.rings[i], self.sides[i].written - self.sides[i].held);
        let is_last = sent > ring.first && self.urgent_at(i, sent - 1, plan);
        is_last && ring.taken < ring.written
    }

    /// Gives an input to an end, and carries out the resulting actions.
    pub(crate) fn tell(&mut self, i: usize, input: Input, plan: &Plan) -> Result<(), Wrong> {
        let mut positions = self.positions(i, plan);
        if let (Mistake::AnswersTooSoon, Input::Record(Record::Leave { at, .. })) =
            (plan.mistake, input)
        {
            positions.arrived = at;
        }
        if plan.mistake == Mistake::ProposesBehindItsEnd && input == Input::Return {
            positions.said = StateFlags::empty();
        }
        let actions = self.sides[i].end.on(input, &positions);
        for action in actions {
            self.carry_out(i, action, plan)?;
        }
        Ok(())
    }

    fn send(&mut self, i: usize, item: Item) {
        if self.tcp_works {
            self.tcp[i].push(item);
        }
    }

    /// Sends bytes as DATA: stated position, true number of the first byte, and length.
    pub(crate) fn send_data(&mut self, i: usize, at: u64, first: u8, len: u8, plan: &Plan) {
        let more = self.sides[i].held > 0 && plan.mistake != Mistake::HidesHeldBytes;
        self.send(i, Item::Data(Record::Data { at, len: len.into(), more }, first));
    }

    /// Sends the next byte of the program as DATA, behind its mark if urgent.
    pub(crate) fn send_next(&mut self, i: usize, byte: u8, plan: &Plan) {
        let mark = Item::Record(Record::Urgent { at: u64::from(byte) + 1 });
        let is_urgent = self.urgent_at(i, byte, plan);
        if is_urgent && plan.mistake != Mistake::MarksTooLate {
            self.send(i, mark);
        }
        self.send_data(i, byte.into(), byte, 1, plan);
        if is_urgent && plan.mistake == Mistake::MarksTooLate {
            self.send(i, mark);
        }
    }

    fn carry_out(&mut self, i: usize, action: Action, plan: &Plan) -> Result<(), Wrong> {
        match action {
            Action::StopRing => self.sides[i].on_ring = false,
            Action::Write(Record::Leave { reason: Reason::Answer, .. })
                if plan.mistake == Mistake::AnswersNoLeave => {}
            Action::Write(record) => self.send(i, Item::Record(record)),
            Action::Repeat { from, to } => {
                let kept = match plan.carrier {
                    Carrier::Copies => from as u8,
                    // There is no copy: other bytes take their place.
                    _ => u8::MAX,
                };
                self.send_data(i, from, kept, (to - from) as u8, plan);
            }
            Action::SendTcp => self.sides[i].on_tcp = true,
            Action::SendRing => {
                let first = self.sides[i].written - self.sides[i].held;
                self.rings[i] = Ring { first, done: self.sides[i].done, ..Ring::default() };
                (self.sides[i].on_ring, self.sides[i].on_tcp) = (true, false);
            }
            Action::ReadTcp { from } => {
                while u64::from(self.sides[i].got) < from {
                    self.take(i, plan)?;
                }
                self.sides[i].reads_ring = false;
            }
            Action::ReadRing { .. } => self.sides[i].reads_ring = true,
            Action::ReleaseRing => {
                if self.sides[i].on_ring || self.sides[i].reads_ring {
                    return Err("a ring in use is released".into());
                }
            }
            Action::PeerSaid(_) | Action::PeerEnded => self.told_end(i)?,
            Action::Prepare => self.sides[i].preparing = true,
            Action::Propose => self.send(i, Item::Message(clc::Kind::Proposal)),
            Action::Accept => self.send(i, Item::Message(clc::Kind::Accept)),
            Action::Confirm => {
                self.sides[i].knows = false;
                self.send(i, Item::Message(clc::Kind::Confirm));
            }
            Action::Decline => self.send(i, Item::Message(clc::Kind::Decline)),
            Action::Reset(violation) => {
                // Each end keeps the rules, so nothing else ends a connection.
                let fate = matches!(
                    violation,
                    Violation::NoCopy { .. }
                        | Violation::Cut { .. }
                        | Violation::EndedInChange
                        | Violation::TcpReset
                );
                if !fate && plan.mistake == Mistake::None {
                    return Err(format!("end {i} accuses its peer: {violation}"));
                }
                self.reset(i);
            }
            Action::Mark(at) => {
                if plan.urgent[1 - i].is_none_or(|byte| u64::from(byte) + 1 != at) {
                    return Err(format!("end {i} has a mark at {at}"));
                }
                self.sides[i].marked = true;
            }
            Action::Await { .. } | Action::DropRing => {}
        }
        Ok(())
    }

    /// Takes the next byte out of the own ring.
    pub(crate) fn take(&mut self, i: usize, plan: &Plan) -> Result<(), Wrong> {
        let (side, ring) = (&mut self.sides[i], &mut self.rings[1 - i]);
        if ring.taken >= ring.arrived {
            return Err(format!("end {i} reads a byte that has not arrived"));
        }
        if side.device == Device::GoneWithMemory {
            return Err(format!("end {i} reads memory that is gone"));
        }
        let byte = ring.first + ring.taken;
        ring.taken += 1;
        // The word announcing the byte also announces the urgency.
        self.sides[i].marked |= self.urgent_at(1 - i, byte, plan);
        self.get(i, byte, plan)
    }

    pub(crate) fn get(&mut self, i: usize, byte: u8, plan: &Plan) -> Result<(), Wrong> {
        let is_urgent = self.urgent_at(1 - i, byte, plan);
        let side = &mut self.sides[i];
        if byte != side.got {
            return Err(format!("end {i} reads byte {byte} in the place of {}", side.got));
        }
        if is_urgent && !side.marked {
            return Err(format!("end {i} reads the urgent byte {byte} as another"));
        }
        side.got += 1;
        Ok(())
    }

    pub(crate) fn told_end(&mut self, i: usize) -> Result<(), Wrong> {
        let (got, written) = (self.sides[i].got, self.sides[1 - i].written);
        if got != written {
            return Err(format!("end {i} is told of an end at {got}, {written} were written"));
        }
        self.sides[i].told = Told::End;
        Ok(())
    }

    /// Breaks TCP; this program is told of a reset.
    pub(crate) fn reset(&mut self, i: usize) {
        self.sides[i].told = Told::Reset;
        self.break_tcp(i);
    }

    /// TCP ends for the peer of `i` as well.
    pub(crate) fn break_tcp(&mut self, i: usize) {
        if self.tcp_works {
            self.rst[1 - i] = true;
        }
        self.tcp_works = false;
        self.tcp.iter_mut().for_each(Vec::clear);
    }

    /// Whether the peer's words declare the end, behind the last byte.
    pub(crate) fn sees_done(&self, i: usize) -> bool {
        let ring = &self.rings[1 - i];
        let reads = matches!(self.sides[i].end.incoming().reading(), Reading::Ring);
        reads && self.sides[i].reads_ring && ring.done && ring.taken == ring.written
    }
}
