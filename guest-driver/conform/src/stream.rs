// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Data of one connection over SMC-D: two rings, and the control block at the start of each.
//!
//! A ring begins behind the 32 bytes of the control block. Integers there are in the byte order of
//! the machine: two bytes for the wrap count of a cursor, four for the cursor's position, two of
//! flags.

use std::time::{Duration, Instant};

use toml::{Table, Value};

use crate::check::judge;
use crate::fabric::{Buffer, Fabric, PeerBuffer};
use crate::value::{Scope, as_number};

/// Bytes of a control block.
const BLOCK: u32 = 32;
/// How often the suite looks into its control block.
const LOOK: Duration = Duration::from_millis(2);

/// How long bytes may take to come back.
const BACK: Duration = Duration::from_secs(8);
/// How long a DMB may stay busy with an ended connection.
const FREED: Duration = Duration::from_secs(2);

/// The failure of a step on the data path.
#[derive(Debug)]
pub(crate) struct StreamFailure {
    /// A sentence.
    pub(crate) says: String,
    /// Whether the expected event may still come.
    pub(crate) is_late: bool,
}

impl From<String> for StreamFailure {
    fn from(says: String) -> StreamFailure {
        StreamFailure { says, is_late: false }
    }
}

impl From<&str> for StreamFailure {
    fn from(says: &str) -> StreamFailure {
        says.to_owned().into()
    }
}

/// A place in a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cursor {
    wrap: u16,
    count: u32,
}

impl Cursor {
    fn advanced(self, by: u32, ring: u32) -> Cursor {
        let count = self.count + by;
        match count >= ring {
            true => Cursor { wrap: self.wrap.wrapping_add(1), count: count - ring },
            false => Cursor { count, ..self },
        }
    }

    /// Bytes from `self` to `to`.
    fn distance(self, to: Cursor, ring: u32) -> u32 {
        let back = if self.wrap == to.wrap { 0 } else { ring };
        (to.count + back).saturating_sub(self.count)
    }

    fn word(self, flags: [u8; 2]) -> [u8; 8] {
        let ([w0, w1], [c0, c1, c2, c3]) = (self.wrap.to_ne_bytes(), self.count.to_ne_bytes());
        let [producer, state] = flags;
        [w0, w1, c0, c1, c2, c3, producer, state]
    }

    fn of_word([w0, w1, c0, c1, c2, c3, ..]: [u8; 8]) -> Cursor {
        let count = u32::from_ne_bytes([c0, c1, c2, c3]);
        Cursor { wrap: u16::from_ne_bytes([w0, w1]), count }
    }
}

