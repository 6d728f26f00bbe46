// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work on a kick: control commands, event records, moves.

use std::sync::atomic::Ordering;
use std::time::Instant;

use virtio_ism_abi::command::Op;
use virtio_ism_abi::event::EVENT_LEN;
use virtio_ism_abi::mv::{MoveHeader, Segment};
use virtio_ism_abi::{CONTROL_QUEUE, EVENT_QUEUE, Status};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use zerocopy::FromBytes;

use super::chain::{Chain, ChainError, Scratch};
use super::connection::Connection;
use super::faults::Fault;
use super::inline_delivery::{InlineContext, with_context};
use super::mapper::Job;
use super::ring::Ring;
use ism_device::sync::lock;
use ism_device::{Delivery, Moved, Outcome};

/// Commands per kick before the worker serves its other queues.
const COMMANDS: usize = 64;
/// Commands between two checks of the event queue.
const COMMANDS_AT_ONCE: usize = 8;
/// Most commands waiting for the front end. Beyond, the control queue is not read.
const BACKLOG: usize = 256;
/// Moves per kick of a queue before the worker serves its other queues.
const MOVES: usize = 64;
/// Payload bytes per kick of a move queue.
const MOVE_BYTES: u64 = 4 << 20;
/// Records per turn.
const EVENTS: usize = 256;
/// Records per turn of another device's thread, kept low to bound the thread's work for this device.
const EVENTS_INLINE: usize = 4;
/// Ranges of past sessions unmapped after one HELLO, the most the device stores.
const STALE: usize = 4096;
/// Length of a move's status on the ring.
const MOVE_STATUS_LEN: usize = 4;

/// Result of one step on a queue.
enum Step {
    /// A chain was used.
    Used,
    /// A chain was used, and the turn's budget is used up.
    UsedUp,
    /// A chain was taken and will be used later.
    Taken,
    /// The queue has no chain.
    Empty,
    /// The queue may have a chain; another call serves it.
    Later,
}

/// How a turn ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The queue is empty, or another call serves the rest.
    Done,
    /// The budget was used up before the queue was empty.
    Over,
}

/// Takes at most `budget` steps on a ring and signals the driver once. `None` if the ring does not
/// run.
fn take_turn(
    connection: &Connection,
    ring: &Ring,
    budget: usize,
    mut step: impl FnMut(&mut Queue, &GuestMemoryMmap) -> Result<Step, ChainError>,
) -> Option<Turn> {
    let memory = connection.memory.handle().memory();
    let mut signal = false;
    let turn = ring.with_queue(|queue| {
        let mut used = 0;
        let turn = steps(queue, &memory, budget, &mut used, &mut step);
        ring.count_used(used);
        signal = used != 0 && queue.needs_notification(&*memory).unwrap_or(true);
        turn
    })?;
    if signal {
        connection.guest.account.signal(|| ring.signal());
    }
    finish_turn(connection, ring, turn)
}

/// An error of a turn breaks the ring.
fn finish_turn(
    connection: &Connection,
    ring: &Ring,
    turn: Result<Turn, ChainError>,
) -> Option<Turn> {
    match turn {
        Ok(turn) => Some(turn),
        Err(error) => {
            ring.set_broken();
            let fault = match error {
                ChainError::Malformed { .. } | ChainError::TooLong { .. } => Fault::BadChain,
                _ => Fault::BrokenRing,
            };
            connection.fault(fault, format_args!("the queue is closed: {error}"));
            None
        }
    }
}

fn steps(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    budget: usize,
    used: &mut usize,
    step: &mut impl FnMut(&mut Queue, &GuestMemoryMmap) -> Result<Step, ChainError>,
) -> Result<Turn, ChainError> {
    queue.disable_notification(memory)?;
    let mut announced = false;
    for _ in 0..budget {
        match step(queue, memory)? {
            Step::Used => *used += 1,
            Step::UsedUp => {
                *used += 1;
                return Ok(Turn::Over);
            }
            Step::Taken => {}
            Step::Later => return Ok(Turn::Done),
            // The driver's index had moved on, but there is no chain.
            Step::Empty if announced => return Err(ChainError::Avail),
            Step::Empty => {
                if !queue.enable_notification(memory)? {
                    return Ok(Turn::Done);
                }
                announced = true;
                continue;
            }
        }
        announced = false;
    }
    Ok(Turn::Over)
}

