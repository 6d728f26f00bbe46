// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A move queue: the driver copies payload into bounce slots, and the device copies the payload on.
//!
//! A MOVE is asynchronous. A later post (or `reap`) takes its completion and notes a refusal in the move's
//! path. Bounce slots and kick chains are made once, so posting allocates nothing.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use virtio_ism_abi::mv::{MoveHeader, Segment, move_flags};
use virtio_ism_abi::{Status, Token};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    CONTROL_TIMEOUT, GuestMem, GuestPool, MAX_PIECES, MovePath, QueueAddresses, QueueError,
    SplitQueue, SplitQueueError, UsedChain, Wiring,
};
use ism_sys::{ForkLocks, LockGuardList, lock, try_hold};

const ENTRIES: usize = 256;
/// Moves under way at most. Their descriptors leave room for 96 kicks.
const SLOTS: u32 = 32;
/// Bytes of a bounce slot: header, segments, payload, status.
const SLOT: usize = 128 << 10;
/// Header and segments of the largest move.
const HEAD: usize = size_of::<MoveHeader>() + MAX_PIECES * size_of::<Segment>();
/// Bytes of the status written by the device.
const STATUS: usize = 4;
/// Offset of the chain in a slot. The status is before the chain: this process has touched its page.
const CHAIN: usize = 8;
/// Distance of kick chains: header, status, padding.
const KICK: usize = 32;
/// Bytes allocated by the queue at a time for kick chains.
const KICKS: usize = 4096;
/// Marks the cookie of a kick; the rest is the path's number.
const KICK_COOKIE: u32 = 1 << 31;
/// Time of spinning for a free slot before sleeping.
const SPIN: Duration = Duration::from_micros(50);
/// How long a kick waits for free descriptors, at most.
const KICK_TIMEOUT: Duration = Duration::from_millis(1);
/// Longest sleep of a post before rechecking the ring without an interrupt.
const RECHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A path in the table of the queue, with its moves and kick under way.
struct Entry {
    // `None`: the entry is free.
    path: Option<Arc<MovePath>>,
    moves: u32,
    kick: bool,
    closed: bool,
    // The pieces of moves refused by the device, in the order of posting.
    refused: Vec<Parts>,
    // The device completed a later move although an earlier move was refused.
    has_hole: bool,
    // Slots of executed moves, until their whole delivery is executed.
    begun: Vec<u32>,
}

/// Offsets in the DMB, with the bytes for each offset.
pub(crate) type Parts = Vec<(u32, Vec<u8>)>;

impl Entry {
    const EMPTY: Entry = Entry {
        path: None,
        moves: 0,
        kick: false,
        closed: false,
        refused: Vec::new(),
        has_hole: false,
        begun: Vec::new(),
    };
}

struct State {
    ring: SplitQueue<ENTRIES>,
    // Free bounce slots. The last used slot is reused first, as its lines are cached.
    free: Vec<u32>,
    // The path of the move in each slot.
    users: [u32; SLOTS as usize],
    // The number of the move in each slot, for the order of moves.
    numbers: [u64; SLOTS as usize],
    // Whether the move in each slot is the last of its delivery.
    ends: [bool; SLOTS as usize],
    posted: u64,
    entries: Vec<Entry>,
    free_entries: Vec<u32>,
    kicks: Vec<GuestMem>,
}

pub(crate) struct MoveQueue {
    state: Mutex<State>,
    slots: GuestMem,
    pool: Arc<GuestPool>,
    max_payload: usize,
    wiring: Wiring,
}

impl ForkLocks for MoveQueue {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        try_hold(&self.state, held)
    }

    fn is_unlocked(&self) -> bool {
        true
    }
}

