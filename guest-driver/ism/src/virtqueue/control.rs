// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control queue: one request, one reply, several threads.
//!
//! Each command has a slot with memory of its own, and a tag. Of the threads waiting for replies, one waits
//! for the interrupt, takes all completions, and wakes the others.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use virtio_ism_abi::Status;
use virtio_ism_abi::command::{Op, ReplyHeader, RequestHeader};
use zerocopy::{FromZeros, IntoBytes};

use super::{CONTROL_TIMEOUT, GuestMem, GuestPool, QueueAddresses, QueueError, SplitQueue, Wiring};
use ism_sys::{ForkLocks, LockGuardList, lock, try_hold};

const ENTRIES: usize = 64;
/// Commands under way at most: each takes two descriptors.
const SLOTS: usize = ENTRIES / 2;
/// Bytes of a slot for the request, and again for the reply; a REGISTER may name up to 29 pieces.
const PART: usize = 512;
/// How long a wait lasts before the thread rechecks the ring without an interrupt.
const RECHECK_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    Posted,
    /// The reply is there; its length in bytes.
    Done(u32),
}

struct State {
    ring: SplitQueue<ENTRIES>,
    slots: [Slot; SLOTS],
    next_tag: u32,
    // Whether a thread waits for the interrupt.
    listening: bool,
}

pub(crate) struct ControlQueue {
    state: Mutex<State>,
    changed: Condvar,
    memory: GuestMem,
    wiring: Wiring,
    timeout: Duration,
}

impl ForkLocks for ControlQueue {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        // A command under way has a thread waiting for its answer.
        let is_idle = self.state.try_lock().is_ok_and(|state| {
            !state.listening && state.slots.iter().all(|slot| *slot == Slot::Free)
        });
        is_idle && try_hold(&self.state, held)
    }

    fn is_unlocked(&self) -> bool {
        true
    }
}

impl ControlQueue {
    pub(crate) fn new(pool: &Arc<GuestPool>, wiring: Wiring) -> Result<ControlQueue, QueueError> {
        let (rings, gpa) = pool.permanent(SplitQueue::<ENTRIES>::MEMORY)?;
        let ring = SplitQueue::new(pool.whole().clone(), rings, gpa, wiring.event_idx)?;
        let memory = pool.alloc(SLOTS * 2 * PART)?;
        let state = State { ring, slots: [Slot::Free; SLOTS], next_tag: 1, listening: false };
        Ok(ControlQueue {
            state: Mutex::new(state),
            changed: Condvar::new(),
            memory,
            wiring,
            timeout: CONTROL_TIMEOUT,
        })
    }

    pub(crate) fn addresses(&self) -> QueueAddresses {
        lock(&self.state).ring.addresses()
    }

    /// Executes a control command: sends `body` (the bytes after the request header) and, if the
    /// status is OK, fills `reply` (the bytes after the reply header) completely. Returns the
    /// status code of the answer.
    ///
    /// Blocks until the device answers; several threads may have commands under way.
    ///
    /// # Errors
    /// The device is gone, did not answer within [`CONTROL_TIMEOUT`](super::CONTROL_TIMEOUT) (and is
    /// gone from now on), or answered something else.
    pub(crate) fn command(&self, op: Op, body: &[u8], reply: &mut [u8]) -> Result<u16, QueueError> {
        let request_len = size_of::<RequestHeader>() + body.len();
        let reply_len = size_of::<ReplyHeader>() + reply.len();
        for (what, len) in [("request", request_len), ("reply", reply_len)] {
            if len > PART {
                return Err(QueueError::Length { what, len, expected: PART });
            }
        }
        let deadline = Instant::now() + self.timeout;
        let mut state = lock(&self.state);
        let index = loop {
            self.check_alive()?;
            self.collect(&mut state)?;
            if let Some(index) = state.slots.iter().position(|slot| *slot == Slot::Free) {
                break index;
            }
            state = self.wait(state, deadline, "a free control slot")?;
        };
        let tag = state.next_tag;
        state.next_tag = tag.wrapping_add(1);
        let at = index * 2 * PART;
        let header = RequestHeader { op: (op as u16).into(), reserved: 0.into(), tag: tag.into() };
        let memory = self.memory.slice();
        memory.copy_in(at, header.as_bytes())?;
        memory.copy_in(at + size_of::<RequestHeader>(), body)?;
        let request = self.memory.span(at, request_len)?;
        let answer = self.memory.span(at + PART, reply_len)?;
        state.ring.add(Some(request), Some(answer), index as u32)?;
        set(&mut state, index, Slot::Posted);
        if state.ring.must_kick() {
            self.wiring.kick.notify();
        }

        let written = loop {
            self.collect(&mut state)?;
            if let Some(Slot::Done(written)) = state.slots.get(index) {
                break *written as usize;
            }
            // The slot of a command without a completion stays posted: the device may still write the slot.
            self.check_alive()?;
            state = self.wait(state, deadline, "a control command")?;
        };
        let result = self.read_reply(at + PART, written, tag, reply);
        set(&mut state, index, Slot::Free);
        drop(state);
        self.changed.notify_all();
        if let Err(error) = &result {
            self.wiring.health.fail(&error.to_string());
        }
        result
    }