impl Connection {
    /// Serves the control queue: a bounded number of commands, with checks of the event queue in
    /// between.
    pub(super) fn serve_control(&self, scratch: &mut Scratch) {
        let Some(ring) = self.ring(CONTROL_QUEUE) else { return };
        for _ in 0..COMMANDS / COMMANDS_AT_ONCE {
            let turn = take_turn(self, ring, COMMANDS_AT_ONCE, |queue, memory| {
                self.one_command(ring, queue, memory, scratch)
            });
            // A long burst of commands must not delay a wake.
            if self.device.has_events() {
                self.serve_events(scratch);
            }
            if turn != Some(Turn::Over) {
                return;
            }
        }
        self.reschedule(0, CONTROL_QUEUE);
    }

    fn one_command(
        &self,
        ring: &Ring,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        scratch: &mut Scratch,
    ) -> Result<Step, ChainError> {
        if self.replies.backlog.load(Ordering::Relaxed) >= BACKLOG {
            return Ok(Step::Later);
        }
        let chain = &mut scratch.chain;
        if !chain.pop(queue, memory)? {
            return Ok(Step::Empty);
        }
        let len = chain.reader(memory).read(&mut scratch.bytes)?;
        let request = scratch.bytes.get(..len).unwrap_or_default();
        let room = usize::try_from(chain.writable_len()).unwrap_or(usize::MAX);
        match self.device.command(request, room) {
            Outcome::Reply(reply) => {
                if reply.is_empty() {
                    self.fault(Fault::NoRoom, format_args!("a command without room for a reply"));
                }
                let len = chain.write(memory, &reply)?;
                queue.add_used(memory, chain.head(), len)?;
                if request.starts_with(&(Op::Hello as u16).to_le_bytes()) {
                    self.unmap_stale();
                }
                return Ok(Step::Used);
            }
            Outcome::Map(job) => self.wait_for(Job::Map(job, chain.suspend(ring.generation()))),
            Outcome::Unmap(job) => self.wait_for(Job::Unmap(job, chain.suspend(ring.generation()))),
        }
        Ok(Step::Taken)
    }

    fn wait_for(&self, job: Job) {
        self.replies.backlog.fetch_add(1, Ordering::Relaxed);
        self.ask_front_end(job);
    }

    /// After HELLO and after each job: asks the front end to unmap mappings left by an earlier session or a
    /// failed command.
    pub(super) fn unmap_stale(&self) {
        for _ in 0..STALE {
            let Some(stale) = self.device.stale_map() else { return };
            self.ask_front_end(Job::Stale(stale));
        }
    }

    /// Publishes the replies of ended mapping jobs. A stopped ring keeps the replies. A ring of another
    /// generation drops the replies, since its driver did not send those commands.
    pub(super) fn publish_replies(&self) {
        if !self.replies.has_ready.swap(false, Ordering::Acquire) {
            return;
        }
        let Some(ring) = self.ring(CONTROL_QUEUE) else { return };
        if !ring.running() {
            self.replies.has_ready.store(true, Ordering::Release);
            return;
        }
        take_turn(self, ring, BACKLOG + 1, |queue, memory| {
            let mut replies = lock(&self.replies.ready);
            let Some((pending, reply)) = replies.pop_front() else { return Ok(Step::Later) };
            drop(replies);
            self.replies.backlog.fetch_sub(1, Ordering::Relaxed);
            if pending.generation != ring.generation() {
                return Ok(Step::Taken);
            }
            let len = pending.write(memory, &reply)?;
            queue.add_used(memory, pending.head, len)?;
            Ok(Step::Used)
        });
        let replies = lock(&self.replies.ready);
        if !replies.is_empty() {
            self.replies.has_ready.store(true, Ordering::Release);
        }
    }

    /// Serves the event queue: writes records into buffers while both last. Takes a record from the device
    /// only with a good buffer at hand.
    pub(super) fn serve_events(&self, scratch: &mut Scratch) {
        let Some(ring) = self.ring(EVENT_QUEUE) else { return };
        // Read first: a record delayed now but due by the next line is served there.
        let delay = self.device.next_event_in();
        if self.device.has_events() {
            let turn = take_turn(self, ring, EVENTS, |queue, memory| {
                self.one_event(queue, memory, &mut scratch.chain)
            });
            if turn == Some(Turn::Over) {
                self.reschedule(0, EVENT_QUEUE);
            }
        }
        if let Some(delay) = delay {
            self.wake_later(delay);
        }
    }

    /// Delivers records from a thread of another device, without ever waiting. `false`: not possible or too
    /// slow, leave delivery to the device's own worker.
    pub(super) fn deliver_inline(&self) -> bool {
        let start = Instant::now();
        self.wakes.cost.allows(start) && with_context(|context| self.deliver_events(start, context))
    }