impl MoveQueue {
    /// `max_move`: most payload of one MOVE accepted by the device, bytes.
    pub(crate) fn new(
        pool: &Arc<GuestPool>,
        max_move: usize,
        wiring: Wiring,
    ) -> Result<MoveQueue, QueueError> {
        let (rings, gpa) = pool.permanent(SplitQueue::<ENTRIES>::MEMORY)?;
        let ring = SplitQueue::new(pool.whole().clone(), rings, gpa, wiring.event_idx)?;
        let slots = pool.alloc_untouched(SLOTS as usize * SLOT)?;
        let state = State {
            ring,
            free: (0..SLOTS).rev().collect(),
            users: [0; SLOTS as usize],
            numbers: [0; SLOTS as usize],
            ends: [true; SLOTS as usize],
            posted: 0,
            entries: Vec::new(),
            free_entries: Vec::new(),
            kicks: Vec::new(),
        };
        Ok(MoveQueue {
            state: Mutex::new(state),
            slots,
            pool: Arc::clone(pool),
            max_payload: max_move.min(SLOT - HEAD - CHAIN),
            wiring,
        })
    }

    pub(crate) fn addresses(&self) -> QueueAddresses {
        lock(&self.state).ring.addresses()
    }

    pub(crate) fn max_payload(&self) -> usize {
        self.max_payload
    }

    pub(crate) fn open_path(&self, token: Token, queue: u16) -> Result<Arc<MovePath>, QueueError> {
        let mut state = lock(&self.state);
        let slot = match state.free_entries.pop() {
            Some(slot) => slot,
            None => {
                if state.entries.len() * KICK >= state.kicks.len() * KICKS {
                    let chains = self.pool.alloc(KICKS)?;
                    state.kicks.push(chains);
                }
                state.entries.push(Entry::EMPTY);
                state.entries.len() as u32 - 1
            }
        };
        let path = Arc::new(MovePath::new(token, queue, slot));
        let entry = Entry { path: Some(Arc::clone(&path)), ..Entry::EMPTY };
        if let Some(place) = state.entries.get_mut(slot as usize) {
            *place = entry;
        }
        Ok(path)
    }

    pub(crate) fn close_path(&self, path: &MovePath) {
        let mut state = lock(&self.state);
        self.collect(&mut state);
        if let Some(entry) = state.entries.get_mut(path.slot() as usize) {
            entry.closed = true;
        }
        state.recycle(path.slot());
    }

    /// Copies the pieces (offset in the DMB, bytes) into memory reachable by the device, and posts one MOVE.
    /// The device executes the moves of one path in the order of posting. The call waits for a free slot if
    /// need be, but not for the move; the queue notes a refusal in `path`.
    ///
    /// `is_last`: a delivery ends with this move. The moves of a delivery count only as a whole.
    ///
    /// # Errors
    /// There are more than [`MAX_PIECES`] pieces or [`Queues::max_payload`](super::Queues::max_payload)
    /// bytes, or the device is gone.
    pub(crate) fn post(
        &self,
        path: &MovePath,
        pieces: &[(u32, &[u8])],
        signal: bool,
        is_last: bool,
    ) -> Result<(), QueueError> {
        let total: usize = pieces.iter().map(|(_, bytes)| bytes.len()).sum();
        if pieces.len() > MAX_PIECES {
            let (len, expected) = (pieces.len(), MAX_PIECES);
            return Err(QueueError::Length { what: "list of pieces", len, expected });
        }
        if total > self.max_payload {
            let expected = self.max_payload;
            return Err(QueueError::Length { what: "payload", len: total, expected });
        }
        let (mut state, slot) = self.take_slot()?;
        let at = slot as usize * SLOT;
        let len = self.fill(at + CHAIN, path.token(), pieces, total, signal)?;
        let chain = self.slots.span(at + CHAIN, len)?;
        let status = self.slots.span(at, STATUS)?;
        state.ring.add(Some(chain), Some(status), slot)?;
        state.posted += 1;
        let number = state.posted;
        if let Some(user) = state.users.get_mut(slot as usize) {
            *user = path.slot();
        }
        if let Some(place) = state.numbers.get_mut(slot as usize) {
            *place = number;
        }
        if let Some(place) = state.ends.get_mut(slot as usize) {
            *place = is_last;
        }
        if let Some(entry) = state.entries.get_mut(path.slot() as usize) {
            entry.moves += 1;
        }
        self.announce(&mut state);
        Ok(())
    }

