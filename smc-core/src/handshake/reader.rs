// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads CLC messages from a byte stream without taking a byte too many.
//!
//! CLC messages share the TCP stream with application data: behind a Decline the data starts at
//! once (CLC-57). So the reader asks for the 8 bytes of the header, learns the length, asks for
//! exactly the rest, and never offers room for more. Bytes that cannot become the awaited message
//! are refused at once, without waiting for more (CLC-54, ERR-9).
//!
//! A listener in doubt about its client's protocol peeks first; see
//! [`looks_like_clc`](crate::wire::clc::looks_like_clc).

use super::error::{Awaited, HandshakeError};
use crate::wire::clc::{HEADER_LEN, Kind, Peek, peek_header};

/// Initial capacity, bytes: enough for most messages.
const USUAL_LEN: usize = 256;

/// Judges the first bytes of a message, in any number; returns the message's length once known.
fn judge(prefix: &[u8], awaited: Awaited) -> Result<Option<usize>, HandshakeError> {
    match peek_header(prefix) {
        Peek::NeedMore(_) => Ok(None),
        Peek::Message { kind, length } => {
            let expected = kind == awaited.kind() || kind == Kind::Decline;
            expected.then_some(Some(length)).ok_or(HandshakeError::OutOfTurn { awaited, got: kind })
        }
        Peek::NotClc(error) => Err(HandshakeError::Malformed { awaited, error }),
    }
}

/// Collects one CLC message from a stream (CLC-57).
///
/// ```
/// use smc_core::handshake::{Awaited, ClcReader};
///
/// // A Decline, and behind it the first application bytes.
/// let mut stream: &[u8] = &[
///     0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0,
///     0xe2, 0xd4, 0xc3, 0xd9, b'h', b'i',
/// ];
/// let mut reader = ClcReader::new(Awaited::Accept);
/// let message = loop {
///     if let Some(message) = reader.message() {
///         break message;
///     }
///     let n = std::io::Read::read(&mut stream, reader.space()).unwrap();
///     reader.filled(n).unwrap();
/// };
/// assert_eq!(message.len(), 28);
/// assert_eq!(stream, b"hi");
/// ```
#[derive(Clone, Debug)]
pub struct ClcReader {
    awaited: Awaited,
    buffer: Vec<u8>,
    filled: usize,
    length: Option<usize>,
}

impl ClcReader {
    /// A reader for the message `awaited`, or for a Decline in its place.
    pub fn new(awaited: Awaited) -> ClcReader {
        let mut buffer = Vec::with_capacity(USUAL_LEN);
        buffer.resize(HEADER_LEN, 0);
        ClcReader { awaited, buffer, filled: 0, length: None }
    }

    /// Takes note of the stream's first bytes, peeked and still to be read. The length in these
    /// bytes allows reading header and rest at once. Of use only before the first read.
    ///
    /// # Errors
    ///
    /// Errors of [`filled`](ClcReader::filled) for these bytes.
    pub fn peeked(&mut self, prefix: &[u8]) -> Result<(), HandshakeError> {
        if self.filled == 0 && self.length.is_none() {
            self.learn(judge(prefix, self.awaited)?);
        }
        Ok(())
    }

    /// Whether nothing was read yet.
    pub const fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Where the next bytes of the stream go; its length is how many may be read. Empty once the
    /// message is complete.
    pub fn space(&mut self) -> &mut [u8] {
        self.buffer.get_mut(self.filled..).unwrap_or_default()
    }

    /// Takes note that `n` bytes were read into [`space`](ClcReader::space). Zero means the end of
    /// the stream.
    ///
    /// # Errors
    ///
    /// Bytes unfit for the awaited message, a length out of bounds, or an ended stream. Each is a
    /// protocol error: the TCP connection is to be broken (CLC-54, CLC-55, SEC-9).
    pub fn filled(&mut self, n: usize) -> Result<(), HandshakeError> {
        if n == 0 && self.message().is_none() {
            return Err(HandshakeError::Closed { awaited: self.awaited, received: self.filled });
        }
        self.filled = self.filled.saturating_add(n).min(self.buffer.len());
        if self.length.is_none() {
            let prefix = self.buffer.get(..self.filled).unwrap_or_default();
            self.learn(judge(prefix, self.awaited)?);
        }
        Ok(())
    }

    fn learn(&mut self, length: Option<usize>) {
        self.length = length;
        if let Some(length) = length {
            self.buffer.resize(length, 0);
        }
    }