    fn deliver_events(&self, start: Instant, context: &mut InlineContext) -> bool {
        let Some(ring) = self.ring(EVENT_QUEUE) else { return true };
        let InlineContext { chain, kicker } = context;
        let memory = self.memory.handle().memory();
        let mut signal = false;
        let done = ring.try_with_queue(|queue| {
            let mut used = 0;
            let step = &mut |queue: &mut Queue, memory: &GuestMemoryMmap| {
                self.one_event(queue, memory, chain)
            };
            let turn = steps(queue, &memory, EVENTS_INLINE, &mut used, step);
            signal = used != 0 && queue.needs_notification(&*memory).unwrap_or(true);
            turn
        });
        let published = Instant::now();
        self.wakes.cost.took(start, published);
        let mut call = || ring.signal_nonblocking(kicker);
        if signal && !self.wakes.cost.signal(published, &mut call) {
            self.wakes.call_pending.store(true, Ordering::Release);
            return false;
        }
        // Another thread works on the ring, and may or may not see the new events.
        let Some(done) = done else { return false };
        let Some(turn) = done else { return true };
        if finish_turn(self, ring, turn) == Some(Turn::Over) {
            self.reschedule(0, EVENT_QUEUE);
        }
        if let Some(delay) = self.device.next_event_in() {
            self.wake_later(delay);
        }
        true
    }

    fn one_event(
        &self,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        chain: &mut Chain,
    ) -> Result<Step, ChainError> {
        if !self.device.has_events() {
            if let Some(delay) = self.device.next_event_in() {
                self.wake_later(delay);
                return Ok(Step::Later);
            }
            // A wake delayed by its rate limit at the first check may be due by now. No other thread would
            // deliver the wake.
            if !self.device.has_events() {
                return Ok(Step::Later);
            }
        }
        if !chain.pop(queue, memory)? {
            return Ok(Step::Empty);
        }
        if !chain.can_write(memory, EVENT_LEN) {
            self.fault(Fault::NoRoom, format_args!("an event buffer below {EVENT_LEN} bytes"));
            return Err(ChainError::Unreachable { head: chain.head() });
        }
        let Some(record) = self.device.next_event() else {
            // Another thread took the record, or its rate limit delays it.
            queue.go_to_previous_position();
            self.reschedule(0, EVENT_QUEUE);
            return Ok(Step::Later);
        };
        let len = chain.write(memory, &record)?;
        queue.add_used(memory, chain.head(), len)?;
        Ok(Step::Used)
    }

    /// Serves a move queue: a bounded number of moves.
    pub(super) fn serve_moves(&self, queue: u16, scratch: &mut Scratch) {
        let Some(ring) = self.ring(queue) else { return };
        let mut bytes = 0;
        let turn = take_turn(self, ring, MOVES, |queue, memory| {
            let step = self.one_move(queue, memory, scratch)?;
            bytes += scratch.chain.readable_len();
            let enough = matches!(step, Step::Used) && bytes >= MOVE_BYTES;
            Ok(if enough { Step::UsedUp } else { step })
        });
        if turn == Some(Turn::Over) {
            self.reschedule(1, queue);
        }
    }

    fn one_move(
        &self,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        scratch: &mut Scratch,
    ) -> Result<Step, ChainError> {
        let chain = &mut scratch.chain;
        if !chain.pop(queue, memory)? {
            return Ok(Step::Empty);
        }
        if !chain.can_write(memory, MOVE_STATUS_LEN) {
            self.fault(Fault::NoRoom, format_args!("a move without room for its status"));
            queue.add_used(memory, chain.head(), 0)?;
            return Ok(Step::Used);
        }
        let mut reader = chain.reader(memory);
        let (header, segments) = scratch.bytes.split_at_mut(size_of::<MoveHeader>());
        let mut len = reader.read(header)?;
        if len == header.len() {
            let nseg = MoveHeader::ref_from_bytes(header).map_or(0, |header| header.nseg.get());
            let want = usize::from(nseg).min(scratch.max_segs) * size_of::<Segment>();
            len += reader.read(segments.get_mut(..want).unwrap_or_default())?;
        }
        let head = scratch.bytes.get(..len).unwrap_or_default();
        let payload_len = chain.readable_len() - len as u64;
        // All or nothing: the whole payload must be in guest memory.
        let moved = if reader.rest_is_reachable() {
            self.device.transfer(head, &mut reader, payload_len)
        } else {
            Moved { status: Status::Eio, wake: None }
        };
        let status = u32::from(moved.status.code()).to_le_bytes();
        let published = chain
            .write(memory, &status)
            .and_then(|len| Ok(queue.add_used(memory, chain.head(), len)?));
        // Only after the status is published: a driver with an outstanding kick skips the next kick. Inline,
        // because this thread holds no lock of a device.
        if let Some(wake) = moved.wake {
            wake.deliver(Delivery::Inline);
        }
        published.map(|()| Step::Used)
    }
}