/// The data path of a connection.
pub(crate) struct Stream {
    own: Box<dyn Buffer>,
    theirs: Box<dyn PeerBuffer>,
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
    /// Attaches the target's DMB, by the token and the size in the target's Accept or Confirm.
    /// `time_factor` multiplies the usual times for the target.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn new(
        fabric: &dyn Fabric,
        own: Box<dyn Buffer>,
        (token, size): (&[u8], u8),
        time_factor: u32,
    ) -> Result<Stream, StreamFailure> {
        let len = 16384u32.checked_shl(size.into()).filter(|_| size < 7).ok_or("no such size")?;
        let token = token.try_into().map_err(|_| "a token has 8 bytes")?;
        let theirs = attach(fabric, token, len, FREED * time_factor)
            .map_err(|says| StreamFailure { says, is_late: true })?;
        let own_ring = (16384 << own.size_code()) - BLOCK;
        let (producer, consumer) = (Cursor::default(), Cursor::default());
        let sent = Vec::new();
        let (their_ring, flags, written, back) = (len - BLOCK, [0; 2], 0, BACK * time_factor);
        Ok(Stream {
            own,
            theirs,
            own_ring,
            their_ring,
            producer,
            consumer,
            flags,
            sent,
            written,
            back,
        })
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
    /// the reported wrap.
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
        let pieces = [(BLOCK + at, head), (BLOCK, tail)];
        self.producer = self.producer.advanced(len, self.their_ring);
        self.written += len;
        let lies = ["producer", "consumer", "wrap"].map(|name| number(name).unwrap_or(0));
        let is_told = !step.contains_key("read") || len > 0;
        if is_told {
            let pieces: Vec<(u32, &[u8])> =
                pieces.into_iter().filter(|(_, bytes)| !bytes.is_empty()).collect();
            self.tell(&pieces, lies)?;
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
            let _ = self.tell(&[], [0; 3]);
        }
    }

    fn tell(&self, pieces: &[(u32, &[u8])], lies: [i64; 3]) -> Result<(), String> {
        let [producer, consumer, wrap] = lies;
        let off = |cursor: Cursor, by: i64| Cursor {
            wrap: cursor.wrap.wrapping_add(wrap as u16),
            count: cursor.count.wrapping_add(by as u32),
        };
        let producer = off(self.producer, producer).word([0; 2]);
        // Only the producer gets a wrong wrap.
        let consumer = Cursor { wrap: self.consumer.wrap, ..off(self.consumer, consumer) };
        self.theirs.deliver(pieces, [producer, consumer.word(self.flags)])
    }

    /// Waits for `len` bytes, compares the bytes with the sent ones, and reports the consumption.
    fn take(&mut self, len: usize) -> Result<(), StreamFailure> {
        let end = Instant::now() + self.back;
        let mut got = 0;
        while got < len {
            let [producer, _] = self.own.words();
            let ready = self.consumer.distance(Cursor::of_word(producer), self.own_ring);
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
            let bytes = self.own.read(BLOCK + self.consumer.count, run as usize);
            let expected: Vec<u8> = self.sent.drain(..bytes.len().min(self.sent.len())).collect();
            if bytes != expected {
                return Err(format!("other bytes came back, from byte {got}").into());
            }
            got += bytes.len();
            self.consumer = self.consumer.advanced(run, self.own_ring);
            self.tell(&[], [0; 3])?;
        }
        Ok(())
    }

    /// Whether the target's words agree with `checks`: `flags` and `state`; `consumed`: everything
    /// read; `produced`: everything sent back; `inside`: both cursors within the rings; `unused`:
    /// zeros in the unused bytes.
    pub(crate) fn is(&self, checks: &Table, scope: &Scope) -> Result<bool, String> {
        let [producer, consumer] = self.own.words();
        let [.., flags, state] = consumer;
        checks.iter().try_fold(true, |so_far, (name, expected)| {
            let holds = match name.as_str() {
                "flags" => judge(&[flags], expected, scope)?,
                "state" => judge(&[state], expected, scope)?,
                "consumed" => Cursor::of_word(consumer) == self.producer,
                "produced" => {
                    let ready = self.consumer.distance(Cursor::of_word(producer), self.own_ring);
                    ready as usize == self.sent.len()
                }
                "inside" => {
                    Cursor::of_word(producer).count < self.own_ring
                        && Cursor::of_word(consumer).count < self.their_ring
                }
                "unused" => as_number(&producer[6..]) == 0,
                other => return Err(format!("no word of a control block is called {other:?}")),
            };
            Ok(so_far && holds)
        })
    }

    /// The words of the target, for people.
    pub(crate) fn describe(&self) -> String {
        let [producer, consumer] = self.own.words();
        let [.., flags, state] = consumer;
        let (producer, consumer) = (Cursor::of_word(producer), Cursor::of_word(consumer));
        format!(
            "producer {}+{}, consumer {}+{}, flags {flags:#04x}, state {state:#04x}",
            producer.wrap, producer.count, consumer.wrap, consumer.count
        )
    }
}

/// Attaches a DMB. The target may use the DMB of an ended connection, not yet detached by another
/// worker of the suite.
fn attach(
    fabric: &dyn Fabric,
    token: [u8; 8],
    len: u32,
    limit: Duration,
) -> Result<Box<dyn PeerBuffer>, String> {
    let end = Instant::now() + limit;
    loop {
        match fabric.attach(token, len) {
            Err(_) if Instant::now() < end => std::thread::sleep(LOOK),
            attached => return attached,
        }
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
        let [_, [.., theirs]] = self.own.words();
        if own & (CLOSED | ABORTED) == 0 {
            let end = if theirs & ABORTED == 0 { CLOSED } else { ABORTED };
            self.flags = [0, own | end];
            let _ = self.tell(&[], [0; 3]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_wrap_at_the_end_of_the_ring() {
        let at = Cursor { wrap: 65535, count: 90 };
        let next = at.advanced(20, 100);
        assert_eq!(next, Cursor { wrap: 0, count: 10 });
        assert_eq!(at.distance(next, 100), 20);
        assert_eq!(at.distance(at, 100), 0);
        assert_eq!(Cursor::of_word(next.word([1, 2])), next);
    }
}