    /// The whole message once complete.
    pub fn message(&self) -> Option<&[u8]> {
        (self.length == Some(self.filled)).then_some(self.buffer.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::WireError;
    use crate::wire::clc::MAX_LEN;

    fn decline() -> Vec<u8> {
        let mut bytes = vec![0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10];
        bytes.extend([0; 16]);
        bytes.extend([0xe2, 0xd4, 0xc3, 0xd9]);
        bytes
    }

    /// Feeds `stream` in pieces of at most `step` bytes; returns the message and the unread rest.
    fn read_all(
        awaited: Awaited,
        stream: &[u8],
        step: usize,
    ) -> Result<(Vec<u8>, usize), HandshakeError> {
        let mut reader = ClcReader::new(awaited);
        let mut at = 0;
        loop {
            if let Some(message) = reader.message() {
                return Ok((message.to_vec(), stream.len() - at));
            }
            let space = reader.space();
            let n = space.len().min(step).min(stream.len() - at);
            space[..n].copy_from_slice(&stream[at..at + n]);
            at += n;
            reader.filled(n)?;
        }
    }

    // Shows: CLC-57.
    #[test]
    fn any_segmentation_gives_the_same_message_and_leaves_the_data() {
        let mut stream = decline();
        stream.extend(b"application data");
        for step in 1..=64 {
            for awaited in [Awaited::Proposal, Awaited::Accept, Awaited::Confirm] {
                let (message, left) = read_all(awaited, &stream, step).unwrap();
                assert_eq!(message, decline());
                assert_eq!(left, b"application data".len());
            }
        }
    }

    // Shows: CLC-54, ERR-9.
    #[test]
    fn refuses_application_data_at_its_first_wrong_byte() {
        let mut reader = ClcReader::new(Awaited::Proposal);
        reader.space()[0] = b'G';
        let error = WireError::BadLeadingEyeCatcher([b'G', 0, 0, 0]);
        let awaited = Awaited::Proposal;
        assert_eq!(reader.filled(1), Err(HandshakeError::Malformed { awaited, error }));
    }

    #[test]
    fn refuses_lengths_out_of_bounds_with_the_header() {
        for (awaited, kind, lengths) in [
            (Awaited::Proposal, 1, [0, 51, MAX_LEN + 1, 65535]),
            (Awaited::Accept, 2, [0, 47, 161, 65535]),
            (Awaited::Confirm, 3, [0, 47, 293, 65535]),
            (Awaited::Accept, 4, [0, 27, 45, 65535]),
        ] {
            for length in lengths {
                let [high, low] = (length as u16).to_be_bytes();
                let header = [0xe2, 0xd4, 0xc3, 0xd9, kind, high, low, 0x20];
                let error = read_all(awaited, &header, 8).unwrap_err();
                let HandshakeError::Malformed {
                    error: WireError::LengthOutOfRange { got, .. },
                    ..
                } = error
                else {
                    panic!("{error:?}");
                };
                assert_eq!(got, length);
            }
        }
    }

    #[test]
    fn refuses_another_message_than_the_awaited_one() {
        let awaited = Awaited::Accept;
        for got in [Kind::Proposal, Kind::Confirm] {
            let header = [0xe2, 0xd4, 0xc3, 0xd9, got.code(), 0, 78, 0x21];
            let error = read_all(awaited, &header, 8).unwrap_err();
            assert_eq!(error, HandshakeError::OutOfTurn { awaited, got });
        }
    }

    #[test]
    fn tells_a_stream_that_ends_early() {
        for cut in 0..28 {
            let error = read_all(Awaited::Accept, &decline()[..cut], 8).unwrap_err();
            assert_eq!(error, HandshakeError::Closed { awaited: Awaited::Accept, received: cut });
        }
    }

    #[test]
    fn a_peeked_header_makes_room_for_the_whole_message_and_no_more() {
        for cut in 0..8 {
            let mut reader = ClcReader::new(Awaited::Proposal);
            reader.peeked(&decline()[..cut]).unwrap();
            assert_eq!(reader.space().len(), 8);
        }
        let mut reader = ClcReader::new(Awaited::Proposal);
        reader.peeked(&decline()[..8]).unwrap();
        assert!(reader.message().is_none());
        reader.space().copy_from_slice(&decline());
        reader.filled(20).unwrap();
        assert!(reader.message().is_none());
        assert_eq!(reader.space().len(), 8);
        reader.filled(8).unwrap();
        assert_eq!(reader.message(), Some(&decline()[..]));
    }

    #[test]
    fn a_peeked_header_is_judged_as_a_read_one_is() {
        let header = [0xe2, 0xd4, 0xc3, 0xd9, Kind::Accept.code(), 0, 78, 0x21];
        let error = ClcReader::new(Awaited::Proposal).peeked(&header).unwrap_err();
        assert_eq!(error, read_all(Awaited::Proposal, &header, 8).unwrap_err());
    }

    #[test]
    fn a_count_beyond_the_space_does_no_harm() {
        let mut reader = ClcReader::new(Awaited::Accept);
        reader.space().copy_from_slice(&decline()[..8]);
        reader.filled(usize::MAX).unwrap();
        assert_eq!(reader.space().len(), 20);
        reader.filled(usize::MAX).unwrap();
        assert_eq!(reader.space().len(), 0);
        assert!(reader.message().is_some());
    }
}
