// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Buffer elements in memory, and the lanes for a peer's stores.

use std::collections::VecDeque;

use super::rng::{Rng, mix};
use crate::connection::{Ring, Span};
use crate::wire::cdc::Cdc;

/// Guard bytes in front of and behind the element, never touched by a store.
const GUARD: usize = 64;
/// Value of untouched bytes.
const CANARY: u8 = 0xc5;

/// Byte number `position` of the stream sent by end `end`.
pub(super) fn stream_byte(end: usize, position: u64) -> u8 {
    mix(position ^ ((end as u64 + 1) << 60)) as u8
}

/// A store at its departure from the writer. One lane carries stores in order.
#[derive(Clone, Debug)]
pub(super) enum Store {
    /// Stream bytes from number `position` on.
    Bytes { span: Span, position: u64 },
    /// The producer word of the control block.
    Producer(u64),
    /// The consumer word of the control block.
    Consumer(u64),
    /// The owner is woken.
    Signal,
    /// SMC-R: a control message, waking the receiver as well.
    Message(Cdc),
}

/// An element with its control block, and canaries around its ring.
#[derive(Clone, Debug)]
pub(super) struct Element {
    bytes: Vec<u8>,
    head: u32,
    len: u32,
    pub(super) producer: u64,
    pub(super) consumer: u64,
    /// SMC-R: messages in the order of their arrival.
    pub(super) inbox: VecDeque<Cdc>,
    pub(super) signalled: bool,
    /// Stream position before which bytes may be stored: the bytes read plus the ring.
    pub(super) limit: Option<u64>,
}

impl Element {
    pub(super) fn new(ring: &Ring, head: u32) -> Element {
        let len = head + ring.len();
        Element {
            bytes: vec![CANARY; GUARD + len as usize + GUARD],
            head,
            len,
            producer: 0,
            consumer: 0,
            inbox: VecDeque::new(),
            signalled: false,
            limit: Some(u64::from(ring.len())),
        }
    }

    fn range(&self, span: Span) -> Result<std::ops::Range<usize>, String> {
        let end = span.offset.checked_add(span.len);
        if span.len != 0 && (span.offset < self.head || end.is_none_or(|end| end > self.len)) {
            return Err(format!("{span:?} leaves the ring {}..{}", self.head, self.len));
        }
        let start = GUARD + span.offset as usize;
        Ok(start..start + span.len as usize)
    }

    pub(super) fn read(&self, span: Span) -> Result<&[u8], String> {
        let range = self.range(span)?;
        self.bytes.get(range).ok_or_else(|| format!("{span:?} is outside the memory"))
    }

    /// Takes a store of end `from`.
    pub(super) fn take(&mut self, store: Store, from: usize) -> Result<(), String> {
        match store {
            Store::Bytes { span, position } => {
                let range = self.range(span)?;
                let end = position + u64::from(span.len);
                if self.limit.is_some_and(|limit| end > limit) {
                    return Err(format!("{span:?} from {position} on overwrites unread bytes"));
                }
                for (byte, number) in self.bytes[range].iter_mut().zip(position..) {
                    *byte = stream_byte(from, number);
                }
            }
            Store::Producer(word) => self.producer = word,
            Store::Consumer(word) => self.consumer = word,
            Store::Signal => self.signalled = true,
            Store::Message(message) => {
                self.inbox.push_back(message);
                self.signalled = true;
            }
        }
        Ok(())
    }

    pub(super) fn check_canaries(&self) -> Result<(), String> {
        let head = GUARD + self.head as usize;
        let tail = GUARD + self.len as usize;
        match self.bytes[..head].iter().chain(&self.bytes[tail..]).all(|b| *b == CANARY) {
            true => Ok(()),
            false => Err("bytes outside the ring were touched".into()),
        }
    }
}

/// The way from one end to the element of the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Lane {
    stores: VecDeque<Store>,
    /// The last message, for a replay (SMC-R failover repeats messages unchanged).
    replay: Option<Cdc>,
}

impl Lane {
    pub(super) fn push(&mut self, store: Store) {
        self.stores.push_back(store);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.stores.is_empty()
    }

    /// The next store to arrive. Messages followed by another one may get lost, and old ones may
    /// come again (CDC-7, CDC-8).
    pub(super) fn pop(&mut self, rng: &mut Rng) -> Option<Store> {
        if let Some(old) = self.replay
            && rng.one_in(32)
        {
            return Some(Store::Message(old));
        }
        let store = self.stores.pop_front()?;
        let Store::Message(message) = store else { return Some(store) };
        let followed = self.stores.iter().any(|s| matches!(s, Store::Message(_)));
        if followed && rng.one_in(4) {
            return self.pop(rng);
        }
        if rng.one_in(8) {
            self.replay = Some(message);
        }
        Some(store)
    }
}