    /// Writes header, segments and payload. Returns how many bytes these are.
    fn fill(
        &self,
        at: usize,
        token: Token,
        pieces: &[(u32, &[u8])],
        total: usize,
        signal: bool,
    ) -> Result<usize, QueueError> {
        let memory = self.slots.slice();
        let header = move_header(token, pieces.len() as u16, total as u32, signal);
        memory.copy_in(at, header.as_bytes())?;
        let mut segment_at = at + size_of::<MoveHeader>();
        let mut payload_at = segment_at + pieces.len() * size_of::<Segment>();
        for (offset, bytes) in pieces {
            let segment = Segment { offset: (*offset).into(), len: (bytes.len() as u32).into() };
            memory.copy_in(segment_at, segment.as_bytes())?;
            memory.copy_in(payload_at, bytes)?;
            segment_at += size_of::<Segment>();
            payload_at += bytes.len();
        }
        Ok(payload_at - at)
    }

    /// The pieces of a path's moves not known to be executed, in the order of posting: moves under way,
    /// still in their slots, and moves refused by the device. Moves of a partly executed delivery are
    /// included. `None`: the device has executed a move behind a refused move.
    pub(crate) fn unconfirmed(&self, path: &MovePath) -> Option<Parts> {
        let mut state = lock(&self.state);
        self.collect(&mut state);
        let entry = state.entries.get(path.slot() as usize)?;
        if entry.has_hole {
            return None;
        }
        let mut under_way: Vec<(u64, u32)> = (0..SLOTS)
            .filter(|slot| state.users.get(*slot as usize) == Some(&path.slot()))
            .filter(|slot| !state.free.contains(slot))
            .filter_map(|slot| Some((*state.numbers.get(slot as usize)?, slot)))
            .collect();
        under_way.sort_unstable();
        let mut pieces = entry.refused.concat();
        for (_, slot) in under_way {
            pieces.extend(self.pieces_of(slot)?);
        }
        Some(pieces)
    }

    /// The pieces of the move in a slot. `None`: the device has changed them.
    fn pieces_of(&self, slot: u32) -> Option<Parts> {
        let memory = self.slots.slice();
        let mut at = slot as usize * SLOT + CHAIN;
        let mut header = MoveHeader::new_zeroed();
        memory.copy_out(at, header.as_mut_bytes()).ok()?;
        at += size_of::<MoveHeader>();
        let count = usize::from(header.nseg.get());
        let (mut pieces, mut total) = (Parts::new(), 0usize);
        let mut payload_at = at + count.min(MAX_PIECES) * size_of::<Segment>();
        for _ in 0..count.min(MAX_PIECES) {
            let mut segment = Segment::new_zeroed();
            memory.copy_out(at, segment.as_mut_bytes()).ok()?;
            at += size_of::<Segment>();
            let len = segment.len.get() as usize;
            total = total.checked_add(len).filter(|total| *total <= self.max_payload)?;
            let mut bytes = vec![0; len];
            memory.copy_out(payload_at, &mut bytes).ok()?;
            payload_at += len;
            pieces.push((segment.offset.get(), bytes));
        }
        (count <= MAX_PIECES).then_some(pieces)
    }

    /// Waits until a bounce slot and two descriptors are free, and takes the slot.
    fn take_slot(&self) -> Result<(MutexGuard<'_, State>, u32), QueueError> {
        let mut state = lock(&self.state);
        let mut start = None;
        loop {
            self.check_alive()?;
            self.collect(&mut state);
            if state.ring.free() >= 2
                && let Some(slot) = state.free.pop()
            {
                return Ok((state, slot));
            }
            if state.give_up_begun() {
                continue;
            }
            let waited = start.get_or_insert_with(Instant::now).elapsed();
            if waited > CONTROL_TIMEOUT {
                self.wiring.health.fail("moves are not executed");
                return Err(QueueError::Timeout { what: "a move", after: waited });
            }
            state = self.wait_for_room(state, waited)?;
        }
    }

