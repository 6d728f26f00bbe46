// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Data of one connection: two rings, and the cursors and flags of both ends.

mod carrier;
mod rdma;

use std::time::{Duration, Instant};

use toml::{Table, Value};

use crate::check::judge;
use crate::fabric::{Buffer, Fabric};
use crate::value::Scope;
pub(crate) use carrier::StreamFailure;
use carrier::{Carrier, Cursor, Dmbs, Faults, LOOK, Words};
pub(crate) use rdma::{Element, Pair, Rmbs};

/// How long bytes may take to come back.
const BACK: Duration = Duration::from_secs(8);

/// The data path of a connection.
pub(crate) struct Stream {
    carrier: Box<dyn Carrier>,
    own_ring: u32,
    their_ring: u32,
    /// In the target's ring.
    producer: Cursor,
    /// In the own ring.
    consumer: Cursor,
    flags: [u8; 2],
    /// Bytes not sent back by the target yet.
    sent: Vec<u8>,
    /// Bytes written so far: the position in the test pattern.
    written: u32,
    /// How long bytes may take to come back.
    back: Duration,
}

impl Stream {
    /// Over SMC-D. Attaches the target's DMB, by the token and the size in the target's Accept or
    /// Confirm. `time_factor` multiplies the usual times for the target.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn over_dmbs(
        fabric: &dyn Fabric,
        own: Box<dyn Buffer>,
        target: (&[u8], u8),
        time_factor: u32,
    ) -> Result<Stream, StreamFailure> {
        Ok(Stream::new(Box::new(Dmbs::attach(fabric, own, target, time_factor)?), time_factor))
    }

    /// Over a link of SMC-R.
    pub(crate) fn over_link(rmbs: Rmbs, time_factor: u32) -> Stream {
        Stream::new(Box::new(rmbs), time_factor)
    }

    fn new(carrier: Box<dyn Carrier>, time_factor: u32) -> Stream {
        let [own_ring, their_ring] = carrier.rings();
        Stream {
            carrier,
            own_ring,
            their_ring,
            producer: Cursor::default(),
            consumer: Cursor::default(),
            flags: [0; 2],
            sent: Vec::new(),
            written: 0,
            back: BACK * time_factor,
        }
    }

    /// Checks the size of the target's ring against the bytes of one write.
    ///
    /// # Errors
    /// The ring is smaller.
    pub(crate) fn has_room(&self, step: &Table) -> Result<(), String> {
        let len = step.get("bytes").and_then(Value::as_integer).unwrap_or(0);
        match u32::try_from(len).is_ok_and(|len| len <= self.their_ring) {
            true => Ok(()),
            false => Err(format!("the target's ring has {} bytes", self.their_ring)),
        }
    }

    /// Executes a step, `times` times.
    ///
    /// # Errors
    /// The failure of the step.
    pub(crate) fn steps(&mut self, step: &Table) -> Result<(), StreamFailure> {
        let times = step.get("times").and_then(Value::as_integer).unwrap_or(1);
        (0..times.min(10_000)).try_for_each(|_| self.step(step))
    }

    /// Executes a step once: `bytes` is the number of bytes to write, or `fill` the whole ring;
    /// `flags` and `state` stay set; `read` is the number of bytes to take, 0 for everything sent;
    /// `producer` and `consumer` are errors added to the reported cursors, `wrap` an error added to
    /// the reported wrap. Over a link, `token` is an error added to the alert token, `key` one added to
    /// the key of the target's element, and `number` the distance from the number of the preceding
    /// message, for a message that takes no number.
    ///
    /// # Errors
    /// The failure of the step.
    fn step(&mut self, step: &Table) -> Result<(), StreamFailure> {
        let number = |name: &str| step.get(name).and_then(Value::as_integer);
        if let Some(flags) = number("flags") {
            self.flags[0] = u8::try_from(flags).map_err(|_| "flags are a byte")?;
        }
        if let Some(state) = number("state") {
            self.flags[1] = u8::try_from(state).map_err(|_| "flags are a byte")?;
        }
        let len = match step.get("fill") {
            Some(_) => self.their_ring,
            None => number("bytes").and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        };
        let bytes: Vec<u8> = (self.written..self.written + len).map(|i| (i % 251) as u8).collect();
        let at = self.producer.count;
        let first = (self.their_ring - at).min(len);
        let (head, tail) = bytes.split_at_checked(first as usize).unwrap_or((&bytes, &[]));
        let pieces = [(at, head), (0, tail)];
        self.producer = self.producer.advanced(len, self.their_ring);
        self.written += len;
        let faults = Faults {
            cursors: ["producer", "consumer", "wrap"].map(|name| number(name).unwrap_or(0)),
            token: number("token").unwrap_or(0),
            key: number("key").unwrap_or(0),
            number: number("number"),
        };
        let is_told = !step.contains_key("read") || len > 0;
        if is_told {
            let pieces: Vec<(u32, &[u8])> =
                pieces.into_iter().filter(|(_, bytes)| !bytes.is_empty()).collect();
            self.tell(&pieces, &faults)?;
        }
        self.sent.extend(bytes);
        match number("read").and_then(|n| usize::try_from(n).ok()) {
            Some(0) => self.take(self.sent.len()),
            Some(len) => self.take(len),
            None => Ok(()),
        }
    }

    /// Aborts the connection, unless closed or aborted by the suite already.
    pub(crate) fn abort(&mut self) {
        const CLOSED_OR_ABORTED: u8 = 0x60;
        const ABORTED: u8 = 0x20;
        if self.flags[1] & CLOSED_OR_ABORTED == 0 {
            self.flags[1] |= ABORTED;
            // A target already gone needs no word.
            let _ = self.tell(&[], &Faults::default());
        }
    }

    fn tell(&mut self, pieces: &[(u32, &[u8])], faults: &Faults) -> Result<(), String> {
        let [producer, consumer, wrap] = faults.cursors;
        let off = |cursor: Cursor, by: i64| Cursor {
            wrap: cursor.wrap.wrapping_add(wrap as u16),
            count: cursor.count.wrapping_add(by as u32),
        };
        let words = Words {
            producer: off(self.producer, producer),
            // Only the producer gets a wrong wrap.
            consumer: Cursor { wrap: self.consumer.wrap, ..off(self.consumer, consumer) },
            flags: self.flags,
            unused: 0,
        };
        self.carrier.deliver(pieces, words, faults)
    }

    /// Waits for `len` bytes, compares the bytes with the sent ones, and reports the consumption.
    fn take(&mut self, len: usize) -> Result<(), StreamFailure> {
        let end = Instant::now() + self.back;
        let mut got = 0;
        while got < len {
            let words = self.carrier.words()?;
            let ready = self.consumer.distance(words.producer, self.own_ring);
            if ready > self.own_ring {
                return Err(StreamFailure::from("the target's producer cursor is beyond the ring"));
            }
            if ready == 0 {
                if Instant::now() > end {
                    let says = format!("{got} of {len} bytes came back");
                    return Err(StreamFailure { says, is_late: true });
                }
                std::thread::sleep(LOOK);
                continue;
            }
            let run = ready.min(self.own_ring - self.consumer.count).min((len - got) as u32);
            let bytes = self.carrier.read(self.consumer.count, run as usize);
            let expected: Vec<u8> = self.sent.drain(..bytes.len().min(self.sent.len())).collect();
            if bytes != expected {
                return Err(format!("other bytes came back, from byte {got}").into());
            }
            got += bytes.len();
            self.consumer = self.consumer.advanced(run, self.own_ring);
            self.tell(&[], &Faults::default())?;
        }
        Ok(())
    }

    /// Whether the target's words agree with `checks`: `flags` and `state`; `consumed`: everything
    /// read; `produced`: everything sent back; `inside`: both cursors within the rings; `unused`:
    /// zeros in the unused bytes; `numbered`: over a link, all messages so far have the suite's token
    /// and the numbers from 1 on.
    pub(crate) fn is(&mut self, checks: &Table, scope: &Scope) -> Result<bool, String> {
        let Words { producer, consumer, flags: [flags, state], unused } = self.last_words();
        checks.iter().try_fold(true, |so_far, (name, expected)| {
            let holds = match name.as_str() {
                "flags" => judge(&[flags], expected, scope)?,
                "state" => judge(&[state], expected, scope)?,
                "consumed" => consumer == self.producer,
                "produced" => {
                    self.consumer.distance(producer, self.own_ring) as usize == self.sent.len()
                }
                "inside" => producer.count < self.own_ring && consumer.count < self.their_ring,
                "unused" => unused == 0,
                "numbered" => self.carrier.is_numbered(),
                other => return Err(format!("no word of the target is called {other:?}")),
            };
            Ok(so_far && holds)
        })
    }

    /// The words of the target, also after the end of the link.
    fn last_words(&mut self) -> Words {
        self.carrier.words().unwrap_or_else(|end| end.last)
    }

    /// The words of the target, for people.
    pub(crate) fn describe(&mut self) -> String {
        let Words { producer, consumer, flags: [flags, state], .. } = self.last_words();
        format!(
            "producer {}+{}, consumer {}+{}, flags {flags:#04x}, state {state:#04x}",
            producer.wrap, producer.count, consumer.wrap, consumer.count
        )
    }
}

/// "Connection closed" of the state flags.
const CLOSED: u8 = 0x40;
/// "Abnormal close".
const ABORTED: u8 = 0x20;

impl Drop for Stream {
    /// Tells the target about the end, so the target does not wait. After its own end the suite
    /// stays silent: the DMB may already belong to another connection.
    fn drop(&mut self) {
        let [_, own] = self.flags;
        let [_, theirs] = self.last_words().flags;
        if own & (CLOSED | ABORTED) == 0 {
            let end = if theirs & ABORTED == 0 { CLOSED } else { ABORTED };
            self.flags = [0, own | end];
            let _ = self.tell(&[], &Faults::default());
        }
    }
}
