// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Elements of RMBs, and CDC messages on a link of SMC-R (RFC 7609 A.4).
//!
//! ```text
//!  0 FE | 1 2C | 2 number | 4 alert token | 8 res | 10 producer wrap | 12 producer count
//! 16 res | 18 consumer wrap | 20 consumer count | 24 producer flags | 25 state flags | 26 reserved
//! ```
//!
//! Cursors begin at 0: the suite's Confirm Link tells a cache size, as that of Linux, and so that
//! elements have no eye catchers.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::carrier::{Carrier, Cursor, Faults, LinkFailure, Words};
use crate::link::Sender;
use crate::rdma::{LinkEnd, QueuePair};

/// First byte of a CDC message. LLC has no such type.
const CDC: u8 = 0xfe;
/// Bytes of a CDC message.
const LEN: usize = 44;
/// Limit of the recorded CDC messages.
const RECORDED: usize = 200;

/// A queue pair of the suite. Messages of CDC are told from those of LLC.
pub(crate) struct Pair {
    queue_pair: Box<dyn QueuePair>,
    /// Messages of LLC that came while data was awaited.
    llc: VecDeque<Vec<u8>>,
    /// The newest words of the target.
    words: Words,
    /// Number of the target's newest CDC message.
    number: u16,
    /// Alert token of the suite.
    token: [u8; 4],
    is_numbered: bool,
    /// CDC messages since the last look: time, sender, bytes.
    recorded: Vec<(Instant, Sender, Vec<u8>)>,
    count: usize,
}

impl Pair {
    pub(crate) fn new(queue_pair: Box<dyn QueuePair>) -> Pair {
        Pair {
            queue_pair,
            llc: VecDeque::new(),
            words: Words::default(),
            number: 0,
            token: [0; 4],
            is_numbered: true,
            recorded: Vec::new(),
            count: 0,
        }
    }

    /// Connects the queue pair.
    ///
    /// # Errors
    /// Errors of the queue pair.
    pub(crate) fn connect(&mut self, peer: &LinkEnd) -> Result<(), String> {
        self.queue_pair.connect(peer)
    }

    /// Sends a message of LLC.
    ///
    /// # Errors
    /// Errors of the queue pair.
    pub(crate) fn send(&mut self, message: &[u8]) -> Result<(), String> {
        self.queue_pair.send(message)
    }

    /// The next message of LLC.
    ///
    /// # Errors
    /// Errors of the queue pair.
    pub(crate) fn receive(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, String> {
        if let Some(message) = self.llc.pop_front() {
            return Ok(Some(message));
        }
        let message = self.queue_pair.receive(limit)?;
        Ok(message.and_then(|message| self.without_cdc(message)))
    }

    /// The CDC messages since the last call.
    pub(crate) fn take_recorded(&mut self) -> Vec<(Instant, Sender, Vec<u8>)> {
        std::mem::take(&mut self.recorded)
    }

    /// Takes note of a CDC message; returns another message.
    fn without_cdc(&mut self, message: Vec<u8>) -> Option<Vec<u8>> {
        if message.first() != Some(&CDC) {
            return Some(message);
        }
        self.number = self.number.wrapping_add(1);
        match parse(&message) {
            Some((number, token, words)) => {
                self.is_numbered &= (number, token) == (self.number, self.token);
                (self.number, self.words) = (number, words);
            }
            None => self.is_numbered = false,
        }
        self.record(Sender::Target, message);
        None
    }

    fn record(&mut self, from: Sender, message: Vec<u8>) {
        self.count += 1;
        if self.count <= RECORDED {
            self.recorded.push((Instant::now(), from, message));
        }
    }

    /// Takes all messages that are there.
    fn look(&mut self) -> Result<(), String> {
        while let Some(message) = self.queue_pair.receive(Duration::ZERO)? {
            let other = self.without_cdc(message);
            self.llc.extend(other);
        }
        Ok(())
    }
}

/// Number, alert token and words of a CDC message. `None`: the message has another length.
fn parse(message: &[u8]) -> Option<(u16, [u8; 4], Words)> {
    let message: &[u8; LEN] =
        message.try_into().ok().filter(|message: &&[u8; LEN]| message[1] == 44)?;
    let [_, _, n0, n1, t0, t1, t2, t3, rest @ ..] = *message;
    let [r0, r1, pw0, pw1, p0, p1, p2, p3, rest @ ..] = rest;
    let [r2, r3, cw0, cw1, c0, c1, c2, c3, flags, state, reserved @ ..] = rest;
    let cursor =
        |wrap, count| Cursor { wrap: u16::from_be_bytes(wrap), count: u32::from_be_bytes(count) };
    let unused = reserved.iter().chain(&[r0, r1, r2, r3]).fold(0, |all, byte| all | byte);
    let words = Words {
        producer: cursor([pw0, pw1], [p0, p1, p2, p3]),
        consumer: cursor([cw0, cw1], [c0, c1, c2, c3]),
        flags: [flags, state],
        unused: unused.into(),
    };
    Some((u16::from_be_bytes([n0, n1]), [t0, t1, t2, t3], words))
}

/// The bytes of a CDC message.
fn message(number: u16, token: u32, words: Words) -> [u8; LEN] {
    let mut message = [0; LEN];
    let cursor = |cursor: Cursor| {
        [&[0; 2][..], &cursor.wrap.to_be_bytes(), &cursor.count.to_be_bytes()].concat()
    };
    let bytes = [
        &[CDC, 44][..],
        &number.to_be_bytes(),
        &token.to_be_bytes(),
        &cursor(words.producer),
        &cursor(words.consumer),
        &words.flags,
    ];
    for (to, from) in message.iter_mut().zip(bytes.concat()) {
        *to = from;
    }
    message
}

/// An element of an RMB, as in Accept or Confirm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    pub(crate) rkey: u32,
    /// Address of the first byte of the element.
    pub(crate) address: u64,
    pub(crate) len: u32,
    /// Alert token of the element's owner.
    pub(crate) token: u32,
}