    fn wait_for_room<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        waited: Duration,
    ) -> Result<MutexGuard<'a, State>, QueueError> {
        if waited < SPIN {
            drop(state);
            std::hint::spin_loop();
            return Ok(lock(&self.state));
        }
        if state.ring.arm() {
            drop(state);
            self.wiring
                .call
                .wait(RECHECK_INTERVAL)
                .map_err(|source| QueueError::System { what: "poll", source })?;
            // This may clear the wake-up of another waiting thread. The other thread has already returned
            // from its wait, or rechecks the ring after `RECHECK_INTERVAL`.
            self.wiring.health.clear(&self.wiring.call);
            state = lock(&self.state);
        }
        state.ring.suppress();
        Ok(state)
    }

    /// Wakes the owner of the DMB by a MOVE without payload. Does nothing before the device has executed the
    /// previous kick of this path, since the previous kick wakes the owner.
    ///
    /// # Errors
    /// The device is gone, or the queue stayed full ([`QueueError::Busy`]).
    pub(crate) fn kick(&self, path: &MovePath) -> Result<(), QueueError> {
        let mut state = lock(&self.state);
        let mut start = None;
        loop {
            self.check_alive()?;
            // Take completions before deciding to skip this kick. An executed previous kick may have woken
            // the owner before the change announced by this kick.
            self.collect(&mut state);
            if state.entries.get(path.slot() as usize).is_none_or(|entry| entry.kick) {
                return Ok(());
            }
            if state.ring.free() >= 2 {
                break;
            }
            if start.get_or_insert_with(Instant::now).elapsed() > KICK_TIMEOUT {
                return Err(QueueError::Busy);
            }
            drop(state);
            std::thread::yield_now();
            state = lock(&self.state);
        }
        let at = path.slot() as usize * KICK;
        let Some(chains) = state.kicks.get(at / KICKS) else { return Ok(()) };
        let header = move_header(path.token(), 0, 0, true);
        chains.slice().copy_in(at % KICKS, header.as_bytes())?;
        let chain = chains.span(at % KICKS, size_of::<MoveHeader>())?;
        let status = chains.span(at % KICKS + size_of::<MoveHeader>(), STATUS)?;
        state.ring.add(Some(chain), Some(status), KICK_COOKIE | path.slot())?;
        if let Some(entry) = state.entries.get_mut(path.slot() as usize) {
            entry.kick = true;
        }
        self.announce(&mut state);
        Ok(())
    }

    /// Takes completions, except while another thread uses the queue and takes them anyway.
    pub(crate) fn reap(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            self.collect(&mut state);
        }
    }

    fn announce(&self, state: &mut State) {
        if state.ring.must_kick() {
            self.wiring.kick.notify();
        }
    }

    fn check_alive(&self) -> Result<(), QueueError> {
        if self.wiring.health.is_gone() { Err(QueueError::Gone) } else { Ok(()) }
    }

    /// Takes every completion.
    fn collect(&self, state: &mut State) {
        loop {
            match state.ring.pop() {
                Ok(Some(done)) => self.finish(state, done),
                Ok(None) => return,
                // The first error was logged; the ring stays broken.
                Err(error) if self.wiring.health.is_gone() => {
                    return tracing::trace!(%error, "move queue");
                }
                Err(error @ SplitQueueError::BadCompletion { .. }) => {
                    return self.wiring.health.fail(&error.to_string());
                }
                Err(_) => return,
            }
        }
    }

    fn finish(&self, state: &mut State, done: UsedChain) {
        let is_kick = done.cookie & KICK_COOKIE != 0;
        let (status, number) = if is_kick {
            let number = done.cookie & !KICK_COOKIE;
            let at = number as usize * KICK;
            let status = state
                .kicks
                .get(at / KICKS)
                .and_then(|chains| read_status(chains, at % KICKS + size_of::<MoveHeader>()));
            (status, number)
        } else {
            let at = done.cookie as usize * SLOT;
            let number = state.users.get(done.cookie as usize).copied().unwrap_or(u32::MAX);
            (read_status(&self.slots, at), number)
        };
        let status = status.filter(|_| done.written as usize >= STATUS);
        let [ok, again, no_session] =
            [Status::Ok, Status::Eagain, Status::Estate].map(|known| Some(u32::from(known.code())));
        if status == no_session {
            self.wiring.health.lose_session();
        }
        let refused = (!is_kick && status != ok).then(|| self.pieces_of(done.cookie));
        if !is_kick {
            state.free_slot(done.cookie, number, refused.is_none());
        }
        let Some(entry) = state.entries.get_mut(number as usize) else { return };
        if is_kick {
            entry.kick = false;
        } else {
            entry.moves = entry.moves.saturating_sub(1);
            match refused {
                Some(Some(pieces)) => entry.refused.push(pieces),
                Some(None) => entry.has_hole = true,
                None => entry.has_hole |= !entry.refused.is_empty(),
            }
        }
        if status != ok
            && !(is_kick && status == again)
            && let Some(path) = &entry.path
        {
            let code = status.and_then(|code| u16::try_from(code).ok()).filter(|code| *code != 0);
            path.note(code.unwrap_or(Status::Eio.code()));
        }
        state.recycle(number);
    }
}