    fn check_alive(&self) -> Result<(), QueueError> {
        if self.wiring.health.is_gone() { Err(QueueError::Gone) } else { Ok(()) }
    }

    /// Takes every completion.
    fn collect(&self, state: &mut State) -> Result<(), QueueError> {
        let mut any = false;
        loop {
            match state.ring.pop() {
                Ok(Some(done)) => {
                    set(state, done.cookie as usize, Slot::Done(done.written));
                    any = true;
                }
                Ok(None) => break,
                Err(error) => {
                    self.wiring.health.fail(&error.to_string());
                    self.changed.notify_all();
                    return Err(error.into());
                }
            }
        }
        if any {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Waits for a change: for the interrupt, or for the thread already waiting for the interrupt.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        deadline: Instant,
        what: &'static str,
    ) -> Result<MutexGuard<'a, State>, QueueError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let after = self.timeout;
            drop(state);
            self.wiring.health.fail("a control command was not answered");
            self.changed.notify_all();
            return Err(QueueError::Timeout { what, after });
        }
        let left = left.min(RECHECK_INTERVAL);
        if state.listening {
            let (state, _) =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            return Ok(state);
        }
        if !state.ring.arm() {
            state.ring.suppress();
            return Ok(state);
        }
        state.listening = true;
        drop(state);
        let woken = self.wiring.call.wait(left);
        let mut state = lock(&self.state);
        state.listening = false;
        state.ring.suppress();
        self.wiring.health.clear(&self.wiring.call);
        // Another waiting thread has to wait for the interrupt from now on.
        self.changed.notify_all();
        woken.map_err(|source| QueueError::System { what: "poll", source })?;
        Ok(state)
    }

    fn read_reply(
        &self,
        at: usize,
        written: usize,
        tag: u32,
        reply: &mut [u8],
    ) -> Result<u16, QueueError> {
        let memory = self.memory.slice();
        let short = |expected| QueueError::Length { what: "reply", len: written, expected };
        let mut header = ReplyHeader::new_zeroed();
        if written < size_of::<ReplyHeader>() {
            return Err(short(size_of::<ReplyHeader>()));
        }
        memory.copy_out(at, header.as_mut_bytes())?;
        if header.tag.get() != tag {
            return Err(QueueError::Tag { got: header.tag.get(), expected: tag });
        }
        let status = header.status.get();
        if status == Status::Ok.code() {
            let expected = size_of::<ReplyHeader>() + reply.len();
            if written != expected {
                return Err(short(expected));
            }
            memory.copy_out(at + size_of::<ReplyHeader>(), reply)?;
        }
        Ok(status)
    }
}