/// An element of each end, and the link between them.
pub(crate) struct Rmbs {
    pair: Rc<RefCell<Pair>>,
    own_len: u32,
    theirs: Element,
    /// Number of the suite's last message.
    number: u16,
}

impl Rmbs {
    pub(crate) fn new(pair: Rc<RefCell<Pair>>, own: (u32, [u8; 4]), theirs: Element) -> Rmbs {
        let (own_len, token) = own;
        pair.borrow_mut().token = token;
        Rmbs { pair, own_len, theirs, number: 0 }
    }
}

impl Carrier for Rmbs {
    fn rings(&self) -> [u32; 2] {
        [self.own_len, self.theirs.len]
    }

    fn words(&mut self) -> Result<Words, LinkFailure> {
        let mut pair = self.pair.borrow_mut();
        let looked = pair.look();
        looked.map_err(|why| LinkFailure { why, last: pair.words })?;
        Ok(pair.words)
    }

    fn read(&self, at: u32, len: usize) -> Vec<u8> {
        self.pair.borrow().queue_pair.read(at as usize, len)
    }

    fn deliver(
        &mut self,
        pieces: &[(u32, &[u8])],
        words: Words,
        faults: &Faults,
    ) -> Result<(), String> {
        let mut pair = self.pair.borrow_mut();
        let Element { rkey, address, token, .. } = self.theirs;
        let rkey = rkey.wrapping_add(faults.key as u32);
        for (at, bytes) in pieces {
            pair.queue_pair.write((rkey, address.wrapping_add(u64::from(*at))), bytes)?;
        }
        let number = match faults.number {
            Some(off) => self.number.wrapping_add(off as u16),
            None => {
                self.number = self.number.wrapping_add(1);
                self.number
            }
        };
        let message = message(number, token.wrapping_add(faults.token as u32), words);
        pair.record(Sender::Suite, message.to_vec());
        pair.queue_pair.send(&message)
    }

    fn is_numbered(&self) -> bool {
        self.pair.borrow().is_numbered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::{hex_of, to_hex};

    #[test]
    fn messages_are_laid_out_as_the_specification_says() {
        let words = Words {
            producer: Cursor { wrap: 1, count: 0x10203 },
            consumer: Cursor { wrap: 2, count: 4 },
            flags: [0x80, 0x40],
            unused: 0,
        };
        let bytes = message(7, 0x4346_0001, words);
        let wire = "fe2c 0007 43460001 0000 0001 00010203 0000 0002 00000004 80 40 00*18";
        assert_eq!(to_hex(&bytes), to_hex(&hex_of(wire).unwrap()));
        let (number, token, read) = parse(&bytes).unwrap();
        assert_eq!((number, token), (7, [0x43, 0x46, 0, 1]));
        assert_eq!((read.producer, read.consumer), (words.producer, words.consumer));
        assert_eq!((read.flags, read.unused), (words.flags, 0));
        let mut odd = bytes;
        odd[43] = 1;
        assert_eq!(parse(&odd).unwrap().2.unused, 1);
        odd[1] = 45;
        assert!(parse(&odd).is_none() && parse(&bytes[..43]).is_none());
    }
}