impl State {
    /// Frees the entry of a closed path with neither moves nor a kick under way.
    fn recycle(&mut self, number: u32) {
        let Some(entry) = self.entries.get_mut(number as usize) else { return };
        if entry.closed && entry.moves == 0 && !entry.kick && entry.path.take().is_some() {
            entry.refused = Vec::new();
            self.free.append(&mut entry.begun);
            self.free_entries.push(number);
        }
    }

    /// Frees the slot of a completed move of the entry with this number. The last move of a delivery frees
    /// the slots of the whole delivery.
    fn free_slot(&mut self, slot: u32, number: u32, is_executed: bool) {
        let is_last = self.ends.get(slot as usize).is_none_or(|is_last| *is_last);
        match self.entries.get_mut(number as usize) {
            Some(entry) if is_executed && !is_last => entry.begun.push(slot),
            Some(entry) => {
                // A delivery whose last move was refused was not executed as a whole.
                if is_executed {
                    self.free.append(&mut entry.begun);
                }
                self.free.push(slot);
            }
            None => self.free.push(slot),
        }
    }

    /// Frees the slots of partly executed deliveries, if there is no other free slot. `true`: slots are free
    /// now.
    fn give_up_begun(&mut self) -> bool {
        if !self.free.is_empty() {
            return false;
        }
        for entry in &mut self.entries {
            self.free.append(&mut entry.begun);
        }
        !self.free.is_empty()
    }
}

fn read_status(memory: &GuestMem, at: usize) -> Option<u32> {
    let mut status = [0; STATUS];
    memory.slice().copy_out(at, &mut status).ok()?;
    Some(u32::from_le_bytes(status))
}

fn move_header(token: Token, nseg: u16, total: u32, signal: bool) -> MoveHeader {
    MoveHeader {
        token: token.0.into(),
        nseg: nseg.into(),
        flags: if signal { move_flags::SIGNAL } else { 0 }.into(),
        // One bit is enough to make the owner read the control block.
        mask: if signal { 1 } else { 0 }.into(),
        total: total.into(),
        ..MoveHeader::new_zeroed()
    }
}

#[cfg(test)]
#[path = "moves_tests.rs"]
mod tests;