fn set(state: &mut State, index: usize, slot: Slot) {
    if let Some(entry) = state.slots.get_mut(index) {
        *entry = slot;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtqueue::{DeviceSide, Health};
    use ism_sys::EventFd;

    fn queue(timeout: Duration) -> (Arc<ControlQueue>, DeviceSide, Arc<EventFd>, Arc<Health>) {
        let (pool, _) = GuestPool::new(4 << 20).unwrap();
        let health = Health::new();
        let (kick, call) = (Arc::new(EventFd::new().unwrap()), Arc::new(EventFd::new().unwrap()));
        health.wake_with(&call);
        let wiring = Wiring {
            kick: Box::new(kick),
            call: call.clone(),
            health: health.clone(),
            event_idx: true,
        };
        let mut queue = ControlQueue::new(&pool, wiring).unwrap();
        queue.timeout = timeout;
        let device = DeviceSide::new(pool.whole().clone(), queue.addresses());
        (Arc::new(queue), device, call, health)
    }

    fn next(device: &mut DeviceSide) -> (u16, Vec<u8>) {
        loop {
            if let Some(head) = device.next() {
                return (head, device.read(head).0);
            }
            std::thread::yield_now();
        }
    }

    /// A reply with this status to a request, and 8 bytes of body.
    fn reply(request: &[u8], status: u8, body: &[u8]) -> Vec<u8> {
        [&[status, 0, 0, 0], &request[4..8], body].concat()
    }

    #[test]
    fn replies_out_of_order_find_their_commands() {
        let (queue, mut device, call, health) = queue(smc_test_support::TIMEOUT);
        let threads: Vec<_> = (0..40u8)
            .map(|i| {
                let queue = queue.clone();
                std::thread::spawn(move || {
                    let mut answer = [0; 8];
                    let status = queue.command(Op::Attach, &[i; 8], &mut answer).unwrap();
                    assert_eq!((status, answer), (0, [i; 8]));
                })
            })
            .collect();
        let mut left = 40;
        let mut held = Vec::new();
        while left > 0 {
            held.push(next(&mut device));
            // More commands than slots: the last ones only come when others are answered.
            if held.len() == SLOTS || held.len() == left {
                for (head, request) in held.drain(..).rev() {
                    device.answer(head, &reply(&request, 0, &request[8..]));
                    left -= 1;
                }
                call.signal();
            }
        }
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(!health.is_gone());
    }

    #[test]
    fn a_refusal_is_a_header_alone() {
        let (queue, mut device, call, _health) = queue(smc_test_support::TIMEOUT);
        let thread = std::thread::spawn(move || queue.command(Op::Attach, &[1; 8], &mut [0; 56]));
        let (head, request) = next(&mut device);
        device.answer(head, &reply(&request, 2, &[]));
        call.signal();
        assert_eq!(thread.join().unwrap().unwrap(), Status::Enoent.code());
    }

    #[test]
    fn silence_fails_the_device() {
        let (queue, mut device, _call, health) = queue(Duration::from_millis(30));
        let result = queue.command(Op::Stats, &[], &mut [0; 128]);
        assert!(matches!(result, Err(QueueError::Timeout { .. })));
        assert!(health.is_gone() && device.next().is_some());
        assert!(matches!(queue.command(Op::Stats, &[], &mut []), Err(QueueError::Gone)));
    }

    #[test]
    fn the_end_of_the_device_ends_a_wait() {
        let (queue, mut device, _call, health) = queue(smc_test_support::TIMEOUT);
        let thread = std::thread::spawn(move || queue.command(Op::Stats, &[], &mut [0; 128]));
        next(&mut device);
        health.fail("test");
        assert!(matches!(thread.join().unwrap(), Err(QueueError::Gone)));
    }

    #[test]
    fn lies_fail_the_device() {
        type Lie = fn(&mut DeviceSide, u16, &[u8]);
        let lies: [Lie; 4] = [
            |device, head, _| device.answer(head, &[&[0; 4][..], &[9; 12]].concat()),
            |device, head, request| device.answer(head, &reply(request, 0, &[1; 4])),
            |device, head, _| device.answer(head, &[0; 7]),
            |device, head, _| device.put(u32::from(head) + 2, 0),
        ];
        for lie in lies {
            let (queue, mut device, call, health) = queue(smc_test_support::TIMEOUT);
            let thread =
                std::thread::spawn(move || queue.command(Op::Attach, &[1; 8], &mut [0; 8]));
            let (head, request) = next(&mut device);
            lie(&mut device, head, &request);
            call.signal();
            thread.join().unwrap().unwrap_err();
            assert!(health.is_gone());
        }
    }

    #[test]
    fn requests_and_replies_fit_their_slots() {
        let (queue, ..) = queue(smc_test_support::TIMEOUT);
        let result = queue.command(Op::Register, &[0; PART], &mut []);
        assert!(matches!(result, Err(QueueError::Length { what: "request", .. })));
        let result = queue.command(Op::Register, &[], &mut [0; PART]);
        assert!(matches!(result, Err(QueueError::Length { what: "reply", .. })));
    }
}
