// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory of both ends of a connection, and the DMBs of SMC-D.
//!
//! The ring of a DMB begins behind the 32 bytes of the control block. Integers there are in the byte
//! order of the machine: two bytes for the wrap count of a cursor, four for the cursor's position,
//! two of flags.

use std::time::{Duration, Instant};

use crate::fabric::{Buffer, Fabric, PeerBuffer};
use crate::value::as_number;

/// How often the suite looks at the words of the target.
pub(super) const LOOK: Duration = Duration::from_millis(2);
/// Bytes of a control block.
const BLOCK: u32 = 32;
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

impl From<LinkFailure> for StreamFailure {
    fn from(end: LinkFailure) -> StreamFailure {
        end.why.into()
    }
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
pub(super) struct Cursor {
    pub(super) wrap: u16,
    pub(super) count: u32,
}

impl Cursor {
    pub(super) fn advanced(self, by: u32, ring: u32) -> Cursor {
        let count = self.count + by;
        match count >= ring {
            true => Cursor { wrap: self.wrap.wrapping_add(1), count: count - ring },
            false => Cursor { count, ..self },
        }
    }

    /// Bytes from `self` to `to`.
    pub(super) fn distance(self, to: Cursor, ring: u32) -> u32 {
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

/// The words of one end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Words {
    pub(super) producer: Cursor,
    pub(super) consumer: Cursor,
    /// Flags of the producer, and of the state.
    pub(super) flags: [u8; 2],
    /// Bytes without a meaning, as one number.
    pub(super) unused: u64,
}

/// Errors of the suite's words, on purpose.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// Added to the positions of producer and consumer, and to the producer's wrap.
    pub(super) cursors: [i64; 3],
    /// Added to the alert token.
    pub(super) token: i64,
    /// Added to the key of the target's element.
    pub(super) key: i64,
    /// Distance from the preceding number, for a message without an own number.
    pub(super) number: Option<i64>,
}

/// The end of a link.
#[derive(Debug)]
pub(super) struct LinkFailure {
    pub(super) why: String,
    /// The last words of the target.
    pub(super) last: Words,
}

/// The rings of both ends, and the way of words between them.
pub(super) trait Carrier {
    /// Bytes of the suite's ring, and of the target's.
    fn rings(&self) -> [u32; 2];
    /// The newest words of the target.
    ///
    /// # Errors
    /// The link is over.
    fn words(&mut self) -> Result<Words, LinkFailure>;
    /// `len` bytes of the suite's ring.
    fn read(&self, at: u32, len: usize) -> Vec<u8>;
    /// Writes pieces (place in the target's ring, bytes), then the words, and signals the target.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn deliver(
        &mut self,
        pieces: &[(u32, &[u8])],
        words: Words,
        faults: &Faults,
    ) -> Result<(), String>;
    /// Whether all messages so far have the right numbers and token, where messages have them.
    fn is_numbered(&self) -> bool {
        true
    }
}

/// A DMB of each end.
pub(super) struct Dmbs {
    own: Box<dyn Buffer>,
    theirs: Box<dyn PeerBuffer>,
    their_len: u32,
}

impl Dmbs {
    /// With the target's DMB of this token and size. The target may use the DMB of an ended
    /// connection, not yet detached by another worker of the suite.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn attach(
        fabric: &dyn Fabric,
        own: Box<dyn Buffer>,
        (token, size): (&[u8], u8),
        time_factor: u32,
    ) -> Result<Dmbs, StreamFailure> {
        let their_len =
            16384u32.checked_shl(size.into()).filter(|_| size < 7).ok_or("no such size")?;
        let token = token.try_into().map_err(|_| "a token has 8 bytes")?;
        let end = Instant::now() + FREED * time_factor;
        loop {
            match fabric.attach(token, their_len) {
                Ok(theirs) => return Ok(Dmbs { own, theirs, their_len }),
                Err(_) if Instant::now() < end => std::thread::sleep(LOOK),
                Err(says) => return Err(StreamFailure { says, is_late: true }),
            }
        }
    }
}

impl Carrier for Dmbs {
    fn rings(&self) -> [u32; 2] {
        [(16384 << self.own.size_code()) - BLOCK, self.their_len - BLOCK]
    }

    fn words(&mut self) -> Result<Words, LinkFailure> {
        let [producer, consumer] = self.own.words();
        let [.., flags, state] = consumer;
        Ok(Words {
            producer: Cursor::of_word(producer),
            consumer: Cursor::of_word(consumer),
            flags: [flags, state],
            unused: as_number(&producer[6..]),
        })
    }

    fn read(&self, at: u32, len: usize) -> Vec<u8> {
        self.own.read(BLOCK + at, len)
    }

    fn deliver(&mut self, pieces: &[(u32, &[u8])], words: Words, _: &Faults) -> Result<(), String> {
        let pieces: Vec<_> = pieces.iter().map(|(at, bytes)| (BLOCK + at, *bytes)).collect();
        let words = [words.producer.word([0; 2]), words.consumer.word(words.flags)];
        self.theirs.deliver(&pieces, words)
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
